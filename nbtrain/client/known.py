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
"""Runs whose checkpoints are read, the newest that have any; each costs two reads by an index."""

Named = list[tuple[str, str]]
"""Words that name something, each with a word or two about it, short enough for a column."""


class Known(Part):
    """Names, ids and what they stand for. Nothing is registered, computed or loaded.

    ``typed`` is the beginning of the words that are wanted: it is searched for before the list is
    cut short. Where no word begins with it, the list is the one without it.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def runs(self, typed: str = "") -> Named:
        """The newest runs by name, else by the first 12 digits of their ids, with their status."""
        store = self._parts.store
        found: dict[str, str] = {}
        for row in store.newest_of_each_name(typed, MOST) or store.newest_of_each_name("", MOST):
            found.setdefault(row.name or row.short_id, row.status)
        return list(found.items())

    def checkpoints(self, typed: str = "") -> Named:
        """Checkpoints of the newest runs by the first 12 digits of their ids, best first."""
        store = self._parts.store
        runs = store.runs_with_checkpoints(typed, _RUNS) or store.runs_with_checkpoints("", _RUNS)
        return _begun([one for row in runs for one in self._checkpoints(row)], typed)

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

    def names(self, kind: Kind, typed: str = "") -> Named:
        """Names of registered things, the one moved last first, samples behind them."""
        if kind == "workload":
            return _told(self._parts.catalog.workload_names(), kind, typed)
        store = self._parts.store
        if kind == "base model":
            slugs = [row["slug"] for row in store.base_models()]
            return _told(["nbtrain/tiny", *slugs], kind, typed)
        if kind == "dataset":
            return _told(self._parts.datasets.names(), kind, typed)
        return _told(store.aliases(kind), kind, typed)


def _told(names: Any, kind: str, typed: str) -> Named:
    return _begun([(name, kind) for name in dict.fromkeys(names)], typed)


def _begun(words: Named, typed: str) -> Named:
    """Those that begin with what is typed, else those that contain it, else all; at most MOST."""
    begun = [word for word in words if word[0].startswith(typed)]
    low = typed.lower()
    return (begun or [word for word in words if low in word[0].lower()] or words)[:MOST]


def _score(point: Mapping[str, Any]) -> float | None:
    """The held-out reward or validation loss of a complete round."""
    if not point.get("round_completed"):
        return None
    loss = point.get("loss")
    found: float | None = point.get("held_out_reward") if loss is None else loss
    return found
