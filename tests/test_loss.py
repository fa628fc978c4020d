"""The loss against TRL's own, and its invariants."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from judged import tiny_policy
from tiny_models import byte_tokenizer

from nbtrain.training.loss import IMPORTANCE_CAP, Tokens, importance, policy_loss
from nbtrain.training.packing import Layout, Packable
from nbtrain.training.policy import Policy
from nbtrain.training.prefix import plan_units

PACKED = Layout(row_tokens=16, batch_tokens=40)
SHARED = Layout(packed_tokens=0, batch_tokens=12)
CASES = [
    *itertools.product(
        ("token", "sequence"), (0.0, 0.04), (False, True), (PACKED, SHARED), (torch.float64,)
    ),
    ("token", 0.04, True, SHARED, torch.float32),
    ("sequence", 0.04, True, PACKED, torch.float32),
]


def batch(seed: int = 0, *, observed: bool = False) -> tuple[list[Packable], list[float]]:
    """Two groups of different sizes, ragged replies, advantages of both signs.

    Prompts are equally long: padded on the left, absolute positions would differ.
    """
    rng = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 60, (count,), generator=rng).tolist())

    items, advantages = [], []
    for prompt, replies in ((ids(7), (3, 9, 1, 6)), (ids(7), (5, 2, 8))):
        advantages += torch.randn(len(replies), generator=rng).tolist()
        for count in replies:
            spans = ((2, 4), (count - 1, count)) if observed and count > 4 else ()
            items.append(Packable(prompt, ids(count), spans))
    return items, advantages


def ours(
    policy: Policy,
    items: list[Packable],
    advantages: list[float],
    old: list[torch.Tensor],
    *,
    level: Any,
    beta: float,
    clips: tuple[float, float],
    layout: Layout,
) -> tuple[torch.Tensor, int]:
    """Loss over the batch, gradients left on the adapter; and the clipped tokens."""
    total = torch.zeros((), dtype=torch.float64)
    clipped = 0
    for unit in plan_units(items, layout, policy.device):
        references = []
        if beta:
            with torch.no_grad():
                scores = policy.scored(unit, temperature=1.0, adapter=False)
                references = [reference for _, reference, _ in scores]
        for number, (part, new, _) in enumerate(policy.scored(unit, temperature=1.0)):
            parts = policy_loss(
                Tokens(
                    new,
                    part.segments,
                    part.lengths,
                    torch.cat([old[m] for m in part.members]),
                    references[number] if beta else None,
                ),
                torch.tensor([advantages[m] for m in part.members], dtype=new.dtype),
                level=level,
                clip_low=clips[0],
                clip_high=clips[1],
                kl_beta=beta,
                normaliser=len(items),
            )
            parts.loss.backward()
            total += parts.loss.detach().double()
            clipped += int(parts.clipped)
    return total, clipped


def padded(items: list[Packable], values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """TRL's layout: prompts padded on the left, replies on the right, observed tokens masked."""
    p = max(len(i.prompt_ids) for i in items)
    c = max(len(i.token_ids) for i in items)
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "old")
    out: dict[str, Any] = {name: [] for name in names}
    for item, value in zip(items, values, strict=True):
        lead, tail = p - len(item.prompt_ids), c - len(item.token_ids)
        out["prompt_ids"].append([0] * lead + list(item.prompt_ids))
        out["prompt_mask"].append([0] * lead + [1] * len(item.prompt_ids))
        out["completion_ids"].append(list(item.token_ids) + [0] * tail)
        out["completion_mask"].append([1] * len(item.token_ids) + [0] * tail)
        sampled = dict(zip(item.sampled, value.tolist(), strict=True))
        out["tool_mask"].append([int(n in sampled) for n in range(c)])
        out["old"].append([sampled.get(n, -3.0) for n in range(c)])
    tensors = {k: torch.tensor(v) for k, v in out.items() if k != "old"}
    tensors["old_per_token_logps"] = torch.tensor(out["old"], dtype=values[0].dtype)
    return tensors


def oracle(
    policy: Policy, tmp_path: Path, *, level: str, beta: float, clips: tuple[float, float]
) -> Any:
    """A real GRPOTrainer around the same model."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(tmp_path / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        importance_sampling_level=level,
        loss_type="grpo",
        beta=beta,
        epsilon=clips[0],
        epsilon_high=clips[1],
        use_bias_correction_kl=False,
        scale_rewards="group",
        per_device_train_batch_size=2,
        num_generations=2,
        report_to=[],
        disable_dropout=True,
    )
    return GRPOTrainer(
        model=policy.model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
        processing_class=byte_tokenizer(),
    )


def exact_logps(model: Any, ids: Any, mask: Any, keep: int, **_: Any) -> tuple[Any, Any, None]:
    """What TRL's fused head returns, which works in fp32, in the model's own float64."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -keep - 1 : -1]
    logps = logits.log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(-1).detach()
    return logps.gather(-1, ids[:, -keep:, None])[..., 0], entropies, None


