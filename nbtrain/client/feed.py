"""A run as updates for whoever shows it live: everything once, then what is new.

Figures come as columns of Float64, keyed by row: a step may change until it is settled, so a row
may come again with other values. All else comes as parts of plain JSON, each whole when it
changed. What the tables and the parts hold is told in ``labextension/src/protocol.ts``.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbtrain.client.feed_parts import Parts
from nbtrain.client.glance import AS_READ, READ_WITHIN
from nbtrain.client.readings import SFT

if TYPE_CHECKING:
    from nbtrain.client.records import HeldOutPoint
    from nbtrain.client.run import Run

__all__ = ["ROUNDS", "STEPS_REINFORCED", "STEPS_SUPERVISED", "Feed", "TableRows", "Update"]

STEPS_REINFORCED = (
    *("id", "step", "avg_reward", "used_reward", "learning_rate", "used", "no_signal"),
    *("filtered", "too_small", "discarded", "pending"),
)
STEPS_SUPERVISED = ("id", "step", "loss", "learning_rate", "grad_norm")
ROUNDS = ("id", "step", "value", "low", "high", "complete")

_KEPT = 64  # serials that later updates can build on
_COLUMN_OF = {name: f"{name}_groups" for name in ("used", "filtered", "too_small")} | {
    name: f"{name}_groups" for name in ("discarded", "pending")
}
_NAN = math.nan


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of a table by column; each column is an array of as many doubles as there are rows.

    A figure that is missing, or was no finite number, is NaN.
    """

    name: str
    columns: tuple[str, ...]
    values: tuple[array[float], ...]

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.values[0])


@dataclass(frozen=True, slots=True)
class Update:
    """What is new since the serial ``base``; with ``base`` 0 it is everything.

    ``feed`` names the run, its attempt and what was hidden since: under another name all that
    came before is to be forgotten.
    """

    feed: str
    serial: int
    base: int
    tables: tuple[TableRows, ...]
    state: Mapping[str, Any]


@dataclass(slots=True)
class _Mark:
    """How long the logs were at a serial."""

    serial: int
    steps: int
    rounds: int


@dataclass(slots=True)
class _Part:
    serial: int
    value: Any = field(repr=False)


class Feed:
    """The updates of one run; several may follow it at once, and from several threads."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._glance = run.glance()
        self._followed = self._glance.followed
        self._lock = threading.RLock()
        self._names = STEPS_SUPERVISED if run.method == SFT else STEPS_REINFORCED
        self._begin()

    def _begin(self) -> None:
        self._generation: int | None = None
        self._serial = 0
        self._marks: deque[_Mark] = deque(maxlen=_KEPT)
        self._state: dict[str, _Part] = {}
        self._parts = Parts(self.run)
        self._picked: object = None
        self._points: dict[int, HeldOutPoint] = {}
        self._round_log: list[int] = []

    @property
    def name(self) -> str:
        """The feed's name now."""
        followed = self._followed
        return f"{self.run.id[:12]}.{followed.row.attempt}.{self._generation}"

    @property
    def serial(self) -> int:
        """That of the newest change."""
        return self._serial

    @property
    def is_final(self) -> bool:
        """Whether the run was over when it was last read, and everything was told of it."""
        return self._followed.is_final and self._parts.is_final

    def whole(self, *, read: bool = True) -> Update:
        """Everything; without ``read`` as of the last news."""
        with self._lock:
            if read or not self._serial:
                self._read()
            followed = self._followed
            tables = (self._steps(followed.steps), self._rounds(self._points))
            state = {name: part.value for name, part in self._state.items()}
            return Update(self.name, self._serial, 0, tables, state)

    def news(self, since: int) -> Update | None:
        """What came or changed after ``since``, a serial of this feed; ``None`` without any.

        It is everything where the feed has begun anew, or where ``since`` is too long ago.
        """
        with self._lock:
            self._read()
            if since == self._serial:
                return None
            mark = next((mark for mark in self._marks if mark.serial == since), None)
            if mark is None:
                return self.whole(read=False)
            followed = self._followed
            steps = dict.fromkeys(followed.step_log[mark.steps :])
            rounds = dict.fromkeys(self._round_log[mark.rounds :])
            tables = []
            if steps:
                tables.append(self._steps(sorted(steps)))
            if rounds:
                tables.append(self._rounds(sorted(rounds)))
            state = {n: part.value for n, part in self._state.items() if part.serial > since}
            return Update(self.name, self._serial, since, tuple(tables), state)

    def _read(self) -> None:
        """Read what is new; the serial counts on where that changed anything."""
        followed = self._followed
        with followed.lock:
            self._glance.refresh(READ_WITHIN)
            if followed.generation != self._generation:
                # Serials never come again, so that nobody builds on those before
                serial = self._serial
                self._begin()
                self._serial = serial
                self._generation = followed.generation
            changed = self._parts.changed()
            self._take_rounds()
            mark = self._marks[-1] if self._marks else _Mark(0, 0, 0)
            now = (len(followed.step_log), len(self._round_log))
            if not changed and now == (mark.steps, mark.rounds):
                return
            self._serial += 1
            for name, value in changed.items():
                self._state[name] = _Part(self._serial, value)
            self._marks.append(_Mark(self._serial, *now))

    def _steps(self, keys: Iterable[int]) -> TableRows:
        rows = [self._followed.steps[key] for key in keys]
        return TableRows("steps", self._names, tuple(_column(rows, n) for n in self._names))

    def _take_rounds(self) -> None:
        """Rounds come once, and again when more is known of them."""
        picked = self._glance.picks(AS_READ)
        if picked is self._picked:
            return
        self._picked = picked
        for key, point in zip(self._followed.rounds, picked[0], strict=True):
            if self._points.get(key) != point:
                self._points[key] = point
                self._round_log.append(key)

    def _rounds(self, keys: Iterable[int]) -> TableRows:
        rows = []
        for key in keys:
            point = self._points[key]
            supervised = self._names is STEPS_SUPERVISED
            value = point.validation_loss if supervised else point.held_out_reward
            known = (point.step, value, point.low, point.high, point.round_completed)
            rows.append(dict(zip(ROUNDS, (key, *known), strict=True)))
        return TableRows("rounds", ROUNDS, tuple(_column(rows, name) for name in ROUNDS))


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> array[float]:
    if name == "no_signal":
        return array("d", map(_no_signal, rows))
    key = _COLUMN_OF.get(name, name)
    return array("d", (_NAN if (v := row.get(key)) is None else v for row in rows))


def _no_signal(step: Mapping[str, Any]) -> float:
    """Tied groups that were not trained on: some methods train on them, as used ones."""
    left_out = step.get("no_signal_not_trained")
    told = step["no_signal_groups"] if left_out is None else left_out
    return _NAN if told is None else float(told)
