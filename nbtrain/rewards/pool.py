"""Scoring groups in killable worker processes.

Processes, timing and killing are pebble's; here are the words of rewards: what one call is, what
a failure means for which completion, and how the pool goes on after anything a reward can do.

One call grades a whole group. When it takes too long or its process dies, each part is called
again alone (a term of one sample on each completion, a term of TRL's form on the group), so that
only the culprit stays ungraded. A group with *u* such parts thus takes at most 1 + *u* calls of
``timeout_seconds`` that hang, spread over the workers. A call begins no further part once half
its time is over, and the rest goes into another call, so slow functions are not taken for hanging.
Once parts have turned out slow, a group's parts are spread over the workers that are free.
"""

from __future__ import annotations

import math
import pickle
import queue
import time
from collections.abc import Collection, Hashable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pebble import ProcessExpired

from nbtrain.errors import Problem
from nbtrain.rewards import worker
from nbtrain.rewards.contract import GradeRequest, GroupGrades, Kind, Outcome, TermInfo, combine
from nbtrain.rewards.crew import Closing, Crew, how_it_died
from nbtrain.rewards.output import Drain
from nbtrain.rewards.packing import read_packed
from nbtrain.rewards.scoring import Unit, describe

__all__ = ["RewardPool"]

_SLICE_SECONDS = 0.5
_SLOW_SECONDS = 0.05
"""A part that takes longer than this is worth a call, and a worker, of its own."""
_STALL_SECONDS = 30.0
_MOST_BREAKS = 3


@dataclass(slots=True)
class _Group:
    """A group being graded: its request as sent, and the outcomes so far."""

    request: bytes
    task_id: str
    retry: bool
    limit: float
    outcomes: list[list[Outcome | None]]
    open_units: int
    seconds: float = 0.0


@dataclass(slots=True)
class _Call:
    """One call of a worker: some units of one group."""

    key: Hashable
    units: tuple[Unit, ...]
    future: Future[Any] | None = field(default=None, repr=False)