@pytest.mark.parametrize(("level", "beta", "observed", "layout", "dtype"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_loss_and_gradient_equal_trl(
    level: str, beta: float, observed: bool, layout: Layout, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Ratios away from 1, clipping active on both sides, unequal groups, shared prompts."""
    # GPT-2 computes in its own precision throughout; others normalise in fp32 even in float64.
    policy = tiny_policy(tmp_path, "gpt2", dtype=dtype)
    items, advantages = batch(observed=observed)
    clips = (0.05, 0.08) if level == "token" else (0.01, 0.02)
    rng = torch.Generator().manual_seed(5)
    (unit,) = plan_units(items, Layout(10_000, 10_000, 10_000), policy.device)
    with torch.no_grad():
        ((part, new, _),) = policy.scored(unit, temperature=1.0)
    noise = torch.randn(new.shape, generator=rng, dtype=torch.float64).to(dtype) * 0.15
    old = list((new + noise).split(part.lengths.tolist()))
    if level == "token":
        far = (-noise).exp() - 1  # both sides of the clip, where it acts and where it does not
        assert (far < -clips[0]).any()
        assert (far > clips[1]).any()

    loss, clipped = ours(
        policy, items, advantages, old, level=level, beta=beta, clips=clips, layout=layout
    )
    assert 0 < clipped < len(new)
    mine = {n: p.grad.clone() for n, p in policy.trainable.items() if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)

    trainer = oracle(policy, tmp_path, level=level, beta=beta, clips=clips)
    inputs = padded(items, old)
    inputs["advantages"] = torch.tensor(advantages, dtype=dtype)
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    trainer.current_gradient_accumulation_steps = 1
    if dtype == torch.float64:
        trainer._get_per_token_logps_and_entropies = exact_logps
    policy.model.train()
    if beta:
        with torch.no_grad(), policy.model.disable_adapter():
            inputs["ref_per_token_logps"] = trainer._get_per_token_logps_and_entropies(
                policy.model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
                inputs["completion_ids"].size(1),
            )[0].to(dtype)
    theirs = trainer._compute_loss(trainer.model, inputs)
    theirs.backward()

    exact = dtype == torch.float64
    assert abs(float(loss) - float(theirs.detach())) <= (1e-9 if exact else 1e-5)
    scale = max(float(p.grad.abs().max()) for p in policy.trainable.values() if p.grad is not None)
    assert scale > 1e-4
    for name, parameter in policy.trainable.items():
        assert parameter.grad is not None
        gap = float((parameter.grad - mine[name]).abs().max())
        assert gap <= (1e-7 if exact else 1e-5), name


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_on_policy_ratio_is_exactly_one(level: Any) -> None:
    """Without old log-probs nothing is clipped and the gradient is the plain policy gradient."""
    new = torch.randn(6, dtype=torch.float32, requires_grad=True)
    tokens = Tokens(new, torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([3, 3]))
    parts = policy_loss(
        tokens, torch.tensor([1.0, -2.0]), level=level, clip_low=1e-6, clip_high=1e-6, normaliser=2
    )
    parts.loss.backward()
    assert float(parts.ratio) == 1.0
    assert int(parts.clipped) == 0
    assert new.grad is not None
    expected = torch.tensor([-1.0, -1.0, -1.0, 2.0, 2.0, 2.0]) / 6
    assert torch.allclose(new.grad, expected, atol=1e-7)


@pytest.mark.parametrize(("level", "weights"), [("token", [2.0, 0.5, 1.0]), ("sequence", None)])
def test_a_sampler_that_differs_is_weighed_up_to_the_cap(level: Any, weights: Any) -> None:
    """By token in GRPO; in GSPO by the geometric mean over the sequence, its own length."""
    mismatch = torch.tensor([3.0, -(2.0**-0.5), 0.0], dtype=torch.float64)
    if weights is None:
        mean = float((mismatch[:2].sum() / 2).exp())
        weights = [min(mean, IMPORTANCE_CAP)] * 2 + [1.0]
    else:
        weights[1] = float(mismatch[1].exp())
    new = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    tokens = Tokens(
        new, torch.tensor([0, 0, 1]), torch.tensor([2, 1]), mismatch=mismatch, reference=new + 1
    )
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    parts = policy_loss(
        tokens, advantages, level=level, clip_low=0.2, clip_high=0.2, kl_beta=0.0, normaliser=2
    )
    parts.loss.backward()
    assert new.grad is not None
    if level == "token":
        expected = [-weights[0] / 4, -weights[1] / 4, weights[2] / 2]
    else:
        expected = [-weights[0] / 4, -weights[0] / 4, weights[2] / 2]
    assert new.grad.tolist() == pytest.approx(expected)
    assert parts.capped is not None
    beyond = importance(tokens, level) > IMPORTANCE_CAP
    assert parts.capped.tolist() == beyond.tolist()
    assert beyond.tolist() == ([True, False, False] if level == "token" else [True, True, False])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_kl_is_not_weighed(level: Any) -> None:
    new = torch.zeros(2, dtype=torch.float64)
    far = Tokens(
        new,
        torch.tensor([0, 0]),
        torch.tensor([2]),
        reference=new + 1,
        mismatch=torch.full((2,), 5.0, dtype=torch.float64),
    )
    near = Tokens(new, far.segments, far.lengths, reference=far.reference)
    how: Any = {"level": level, "clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.1, "normaliser": 1}
    nothing = torch.zeros(1, dtype=torch.float64)
    one = policy_loss(far, nothing, **how)
    assert float(one.loss) == float(policy_loss(near, nothing, **how).loss) > 0


def test_kl_needs_a_reference() -> None:
    tokens = Tokens(torch.zeros(1), torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(ValueError, match="reference"):
        policy_loss(
            tokens,
            torch.ones(1),
            level="token",
            clip_low=0.2,
            clip_high=0.2,
            kl_beta=0.1,
            normaliser=1,
        )
