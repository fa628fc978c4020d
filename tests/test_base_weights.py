"""Every architecture loads from a folder, and an adapter reaches its language and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sampler_contract import prompt, shared_model
from tiny_models import FAMILIES, IMAGE_TEXT_FULL, OWN_CACHE, tiny_model, with_lora
from transformers import CLIPConfig, T5Config

from nbtrain.errors import StartChecksFailed
from nbtrain.training.base_weights import language_target, load_base

IMAGE_TEXT = ("gemma3_image", "qwen3_5_image", "llava")


@pytest.mark.parametrize("family", ["llama", "mamba", "qwen3_next", *IMAGE_TEXT])
def test_a_saved_model_loads_with_equal_logits(family: str, tmp_path: Path) -> None:
    model = shared_model(family)
    model.save_pretrained(tmp_path)
    loaded = load_base(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    assert type(loaded) is type(model)
    assert not loaded.training
    ids = torch.tensor([prompt(9)])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    low = load_base(tmp_path, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert low.get_input_embeddings().weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (T5Config(), "'t5' is an encoder-decoder"),
        (CLIPConfig(), "'clip' has no causal and no image-text class"),
    ],
    ids=["t5", "clip"],
)
def test_what_is_no_language_model_is_refused_by_name(config, said: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(StartChecksFailed, match=said):
        load_base(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("family", [*FAMILIES, *OWN_CACHE, *IMAGE_TEXT_FULL])
def test_every_adapted_layer_takes_part_and_no_other_is_adapted(family: str) -> None:
    model = with_lora(tiny_model(family))
    ids = torch.tensor([prompt(12)])
    model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    adapted = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert adapted
    assert all("lora" in name for name in adapted)
    idle = [n for n, p in adapted.items() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == []
    assert not any("vision" in n or "projector" in n or "lm_head" in n for n in adapted)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3_next"])
def test_text_models_keep_the_usual_word(family: str) -> None:
    assert language_target(shared_model(family)) == "all-linear"


@pytest.mark.parametrize("family", [*IMAGE_TEXT, "jamba", "mamba"])
def test_what_is_left_out(family: str) -> None:
    target = language_target(tiny_model(family))
    adapted = {
        name.rpartition(".")[2]
        for name, module in with_lora(tiny_model(family)).named_modules()
        if hasattr(module, "lora_A")
    }
    assert "(" not in target  # a plain alternation, whatever the layers' numbers
    if family in IMAGE_TEXT:
        assert {"q_proj", "gate_proj", "down_proj"} <= adapted
        assert not {"fc1", "qkv", "linear_1", "linear_fc1"} & adapted
    else:
        assert {"in_proj", "x_proj"} <= adapted
        assert "dt_proj" not in adapted
        assert ("out_proj" in adapted) == (family == "jamba")


def test_a_model_without_linear_layers_is_refused() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        for name in ("self_attn", "mlp"):
            delattr(layer, name)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no linear layer"):
        language_target(model)