class RewardPool(Closing):
    """Worker processes that hold the rewards packed at ``rewards_path`` and grade groups.

    ``workers`` processes start at once and load the rewards once each. ``timeout_seconds`` limits
    one call; a call over it is killed with its process. What rewards print goes to ``log_path``,
    at most 10 MiB per worker. At most ``queue_limit`` groups may wait. A worker may take
    ``start_seconds`` to load. Use it from one thread, which must outlive it: on Linux the workers
    die with the thread that started them.

    Raises :class:`~nbtrain.errors.Refused` when ``rewards_path`` holds no packed rewards.
    """

    def __init__(
        self,
        rewards_path: str | Path,
        *,
        workers: int,
        timeout_seconds: float,
        log_path: str | Path,
        queue_limit: int = 4096,
        start_seconds: float = 120.0,
    ) -> None:
        if workers < 1 or not 0 < timeout_seconds < math.inf:
            msg = f"workers {workers} and timeout_seconds {timeout_seconds} must be above 0"
            raise ValueError(msg)
        self.terms: tuple[TermInfo, ...] = read_packed(rewards_path).terms
        self.timeout_seconds = float(timeout_seconds)
        self.log_path = Path(log_path)
        self._queue_limit = queue_limit
        self._start_seconds = start_seconds
        self._groups: dict[Hashable, _Group] = {}
        self._calls: dict[int, _Call] = {}
        self._ready: list[tuple[Any, GroupGrades]] = []
        self._events: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._next = 0
        self._breaks = 0
        self._workers = workers
        self._part_seconds = 0.0
        self._progress = time.monotonic()
        self._drain = Drain(self.log_path, workers)
        self._crew = Crew(str(Path(rewards_path).resolve()), workers, self._drain.writer)

    # --- for the caller ----------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Groups submitted and not yet returned by :meth:`finished`."""
        return len(self._groups) + len(self._ready)

    def submit(
        self,
        key: Hashable,
        request: GradeRequest,
        *,
        terms: Collection[int] | None = None,
        retry: bool = True,
        limit: float | None = None,
    ) -> None:
        """Have a group graded; ``key`` comes back with its grades.

        ``terms`` asks for some of the terms only, by their index; without ``retry`` a call that
        fails is not tried again in parts. ``limit`` seconds bound this group's calls where that
        is less than ``timeout_seconds``. Raises ``ValueError`` for a key that is under way and
        ``RuntimeError`` when the queue is full or the pool closed.
        """
        if self._closed:
            msg = "the reward pool is closed"
            raise RuntimeError(msg)
        if key in self._groups:
            msg = f"a group {key!r} is being graded already"
            raise ValueError(msg)
        if self.pending >= self._queue_limit:
            msg = f"{self.pending} groups wait for their grades already; take finished ones first"
            raise RuntimeError(msg)
        count = len(request.completions)
        units = self._units(count, range(len(self.terms)) if terms is None else terms)
        blank: list[list[Outcome | None]] = [[None] * len(self.terms) for _ in range(count)]
        data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        seconds = min(self.timeout_seconds, math.inf if limit is None else limit)
        group = _Group(data, request.task_id, retry, seconds, blank, len(units))
        if not self._calls:
            self._progress = time.monotonic()
        self._groups[key] = group
        for share in self._shares(units):
            self._call(key, share)
        if not units:
            self._complete(key)

    def finished(self, block: float | None = 0.0) -> list[tuple[Any, GroupGrades]]:
        """Groups whose grading is complete, in the order they were completed.

        Waits up to ``block`` seconds for the first one, without limit when None; returns at once
        when nothing is under way.
        """
        end = math.inf if block is None else time.monotonic() + block
        self._take_events(0.0)
        while not self._ready and self._groups and (left := end - time.monotonic()) > 0:
            self._take_events(min(left, _SLICE_SECONDS))
            self._look_for_stall()
        ready, self._ready = self._ready, []
        return ready

    def check_start(self) -> Problem | None:
        """Wait until a worker has loaded the rewards; the problem when that fails, else None."""
        for _ in range(_MOST_BREAKS):
            try:
                future = self._crew.schedule(worker.hello)
                failure: str | None = future.result(timeout=self._start_seconds)
            except TimeoutError:
                failure = f"the rewards were not loaded within {self._start_seconds:g} s"
            except RuntimeError:  # the pool's processes died
                self._rebuild()
                continue
            return None if failure is None else Problem("rewards", failure)
        hint = f"See {self.log_path.name}, the log of the rewards"
        return Problem("rewards", "the process that loads the rewards dies", hint=hint)

    def _end(self) -> None:
        self._crew.stop()
        self._drain.close()
        self._groups.clear()
        self._calls.clear()

    # --- calls -------------------------------------------------------------------------------

    def _units(self, count: int, terms: Collection[int]) -> list[Unit]:
        units: list[Unit] = []
        for index in terms:
            if self.terms[index].form.per_sample:
                units += [Unit(index, sample) for sample in range(count)]
            elif count:
                units.append(Unit(index, None))
        return units

    def _shares(self, units: list[Unit]) -> list[list[Unit]]:
        """The units of a group in as many calls as pay."""
        free = self._workers - len(self._calls)
        count = min(free, len(units)) if self._part_seconds > _SLOW_SECONDS else 1
        count = max(1, count)
        return [units[first::count] for first in range(min(count, len(units)))]

    def _call(self, key: Hashable, units: Collection[Unit]) -> None:
        call = _Call(key, tuple(units))
        number = self._next
        self._next += 1
        self._calls[number] = call
        try:
            self._send(number, call)
        except RuntimeError:
            # An idle worker was killed: pebble gives the whole pool up, we do not.
            self._rebuild()

    def _send(self, number: int, call: _Call) -> None:
        request, limit = self._groups[call.key].request, self._groups[call.key].limit
        future = self._crew.schedule(worker.grade, request, call.units, limit / 2, limit=limit)
        call.future = future
        future.add_done_callback(lambda _: self._events.put(number))

    def _take_events(self, wait: float) -> None:
        """Handle finished calls; wait for the first of them at most ``wait`` seconds."""
        try:
            number = self._events.get(timeout=wait) if wait else self._events.get_nowait()
            while True:
                self._handle(number)
                number = self._events.get_nowait()
        except queue.Empty:
            return

    def _handle(self, number: int) -> None:
        call = self._calls.get(number)
        if call is None or call.future is None or not call.future.done():
            return  # of a pool that was given up
        error = call.future.exception()
        if isinstance(error, BrokenProcessPool):
            self._rebuild()
            return
        self._progress = time.monotonic()
        del self._calls[number]
        if error is None:
            self._breaks = 0
            done, left, seconds = call.future.result()
            self._part_seconds += (seconds / max(1, len(done)) - self._part_seconds) / 4
            self._record(call.key, done, seconds)
            if left:
                self._call(call.key, left)
        elif isinstance(error, ProcessExpired):
            worker.kill_group(error.pid)
            text = f"{self._who(call)} gave no answer: {how_it_died(error.exitcode)}"
            self._failed(call, "died", f"{text}; see {self.log_path.name}")
        elif isinstance(error, TimeoutError):
            limit = f"{self._groups[call.key].limit:.3g} s"
            text = f"{self._who(call)} did not answer within {limit}; its process was killed"
            self._failed(call, "timeout", text)
        else:
            self._failed(call, "exception", f"{self._who(call)} failed: {describe(error)}")

    def _failed(self, call: _Call, kind: Kind, text: str) -> None:
        if len(call.units) > 1 and self._groups[call.key].retry:
            self._drain.say(f"{text}; each part is tried alone")
            for unit in call.units:
                self._call(call.key, [unit])
            return
        self._give_up(call, kind, text)

    def _give_up(self, call: _Call, kind: Kind, text: str) -> None:
        self._drain.say(text)
        outcome = Outcome(kind, error=text)
        count = len(self._groups[call.key].outcomes)
        self._record(
            call.key,
            [(u, [outcome] * (count if u.sample is None else 1)) for u in call.units],
            self._groups[call.key].limit if kind == "timeout" else 0.0,
        )

    def _record(
        self, key: Hashable, done: Collection[tuple[Unit, list[Outcome]]], seconds: float
    ) -> None:
        group = self._groups[key]
        for (term, sample), outcomes in done:
            first = 0 if sample is None else sample
            for offset, outcome in enumerate(outcomes):
                group.outcomes[first + offset][term] = outcome
        group.open_units -= len(done)
        group.seconds += seconds
        if group.open_units == 0:
            self._complete(key)

    def _complete(self, key: Hashable) -> None:
        group = self._groups.pop(key)
        grades = tuple(combine(self.terms, outcomes) for outcomes in group.outcomes)
        self._ready.append((key, GroupGrades(grades, group.seconds)))

    def _who(self, call: _Call) -> str:
        names = dict.fromkeys(self.terms[unit.term].name for unit in call.units)
        text = f"reward {', '.join(map(repr, names))}"
        samples = {unit.sample for unit in call.units}
        if len(samples) == 1 and (sample := samples.pop()) is not None:
            text += f" on completion {sample + 1}"
        task_id = self._groups[call.key].task_id
        return f"{text} of task {task_id}" if task_id else text

    # --- the processes -----------------------------------------------------------------------

    def _rebuild(self) -> None:
        """New workers; calls under way begin again, or fail after too many breaks in a row."""
        resent = False
        while not resent:
            self._breaks += 1
            self._drain.say("the reward processes ended unexpectedly and are started again")
            self._crew.renew()
            self._progress = time.monotonic()
            if self._breaks > _MOST_BREAKS:
                self._give_all_up()
            resent = self._resend()

    def _resend(self) -> bool:
        try:
            for number, call in self._calls.items():
                self._send(number, call)
        except RuntimeError:
            return False
        return True

    def _give_all_up(self) -> None:
        self._breaks = 0
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            text = f"{self._who(call)} gave no answer: its process dies again and again"
            self._give_up(call, "died", f"{text}; see {self.log_path.name}")

    def _look_for_stall(self) -> None:
        # Nothing that works is silent for long: a call ends or is killed within its limit, and
        # loaded workers take a call at once. Only a kill from outside, in the instant a worker
        # holds the lock of pebble's pipe, leads here.
        if any(call.future and call.future.running() for call in self._calls.values()):
            limit = self.timeout_seconds + _STALL_SECONDS
        elif self._crew.load_seconds is None:
            limit = self._start_seconds + _STALL_SECONDS
        else:
            limit = 5 * self._crew.load_seconds + _STALL_SECONDS / 3
        if self._calls and time.monotonic() - self._progress > limit:
            self._rebuild()
