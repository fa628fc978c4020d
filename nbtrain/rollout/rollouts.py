"""Running groups through the sampler and the graders until every trajectory is graded.

Training and validation share this: it samples, decodes and grades, and decides nothing.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from nbtrain.rewards.contract import GradeRequest, GroupGrades
from nbtrain.rewards.pool import RewardPool
from nbtrain.rollout.types import (
    Finish,
    Group,
    Sample,
    Sampler,
    SampleRequest,
    TaskView,
    TerminationReason,
    Trajectory,
)

_GRADE_WAIT_SECONDS = 0.05

_MOST_UNGRADED = 512
"""Groups that may wait for their grades; sampling holds still above that."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How replies are sampled.

    ``max_new_tokens`` bounds a reply, ``max_trajectory_tokens`` all replies of a trajectory and
    ``max_context`` prompt and replies together. ``timeout`` bounds the seconds from a trajectory's
    first token to its last; waiting for its turn does not count.
    """

    max_new_tokens: int
    max_trajectory_tokens: int
    max_context: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    timeout: float = math.inf


@dataclass(slots=True)
class Spent:
    """Seconds by part, added up over a rollout."""

    sampling: float = 0.0
    grading: float = 0.0


class Decode(Protocol):
    """Token ids of a reply to text."""

    def __call__(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, without its end token."""
        ...


@dataclass(slots=True)
class _Open:
    """A group under way, and how many of its trajectories are still being sampled."""

    group: Group
    task: TaskView
    sampling: int
    graded: bool = False
    by_request: dict[int, Trajectory] = field(default_factory=dict)


