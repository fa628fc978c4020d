"""The learning rate by step, as a pure function: the job trains by it, previews draw it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypedDict


class Schedule(TypedDict):
    """The keyword arguments of :func:`learning_rate`."""

    learning_rate: float
    warmup: int
    hold: int
    total_steps: int
    min_ratio: float


def learning_rate(
    step: int,
    *,
    learning_rate: float,
    warmup: int,
    hold: int,
    total_steps: int,
    min_ratio: float,
) -> float:
    """The rate that step ``step`` trains at.

    Steps are global and count from 1, skipped updates included. The rate rises linearly and
    reaches ``learning_rate`` at step ``warmup``, so that the first update never runs at zero;
    it holds up to step ``warmup + hold``, then follows a cosine to ``learning_rate * min_ratio``
    at ``total_steps``. A run that ends while the rate holds never decays. Steps past
    ``total_steps`` keep the last rate. Raises ``ValueError`` for a step below 1.
    """
    if step < 1:
        msg = f"steps count from 1, found {step}"
        raise ValueError(msg)
    if step < warmup:
        return learning_rate * step / warmup
    decay_from = warmup + hold
    if step <= decay_from or total_steps <= decay_from:
        return learning_rate
    progress = min(1.0, (step - decay_from) / (total_steps - decay_from))
    falling = 0.5 * (1.0 + math.cos(math.pi * progress))
    return learning_rate * (min_ratio + (1.0 - min_ratio) * falling)


def schedule_of(options: Mapping[str, Any], total_steps: int) -> Schedule:
    """The schedule of a plan's options; ``total_steps`` is the global step at which it ends."""
    return {
        "learning_rate": options["learning_rate"],
        "warmup": options["lr_warmup_steps"],
        "hold": options["lr_hold_steps"],
        "total_steps": total_steps,
        "min_ratio": options["lr_min_ratio"],
    }


def trace(schedule: Schedule, *, start_step: int = 0) -> list[float]:
    """The rates of steps ``start_step + 1`` to ``total_steps``, in order."""
    steps = range(start_step + 1, schedule["total_steps"] + 1)
    return [learning_rate(step, **schedule) for step in steps]
