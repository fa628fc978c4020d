"""What was read of a run so far: the one reading that its summary and all its panels share."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbtrain.jobs.liveness import Liveness, seen_of

if TYPE_CHECKING:
    from nbtrain.store import Pulse, Row, Store, StoredCheckpoint, StoredRun

__all__ = ["Followed", "newest_error"]

_NEWEST = 512  # trajectories among which the most frequent error is looked for
_ERRORS_LOOKED_FOR = 5.0  # seconds between two looks at them, until the run is over


class Followed:
    """The rows of one run, kept up to date by reading only what is new.

    ``steps`` and ``rounds`` are by key, in the order of keys; ``step_log`` and ``round_log`` name
    the keys whose row came or changed, in that order, and ``generation`` counts how often
    everything before was forgotten: another attempt hides rows, and then the logs begin anew.
    ``look`` returns the run's row after ending it where its host is gone.
    """

    def __init__(
        self, store: Store, run_key: int, look: Callable[[], tuple[StoredRun, Liveness]]
    ) -> None:
        self.store = store
        self.run_key = run_key
        self.lock = threading.RLock()
        self.generation = 0
        self._look = look
        self._attempt: int | None = None
        self._stepped = 0
        self._at = float("-inf")
        self._saved: tuple[Any, ...] | None = None
        self._fixed = False
        self.row: StoredRun
        self.seen: Liveness
        self._forget()

    def _forget(self) -> None:
        self.generation += 1
        self.steps: dict[int, Row] = {}
        self.rounds: dict[int, Row] = {}
        self.step_log: list[int] = []
        self.round_log: list[int] = []
        self.checkpoints: list[StoredCheckpoint] = []
        self.checkpoints_read = 0
        """How often the checkpoints were read: they may have changed since the last number."""
        self.cut = 0
        self.error: str | None = None
        self._step_cursor = 0
        self._round_cursor = 0
        self._saved = None
        self._attempted = 0
        self._cut_cursor = 0
        self._errors_due = 0.0

    @property
    def is_final(self) -> bool:
        """Whether the run was over at the last look, so that nothing will change any more."""
        return self._fixed

    def refresh(self, within: float = 0.0) -> tuple[StoredRun, Liveness]:
        """Read what is new and return the run's row and whether its job lives.

        What was read in the last ``within`` seconds is new enough.
        """
        with self.lock:
            if time.monotonic() - self._at < within:
                return self.row, self.seen
            pulse = self.store.pulse(self.run_key, self._step_cursor, self._round_cursor)
            row, seen = pulse.run, seen_of(pulse.run, pulse.attempt or {})
            another = self._attempt is not None and row.run_id != self.row.run_id
            if another or (seen.state == "gone" and not row.ended_for_good):
                row, seen = self._look()  # refuses a run of a store that took this one's place
            if self._anew(pulse, row):
                if self._step_cursor or self._round_cursor:
                    pulse = self.store.pulse(self.run_key)
                    row = pulse.run
                self._begin(row, pulse)
            self.row, self.seen = row, seen
            self._take(pulse.steps, pulse.rounds)
            self._read_more(row, hurry=within > 0)
            self._fixed = row.ended_for_good
            self._at = time.monotonic()
            return row, seen

    def _anew(self, pulse: Pulse, row: StoredRun) -> bool:
        """Whether what is known may be more than what rows after a key tell.

        Those of an ended run are read once more from the start: a step that was not settled may
        have changed. An attempt that comes back hides rows, before its first step.
        """
        if row.attempt != self._attempt or (row.ended_for_good and not self._fixed):
            return True
        back = row.completed_steps < self.row.completed_steps
        return back or any(step["attempt"] > self._stepped for step in pulse.steps)

    def _begin(self, row: StoredRun, pulse: Pulse) -> None:
        """All rows come once more; what was known is kept where none of it is hidden now."""
        steps, rounds = ({found["id"] for found in rows} for rows in (pulse.steps, pulse.rounds))
        hidden = self.steps.keys() - steps or self.rounds.keys() - rounds
        if row.attempt != self._attempt or hidden:
            self._forget()
            self._attempt = row.attempt
        self._stepped = max((step["attempt"] for step in pulse.steps), default=0)
        self.cut = self._cut_cursor = self._attempted = 0

    def _take(self, steps: list[Row], rounds: list[Row]) -> None:
        for step in steps:
            if self.steps.get(step["id"]) != step:
                self.steps[step["id"]] = step
                self.step_log.append(step["id"])
        if steps:
            self._stepped = steps[-1]["attempt"]
            open_ones = (step["id"] for step in steps if not step["settled"])
            self._step_cursor = next(open_ones, steps[-1]["id"] + 1) - 1
        for found in rounds:
            if found["id"] not in self.rounds:
                self.rounds[found["id"]] = found
                self.round_log.append(found["id"])
                self._round_cursor = found["id"]

    def _read_more(self, row: StoredRun, *, hurry: bool) -> None:
        # What a run saved changes with a save; what else changes is read anew when it is over
        saved = (row.attempt, row.saved_step, row.ended_for_good)
        if saved != self._saved:
            self.checkpoints = self.store.checkpoints(row.key)
            self.checkpoints_read += 1
            self._saved = saved
        if row.graded_trajectories >= row.attempted_trajectories:
            return
        due = row.ended_for_good or not hurry or time.monotonic() >= self._errors_due
        if row.attempted_trajectories != self._attempted and due:
            self._attempted = row.attempted_trajectories
            key, error = newest_error(self.store, row)
            self.error = error or self.error
            self.cut += self.store.cut_count(row.key, self._cut_cursor, key)
            self._cut_cursor = key
            self._errors_due = time.monotonic() + _ERRORS_LOOKED_FOR


def newest_error(store: Store, row: StoredRun) -> tuple[int, str | None]:
    """The newest trajectory's key, and an error of the kind that is the most frequent among the
    newest ones that ended without a grade.
    """
    from nbtrain.client.diagnosis.errors import alike

    newest = store.trajectories(
        row.key,
        split="train",
        limit=_NEWEST,
        newest=True,
        columns=("id", "status", "reward", "error"),
    )
    errors = [
        t["error"]
        for t in newest
        if t["reward"] is None and t["error"] and t["status"] != "aborted"
    ]
    kinds = Counter(map(alike, errors))
    most = max(kinds, key=lambda kind: kinds[kind], default=None)
    last = newest[-1]["id"] if newest else 0
    return last, next((error for error in errors if alike(error) == most), None)
