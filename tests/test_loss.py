"""The loss against TRL's own, and its invariants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import byte_tokenizer, tiny_model

from nbtrain.training.loss import Tokens, policy_loss
from nbtrain.training.packing import Packable, build_row, plan_rows
from nbtrain.training.policy import Policy

CASES = [
    pytest.param(level, beta, id=f"{level}-kl{beta}")
    for level in ("token", "sequence")
    for beta in (0.0, 0.04)
]


def batch(seed: int = 0) -> list[Packable]:
    """Two groups of different sizes, ragged replies, advantages of both signs.

    Prompts are equally long: padded on the left, absolute positions would differ.
    """
    rng = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 60, (count,), generator=rng).tolist())

    items = []
    for prompt, replies in ((ids(7), (3, 9, 1, 6)), (ids(7), (5, 2, 8))):
        spread = torch.randn(len(replies), generator=rng).tolist()
        items += [Packable(prompt, ids(n), a) for n, a in zip(replies, spread, strict=True)]
    return items


def lora_policy(dtype: torch.dtype, tmp_path: Path) -> Policy:
    """A tiny random GPT-2 with an adapter whose second half is not zero."""
    folder = tmp_path / "model"
    # GPT-2 computes in its own precision throughout; others normalise in fp32 even in float64.
    model = tiny_model("gpt2").to(dtype)
    model.save_pretrained(folder)
    policy = Policy.load(
        folder,
        precision="fp32",
        lora_rank=4,
        lora_alpha=8,
        target_modules="default",
        seed=1,
        device=torch.device("cpu"),
    )
    policy.model.to(dtype)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            noise = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
            parameter.add_(noise.to(dtype) * 0.2)
    return policy


def ours(
    policy: Policy,
    items: list[Packable],
    old: list[torch.Tensor],
    *,
    level: Any,
    beta: float,
    clips: tuple[float, float],
    row_tokens: int,
) -> tuple[torch.Tensor, int]:
    """Loss over the batch, gradients left on the adapter; and the clipped tokens."""
    total = torch.zeros((), dtype=torch.float64)
    clipped = 0
    for plan in plan_rows(items, row_tokens=row_tokens):
        row = build_row(plan, items, policy.device)
        new, _ = policy.logprobs(row, temperature=1.0)
        reference = None
        if beta:
            with torch.no_grad():
                reference, _ = policy.logprobs(row, temperature=1.0, adapter=False)
        parts = policy_loss(
            Tokens(
                new, row.segments, row.lengths, torch.cat([old[m] for m in row.members]), reference
            ),
            torch.tensor([items[m].advantage for m in row.members], dtype=new.dtype),
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
    """TRL's layout: prompts padded on the left, replies on the right."""
    p = max(len(i.prompt_ids) for i in items)
    c = max(len(i.token_ids) for i in items)
    out: dict[str, Any] = {
        k: [] for k in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "old")
    }
    for item, value in zip(items, values, strict=True):
        lead, tail = p - len(item.prompt_ids), c - len(item.token_ids)
        out["prompt_ids"].append([0] * lead + list(item.prompt_ids))
        out["prompt_mask"].append([0] * lead + [1] * len(item.prompt_ids))
        out["completion_ids"].append(list(item.token_ids) + [0] * tail)
        out["completion_mask"].append([1] * len(item.token_ids) + [0] * tail)
        out["old"].append(value.tolist() + [0.0] * tail)
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


@pytest.mark.parametrize(("level", "beta"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.filterwarnings("ignore")
def test_loss_and_gradient_equal_trl(
    level: str, beta: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Ratios away from 1, clipping active on both sides, unequal groups, shared prompts."""
    policy = lora_policy(dtype, tmp_path)
    items = batch()
    clips = (0.05, 0.08) if level == "token" else (0.01, 0.02)
    rng = torch.Generator().manual_seed(5)
    row = build_row(plan_rows(items, row_tokens=10_000)[0], items, policy.device)
    with torch.no_grad():
        new, _ = policy.logprobs(row, temperature=1.0)
    noise = torch.randn(new.shape, generator=rng, dtype=torch.float64).to(dtype) * 0.15
    old = list((new + noise).split(row.lengths.tolist()))

    loss, clipped = ours(policy, items, old, level=level, beta=beta, clips=clips, row_tokens=16)
    assert 0 < clipped < sum(len(i.token_ids) for i in items)
    mine = {n: p.grad.clone() for n, p in policy.trainable.items() if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)

    trainer = oracle(policy, tmp_path, level=level, beta=beta, clips=clips)
    inputs = padded(items, old)
    inputs["advantages"] = torch.tensor([i.advantage for i in items], dtype=dtype)
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


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_splitting_into_micro_batches_changes_nothing(level: Any, tmp_path: Path) -> None:
    policy = lora_policy(torch.float64, tmp_path)
    items = batch(2)
    old = [torch.full((len(i.token_ids),), -4.0, dtype=torch.float64) for i in items]
    gradients, losses = [], []
    for row_tokens in (1, 12, 20, 10_000):
        policy.model.zero_grad(set_to_none=True)
        loss, _ = ours(
            policy, items, old, level=level, beta=0.1, clips=(0.2, 0.2), row_tokens=row_tokens
        )
        losses.append(float(loss))
        gradients.append(
            torch.cat([p.grad.flatten() for p in policy.trainable.values() if p.grad is not None])
        )
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        assert loss == pytest.approx(losses[0], abs=1e-12)
        assert torch.allclose(gradient, gradients[0], atol=1e-12)


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
