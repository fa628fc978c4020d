"""Trajectories in flight: sampled, taking turns with their environments, graded by group.

Training and validation share one flight, each through a :class:`Lane` of its own. It samples,
acts and grades, and decides nothing: which groups start, count or train is the collector's.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nbtrain.rewards.contract import GradeRequest, GroupGrades
from nbtrain.rollout.attempt import Attempt, Open, Stage
from nbtrain.rollout.budgets import Budgets
from nbtrain.rollout.limits import Sampling, ending
from nbtrain.rollout.types import (
    Conversation,
    EnvironmentEvent,
    EnvironmentEventKind,
    Environments,
    Group,
    Sample,
    Sampler,
    TaskView,
    TerminationReason,
    Trajectory,
)

__all__ = ["Decode", "Flight", "Lane", "Spent", "apply_grades"]

_WAIT_SECONDS = 0.05
_LEAST_LIMIT = 0.01

_UNGRADED = (TerminationReason.STALE, TerminationReason.CANCELLED)


@dataclass(slots=True)
class Spent:
    """Seconds by part, added up: sampling, and waiting for grades or environments alone."""

    sampling: float = 0.0
    grading: float = 0.0
    environment: float = 0.0

    @property
    def idle(self) -> float:
        """Seconds in which nothing could be decoded."""
        return self.grading + self.environment


class Decode(Protocol):
    """Token ids of a reply to text."""

    def __call__(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, without its end token."""
        ...


