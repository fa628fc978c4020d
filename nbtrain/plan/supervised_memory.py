"""How much memory a rank of a supervised run needs: arithmetic on a plan and a model's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from nbtrain.plan.registry import BaseModelInfo
from nbtrain.plan.resolved import ResolvedPlan

__all__ = ["SupervisedMemory", "memory_of"]

_BYTES = {"fp32": 4.0, "bf16": 2.0, "int4": 0.57}
"""Of a weight in a linear layer; nf4 keeps a scale for every 64 of them."""
_WIDE = {"fp32": 4, "bf16": 2, "int4": 2}
_ADAPTER_BYTES = 16  # weight, gradient and two moments in fp32


@dataclass(frozen=True, slots=True)
class SupervisedMemory:
    """Bytes of one rank: base model, adapter with optimizer, the longest pass."""

    weights: int
    adapter: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.adapter + self.activations


def memory_of(
    plan: ResolvedPlan, model: BaseModelInfo, *, longest: int, trained: float = 1.0
) -> SupervisedMemory | None:
    """What a rank holds in a pass of its longest sequences, ``None`` where the sizes are unknown.

    Without gradient checkpointing every layer keeps its activations, with it the input of each
    and one layer's. ``longest`` are the tokens of the longest sequence, ``trained`` the share of
    them in the loss.
    """
    sizes = model.sizes
    hidden, layers, vocabulary = sizes.hidden_size, sizes.layers, sizes.vocabulary
    if not (model.parameters and hidden and layers and vocabulary and sizes.head_dim):
        return None
    precision = plan["precision"]
    wide = _WIDE[precision]
    heads, kv_heads = sizes.heads or 1, sizes.kv_heads or 1
    inner = sizes.intermediate_size or 4 * hidden
    linear = 2 * (hidden + heads * sizes.head_dim) + 2 * (hidden + kv_heads * sizes.head_dim)
    linear += 0 if sizes.experts else 3 * (hidden + inner)
    embedded = vocabulary * hidden
    sequences = min(plan["micro_batch_per_gpu"], plan["micro_batch_sequences"] or 1 << 30)
    tokens = sequences * longest
    one_layer = tokens * (10 * hidden + 5 * inner) * wide
    if plan["attention_implementation"] == "eager":
        one_layer += sequences * heads * longest * longest * (wide + 4)
    kept = layers * tokens * hidden * wide + one_layer
    activations = kept if plan["gradient_checkpointing"] else layers * one_layer
    logits = round(tokens * trained) * vocabulary * (2 * wide + 8)
    linear_weights = max(0, model.parameters - embedded)
    return SupervisedMemory(
        weights=round(linear_weights * _BYTES[precision] + embedded * wide),
        adapter=_ADAPTER_BYTES * layers * plan["lora_rank"] * linear,
        activations=activations + logits,
    )
