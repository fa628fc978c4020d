"""What can be named, for completion: cheap reads, a bounded number of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from nbtrain.client.parts import Part

if TYPE_CHECKING:
    from nbtrain.client.parts import Parts
    from nbtrain.store import StoredRun

__all__ = ["Kind", "Known"]

Kind = Literal["workload", "dataset", "base model", "model", "bundle"]

MOST = 100
"""Of each kind."""
_RUNS = 10
"""The newest runs whose checkpoints are read; each costs two reads by an index."""

Named = list[tuple[str, str]]
"""Words that name something, each with a word or two about it, short enough for a column."""


class Known(Part):
    """Names, ids and what they stand for. Nothing is registered, computed or loaded."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def runs(self) -> Named:
        """The newest runs by name, else by the first 12 digits of their ids, with their status."""
        found: dict[str, str] = {}
        for row in self._parts.store.runs(MOST, texts=False):
            found.setdefault(row.name or row.short_id, row.status)
        return list(found.items())

    def checkpoints(self) -> Named:
        """Checkpoints of the newest runs by the first 12 digits of their ids, best first."""
        found: Named = []
        for row in self._parts.store.runs(_RUNS, texts=False):
            found += self._checkpoints(row)
        return found[:MOST]

    def _checkpoints(self, run: StoredRun) -> Named:
        store = self._parts.store
        saved = store.checkpoints(run.key)
        rounds = {row["step"]: row for row in store.validation_rounds(run.key)} if saved else {}
        scored = []
        for row in saved:
            score = _score(rounds.get(row.step, {}))
            told = f"step {row.step}" + ("" if score is None else f" {score:.2f}")
            worth = float("inf") if score is None else score if run.method == "sft" else -score
            scored.append((worth, -row.step, row.short_id, told))
        return [(ident, told) for *_, ident, told in sorted(scored)]

    def names(self, kind: Kind) -> Named:
        """Names of registered things, the one moved last first, samples behind them."""
        if kind == "workload":
            return _told(self._parts.catalog.workload_names(), kind)
        store = self._parts.store
        if kind == "base model":
            slugs = [row["slug"] for row in store.base_models()]
            return _told(["nbtrain/tiny", *slugs], kind)
        if kind == "dataset":
            return _told(self._parts.datasets.names(), kind)
        return _told(store.aliases(kind), kind)


def _told(names: Any, kind: str) -> Named:
    return [(name, kind) for name in list(dict.fromkeys(names))[:MOST]]


def _score(point: Mapping[str, Any]) -> float | None:
    """The held-out reward or validation loss of a complete round."""
    if not point.get("round_completed"):
        return None
    loss = point.get("loss")
    found: float | None = point.get("held_out_reward") if loss is None else loss
    return found