class Grader(Protocol):
    """What the flight needs of a reward pool."""

    def submit(self, key: int, request: GradeRequest, *, limit: float | None = None) -> None:
        """Queue a group; a call is killed after ``limit`` seconds where that is given."""
        ...

    def finished(self, block: float | None = 0.0) -> list[tuple[int, GroupGrades]]:
        """Graded groups; waits up to ``block`` seconds for the first."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """The limit of every call."""
        ...


class Lane:
    """One user's trajectories: at most ``max_in_flight`` of them at a time, in launch order.

    ``most_ungraded`` groups may wait for their grades; above that nothing new starts. With
    ``grading`` off, groups come back as soon as they are sampled, their requests in ``requests``.
    """

    def __init__(
        self,
        flight: Flight,
        *,
        max_in_flight: int,
        most_ungraded: int,
        grading: bool,
        conversation: Conversation | None,
    ) -> None:
        self._flight = flight
        self.conversation = conversation
        self.max_in_flight = max_in_flight
        self.most_ungraded = most_ungraded
        self.grading = grading
        self.waiting: deque[Attempt] = deque()
        self.open: dict[int, Open] = {}  # by group id
        self.done: list[Group] = []
        self.requests: list[GradeRequest] = []
        self.in_flight = 0
        self.ungraded = 0

    @property
    def free(self) -> int:
        """Trajectories that could start at once if they were launched now."""
        if self.ungraded >= self.most_ungraded:
            return 0
        return self.max_in_flight - self.in_flight - len(self.waiting)

    def launch(
        self,
        group: Group,
        task: TaskView,
        streams: Sequence[tuple[int, ...]],
        sampling: Sampling,
    ) -> None:
        """Put an empty group under way, one trajectory for each random stream."""
        self._flight.launch(self, group, task, streams, sampling)

    def take(self) -> list[Group]:
        """Groups that are complete since the last call, in the order they became so."""
        done, self.done = self.done, []
        return done

    def cancel_older(self, oldest: int) -> list[Group]:
        """Cancel what began under a policy before version ``oldest``, as STALE.

        Returns the groups that are over by this; others go on with what is left of them.
        """
        return self._flight.cancel_older(self, oldest)

    def abandon(self) -> list[Group]:
        """Cancel everything that is not graded yet; returns the groups, all CANCELLED."""
        return self._flight.abandon(self)


class Flight:
    """Runs the trajectories of its lanes.

    ``tick`` is called in every round: it keeps heartbeats going and raises to stop a run.
    ``chat`` says whether completions reach reward functions as message lists (chat) or as text
    (raw). ``environments`` and ``conversation`` come together, for tasks with an environment.
    """

    def __init__(
        self,
        sampler: Sampler,
        rewards: Grader,
        decode: Decode,
        *,
        chat: bool,
        environments: Environments | None = None,
        conversation: Conversation | None = None,
        budgets: Budgets | None = None,
        tick: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sampler = sampler
        self._rewards = rewards
        self._decode = decode
        self._chat = chat
        self._environments = environments
        self._conversation = conversation
        self.budgets = budgets or Budgets()
        self._tick = tick
        self._clock = clock
        self._version = 0
        self._next = 0
        self._lanes: list[Lane] = []
        self._lane_of: dict[Open, Lane] = {}
        self._attempts: dict[int, Attempt] = {}
        self._sampling: dict[int, Attempt] = {}  # by request
        self._decoding: dict[int, Attempt] = {}  # of these, the ones with a slot
        self._grading: dict[int, Open] = {}
        self._deadline = math.inf  # none of those decoding is over its time before this
        self._spent = Spent()

    def lane(
        self,
        *,
        max_in_flight: int,
        most_ungraded: int = 512,
        grading: bool = True,
        conversation: Conversation | None = None,
    ) -> Lane:
        """A lane of its own for one user of this flight.

        ``conversation`` renders its messages where that is not the flight's way.
        """
        lane = Lane(
            self,
            max_in_flight=max_in_flight,
            most_ungraded=most_ungraded,
            grading=grading,
            conversation=conversation or self._conversation,
        )
        self._lanes.append(lane)
        return lane

    def close_lane(self, lane: Lane) -> None:
        """Forget a lane that nothing is under way in."""
        self._lanes.remove(lane)

    def new_policy(self, version: int) -> None:
        """The weights have changed: tokens from now on carry ``version``."""
        self._version = version
        self._sampler.new_policy(version)

    def take_spent(self) -> Spent:
        """Seconds spent since the last call."""
        spent, self._spent = self._spent, Spent()
        return spent

    def launch(
        self,
        lane: Lane,
        group: Group,
        task: TaskView,
        streams: Sequence[tuple[int, ...]],
        sampling: Sampling,
    ) -> None:
        """See :meth:`Lane.launch`."""
        one = Open(group, task, sampling, running=len(streams))
        lane.open[group.group_id] = one
        self._lane_of[one] = lane
        for sample, stream in enumerate(streams):
            trajectory = _blank(group, sample, task)
            group.trajectories.append(trajectory)
            attempt = Attempt(self._key(), trajectory, one, stream)
            one.attempts.append(attempt)
            lane.waiting.append(attempt)

    def advance(self) -> None:
        """One round: start what may start, decode a token of each, take answers and grades."""
        self._tick()
        for lane in self._lanes:
            self._start(lane)
        decoding = self._sampler.pending > 0
        if decoding:
            self._decode_once()
        self._take_events(decoding)
        self._take_grades(decoding)

    def cancel_older(self, lane: Lane, oldest: int) -> list[Group]:
        """See :meth:`Lane.cancel_older`."""
        over = []
        for one in list(lane.open.values()):
            stale = [
                a
                for a in one.attempts
                if a.stage is not Stage.ENDED and a.version is not None and a.version < oldest
            ]
            self._stop(stale, TerminationReason.STALE)
            ended = [a for a in one.attempts if a.stage is Stage.ENDED]
            if stale and len(ended) == len(one.attempts) and not one.grading:
                left = [a for a in ended if a.trajectory.reason not in _UNGRADED]
                if any(a.version is None or a.version >= oldest for a in left):
                    self._sampled(lane, one)
                    continue
                for attempt in left:
                    attempt.trajectory.reason = TerminationReason.STALE
                self._forget(lane, one)
                over.append(one.group)
        return over

    def abandon(self, lane: Lane) -> list[Group]:
        """See :meth:`Lane.abandon`."""
        groups = []
        for one in list(lane.open.values()):
            running = [a for a in one.attempts if a.stage is not Stage.ENDED]
            self._stop(running, TerminationReason.CANCELLED)
            for trajectory in one.group.trajectories:
                trajectory.reason = TerminationReason.CANCELLED
            self._forget(lane, one)
            groups.append(one.group)
        lane.waiting.clear()
        return groups

    # --- starting and sampling -----------------------------------------------------------------

    def _key(self) -> int:
        self._next += 1
        return self._next

    def _start(self, lane: Lane) -> None:
        ready: list[Attempt] = []
        while (
            lane.waiting
            and lane.in_flight < lane.max_in_flight
            and lane.ungraded < lane.most_ungraded
        ):
            attempt = lane.waiting.popleft()
            lane.in_flight += 1
            self.budgets.trajectories += 1
            self._attempts[attempt.key] = attempt
            if self._environments is None:
                attempt.begin(None, None)
                ready.append(attempt)
            else:
                attempt.stage = Stage.OPENING
                self._environments.open(attempt.key, attempt.one.task.columns)
        self._ask(ready)

    def _ask(self, attempts: Sequence[Attempt]) -> None:
        """Have the next reply of these sampled, together, so that equal prompts share a prefill."""
        requests = []
        for attempt in attempts:
            request = attempt.next_request(self._key())
            if request is None:
                self._end(attempt, attempt.trajectory.reason)
                continue
            attempt.stage, attempt.request = Stage.SAMPLING, request.request_id
            self._sampling[request.request_id] = attempt
            requests.append(request)
        if requests:
            self._sampler.submit(requests)

    def _decode_once(self) -> None:
        began = self._clock()
        finished = self._sampler.step()
        for request_id in self._sampler.admitted():
            attempt = self._sampling[request_id]
            attempt.began = began
            if attempt.version is None:
                attempt.version = self._version
            self._decoding[request_id] = attempt
            self._deadline = min(self._deadline, began + attempt.left)
        self.budgets.tokens += len(self._decoding)
        for sample in finished:
            self._replied(sample)
        self._stop_overdue()
        self._spent.sampling += self._clock() - began

    def _replied(self, sample: Sample) -> None:
        attempt = self._taken(sample)
        attempt.replied(sample)
        trajectory = attempt.trajectory
        trajectory.completion = self._decode(sample.token_ids)
        reason = ending(attempt.sampling, sample.finish, sampled=trajectory.output_tokens)
        conversation = self._lane_of[attempt.one].conversation
        if conversation is None or self._environments is None:
            self._end(attempt, reason or TerminationReason.ENV_DONE)
            return
        reply = conversation.reply(sample.token_ids)
        assert trajectory.messages is not None, "set when it began"
        trajectory.messages.append(reply)
        if reason is not None:
            self._end(attempt, reason)  # a reply that was cut never acts
            return
        attempt.stage = Stage.ACTING
        limit = max(attempt.left, _LEAST_LIMIT)
        self._environments.act(attempt.key, reply, limit=limit)

    def _stop_overdue(self) -> None:
        now = self._clock()
        if now <= self._deadline:
            return
        ends = {r: a.began + a.left for r, a in self._decoding.items() if a.began is not None}
        overdue = [self._decoding[request] for request, end in ends.items() if end < now]
        self._deadline = min((end for end in ends.values() if end >= now), default=math.inf)
        self._stop(overdue, TerminationReason.TIMEOUT)

    # --- environments --------------------------------------------------------------------------

    def _take_events(self, decoding: bool) -> None:
        if self._environments is None:
            return
        began = self._clock()
        waits = not decoding and any(
            a.stage in (Stage.OPENING, Stage.ACTING, Stage.CLOSING) for a in self._attempts.values()
        )
        events = self._environments.events(_WAIT_SECONDS if waits else 0.0)
        if waits:
            self._spent.environment += self._clock() - began
        again = [a for a in map(self._answered, events) if a is not None]
        self._ask(again)

    def _answered(self, event: EnvironmentEvent) -> Attempt | None:
        """Move a trajectory on by its environment's answer; itself when it goes on sampling."""
        attempt = self._attempts.get(event.key)
        if attempt is None:
            return None
        trajectory, kind = attempt.trajectory, event.kind
        if attempt.stage is Stage.ACTING:
            attempt.spent += event.seconds
        if kind is EnvironmentEventKind.FAILED:
            trajectory.error = event.error
            reason = TerminationReason.ERROR
            if event.timed_out and attempt.stage is Stage.ACTING:
                reason = TerminationReason.TIMEOUT
            elif attempt.stage is Stage.CLOSING and trajectory.reason is not reason.ENV_DONE:
                reason = trajectory.reason  # it had ended already
            self._over(attempt, reason)
            return None
        if kind is EnvironmentEventKind.OPENED:
            attempt.begin(self._lane_of[attempt.one].conversation, event.text)
            return attempt
        if kind is EnvironmentEventKind.CLOSED:
            attempt.state = dict(event.state)
            self._over(attempt, trajectory.reason)
            return None
        return self._observed(attempt, event)

    def _observed(self, attempt: Attempt, event: EnvironmentEvent) -> Attempt | None:
        conversation = self._lane_of[attempt.one].conversation
        assert conversation is not None, "environments come with a conversation"
        if event.messages:
            ids = [] if event.done else conversation.observation(event.messages)
            attempt.observed(event.messages, ids)
        if event.done or not event.messages:
            self._end(attempt, TerminationReason.ENV_DONE)
            return None
        if attempt.trajectory.turns >= attempt.sampling.max_turns:
            self._end(attempt, TerminationReason.MAX_TURNS)
            return None
        return attempt

    # --- ending and grading --------------------------------------------------------------------

    def _end(self, attempt: Attempt, reason: TerminationReason) -> None:
        """A trajectory has ended for ``reason``; its environment tells its state first."""
        attempt.trajectory.reason = reason
        if self._environments is not None:
            attempt.stage = Stage.CLOSING
            self._environments.close(attempt.key)
            return
        self._over(attempt, reason)

    def _over(self, attempt: Attempt, reason: TerminationReason) -> None:
        lane = self._lane_of[attempt.one]
        del self._attempts[attempt.key]
        lane.in_flight -= 1
        if attempt.one.end(attempt, reason):
            self._sampled(lane, attempt.one)

    def _stop(self, attempts: Sequence[Attempt], reason: TerminationReason) -> None:
        """End these at once, whatever they are doing, keeping what they have sampled."""
        requests = [
            a.request for a in attempts if a.stage is Stage.SAMPLING and a.request is not None
        ]
        for sample in self._sampler.cancel(requests):
            attempt = self._taken(sample)
            attempt.replied(sample)
            attempt.trajectory.completion = self._decode(sample.token_ids)
        if self._environments is not None:
            self._environments.drop([a.key for a in attempts if a.key in self._attempts])
        for attempt in attempts:
            lane = self._lane_of[attempt.one]
            if self._attempts.pop(attempt.key, None) is not None:
                lane.in_flight -= 1
            else:
                lane.waiting.remove(attempt)
            last = attempt.one.end(attempt, reason)
            if last and reason is TerminationReason.TIMEOUT:
                self._sampled(lane, attempt.one)

    def _taken(self, sample: Sample) -> Attempt:
        """The trajectory whose reply the sampler has given back, its seconds counted."""
        attempt = self._sampling.pop(sample.request_id)
        self._decoding.pop(sample.request_id, None)
        if attempt.began is not None:
            attempt.spent += self._clock() - attempt.began
            attempt.began = None
        return attempt

    def _sampled(self, lane: Lane, one: Open) -> None:
        """All of a group has ended: have it graded."""
        request = self._grade_request(one)
        if not lane.grading:
            lane.requests.append(request)
            self._finish(lane, one)
            return
        # What is over its time already must not take the others' away
        timed_out = TerminationReason.TIMEOUT
        lefts = [a.left for a in one.attempts if a.trajectory.reason is not timed_out]
        left = max(min(lefts, default=math.inf), _LEAST_LIMIT)
        one.grading, one.limit = True, left if left < self._rewards.timeout_seconds else None
        lane.ungraded += 1
        key = self._key()
        self._grading[key] = one
        self._rewards.submit(key, request, limit=one.limit)

    def _grade_request(self, one: Open) -> GradeRequest:
        trajectories = one.group.trajectories
        with_environment = self._environments is not None
        return GradeRequest(
            prompt=one.task.prompt,
            completions=[
                (t.messages or [_message(t.completion)]) if with_environment else t.completion
                for t in trajectories
            ],
            columns=one.task.columns,
            raw=not self._chat,
            task_id=one.task.task_id,
            environments=[a.state for a in one.attempts] if with_environment else None,
        )

    def _take_grades(self, decoding: bool) -> None:
        waits = not decoding and bool(self._grading) and not self._attempts
        began = self._clock()
        finished = self._rewards.finished(_WAIT_SECONDS if waits else 0.0)
        if waits:
            self._spent.grading += self._clock() - began
        for key, grades in finished:
            one = self._grading.pop(key, None)
            if one is None:
                continue  # abandoned meanwhile
            apply_grades(one.group, grades, limit=one.limit)
            lane = self._lane_of[one]
            lane.ungraded -= 1
            self._finish(lane, one)

    def _finish(self, lane: Lane, one: Open) -> None:
        lane.done.append(one.group)
        del lane.open[one.group.group_id], self._lane_of[one]

    def _forget(self, lane: Lane, one: Open) -> None:
        if one.grading:
            lane.ungraded -= 1
            self._grading = {key: other for key, other in self._grading.items() if other is not one}
        del lane.open[one.group.group_id], self._lane_of[one]


