"""A sampler and a grader that follow a script: for tests of what is decided, not of how it runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from nbtrain.rewards import Grade, GradeRequest, GroupGrades
from nbtrain.rollout.types import Finish, Sample, SampleRequest

Script = Callable[[SampleRequest], tuple[list[int], Finish]]


class ScriptedSampler:
    """Finishes ``burst`` requests a step, in the order ``pick`` chooses."""

    def __init__(
        self, script: Script, pick: Callable[[int], int] = lambda n: 0, burst: int = 1
    ) -> None:
        self._burst = burst
        self._script = script
        self._pick = pick
        self._queue: list[SampleRequest] = []
        self._admitted: list[int] = []
        self.version = 0
        self.most_in_flight = 0
        self.requests: list[SampleRequest] = []

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self._queue += requests
        self._admitted += [request.request_id for request in requests]
        self.requests += requests
        self.most_in_flight = max(self.most_in_flight, len(self._queue))

    def step(self) -> list[Sample]:
        samples = []
        for _ in range(min(self._burst, len(self._queue))):
            request = self._queue.pop(self._pick(len(self._queue)) % len(self._queue))
            samples.append(self._sample(request, *self._script(request)))
        return samples

    def cancel(self, request_ids: Iterable[int]) -> list[Sample]:
        wanted = set(request_ids)
        gone = [r for r in self._queue if r.request_id in wanted]
        self._queue = [r for r in self._queue if r.request_id not in wanted]
        return [self._sample(r, [], Finish.CANCELLED) for r in gone]

    def admitted(self) -> list[int]:
        new, self._admitted = self._admitted, []
        return new

    def new_policy(self, version: int) -> None:
        self.version = version

    @property
    def pending(self) -> int:
        return len(self._queue)

    def _sample(self, request: SampleRequest, ids: list[int], finish: Finish) -> Sample:
        return Sample(request.request_id, ids, [-1.0] * len(ids), [self.version] * len(ids), finish)


class ScriptedRewards:
    """Grades in process, ``burst`` groups at a time; ``pick`` chooses which come first."""

    def __init__(
        self,
        score: Callable[[str], float | None],
        pick: Callable[[int], int] = lambda n: 0,
        burst: int = 1,
    ) -> None:
        self._burst = burst
        self._score = score
        self._pick = pick
        self._waiting: list[tuple[Hashable, GradeRequest]] = []

    timeout_seconds = 60.0

    def submit(self, key: Hashable, request: GradeRequest, *, limit: float | None = None) -> None:
        self._waiting.append((key, request))

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def finished(self, block: float | None = None) -> list[tuple[Hashable, GroupGrades]]:
        graded = []
        for _ in range(min(self._burst, len(self._waiting))):
            key, request = self._waiting.pop(self._pick(len(self._waiting)) % len(self._waiting))
            grades = tuple(self._grade(str(text)) for text in request.completions)
            graded.append((key, GroupGrades(grades)))
        return graded

    def _grade(self, text: str) -> Grade:
        score = self._score(text)
        kind = "missing" if score is None else "ok"
        return Grade(reward=score, terms={"scripted": score}, error=None, kind=kind)
