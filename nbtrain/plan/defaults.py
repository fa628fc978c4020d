"""Defaults that are computed from other options and the base model, and rules for single values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from nbtrain.plan.fields import Compute, show
from nbtrain.plan.registry import BaseModelInfo

MAX_CONCURRENT = 1024
MOST_REWARD_WORKERS, MOST_ENVIRONMENT_WORKERS = 4, 64
"""What ``null`` comes to at most; a machine with fewer cores scores in fewer processes."""
_CLIP = {"gspo": (3e-4, 4e-4), "grpo": (0.2, 0.2)}  # the ranges their authors publish
STALE_GSPO_CLIP = (0.02, 0.02)
"""GSPO's range with ``max_staleness`` above 0. The published one clips most sequences there: the
log-probs of older policies and of another arithmetic differ by more than it lets pass."""
SAMPLERS = ("ragged", "generate", "vllm")
EFFORTS = ("off", "minimal", "low", "medium", "high", "xhigh", "max", "on")
"""Levels of thinking, least first; ``on`` is the one of models that know only on and off."""


def validation_on(values: Mapping[str, Any]) -> bool:
    """Whether a run with these options validates."""
    return bool(values["val_enabled"]) and values["val_interval_steps"] > 0


def concurrency(batch_size: int, group_size: int) -> int:
    """The default of ``max_concurrent_trajectories``: twice a batch, clamped to its bound."""
    return min(MAX_CONCURRENT, batch_size * group_size * 2)


def twice_a_batch(values: Mapping[str, Any], _: BaseModelInfo | None) -> int:
    """The default of ``max_concurrent_trajectories``."""
    return concurrency(values["batch_size"], values["group_size"])


def checkpoint_interval(num_steps: int, val_interval: int | None) -> int:
    """The default of ``checkpoint_interval_steps``.

    ``val_interval`` is ``None`` without validation. At most 20 checkpoints over the run, lined up
    with validation: every checkpoint falls on a validated step or, when validation is the rarer,
    every validated step has its checkpoint, so that the best validated step can be picked.
    """
    base = math.ceil(num_steps / 20)
    if val_interval is None:
        return base
    if val_interval <= base:
        return math.ceil(base / val_interval) * val_interval
    return next(d for d in range(base, val_interval + 1) if val_interval % d == 0)


def context(_: Mapping[str, Any], model: BaseModelInfo | None) -> int | None:
    """The base model's context."""
    return model.max_context if model else None


def precision(_: Mapping[str, Any], model: BaseModelInfo | None) -> str | None:
    """As the catalog says."""
    return model.precision if model else None


def lowest_effort(_: Mapping[str, Any], model: BaseModelInfo | None) -> str | None:
    """The least thinking that is not none; ``None`` for a model without levels."""
    levels = model.thinking if model else ()
    return next((level for level in EFFORTS if level != "off" and level in levels), None)


def levels(model: BaseModelInfo) -> tuple[str, ...]:
    """The levels of thinking that a base model has."""
    return model.thinking


def like(name: str) -> Compute:
    """The value of another option."""
    return lambda values, _: values[name]


def clip_default(side: int) -> Compute:
    """The default of ``clip_low`` (side 0) or ``clip_high`` (1)."""

    def clip(values: Mapping[str, Any], _: BaseModelInfo | None) -> float:
        stale = values["algorithm"] == "gspo" and values["max_staleness"] > 0
        return (STALE_GSPO_CLIP if stale else _CLIP[values["algorithm"]])[side]

    return clip


def clip_words(side: int) -> str:
    """The same in words."""
    stale, fresh, grpo = (
        show(pair[side]) for pair in (STALE_GSPO_CLIP, _CLIP["gspo"], _CLIP["grpo"])
    )
    return f"{stale} for gspo ({fresh} at max_staleness 0), {grpo} for grpo"


def interval(values: Mapping[str, Any], _: BaseModelInfo | None) -> int:
    """The default of ``checkpoint_interval_steps``."""
    on = validation_on(values)
    return checkpoint_interval(values["num_steps"], values["val_interval_steps"] if on else None)


def budgets(limit: int) -> tuple[int, ...]:
    """Output tokens that density-aware training gives a task: 1/8, 1/4, 1/2 and all of ``limit``.

    Rounded up; below a limit of 4 some coincide and stand once.
    """
    return tuple(sorted({math.ceil(limit / share) for share in (8, 4, 2, 1)}))


def no_zero(value: int) -> str | None:
    """The complaint about a limit of 0."""
    return "is -1 (no limit) or at least 1" if value == 0 else None


def too_cold(value: float) -> str | None:
    """The complaint about a temperature that is neither greedy nor warm enough."""
    # Logits divided by less overflow; nothing but the likeliest token would be sampled anyway
    return "is 0 (greedy) or at least 0.01" if 0 < value < 0.01 else None


def pattern(value: str) -> str | None:
    """The complaint about what is no regular expression."""
    if not value.strip():
        return 'is a regular expression or "default"'
    try:
        re.compile(value)
    except re.error as error:
        return f"is no valid regular expression ({error})"
    return None