def apply_grades(group: Group, grades: GroupGrades, *, limit: float | None = None) -> None:
    """Write the graders' verdicts onto a group's trajectories, one grade per trajectory.

    A failed grade leaves the reward ``None``; a finished trajectory whose grading failed ended
    for ERROR, or for TIMEOUT where its own limit cut the grading short; one whose reward function
    returned ``None`` stays ENV_DONE without a grade. What an ERROR or a cancelled trajectory
    might have earned by chance is not recorded.
    """
    for trajectory, grade in zip(group.trajectories, grades.grades, strict=True):
        trajectory.terms = dict(grade.terms)
        if trajectory.reason in (TerminationReason.ERROR, *_UNGRADED):
            trajectory.terms = dict.fromkeys(grade.terms)
            continue
        trajectory.reward = grade.reward
        trajectory.error = grade.error or trajectory.error
        failed = grade.reward is None and grade.kind != "missing"
        if failed and trajectory.reason is TerminationReason.ENV_DONE:
            late = grade.kind == "timeout" and limit is not None
            trajectory.reason = TerminationReason.TIMEOUT if late else TerminationReason.ERROR


def _message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _blank(group: Group, sample: int, task: TaskView) -> Trajectory:
    return Trajectory(
        trajectory_id=-1,
        group_id=group.group_id,
        sample=sample,
        prompt_ids=task.prompt_ids,
        token_ids=[],
        logprobs=[],
        versions=[],
        reason=TerminationReason.CANCELLED,
    )
