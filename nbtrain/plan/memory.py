"""How much memory a rank of a run needs: arithmetic on a plan and a model's dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nbtrain.errors import Problem
from nbtrain.plan.defaults import validation_on
from nbtrain.plan.fields import show
from nbtrain.plan.registry import BaseModelInfo
from nbtrain.plan.resolved import ResolvedPlan

__all__ = [
    "MICRO_BATCH_TOKENS",
    "PROMPT_TOKENS",
    "Memory",
    "memory_of",
    "memory_problem",
    "ranks_of",
    "size",
]

PROMPT_TOKENS = 512
"""Length of a prompt that is assumed where nobody has counted."""
MICRO_BATCH_TOKENS = 1024
"""Tokens of a micro-batch of the loss, unless one reply is longer."""
WARN_SHARE, REFUSE_SHARE = 0.8, 1.2
_BYTES = {"fp32": 4, "bf16": 2}
_ADAPTER_COPIES = 4  # weights, gradient and two moments, all fp32
_KV_SHARE = 3  # the sampler admits replies into a third of what is free; the rest queue


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank.

    ``weights`` of the base model, twice with vLLM, which loads its own; ``adapter`` with its
    gradient, the optimizer's moments and the kept older versions; ``kv`` keys and values if
    everything in flight were decoded at once, ``kv_one`` those of one trajectory, ``kv_reply``
    those of one reply of ``reply_tokens`` without its prompt (0 where the model's cache may be
    smaller than one that keeps every token); ``loss`` logits and activations with the longest
    reply allowed, ``loss_least`` with replies that fit a usual micro-batch. ``together`` says
    whether sampling goes on during an update, so that both are held at once.
    """

    weights: int
    adapter: int
    kv: int
    kv_one: int
    loss: int
    loss_least: int
    together: bool
    kv_reply: int = 0
    reply_tokens: int = 0

    @property
    def certain(self) -> int:
        """What the run needs even if every reply is short."""
        return self.weights + self.adapter + self.loss_least

    def peak(self, free: int | None = None) -> int:
        """What it needs with the longest replies; the sampler adapts to ``free`` bytes."""
        kv = self.kv if free is None else max(self.kv_one, min(self.kv, free // _KV_SHARE))
        both = self.loss + kv if self.together else max(self.loss, kv)
        return self.weights + self.adapter + both


def memory_of(
    plan: ResolvedPlan, model: BaseModelInfo, *, longest: int, prompt_tokens: int
) -> Memory | None:
    """What a rank of ``plan`` holds, or ``None`` where the model's headers do not tell enough.

    ``longest`` are the tokens of the longest reply, ``prompt_tokens`` those before it.
    """
    sizes = model.sizes
    hidden, layers, vocabulary = sizes.hidden_size, sizes.layers, sizes.vocabulary
    if not (model.parameters and hidden and layers and vocabulary and sizes.head_dim):
        return None
    wide = _BYTES[plan["precision"]]
    kv_heads, heads = sizes.kv_heads or 1, sizes.heads or 1
    inner = sizes.intermediate_size or 4 * hidden
    queries, keys = heads * sizes.head_dim, kv_heads * sizes.head_dim
    linear = 2 * (hidden + queries) + 2 * (hidden + keys)
    linear += 0 if sizes.experts else 3 * (hidden + inner)  # the adapter leaves experts alone
    adapter = 4 * layers * plan["lora_rank"] * linear
    stale = plan["max_staleness"]
    kept = stale + 1 if stale and wide < 4 else 0  # in fp32 none is needed
    kept += plan.warm_start is not None  # what the KL is taken to
    context = min(model.max_context, longest + prompt_tokens)
    kv_token = 2 * layers * keys * wide
    kv_one = kv_token * context
    reply = _longest_turn(plan, model.max_context)
    flights = plan["max_concurrent_trajectories"]
    if not stale:
        flights = min(flights, plan["batch_size"] * plan["group_size"])

    sequences = plan["batch_size"] * plan["group_size"]
    sequences = min(sequences, plan.options.get("micro_batch_sequences") or sequences)
    usual = min(MICRO_BATCH_TOKENS, sequences * longest)

    def loss(tokens: int) -> int:
        activations = layers * (tokens + prompt_tokens) * (10 * hidden + 5 * inner) * wide
        return activations + tokens * vocabulary * (2 * wide + 8)

    return Memory(
        weights=model.parameters * wide * (2 if plan["sampler"] == "vllm" else 1),
        adapter=adapter * (_ADAPTER_COPIES + kept),
        kv=kv_one * math.ceil(flights / ranks_of(plan)),
        kv_one=kv_one,
        loss=loss(max(usual, longest)),
        loss_least=loss(usual),
        together=stale > 0,
        kv_reply=kv_token * reply if plan["sampler"] == "ragged" else 0,
        reply_tokens=reply,
    )


def _longest_turn(plan: ResolvedPlan, context: int) -> int:
    """Tokens of the longest reply of training and of validation."""
    prefixes = ("", "val_") if validation_on(plan.options) else ("",)
    kinds = ("turn", "trajectory")
    limits: list[list[int]] = [
        [plan[f"{p}max_output_tokens_per_{kind}"] for kind in kinds] for p in prefixes
    ]
    return max(min(*each, context) for each in limits)


def ranks_of(plan: ResolvedPlan) -> int:
    """How many ranks a plan has; one that was resolved before there were several has one."""
    return int(plan.options.get("gpus", 1))


def memory_problem(
    memory: Memory | None, free_bytes: int | None, *, kv_bytes: int | None = None
) -> Problem | str | None:
    """What a start check says of ``free_bytes``, a rank's share before the model is loaded.

    ``kv_bytes`` is the sampler's part of it for keys and values, by default a third. A
    :class:`Problem` where even short replies need more than 120 % of what is free, or where the
    keys and values of one reply do not fit into that part; a warning where the longest replies
    would need more than 80 %, or a whole trajectory not fit; ``None`` where all is well or cannot
    be told.
    """
    if memory is None or not free_bytes:
        return None
    share = free_bytes // _KV_SHARE if kv_bytes is None else kv_bytes
    told = (
        f"{size(memory.weights)} base model, {size(memory.adapter)} adapter and optimizer, "
        f"{size(memory.loss_least)} loss of a micro-batch"
    )
    if memory.certain > REFUSE_SHARE * free_bytes:
        message = (
            f"memory: the run needs at least {size(memory.certain)} in every rank, "
            f"{size(free_bytes)} are free ({told})"
        )
        hint = "Take a smaller base model, precision: bf16, or a lower lora_rank"
        return Problem("memory", message, memory.certain, f"at most {size(free_bytes)}", hint=hint)
    if memory.kv_reply > share:
        message = (
            f"memory: keys and values of one reply of {show(memory.reply_tokens)} tokens take "
            f"{size(memory.kv_reply)}, the sampler's share of memory is {size(share)}"
        )
        tokens = memory.reply_tokens * share // memory.kv_reply
        hint = (
            "Lower max_output_tokens_per_turn or max_output_tokens_per_trajectory (and those of "
            f"validation) below {show(tokens)}"
        )
        return Problem("memory", message, memory.kv_reply, f"at most {size(share)}", hint=hint)
    peak = memory.peak(free_bytes)
    fits = not memory.kv_reply or memory.kv_one <= share
    if fits and max(memory.certain, peak) <= WARN_SHARE * free_bytes:
        return None
    return (
        f"memory: with the longest replies a rank needs about {size(max(peak, memory.certain))} of "
        f"the {size(free_bytes)} that are free ({told}, {size(memory.loss)} loss of the longest "
        f"reply, {size(memory.kv_one)} keys and values of each); lower "
        "max_output_tokens_per_turn or max_output_tokens_per_trajectory"
    )


def size(count: float) -> str:
    """Bytes as a person reads them: ``812 MB``, ``1.2 GB``."""
    for unit in ("bytes", "kB", "MB"):
        if count < 999.5:
            return f"{show(round(count))} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
