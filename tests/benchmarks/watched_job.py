"""The job of a run in this process, its books checked after every commit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from nbtrain.training.job import Job
from nbtrain.training.record import StoreRecorder


@dataclass
class Watched:
    """What the checks saw: steps checked, rows amended, memory in MiB step by step."""

    checks: int = 0
    amended: int = 0
    memory: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class WatchedRecorder(StoreRecorder):
    """Checks the books of the whole run after each commit."""

    watched: Watched

    def step(self, row: Any, groups: Any, trajectories: Any, changes: Any) -> None:
        super().step(row, groups, trajectories, changes)
        watched = self.watched
        watched.memory.append(psutil.Process().memory_info().rss / 2**20)
        watched.seconds.append(time.monotonic())
        watched.amended += len(changes.steps)
        check_books(self._store, self._writer, {*changes.steps, row["step"]})
        watched.checks += 1

    def closing(self, step: int, trajectories: Any, changes: Any) -> None:
        super().closing(step, trajectories, changes)
        check_books(self._store, self._writer, {*changes.steps, step})


class WatchedJob(Job):
    """A job whose recorder checks what it has committed."""

    watched: Watched

    def _recorder(self, parts: Any) -> StoreRecorder:
        plain = super()._recorder(parts)
        plain.__class__ = WatchedRecorder
        assert isinstance(plain, WatchedRecorder)
        plain.watched = self.watched
        return plain


def check_books(store: Any, writer: Any, touched: set[int]) -> None:
    """The equation over the run so far, and those of the rows that a commit has touched."""
    columns = ["step", *(f"{n}_groups" for n in ("started", "in_flight", "completed", "cancelled"))]
    rows = store.steps(writer.run_key, columns=columns)
    assert [row["step"] for row in rows] == list(range(1, max(touched) + 1))
    over = sum(row["completed_groups"] + row["cancelled_groups"] for row in rows)
    assert rows[-1]["started_groups"] == rows[-1]["in_flight_groups"] + over
    for row in store.steps_at(writer.run_key, touched):
        check_row(row)


def check_row(row: Any) -> None:
    """The equations of one step."""
    metrics = row["metrics"]
    places = ("used", "filtered", "too_small", "discarded", "pending")
    placed = sum(row[f"{place}_groups"] for place in places) + metrics["no_signal_not_trained"]
    assert placed == row["completed_groups"], row
    assert bool(row["settled"]) == (row["pending_groups"] == 0), row
    graded = metrics["correct"] + metrics["partial"] + metrics["incorrect"]
    assert graded == metrics["graded_trajectories"], row
    attempted = graded + metrics["error"] + metrics["incomplete"]
    assert attempted == metrics["attempted_trajectories"], row
    assert sum(metrics["termination_reasons"].values()) == metrics["attempted_trajectories"], row
