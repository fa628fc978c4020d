"""Which architectures pass: held against every causal family that transformers knows."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from nbtrain.catalog.architecture import (
    architecture_problems,
    max_context,
    own_cache,
    sampler_kind,
)

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


def test_the_ragged_sampler_gets_only_what_transformers_itself_holds_whole() -> None:
    seen = 0
    ragged, generate = set(), set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family, config, layers in families():
            seen += 1
            if messages(config):
                continue
            kind = sampler_kind(config)
            (ragged if kind == "ragged" else generate).add(family)
            if layers != {"full_attention"} and not never_slides(config):
                assert kind == "generate", f"{family} has {layers}"
    assert seen > 50
    common = {
        "llama", "qwen2", "qwen3", "gemma", "phi", "phi3", "gpt2", "gpt_neox", "mixtral", "olmo2",
        "smollm3", "stablelm", "starcoder2", "granite", "glm4", "falcon", "opt", "qwen3_moe",
    }  # fmt: skip
    assert common <= ragged
    other = {"mamba", "mamba2", "jamba", "bamba", "lfm2", "falcon_h1", "qwen3_next", "gemma3_text"}
    assert other <= generate
    assert not {"rwkv", "xlstm", "recurrent_gemma"} & (ragged | generate)


def never_slides(config: dict[str, Any]) -> bool:
    window, context = config.get("sliding_window"), max_context(config)
    return window is not None and context is not None and window >= context


def test_unstated_contexts_are_those_that_the_classes_fill_in() -> None:
    from transformers import CONFIG_MAPPING

    for family in ("gemma3", "gemma3_text"):
        text = CONFIG_MAPPING[family]().get_text_config()
        assert max_context({"model_type": family}) == text.max_position_embeddings


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"audio_config": {}}, "sound"),
        ({"text_config": {}}, "beside text"),
        ({"model_type": "rwkv"}, "outside a cache of transformers (rwkv)"),
        ({"vision_config": {}, "architectures": ["CLIPModel"]}, "no causal language model"),
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
    ("change", "why"),
    [
        ({"sliding_window": 1024}, "sliding window of 1024"),
        ({"sliding_window": 1024, "use_sliding_window": True}, "sliding window of 1024"),
        ({"sliding_window": 2047}, "sliding window of 2047"),
        (
            {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_attention (sliding window 8)",
        ),
        ({"sliding_window": 4096, "layer_types": ["linear_attention"]}, "linear_attention"),
        ({"attention_types": [[["global", "local"], 6]]}, "local"),
        ({"attention_chunk_size": 1024}, "window of 1024"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"model_type": "mamba2"}, "(mamba2)"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers"),
        ({"alibi": True}, "attention mask"),
        ({"model_type": "bloom"}, "attention mask"),
        ({"vision_config": {}, "text_config": {"layer_types": ["conv"]}}, "conv"),
    ],
)
def test_what_needs_a_cache_of_its_own_takes_the_plain_sampler(
    change: dict[str, Any], why: str
) -> None:
    config = LLAMA | change
    assert why in str(own_cache(config, 2048))
    assert sampler_kind(config) == "generate"
    if "text_config" not in config:
        assert messages(config) == ""


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},  # Qwen2
        {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 4},
        {"sliding_window": 4096, "layer_types": ["full_attention"] * 4},
        {"sliding_window": 2048},  # as wide as the context: it never slides
        {"sliding_window": 2048, "layer_types": ["full_attention", "sliding_attention"]},
        {"architectures": None},
        {"quantization_config": None},
        {
            "vision_config": {"layer_types": ["conv"]},
            "text_config": {"model_type": "qwen3", "max_position_embeddings": 512},
            "architectures": ["SomeVLForConditionalGeneration"],
        },
    ],
)
def test_what_attends_to_everything_takes_the_ragged_sampler(change: dict[str, Any]) -> None:
    assert messages(LLAMA | change) == ""
    assert sampler_kind(LLAMA | change) == "ragged"


def test_a_window_slides_only_below_the_context_in_question() -> None:
    config = LLAMA | {"sliding_window": 1024}
    assert own_cache(config, 1024) is None
    assert own_cache(config, 1025) is not None
    assert own_cache(config, None) is not None


def test_all_problems_come_at_once() -> None:
    config = LLAMA | {
        "is_encoder_decoder": True,
        "auto_map": {"A": "b"},
        "quantization_config": {"a": 1},
    }
    assert len(architecture_problems(config, "m")) == 3


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024, "n_ctx": 2048}, 1024),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": 0}, None),
        ({"model_type": "x", "text_config": {"max_position_embeddings": 64}}, 64),
        ({"model_type": "mamba", "state_size": 16}, 8192),
        ({"model_type": "jamba", "num_attention_heads": 4}, None),
        ({}, None),
    ],
)
def test_context(config: dict[str, Any], expected: int | None) -> None:
    assert max_context(config) == expected
