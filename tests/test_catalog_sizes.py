"""A decoder's dimensions under the names that model families use."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from nbtrain.catalog.base_models import BaseModel, embedded_folder, read_base_model
from nbtrain.catalog.digests import FileDigests
from nbtrain.catalog.sizes import model_sizes
from nbtrain.plan.registry import ModelSizes

LLAMA = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (LLAMA, ModelSizes(576, 1536, 30, 9, 3, 64, 49_152)),
        ({**LLAMA, "head_dim": 128}, ModelSizes(576, 1536, 30, 9, 3, 128, 49_152)),
        ({"text_config": LLAMA, "hidden_size": 7}, ModelSizes(576, 1536, 30, 9, 3, 64, 49_152)),
        (
            {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100},
            ModelSizes(64, 256, 2, 4, 4, 16, 100),
        ),
        (
            {**LLAMA, "num_experts": 8, "moe_intermediate_size": 96},
            ModelSizes(576, 96, 30, 9, 3, 64, 49_152, 8),
        ),
        (
            {"embedding_length": 64, "block_count": 2, "head_count": 4, "head_count_kv": 2,
             "feed_forward_length": 128, "vocab_size": 9},
            ModelSizes(64, 128, 2, 4, 2, 16, 9),
        ),
        ({"hidden_size": True, "vocab_size": -1, "num_hidden_layers": "2"}, ModelSizes()),
        ({}, ModelSizes()),
    ],
)  # fmt: skip
def test_sizes_by_every_name(config: dict[str, Any], sizes: ModelSizes) -> None:
    assert model_sizes(config) == sizes


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3_text", "gpt_oss", "mistral"])
def test_families_of_transformers_tell_all_that_memory_needs(family: str) -> None:
    found = model_sizes(CONFIG_MAPPING[family]().to_dict())
    assert found.hidden_size
    assert found.layers
    assert found.vocabulary
    assert found.head_dim
    assert found.kv_heads
    assert found.intermediate_size


def test_a_model_keeps_sizes_and_levels_through_json(tmp_path: Any) -> None:
    tiny = read_base_model("nbtrain/tiny", FileDigests(tmp_path / "digests.json"))
    assert tiny.sizes == model_sizes(tiny_config())
    assert tiny.sizes.layers
    assert tiny.thinking == ()
    thinker = BaseModel(**{**tiny.to_json(), "thinking": ["off", "on"]})
    assert thinker.thinking == ("off", "on")
    assert BaseModel(**tiny.to_json()) == tiny


def tiny_config() -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads((embedded_folder() / "config.json").read_text())
    return found
