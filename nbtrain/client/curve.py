"""The losses of a supervised run as a glance shows them, reading only what is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nbtrain.client.readings import SFT
from nbtrain.report.supervised import Supervised, Validated

if TYPE_CHECKING:
    from nbtrain.client.records import HeldOutPoint
    from nbtrain.plan.resolved import ResolvedPlan
    from nbtrain.store import Store, StoredRun

__all__ = ["LossCurve"]

_COLUMNS = ("id", "step", "loss", "learning_rate")


class LossCurve:
    """What is read of the steps of a supervised run; every step is settled when it is written."""

    def __init__(self) -> None:
        self._cursor = 0
        self._losses: list[tuple[int, float | None]] = []
        self._rates: list[tuple[int, float | None]] = []
        self._last: dict[str, Any] = {}

    def read(self, store: Store, row: StoredRun) -> None:
        """Read the steps after those that are known."""
        steps = store.steps(row.key, self._cursor, columns=_COLUMNS)
        if not steps:
            return
        self._losses += [(step["step"], step["loss"]) for step in steps]
        self._rates += [(step["step"], step["learning_rate"]) for step in steps]
        self._cursor = steps[-1]["id"]
        newest = store.steps(row.key, self._cursor - 1, limit=1, columns=("metrics",))
        self._last = (newest[0]["metrics"] if newest else None) or {}

    def told(self, plan: ResolvedPlan, rounds: Sequence[HeldOutPoint]) -> Supervised | None:
        """The figures; ``None`` of a run that is not supervised."""
        if plan.method != SFT:
            return None
        return Supervised(
            losses=list(self._losses),
            rates=list(self._rates),
            rounds=[
                Validated(p.step, p.validation_loss, p.perplexity, p.round_completed)
                for p in rounds
            ],
            epoch=self._last.get("epoch"),
            epochs=None if plan.smoke else plan.options.get("epochs"),
            trained_tokens=self._last.get("trained_tokens"),
            validates=plan.validation_dataset is not None or plan.smoke is not None,
        )
