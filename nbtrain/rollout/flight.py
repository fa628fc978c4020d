"""Trajectories in flight: sampled, taking turns with their environments, graded by group.

Training and validation share one flight, each through a :class:`Lane` of its own. It samples,
acts and grades, and decides nothing: which groups start, count or train is the collector's.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from nbtrain.plan.fields import counted
from nbtrain.rollout.budgets import Budgets
from nbtrain.rollout.grading import apply_grades, grade_request, time_for_grading
from nbtrain.rollout.lane import Decode, Grader, Lane, Spent
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
from nbtrain.rollout.underway import Open, Rollout, Stage

__all__ = ["Flight"]

_WAIT_SECONDS = 0.05
_LEAST_LIMIT = 0.01
_GAP_SECONDS = 0.002
_LONGEST_TOKEN = 256
"""Characters that no token has more of."""

_STAGES = {
    Stage.OPENING: "starting their environment",
    Stage.SAMPLING: "being sampled",
    Stage.ACTING: "waiting for their environment",
    Stage.CLOSING: "closing their environment",
}

_UNGRADED = (TerminationReason.STALE, TerminationReason.CANCELLED)


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
        self._rollouts: dict[int, Rollout] = {}
        self._sampling: dict[int, Rollout] = {}  # by request
        self._decoding: dict[int, Rollout] = {}  # of these, the ones with a slot
        self._grading: dict[int, Open] = {}
        self._deadline = math.inf  # none of those decoding is over its time before this
        self._spent = Spent()
        self._seen = clock()

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

    def activity(self) -> str:
        """What is under way now, in a few words."""
        by_stage = Counter(rollout.stage for rollout in self._rollouts.values())
        words = [f"{by_stage[stage]} {what}" for stage, what in _STAGES.items() if by_stage[stage]]
        groups = len(self._grading)
        words += [f"{counted(groups, 'group')} being graded"] if groups else []
        return ", ".join(words) or "nothing in flight"

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
            rollout = Rollout(self._key(), trajectory, one, stream)
            one.rollouts.append(rollout)
            lane.waiting.append(rollout)

    def advance(self) -> None:
        """One round: start what may start, decode a token of each, take answers and grades."""
        self._tick()
        self._skip_gap()
        for lane in self._lanes:
            self._start(lane)
        decoding = self._sampler.pending > 0
        if decoding:
            self._decode_once()
        self._take_events(decoding)
        self._take_grades(decoding)
        self._seen = self._clock()

    def cancel_older(self, lane: Lane, oldest: int) -> list[Group]:
        """See :meth:`Lane.cancel_older`."""
        over = []
        for one in list(lane.open.values()):
            stale = [
                a
                for a in one.rollouts
                if a.stage is not Stage.ENDED and a.version is not None and a.version < oldest
            ]
            self._stop(stale, TerminationReason.STALE)
            ended = [a for a in one.rollouts if a.stage is Stage.ENDED]
            if stale and len(ended) == len(one.rollouts) and not one.grading:
                left = [a for a in ended if a.trajectory.reason not in _UNGRADED]
                if any(a.version is None or a.version >= oldest for a in left):
                    self._sampled(lane, one)
                    continue
                for rollout in left:
                    rollout.trajectory.reason = TerminationReason.STALE
                self._forget(lane, one)
                over.append(one.group)
        return over

    def abandon(self, lane: Lane) -> list[Group]:
        """See :meth:`Lane.abandon`."""
        groups = []
        for one in list(lane.open.values()):
            running = [a for a in one.rollouts if a.stage is not Stage.ENDED]
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
        ready: list[Rollout] = []
        while (
            lane.waiting
            and lane.in_flight < lane.max_in_flight
            and lane.ungraded < lane.most_ungraded
        ):
            rollout = lane.waiting.popleft()
            lane.in_flight += 1
            self.budgets.trajectories += 1
            self._rollouts[rollout.key] = rollout
            if self._environments is None:
                rollout.begin(None, None)
                ready.append(rollout)
            else:
                rollout.stage = Stage.OPENING
                task = rollout.one.task
                self._environments.open(rollout.key, {**task.columns, "prompt": task.prompt})
        self._ask(ready)

    def _ask(self, rollouts: Sequence[Rollout]) -> None:
        """Have the next reply of these sampled, together, so that equal prompts share a prefill."""
        requests = []
        for rollout in rollouts:
            request = rollout.next_request(self._key())
            if request is None:
                self._end(rollout, rollout.trajectory.reason)
                continue
            rollout.stage, rollout.request = Stage.SAMPLING, request.request_id
            self._sampling[request.request_id] = rollout
            requests.append(request)
        if requests:
            self._sampler.submit(requests)

    def _skip_gap(self) -> None:
        """Nothing was decoded since the last round (an update, a save): no reply's clock ran."""
        gap = self._clock() - self._seen
        if gap > _GAP_SECONDS:
            for rollout in self._decoding.values():
                if rollout.began is not None:
                    rollout.began += gap
            self._deadline += gap

    def _decode_once(self) -> None:
        began = self._clock()
        finished = self._sampler.step()
        for request_id in self._sampler.admitted():
            rollout = self._sampling[request_id]
            rollout.began = began
            if rollout.version is None:
                rollout.version = self._version
            self._decoding[request_id] = rollout
            self._deadline = min(self._deadline, began + rollout.left)
        self.budgets.tokens += len(self._decoding)
        for sample in finished:
            self._replied(sample)
        self._stop_overdue()
        self._spent.sampling += self._clock() - began

    def _replied(self, sample: Sample) -> None:
        rollout = self._taken(sample)
        rollout.replied(sample)
        trajectory = rollout.trajectory
        trajectory.completion = self._decode(sample.token_ids)
        reason = ending(rollout.sampling, sample.finish, sampled=trajectory.output_tokens)
        conversation = self._lane_of[rollout.one].conversation
        if conversation is None or self._environments is None:
            self._end(rollout, reason or TerminationReason.ENV_DONE)
            return
        reply = conversation.reply(sample.token_ids)
        assert trajectory.messages is not None, "set when it began"
        trajectory.messages.append(reply)
        if reason is not None:
            self._end(rollout, reason)  # a reply that was cut never acts
            return
        rollout.stage = Stage.ACTING
        limit = max(rollout.left, _LEAST_LIMIT)
        self._environments.act(rollout.key, reply, limit=limit)

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
            a.stage in (Stage.OPENING, Stage.ACTING, Stage.CLOSING) for a in self._rollouts.values()
        )
        events = self._environments.events(_WAIT_SECONDS if waits else 0.0)
        if waits:
            self._spent.environment += self._clock() - began
        again = [a for a in map(self._answered, events) if a is not None]
        self._ask(again)

    def _answered(self, event: EnvironmentEvent) -> Rollout | None:
        """Move a trajectory on by its environment's answer; itself when it goes on sampling."""
        rollout = self._rollouts.get(event.key)
        if rollout is None:
            return None
        trajectory, kind = rollout.trajectory, event.kind
        if rollout.stage is Stage.ACTING:
            rollout.spent += event.seconds
        if kind is EnvironmentEventKind.FAILED:
            trajectory.error = event.error
            reason = TerminationReason.ERROR
            if event.timed_out and rollout.stage is Stage.ACTING:
                reason = TerminationReason.TIMEOUT
            elif rollout.stage is Stage.CLOSING and trajectory.reason is not reason.ENV_DONE:
                reason = trajectory.reason  # it had ended already
            self._over(rollout, reason)
            return None
        if kind is EnvironmentEventKind.OPENED:
            return self._opened(rollout, event)
        if kind is EnvironmentEventKind.CLOSED:
            rollout.state = dict(event.state)
            self._over(rollout, trajectory.reason)
            return None
        return self._observed(rollout, event)

    def _opened(self, rollout: Rollout, event: EnvironmentEvent) -> Rollout | None:
        try:
            rollout.begin(self._lane_of[rollout.one].conversation, event.text)
        except Exception as error:  # templates are programs: anything may come out of one
            self._unsayable(rollout, "what reset added to the prompt", error)
            return None
        return rollout

    def _observed(self, rollout: Rollout, event: EnvironmentEvent) -> Rollout | None:
        conversation = self._lane_of[rollout.one].conversation
        assert conversation is not None, "environments come with a conversation"
        room = rollout.trajectory.turns < rollout.sampling.max_turns
        limit = rollout.sampling.max_context
        letters = sum(len(str(message.get("content") or "")) for message in event.messages)
        if not event.done and letters > _LONGEST_TOKEN * limit:
            rollout.trajectory.error = (
                f"what the environment said is {letters:,} characters long, "
                f"more than the context of {limit:,} tokens can hold"
            )
            self._end(rollout, TerminationReason.TRUNCATION)
            return None
        if event.messages and (room or event.done):
            try:
                ids = [] if event.done else conversation.observation(event.messages)
            except Exception as error:
                self._unsayable(rollout, "a message of the environment", error)
                return None
            rollout.observed(event.messages, ids)
        if event.done or not event.messages:
            self._end(rollout, TerminationReason.ENV_DONE)
            return None
        if rollout.trajectory.turns >= rollout.sampling.max_turns:
            self._end(rollout, TerminationReason.MAX_TURNS)
            return None
        return rollout

    def _unsayable(self, rollout: Rollout, what: str, error: Exception) -> None:
        rollout.trajectory.error = f"the chat template refuses {what}: {error}"
        self._end(rollout, TerminationReason.ERROR)

    # --- ending and grading --------------------------------------------------------------------

    def _end(self, rollout: Rollout, reason: TerminationReason) -> None:
        """A trajectory has ended for ``reason``; its environment tells its state first."""
        rollout.trajectory.reason = reason
        if self._environments is not None:
            rollout.stage = Stage.CLOSING
            self._environments.close(rollout.key)
            return
        self._over(rollout, reason)

    def _over(self, rollout: Rollout, reason: TerminationReason) -> None:
        lane = self._lane_of[rollout.one]
        del self._rollouts[rollout.key]
        lane.in_flight -= 1
        if rollout.one.end(rollout, reason):
            self._sampled(lane, rollout.one)

    def _stop(self, rollouts: Sequence[Rollout], reason: TerminationReason) -> None:
        """End these at once, whatever they are doing, keeping what they have sampled."""
        requests = [
            a.request for a in rollouts if a.stage is Stage.SAMPLING and a.request is not None
        ]
        for sample in self._sampler.cancel(requests):
            rollout = self._taken(sample)
            rollout.replied(sample)
            rollout.trajectory.completion = self._decode(sample.token_ids)
        if self._environments is not None:
            self._environments.drop([a.key for a in rollouts if a.key in self._rollouts])
        for rollout in rollouts:
            lane = self._lane_of[rollout.one]
            if self._rollouts.pop(rollout.key, None) is not None:
                lane.in_flight -= 1
            else:
                lane.waiting.remove(rollout)
            last = rollout.one.end(rollout, reason)
            if last and reason is TerminationReason.TIMEOUT:
                self._sampled(lane, rollout.one)

    def _taken(self, sample: Sample) -> Rollout:
        """The trajectory whose reply the sampler has given back, its seconds counted."""
        rollout = self._sampling.pop(sample.request_id)
        self._decoding.pop(sample.request_id, None)
        if rollout.began is not None:
            rollout.spent += self._clock() - rollout.began
            rollout.began = None
        return rollout

    def _sampled(self, lane: Lane, one: Open) -> None:
        """All of a group has ended: have it graded."""
        request = grade_request(one, chat=self._chat, environments=self._environments is not None)
        if not lane.grading:
            lane.requests.append(request)
            self._finish(lane, one)
            return
        one.grading = True
        one.limit = time_for_grading(one, self._rewards.timeout_seconds)
        lane.ungraded += 1
        key = self._key()
        self._grading[key] = one
        self._rewards.submit(key, request, limit=one.limit)

    def _take_grades(self, decoding: bool) -> None:
        waits = not decoding and bool(self._grading) and not self._rollouts
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
