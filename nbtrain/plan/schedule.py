"""The learning rate by step, as a pure function: the job trains by it, previews draw it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict

Kind = Literal["linear", "cosine", "constant"]


class Schedule(TypedDict):
    """The keyword arguments of :func:`learning_rate`."""

    learning_rate: float
    warmup: int
    hold: int
    total_steps: int
    min_ratio: float
    kind: NotRequired[Kind]


def learning_rate(
    step: int,
    *,
    learning_rate: float,
    warmup: int,
    hold: int,
    total_steps: int,
    min_ratio: float,
    kind: Kind = "cosine",
) -> float:
    """The rate that step ``step`` trains at.

    Steps are global and count from 1, skipped updates included. The rate rises linearly and
    reaches ``learning_rate`` at step ``warmup``, so that the first update never runs at zero;
    it holds up to step ``warmup + hold``, then follows a cosine or a straight line (``kind``) to
    ``learning_rate * min_ratio`` at ``total_steps``; a constant one holds on. Where that floor is
    0 it would be reached one step later, so that no update runs at rate zero. A run that ends
    while the rate holds never decays. Steps past ``total_steps`` keep the last rate. Raises
    ``ValueError`` for a step below 1.
    """
    if step < 1:
        msg = f"steps count from 1, found {step}"
        raise ValueError(msg)
    if step < warmup:
        return learning_rate * step / warmup
    decay_from = warmup + hold
    if kind == "constant" or step <= decay_from or total_steps <= decay_from:
        return learning_rate
    spread = total_steps - decay_from + (min_ratio == 0)
    progress = (min(step, total_steps) - decay_from) / spread
    falling = 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return learning_rate * (min_ratio + (1.0 - min_ratio) * falling)


def schedule_of(options: Mapping[str, Any], total_steps: int) -> Schedule:
    """The schedule of a plan's settings; ``total_steps`` is the global step at which it ends.

    A supervised run's has no hold, and its warm-up is ``warmup_ratio`` of all updates, rounded up.
    """
    if "warmup_ratio" in options:
        return {
            "learning_rate": options["learning_rate"],
            "warmup": warm_up(options["warmup_ratio"], total_steps),
            "hold": 0,
            "total_steps": total_steps,
            "min_ratio": options["min_learning_rate_ratio"],
            "kind": options["scheduler_kind"],
        }
    return {
        "learning_rate": options["learning_rate"],
        "warmup": options["lr_warmup_steps"],
        "hold": options["lr_hold_steps"],
        "total_steps": total_steps,
        "min_ratio": options["lr_min_ratio"],
    }


def warm_up(ratio: float, total_steps: int) -> int:
    """Updates of a warm-up by share of all updates, rounded up; at least one.

    The first update of a run without warm-up thus trains at the full rate, as under transformers'
    own schedules, and a decay begins with the second.
    """
    return max(1, math.ceil(round(ratio * total_steps, 9)))  # 0.07 x 100 is above 7 in floats


def trace(schedule: Schedule, *, start_step: int = 0) -> list[float]:
    """The rates of steps ``start_step + 1`` to ``total_steps``, in order."""
    steps = range(start_step + 1, schedule["total_steps"] + 1)
    return [learning_rate(step, **schedule) for step in steps]
