"""What the tasks of validation rounds got, read from the store once per round.

A round is committed whole and never changes, so what was read of it is kept in memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbtrain.plan.picking import Interval, Scores, intervals, task_means

if TYPE_CHECKING:
    from nbtrain.store import Store

__all__ = ["NOT_READ", "RoundRead", "rounds_read"]

_KEPT = 2000  # rounds: about 10 MB at 50 tasks


@dataclass(frozen=True, slots=True)
class RoundRead:
    """The mean counted reward of each task of a round, and the interval of their mean."""

    tasks: Scores = field(default_factory=dict)
    interval: Interval | None = None


NOT_READ = RoundRead()
"""Of a round that is not complete, or has no samples."""


class _Memory:
    """The rounds read last, over all stores of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, RoundRead] = OrderedDict()

    def get(self, key: Hashable) -> RoundRead | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, entries: Mapping[Hashable, RoundRead]) -> None:
        with self._lock:
            self._kept.update(entries)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)


_memory = _Memory()


def rounds_read(
    store: Store, rows: Iterable[Mapping[str, Any]], steps: Collection[int] | None = None
) -> dict[int, RoundRead]:
    """What the complete rounds among ``rows`` are made of, by their row's ``id``.

    ``rows`` are the store's, of one run; ``steps`` narrows them. Rounds of a supervised run have
    no samples and are left out.
    """
    wanted = [
        row
        for row in rows
        if row["round_completed"]
        and row["held_out_reward"] is not None
        and (steps is None or row["step"] in steps)
    ]
    keys = {row["id"]: (store.url, row["run"], row["id"], row["created_at"]) for row in wanted}
    found = {ident: seen for ident, key in keys.items() if (seen := _memory.get(key)) is not None}
    missing = [row for row in wanted if row["id"] not in found]
    if missing:
        new = _read(store, missing)
        _memory.put({keys[ident]: read for ident, read in new.items()})
        found |= new
    return found


def _read(store: Store, rows: list[Mapping[str, Any]]) -> dict[int, RoundRead]:
    samples: defaultdict[tuple[int, int], list[tuple[str, float | None, str | None]]]
    samples = defaultdict(list)
    for attempt, step, *sample in store.held_out(rows[0]["run"], {row["step"] for row in rows}):
        task, reward, reason = sample
        samples[attempt, step].append((task or "", reward, reason))
    means = [task_means(samples[row["attempt"], row["step"]]) for row in rows]
    ends = intervals([list(tasks.values()) for tasks in means])
    return {
        row["id"]: RoundRead(tasks, interval)
        for row, tasks, interval in zip(rows, means, ends, strict=True)
    }
