"""Trajectories page by page, each page's texts read at once when the first is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nbtrain.client import tables
from nbtrain.client.listing import Pages
from nbtrain.client.records import TrajectoryItem
from nbtrain.client.whole import LARGEST
from nbtrain.errors import NotFound
from nbtrain.plan.fields import describe

if TYPE_CHECKING:
    from nbtrain.store import Store

_TEXTS = 200  # texts read together; a page of rows is larger


class _Texts:
    """The texts of a stretch of trajectories, read once."""

    def __init__(self, store: Store, keys: list[int]) -> None:
        self._store = store
        self._keys = keys
        self._found: Mapping[int, Mapping[str, Any]] | None = None
        self._lock = threading.Lock()

    def of(self, key: int) -> Callable[[], Mapping[str, Any]]:
        def read() -> Mapping[str, Any]:
            with self._lock:
                if self._found is None:
                    self._found = self._store.texts(self._keys)
                return self._found.get(key, {})

        return read


def trajectory_pages(
    store: Store,
    run_key: int,
    run_id: str,
    *,
    step: int | None,
    split: str | None,
    limit: int | None,
    after: str | None,
) -> Pages[TrajectoryItem]:
    """The pages behind ``client.trajectories.list``."""
    first = 0 if after is None else _key(after, run_id)

    def read(cursor: int, size: int) -> tuple[list[TrajectoryItem], int]:
        begun = cursor or first
        rows = store.trajectories(run_key, begun, step=step, split=split, limit=size)
        items: list[TrajectoryItem] = []
        for start in range(0, len(rows), _TEXTS):
            some = rows[start : start + _TEXTS]
            texts = _Texts(store, [row["id"] for row in some])
            items += [
                TrajectoryItem(tables.trajectory_row(row, run_id), texts.of(row["id"]))
                for row in some
            ]
        return items, rows[-1]["id"] if rows else begun

    def count() -> int:
        if step is None and after is None:
            return store.trajectory_count(run_key, split=split)
        found = store.trajectories(run_key, first, step=step, split=split, columns=("id",))
        return len(found)

    return Pages(read, count, limit=limit)


def _key(ref: str, run_id: str) -> int:
    """The row's key in a trajectory's public id."""
    head, _, tail = ref.rpartition("-") if isinstance(ref, str) else ("", "", "")
    if head != run_id[:12] or not tail.isdecimal():
        told = repr(ref) if isinstance(ref, str) else describe(ref)
        msg = f"{told} is no trajectory of run {run_id[:12]}; one looks like {run_id[:12]}-17"
        raise NotFound(msg)
    # More digits than the largest has are still a place after all others
    return min(int(tail), LARGEST) if len(tail) < 20 else LARGEST
