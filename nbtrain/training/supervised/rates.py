"""The learning rate of each global step of a supervised plan."""

from __future__ import annotations

import math
from collections.abc import Callable

from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.plan.schedule import learning_rate

__all__ = ["rates_of"]


def rates_of(plan: ResolvedPlan, total_steps: int) -> Callable[[int], float]:
    """The rate by step (from 1) of a run that ends at ``total_steps``."""

    def rate(step: int) -> float:
        return learning_rate(
            step,
            kind=plan["scheduler_kind"],
            learning_rate=plan["learning_rate"],
            warmup=math.ceil(plan["warmup_ratio"] * total_steps),
            hold=0,
            total_steps=total_steps,
            min_ratio=plan["min_learning_rate_ratio"],
        )

    return rate
