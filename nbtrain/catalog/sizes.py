"""A decoder's dimensions, from its configuration under the names that model families use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbtrain.plan.registry import ModelSizes

__all__ = ["model_sizes"]

# Hugging Face's names, older ones of GPT-2 and the like, then those of GGUF headers.
_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "embedding_length"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "feed_forward_length"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "block_count"),
    "heads": ("num_attention_heads", "n_head", "head_count"),
    "kv_heads": ("num_key_value_heads", "head_count_kv"),
    "head_dim": ("head_dim", "key_length"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "expert_count"),
}
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_feed_forward_length")


def model_sizes(config: Mapping[str, Any]) -> ModelSizes:
    """What the configuration states; of an image-text model that of its language part.

    What follows from the rest by convention is filled in: as many key-value heads as heads,
    heads that divide the hidden size, an MLP of four times its width in GPT-2's family.
    """
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    found = {name: _first(config, keys) for name, keys in _NAMES.items()}
    hidden, heads = found["hidden_size"], found["heads"]
    if found["kv_heads"] is None:
        found["kv_heads"] = heads
    if found["head_dim"] is None and hidden and heads:
        found["head_dim"] = hidden // heads
    if found["intermediate_size"] is None and hidden and "n_embd" in config:
        found["intermediate_size"] = 4 * hidden
    if found["experts"] and (width := _first(config, _EXPERT_WIDTH)):
        found["intermediate_size"] = width
    return ModelSizes(**found)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