class Rollouts:
    """Samples and grades whole groups.

    ``tick`` is called between decode steps, and while waiting for grades: it keeps heartbeats
    going and raises to stop a run. ``chat`` says whether completions reach reward functions as
    message lists (chat) or as text (raw).
    """

    def __init__(
        self,
        sampler: Sampler,
        rewards: RewardPool,
        decode: Decode,
        *,
        chat: bool,
        tick: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sampler = sampler
        self._rewards = rewards
        self._decode = decode
        self._chat = chat
        self._tick = tick
        self._clock = clock
        self._next_request = 0
        self._round = 0
        self._spent = Spent()

    def take_spent(self) -> Spent:
        """Seconds spent since the last call."""
        spent, self._spent = self._spent, Spent()
        return spent

    def run(
        self,
        groups: Sequence[tuple[Group, TaskView]],
        streams: Sequence[Sequence[tuple[int, ...]]],
        sampling: Sampling,
        *,
        max_in_flight: int,
        deadline: float | None = None,
    ) -> bool:
        """Sample and grade ``groups`` in place: ``streams[g][k]`` keys trajectory k of group g.

        Parameters
        ----------
        groups
            Empty groups, with the task of each.
        streams
            One random stream per trajectory to sample.
        sampling
            Limits and temperature.
        max_in_flight
            Largest number of trajectories being sampled at a time.
        deadline
            On the clock of this object; once it has passed, what is unfinished is cancelled.

        Returns
        -------
        bool
            False when the deadline cut the rollout short; unfinished trajectories are CANCELLED.
        """
        self._round += 1
        waiting: deque[SampleRequest] = deque()
        opened: dict[int, _Open] = {}
        owner: dict[int, _Open] = {}
        for (group, task), keys in zip(groups, streams, strict=True):
            one = _Open(group, task, len(keys))
            opened[group.group_id] = one
            for sample, stream in enumerate(keys):
                request = self._request(task, sampling, stream)
                trajectory = self._trajectory(group, sample, task)
                one.by_request[request.request_id] = trajectory
                owner[request.request_id] = one
                waiting.append(request)
        begun: dict[int, float] = {}
        ungraded = len(opened)
        while ungraded:
            self._tick()
            if deadline is not None and self._clock() > deadline:
                self._abandon(opened, [request.request_id for request in waiting])
                return False
            room = max_in_flight - self._sampler.pending
            if waiting and room > 0 and self._rewards.pending < _MOST_UNGRADED:
                batch = [waiting.popleft() for _ in range(min(room, len(waiting)))]
                self._sampler.submit(batch)
            if self._sampler.pending:
                began = self._clock()
                finished = self._sampler.step()
                # Only this rollout's: a start check or a rollout cut short may have left others
                begun |= {r: began for r in self._sampler.admitted() if r in owner}
                for done in [*finished, *self._overdue(begun, sampling.timeout)]:
                    seconds = self._clock() - begun.pop(done.request_id)
                    self._ended(owner[done.request_id], done, sampling, seconds)
                self._spent.sampling += self._clock() - began
            ungraded -= self._take_grades(opened, block=not self._sampler.pending)
        return True

    def sample_only(
        self,
        group: Group,
        task: TaskView,
        streams: Sequence[tuple[int, ...]],
        sampling: Sampling,
    ) -> list[str]:
        """Sample one group without grading it; returns its completions."""
        by_request = {}
        for sample, stream in enumerate(streams):
            request = self._request(task, sampling, stream)
            by_request[request.request_id] = self._trajectory(group, sample, task)
            self._sampler.submit([request])
        while self._sampler.pending:
            self._tick()
            for done in self._sampler.step():
                by_request[done.request_id].completion = self._decode(done.token_ids)
        return [trajectory.completion for trajectory in group.trajectories]

    def _overdue(self, begun: dict[int, float], timeout: float) -> list[Sample]:
        """Cancel the trajectories that began more than ``timeout`` seconds ago."""
        if not begun or self._clock() - next(iter(begun.values())) <= timeout:
            return []  # they began in this order: the first is the oldest
        now = self._clock()
        return self._sampler.cancel([r for r, at in begun.items() if now - at > timeout])

    def _request(
        self, task: TaskView, sampling: Sampling, stream: tuple[int, ...]
    ) -> SampleRequest:
        self._next_request += 1
        room = sampling.max_context - len(task.prompt_ids)
        return SampleRequest(
            request_id=self._next_request,
            prompt_ids=task.prompt_ids,
            max_new_tokens=min(sampling.max_new_tokens, sampling.max_trajectory_tokens, room),
            stream=stream,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )

    def _trajectory(self, group: Group, sample: int, task: TaskView) -> Trajectory:
        trajectory = Trajectory(
            trajectory_id=-1,
            group_id=group.group_id,
            sample=sample,
            prompt_ids=task.prompt_ids,
            token_ids=[],
            logprobs=[],
            versions=[],
            reason=TerminationReason.CANCELLED,
        )
        group.trajectories.append(trajectory)
        return trajectory

    def _ended(self, one: _Open, sample: Sample, sampling: Sampling, seconds: float) -> None:
        trajectory = one.by_request[sample.request_id]
        trajectory.token_ids = sample.token_ids
        trajectory.logprobs = sample.logprobs
        trajectory.versions = sample.versions
        trajectory.seconds = seconds
        trajectory.completion = self._decode(sample.token_ids)
        if sample.finish is Finish.STOP:
            trajectory.reason = TerminationReason.ENV_DONE
        elif sample.finish is Finish.LENGTH:
            at_limit = len(sample.token_ids) >= sampling.max_trajectory_tokens
            trajectory.reason = (
                TerminationReason.LIMIT_REACHED if at_limit else TerminationReason.TRUNCATION
            )
        else:
            trajectory.reason = TerminationReason.TIMEOUT
        one.sampling -= 1
        if one.sampling == 0:
            self._rewards.submit((self._round, one.group.group_id), self._grade_request(one))

    def _grade_request(self, one: _Open) -> GradeRequest:
        texts = [trajectory.completion for trajectory in one.group.trajectories]
        return GradeRequest(
            prompt=one.task.prompt,
            completions=texts,
            columns=one.task.columns,
            raw=not self._chat,
            task_id=one.task.task_id,
        )

    def _take_grades(self, opened: dict[int, _Open], *, block: bool) -> int:
        began = self._clock()
        finished = self._rewards.finished(_GRADE_WAIT_SECONDS if block else 0.0)
        if block:
            self._spent.grading += self._clock() - began
        taken = 0
        for (at, key), grades in finished:
            if at != self._round:
                continue  # of a rollout that its deadline cut short
            one = opened[key]
            one.graded = True
            apply_grades(one.group, grades)
            taken += 1
        return taken

    def _abandon(self, opened: dict[int, _Open], waiting: list[int]) -> None:
        """Cancel what is unfinished; groups not graded by now keep CANCELLED trajectories."""
        never_submitted = set(waiting)
        for one in opened.values():
            if one.graded:
                continue
            submitted = [r for r in one.by_request if r not in never_submitted]
            for partial in self._sampler.cancel(submitted):
                trajectory = one.by_request[partial.request_id]
                trajectory.token_ids = partial.token_ids
                trajectory.logprobs = partial.logprobs
                trajectory.versions = partial.versions
            for trajectory in one.group.trajectories:
                trajectory.reason = TerminationReason.CANCELLED


def apply_grades(group: Group, grades: GroupGrades) -> None:
    """Write the graders' verdicts onto a group's trajectories, one grade per trajectory.

    A failed grade leaves the reward ``None``; a finished trajectory whose grading failed ended
    for ERROR, one whose reward function returned ``None`` stays ENV_DONE without a grade.
    """
    for trajectory, grade in zip(group.trajectories, grades.grades, strict=True):
        trajectory.reward = grade.reward
        trajectory.terms = dict(grade.terms)
        trajectory.error = grade.error
        failed = grade.reward is None and grade.kind != "missing"
        if failed and trajectory.reason is TerminationReason.ENV_DONE:
            trajectory.reason = TerminationReason.ERROR


def with_model_defaults(
    sampling: Sampling, *, top_p: float | None, top_k: int | None, model: dict[str, float | None]
) -> Sampling:
    """Fill ``null`` top-p and top-k with the model's own generation settings (none: no cut)."""
    own_p, own_k = model.get("top_p"), model.get("top_k")
    p = top_p if top_p is not None else (1.0 if own_p is None else float(own_p))
    k = top_k if top_k is not None else (-1 if not own_k else int(own_k))
    return replace(sampling, top_p=p, top_k=k)
