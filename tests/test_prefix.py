"""Every way to score equals the plain one, gradients too, on every family of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from judged import judged, shake, tiny_policy
from tiny_models import FAMILIES, PAD, VOCABULARY, tiny_model, with_lora
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

from nbtrain.rollout.lean_lora import LeanLora
from nbtrain.training.lora_linear import trained_lora
from nbtrain.training.packing import Layout, Packable
from nbtrain.training.policy import Policy
from nbtrain.training.prefix import plan_units
from nbtrain.training.scoring import token_scores
from nbtrain.training.update import Updater, UpdateSettings

CPU = torch.device("cpu")
ITEMS = [
    Packable((5, 6, 7, 8), (9, 10, 11, 40, 41), ((1, 3),)),
    Packable((5, 6, 7, 8), (12,)),
    Packable((5, 6, 7, 8), (13, 9, 9, 14, 10)),
    Packable((20, 21), (22, 23)),
    Packable((20, 21, 9), (22, 23, 24)),
]
LAYOUTS = {
    "packed": Layout(),
    "packed apart": Layout(row_tokens=0),
    "prefix": Layout(packed_tokens=0),
    "prefix, a reply at a time": Layout(packed_tokens=0, batch_tokens=1),
}


def by_member(policy: Policy, layout: Layout, *, packs: bool = True) -> tuple[torch.Tensor, Any]:
    """All log-probs in the order of the items, and the adapter's gradient of their weighted sum."""
    policy.model.zero_grad(set_to_none=True)
    found: dict[int, torch.Tensor] = {}
    for unit in plan_units(ITEMS, layout, CPU, packs=packs):
        for part, new, _ in policy.scored(unit, temperature=0.7):
            pieces = new.split(part.lengths.tolist())
            weighed = [p.sum() * (n + 1) for n, p in zip(part.members, pieces, strict=True)]
            torch.stack(weighed).sum().backward()
            found |= {n: p.detach() for n, p in zip(part.members, pieces, strict=True)}
    gradient = torch.cat([p.grad.flatten() for p in policy.trainable.values()])  # type: ignore[union-attr]
    return torch.cat([found[n] for n in range(len(ITEMS))]), gradient


def by_hand(policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by PEFT's own layers, one plain forward pass a trajectory."""
    policy.model.zero_grad(set_to_none=True)
    scores = []
    for number, item in enumerate(ITEMS):
        ids = torch.tensor([item.prompt_ids + item.token_ids])
        logits = policy.model(input_ids=ids).logits[0, len(item.prompt_ids) - 1 : -1] / 0.7
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(item.token_ids)[:, None])[:, 0]
        chosen = chosen[item.sampled]
        (chosen.sum() * (number + 1)).backward()
        scores.append(chosen.detach())
    gradient = torch.cat([p.grad.flatten() for p in policy.trainable.values()])  # type: ignore[union-attr]
    return torch.cat(scores), gradient


@pytest.mark.parametrize("family", FAMILIES)
def test_no_layout_changes_scores_or_gradients(family: str, tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, family, dtype=torch.float32, noise=0.05)
    assert policy.packs
    scores, gradient = by_hand(policy)
    for name, layout in LAYOUTS.items():
        for packs in (True, False):
            ours, mine = by_member(policy, layout, packs=packs)
            assert torch.allclose(ours, scores, atol=2e-5), (name, packs)
            assert float((mine - gradient).norm() / gradient.norm()) <= 1e-5, (name, packs)


