"""A sampler, graders and environments that cost time on a clock of their own, and no real time.

So what a collection spends its seconds on is decided, not measured: the real collector and flight
run on the clock, and nothing depends on the machine.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nbtrain.rewards import Grade, GradeRequest, GroupGrades
from nbtrain.rollout.types import (
    EnvironmentEvent,
    EnvironmentEventKind,
    Finish,
    Sample,
    SampleRequest,
)

Latency = Callable[[random.Random], float]


class Clock:
    """Seconds that pass only when something takes them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, block: float, until: float) -> None:
        """Pass up to ``block`` seconds, until ``until`` at the latest."""
        self.now = max(self.now, min(self.now + block, until))


class ClockSampler:
    """Decodes a token of ``n`` requests in ``seconds(n)``; ``length`` draws a reply's tokens."""

    def __init__(
        self,
        clock: Clock,
        *,
        seconds: Callable[[int], float],
        length: Callable[[random.Random], int],
    ) -> None:
        self._clock, self._seconds, self._length = clock, seconds, length
        self._left: dict[int, list[int]] = {}
        self._admitted: list[int] = []
        self._version = 0

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        for request in requests:
            count = self._length(random.Random(repr(request.stream)))
            self._left[request.request_id] = [count, count]
            self._admitted.append(request.request_id)

    def step(self) -> list[Sample]:
        self._clock.now += self._seconds(len(self._left))
        for counts in self._left.values():
            counts[0] -= 1
        done = [request for request, counts in self._left.items() if counts[0] == 0]
        return [self._sample(request, Finish.STOP) for request in done]

    def cancel(self, request_ids: Iterable[int]) -> list[Sample]:
        return [self._sample(r, Finish.CANCELLED) for r in request_ids if r in self._left]

    def admitted(self) -> list[int]:
        new, self._admitted = self._admitted, []
        return new

    def new_policy(self, version: int) -> None:
        self._version = version

    @property
    def pending(self) -> int:
        return len(self._left)

    def _sample(self, request: int, finish: Finish) -> Sample:
        left, whole = self._left.pop(request)
        count = whole - max(left, 0)
        return Sample(request, [7] * count, [-1.0] * count, [self._version] * count, finish)


class Workers:
    """``count`` workers that take calls first come, first served."""

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock = clock
        self._free_at = [0.0] * count

    def call(self, seconds: float) -> float:
        """When a call that begins as soon as a worker is free will be over."""
        end = max(self._clock.now, heapq.heappop(self._free_at)) + seconds
        heapq.heappush(self._free_at, end)
        return end


class ClockGraders:
    """Grades each completion in a call of its own, which takes ``latency``."""

    timeout_seconds = 1e6

    def __init__(self, clock: Clock, *, workers: int, latency: Latency) -> None:
        self._clock, self._latency = clock, latency
        self._workers = Workers(clock, workers)
        self._rng = random.Random(0)
        self._due: list[tuple[float, int, GroupGrades]] = []
        self.most_waiting = 0

    def submit(self, key: int, request: GradeRequest, *, limit: float | None = None) -> None:
        ends, grades = [], []
        for _ in request.completions:
            ends.append(self._workers.call(self._latency(self._rng)))
            grades.append(Grade(self._rng.random(), {}))
        heapq.heappush(self._due, (max(ends), key, GroupGrades(tuple(grades))))
        self.most_waiting = max(self.most_waiting, len(self._due))

    def finished(self, block: float | None = 0.0) -> list[tuple[int, GroupGrades]]:
        if self._due and self._due[0][0] > self._clock.now:
            self._clock.wait(1e9 if block is None else block, self._due[0][0])
        done = []
        while self._due and self._due[0][0] <= self._clock.now:
            _, key, grades = heapq.heappop(self._due)
            done.append((key, grades))
        return done


class ClockEnvironments:
    """Answers each reply after ``latency``, and ends with the second; ``workers`` at a time."""

    def __init__(self, clock: Clock, *, workers: int, latency: Latency) -> None:
        self._clock, self._latency = clock, latency
        self._rng = random.Random(0)
        self._free = workers
        self._queue: deque[int] = deque()
        self._turns: dict[int, int] = {}
        self._due: list[tuple[float, int, EnvironmentEvent]] = []
        self._next = 0

    def open(self, key: int, columns: Mapping[str, Any]) -> None:
        self._queue.append(key)
        self._let_in()

    def act(self, key: int, reply: Mapping[str, Any], *, limit: float) -> None:
        self._turns[key] += 1
        done = self._turns[key] == 2
        said = () if done else ({"role": "user", "content": "and?"},)
        seconds = 0.0 if done else self._latency(self._rng)
        observed = EnvironmentEventKind.OBSERVED
        event = EnvironmentEvent(key=key, kind=observed, messages=said, done=done, seconds=seconds)
        self._later(seconds, event)

    def close(self, key: int) -> None:
        self._leave(key)
        self._later(0.0, EnvironmentEvent(key=key, kind=EnvironmentEventKind.CLOSED, seconds=0.0))

    def drop(self, keys: Iterable[int]) -> None:
        gone = set(keys)
        self._queue = deque(key for key in self._queue if key not in gone)
        self._due = [entry for entry in self._due if entry[2].key not in gone]
        heapq.heapify(self._due)
        for key in gone & self._turns.keys():
            self._leave(key)

    def events(self, block: float = 0.0) -> list[EnvironmentEvent]:
        if self._due and self._due[0][0] > self._clock.now:
            self._clock.wait(block, self._due[0][0])
        events = []
        while self._due and self._due[0][0] <= self._clock.now:
            events.append(heapq.heappop(self._due)[2])
        return events

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def busy(self) -> int:
        return len(self._due)

    def _let_in(self) -> None:
        while self._queue and self._free:
            key = self._queue.popleft()
            self._free -= 1
            self._turns[key] = 0
            opened = EnvironmentEventKind.OPENED
            self._later(0.0, EnvironmentEvent(key=key, kind=opened, seconds=0.0))

    def _leave(self, key: int) -> None:
        del self._turns[key]
        self._free += 1
        self._let_in()

    def _later(self, seconds: float, event: EnvironmentEvent) -> None:
        self._next += 1
        heapq.heappush(self._due, (self._clock.now + seconds, self._next, event))
