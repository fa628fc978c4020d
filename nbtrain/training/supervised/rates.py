"""The learning rate of each global step of a supervised plan."""

from __future__ import annotations

from collections.abc import Callable

from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.plan.schedule import learning_rate, schedule_of

__all__ = ["rates_of"]


def rates_of(plan: ResolvedPlan, total_steps: int) -> Callable[[int], float]:
    """The rate by step (from 1) of a run that ends at ``total_steps``: what its plan shows."""
    schedule = schedule_of(plan.options, total_steps)
    return lambda step: learning_rate(step, **schedule)