def test_the_base_is_scored_without_the_adapter(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, dtype=torch.float32, noise=0.1)
    base = tiny_model("llama")
    for layout in LAYOUTS.values():
        for unit in plan_units(ITEMS, layout, CPU):
            with torch.no_grad():
                for part, new, entropy in policy.scored(unit, temperature=1.0, adapter=False):
                    for n, ours, spread in zip(
                        part.members,
                        new.split(part.lengths.tolist()),
                        entropy.split(part.lengths.tolist()),
                        strict=True,
                    ):
                        item = ITEMS[n]
                        ids = torch.tensor([item.prompt_ids + item.token_ids])
                        logits = base(input_ids=ids).logits[0, len(item.prompt_ids) - 1 : -1]
                        own = torch.distributions.Categorical(logits=logits[item.sampled])
                        targets = torch.tensor(item.token_ids)[item.sampled]
                        assert torch.allclose(ours, own.log_prob(targets), atol=2e-5)
                        assert torch.allclose(spread, own.entropy(), atol=2e-5)


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def odd_models(window: int = 4) -> dict[str, Any]:
    """Models whose tokens cannot share a row: windows, recurrent states, positions of their own."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MambaConfig, MambaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "pad_token_id": PAD}
    return {
        "gemma3": Gemma3ForCausalLM(
            Gemma3TextConfig(
                **sizes,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                sliding_window=window,
                layer_types=["sliding_attention", "full_attention"],
            )
        ),
        "mamba": MambaForCausalLM(
            MambaConfig(**sizes, state_size=4, num_hidden_layers=2, use_mambapy=False)
        ),
        "bloom": BloomForCausalLM(
            BloomConfig(**{**sizes, "n_layer": 2, "n_head": 4, "pad_token_id": PAD})
        ),
    }


@pytest.mark.parametrize("kind", ["gemma3", "mamba", "bloom"])
@pytest.mark.filterwarnings("ignore")
def test_other_architectures_run_in_plain_rows(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy = tiny_policy(saved(odd_models()[kind], tmp_path), dtype=torch.float32, noise=0.1)
    assert not policy.packs
    scores, gradient = by_hand(policy)
    ours, mine = by_member(policy, Layout(), packs=policy.packs)
    assert torch.allclose(ours, scores, atol=1e-5)
    assert float((mine - gradient).norm() / gradient.norm()) <= 1e-5
    updater = Updater(policy, UpdateSettings("token", 0.2, 0.2, 0.0, 1.0, 1.0), weight_decay=0.0)
    report = updater.update([judged(1, [0.0, 1.0, 0.4])], 1e-3, version=0)
    assert report.applied


def test_a_window_that_never_slides_packs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = saved(odd_models(16)["gemma3"], tmp_path)
    how: dict[str, Any] = {
        "precision": "fp32",
        "lora_rank": 2,
        "lora_alpha": 4,
        "target_modules": "default",
        "seed": 0,
        "device": CPU,
    }
    assert not Policy.load(folder, max_context=64, **how).packs
    assert Policy.load(folder, max_context=16, **how).packs


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_scores_and_their_gradient_are_autograds(temperature: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(5, 11, dtype=torch.float64) * 3).requires_grad_()
    targets = torch.tensor([0, 3, 10, 3, 7])
    chosen, entropy = token_scores(logits, targets, temperature)
    (mine,) = torch.autograd.grad(chosen @ torch.arange(5.0, dtype=torch.float64), logits)
    own = torch.distributions.Categorical(logits=logits / (temperature or 1.0))
    assert torch.allclose(chosen, own.log_prob(targets), atol=1e-12)
    assert torch.allclose(entropy, own.entropy(), atol=1e-12)
    assert not entropy.requires_grad
    (theirs,) = torch.autograd.grad(
        own.log_prob(targets) @ torch.arange(5.0, dtype=torch.float64), logits
    )
    assert torch.allclose(mine, theirs, atol=1e-12)


def test_scores_of_bf16_logits_are_fp32() -> None:
    logits = torch.randn(3, 9, dtype=torch.bfloat16, requires_grad=True)
    chosen, entropy = token_scores(logits, torch.tensor([1, 2, 3]), 1.0)
    assert chosen.dtype == entropy.dtype == torch.float32
    chosen.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_lora_layer_in_one_operation_is_pefts(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    model = with_lora(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=2,
                attention_bias=bias,
            )
        ),
        scale=0.3,
    )
    if dtype == torch.float64:
        model.double()
    else:  # the base in bf16, the adapter in fp32
        for name, parameter in model.named_parameters():
            if "lora" not in name:
                parameter.data = parameter.data.to(dtype)
    layer: Any = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert isinstance(layer.base_layer, nn.Linear)
    lean = LeanLora(model.modules(), trained_lora)
    weights = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    results = []
    for run_lean in (False, True):
        x = torch.linspace(-1, 1, 2 * 3 * 16).view(2, 3, 16).to(dtype).requires_grad_()
        if run_lean:
            with lean.active():
                assert "forward" in layer.__dict__
                out = layer(x)
        else:
            out = layer(x)
        pull = torch.linspace(-1, 2, out.numel()).view(out.shape).to(dtype)
        results.append([out, *torch.autograd.grad(out, [x, *weights], pull)])
    limit = 1e-12 if dtype == torch.float64 else 2e-2
    for mine, theirs in zip(results[1], results[0], strict=True):
        assert mine.dtype == theirs.dtype
        assert float((mine - theirs).detach().norm() / theirs.detach().norm()) < limit


def test_a_weight_changed_later_is_seen(tmp_path: Path) -> None:
    """Updates and kept adapters replace weights under the lean layers."""
    policy = tiny_policy(tmp_path, dtype=torch.float32)
    before, _ = by_member(policy, Layout())
    shake(policy, 0.1, seed=9)
    after, _ = by_member(policy, Layout())
    assert not torch.allclose(before, after, atol=1e-3)
    assert torch.allclose(after, by_hand(policy)[0], atol=2e-5)
