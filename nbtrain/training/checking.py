"""A run's start checks alone: everything is loaded and tried, and nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from nbtrain.errors import Problem, StartChecksFailed
from nbtrain.plan.checks import Check
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.store import Store
from nbtrain.training.control import Control
from nbtrain.training.ranks import join_ranks
from nbtrain.training.starting import Starter

__all__ = ["check_only"]


def check_only(
    store: Store,
    plan: ResolvedPlan,
    folder: Path,
    told: Callable[[str], object] = lambda line: None,
) -> tuple[list[Check], list[Problem]]:
    """The start checks of a reinforcement run, in this process and without a run.

    ``folder`` takes logs and what else a run leaves in its own; worker processes are gone when
    this returns. ``told`` hears now and then what is being checked. Returns what was measured, and
    all that would keep the run from starting.
    """
    ranks, device = join_ranks(folder, 0)
    control = Control(list, lambda command: None, lambda said: told(said) if said else None)
    starter = Starter(store, plan, folder, ranks=ranks, device=device, control=control)
    with ExitStack() as stack:
        try:
            starter.start(stack)
        except StartChecksFailed as error:
            return starter.checks, list(error.problems)
    return starter.checks, []
