"""Which architectures pass: held against every causal family that transformers knows."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from nbtrain.catalog.architecture import architecture_problems, max_context

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
}


def messages(config: dict[str, Any]) -> str:
    return "\n".join(str(problem) for problem in architecture_problems(config, "m"))


def families() -> Iterator[tuple[str, dict[str, Any], set[str]]]:
    """Every causal family with its default configuration and its cache's layer types."""
    from transformers import CONFIG_MAPPING
    from transformers.cache_utils import get_layer_types_and_kwargs
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for family, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        try:
            config = CONFIG_MAPPING[family]()
            layers = set(get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0])
        except Exception:
            continue  # some have no default configuration
        data = json.loads(config.to_json_string(use_diff=False))
        data["architectures"] = [names if isinstance(names, str) else names[0]]
        yield family, data, layers


def test_what_the_cache_of_transformers_holds_otherwise_than_whole_is_refused() -> None:
    seen = 0
    passed = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family, config, layers in families():
            seen += 1
            if layers != {"full_attention"}:
                assert messages(config), f"{family} has {layers} and passed"
            if not messages(config):
                passed.add(family)
    assert seen > 50
    common = {
        "llama", "qwen2", "qwen3", "gemma", "phi", "phi3", "gpt2", "gpt_neox", "mixtral", "olmo2",
        "smollm3", "stablelm", "starcoder2", "granite", "glm4", "falcon", "opt", "qwen3_moe",
    }  # fmt: skip
    assert common <= passed
    recurrent = {"mamba", "mamba2", "rwkv", "xlstm", "jamba", "bamba", "lfm2", "falcon_h1"}
    assert not recurrent & passed  # some of these keep their state outside the cache


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sliding_window": 1024}, "sliding window (sliding_window: 1024)"),
        ({"sliding_window": 1024, "use_sliding_window": True}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "(sliding_attention)"),
        ({"layer_types": ["linear_attention"]}, "(linear_attention)"),
        ({"attention_types": [[["global", "local"], 6]]}, "(local)"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"model_type": "rwkv7"}, "(rwkv7)"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"vision_config": {}}, "images"),
        ({"architectures": ["BertForMaskedLM"]}, "no causal language model (BertForMaskedLM)"),
        ({"quantization_config": {"quant_method": "gptq"}}, "(quantization_config: gptq)"),
        ({"auto_map": {"AutoModelForCausalLM": "m.M"}}, "code of its own (auto_map)"),
        ({"max_position_embeddings": None}, "no context length"),
        ({"model_type": None}, "no model_type"),
    ],
)
def test_refused_by_name(change: dict[str, Any], said: str) -> None:
    assert messages(LLAMA) == ""
    assert said in messages(LLAMA | change)
    assert "'m'" in messages(LLAMA | change)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},  # Qwen2
        {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 4},
        {"sliding_window": 4096, "layer_types": ["full_attention"] * 4},
        {"architectures": None},
        {"quantization_config": None},
    ],
)
def test_what_is_switched_off_is_not_refused(change: dict[str, Any]) -> None:
    assert messages(LLAMA | change) == ""


def test_a_window_as_wide_as_the_context_says_how_to_get_rid_of_it() -> None:
    assert "set sliding_window to null" in messages(LLAMA | {"sliding_window": 2048})
    assert "to null" not in messages(LLAMA | {"sliding_window": 2047})


def test_all_problems_come_at_once() -> None:
    config = LLAMA | {"sliding_window": 8, "auto_map": {"A": "b"}, "quantization_config": {"a": 1}}
    assert len(architecture_problems(config, "m")) == 3


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024, "n_ctx": 2048}, 1024),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": 0}, None),
        ({}, None),
    ],
)
def test_context(config: dict[str, Any], expected: int | None) -> None:
    assert max_context(config) == expected
