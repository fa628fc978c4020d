"""Lean LoRA layers: PEFT's results bit for bit, and PEFT itself where they do not apply."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear
from tiny_models import FAMILIES, VOCABULARY, tiny_model, with_lora

from nbtrain.rollout.lean_lora import LeanLora

IDS = torch.arange(60).reshape(3, 20) * 7 % VOCABULARY


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS).logits


def lean_layers(model: torch.nn.Module) -> int:
    return sum("forward" in m.__dict__ for m in model.modules() if isinstance(m, Linear))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", [2.0, 1.7], ids=["power", "other"])
def test_results_are_bit_equal_to_pefts(family: str, dtype: torch.dtype, scaling: float) -> None:
    model = with_lora(tiny_model(family, dtype=dtype))
    for module in model.modules():
        if isinstance(module, Linear):
            module.scaling["default"] = scaling
    expected = logits(model)
    with LeanLora(model.modules()).active():
        assert lean_layers(model) > 5
        assert torch.equal(logits(model), expected)
    assert lean_layers(model) == 0


def test_changed_and_replaced_weights_are_seen() -> None:
    model = with_lora(tiny_model("llama"))
    lean = LeanLora(model.modules())
    with lean.active():
        before = logits(model)
    layer = next(m for m in model.modules() if isinstance(m, Linear))
    layer.lora_B["default"].weight = torch.nn.Parameter(layer.lora_B["default"].weight + 0.1)
    with torch.no_grad():
        layer.lora_A["default"].weight.mul_(3)
    expected = logits(model)
    with lean.active():
        assert torch.equal(logits(model), expected)
    assert not torch.equal(before, expected)


def test_disabled_merged_and_stacked_adapters_are_pefts() -> None:
    model = with_lora(tiny_model("llama"))
    lean = LeanLora(model.modules())
    with model.disable_adapter(), lean.active():
        assert lean_layers(model) == 0
    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear"))
    model.base_model.set_adapter(["default", "second"])
    with lean.active():
        assert lean_layers(model) == 0
    model.set_adapter("second")
    expected = logits(model)
    with lean.active():
        assert lean_layers(model) > 5
        assert torch.equal(logits(model), expected)
    model.merge_adapter()
    with lean.active():
        assert lean_layers(model) == 0


def test_variants_and_hooked_layers_are_pefts() -> None:
    config = LoraConfig(r=4, target_modules="all-linear", use_dora=True)
    dora = get_peft_model(tiny_model("llama"), config).eval()
    with LeanLora(dora.modules()).active():
        assert lean_layers(dora) == 0
    model = with_lora(tiny_model("llama"))
    layer = next(m for m in model.modules() if isinstance(m, Linear))
    layer.base_layer.register_forward_hook(lambda module, args, out: out + 1)
    expected = logits(model)
    with LeanLora(model.modules()).active():
        assert "forward" not in layer.__dict__
        assert torch.equal(logits(model), expected)


def test_layers_are_put_back_when_the_block_raises() -> None:
    model = with_lora(tiny_model("llama"))
    with pytest.raises(IndexError), LeanLora(model.modules()).active():
        model(input_ids=torch.tensor([[VOCABULARY + 1]]))
    assert lean_layers(model) == 0
