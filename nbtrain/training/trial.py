"""The start check's trial: one group sampled, acted on and graded before the first update."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nbtrain.environments import EnvironmentPool
from nbtrain.environments.fleet import LATE
from nbtrain.errors import Problem
from nbtrain.plan.checks import Check
from nbtrain.rewards.contract import GradeRequest
from nbtrain.rewards.pool import RewardPool
from nbtrain.rewards.trials import trial
from nbtrain.rollout.admission import LIMITS
from nbtrain.rollout.flight import Flight
from nbtrain.rollout.lane import Lane
from nbtrain.rollout.limits import Sampling
from nbtrain.rollout.types import Conversation, Group, TaskView, TerminationReason
from nbtrain.rollout.underway import Stage
from nbtrain.training.start_checks import reward_checks

__all__ = ["TRIAL_SECONDS", "Trial", "judge_environments"]

TRIAL_SECONDS = 120.0
"""Longest that the trial waits for one call of an environment or of a reward.

The limits of training hold for a whole trajectory, two hours unless stated: nobody should wait
that long to learn that an environment hangs.
"""

_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<where>.+)$', re.M)


@dataclass(slots=True)
class Trial:
    """Tries one group. ``says`` hears what is being done, ``tick`` raises to stop the run.

    What is wrong is in ``problems`` when it is over, what is only worth knowing in ``remarks``,
    what was measured of the rewards in ``checks``; ``ungraded`` is whether the task alone may be
    at fault, whose completions got no grade.
    """

    flight: Flight
    rewards: RewardPool
    environments: EnvironmentPool | None
    conversation: Conversation
    says: Callable[[str], object]
    tick: Callable[[], object]
    problems: list[Problem] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    ungraded: bool = False

    def run(self, task: TaskView, streams: Sequence[tuple[int, ...]], sampling: Sampling) -> None:
        """Sample a group for ``task``, one trajectory for each stream, and grade it."""
        group = Group(0, 0, task.task_id, 0)
        heard = _Listener(self.conversation, sampling.max_context)
        calls = min(sampling.timeout, TRIAL_SECONDS)
        # a call late in a trajectory has its whole time too: what is looked for is one that hangs
        sampling = replace(sampling, timeout=sampling.timeout + calls)
        pool = self.environments
        if pool is not None:
            pool.most_seconds = calls
        lane = self.flight.lane(
            max_in_flight=len(streams),
            grading=False,
            conversation=None if pool is None else heard,
        )
        try:
            lane.launch(group, task, streams, sampling)
            self._sample(lane, group)
        finally:
            if pool is not None:
                pool.most_seconds = float("inf")
        self.flight.close_lane(lane)
        if pool is not None:
            found, remarks = judge_environments(
                group, pool.name, step=pool.contract.form == "step", heard=heard.too_long
            )
            self.problems += found
            self.remarks += remarks
        if lane.requests:
            self._grade(lane.requests[0], group)

    def _sample(self, lane: Lane, group: Group) -> None:
        since: float | None = None
        while lane.open:
            (one,) = lane.open.values()
            stages = [rollout.stage for rollout in one.rollouts]
            ended = stages.count(Stage.ENDED)
            said = f"one group is being sampled ({ended} of {len(stages)} ended)"
            if Stage.SAMPLING in stages or Stage.LANE in stages:
                since = None
            else:
                since = time.monotonic() if since is None else since
                said += f", waiting for environments since {time.monotonic() - since:.0f} s"
            self.says(said)
            self.flight.advance()
            if any(LATE in (t.error or "") for t in group.trajectories):
                lane.abandon()  # one that hangs is enough; the others may hang as long

    def _grade(self, request: GradeRequest, group: Group) -> None:
        """Try the rewards on what its environments, where there are any, brought to an end."""
        kept = [n for n, t in enumerate(group.trajectories) if t.error is None]
        if not kept:
            return
        states = request.environments
        request = replace(
            request,
            completions=[request.completions[n] for n in kept],
            environments=None if states is None else [states[n] for n in kept],
        )
        began = time.monotonic()

        def tick() -> None:
            self.says(f"the rewards are being tried since {time.monotonic() - began:.0f} s")
            self.tick()

        tried = trial(
            self.rewards,
            request,
            limit=min(self.rewards.timeout_seconds, TRIAL_SECONDS),
            tick=tick,
            unrewarded=self._unrewarded([group.trajectories[n].reason for n in kept], request),
        )
        self.ungraded = tried.ungraded
        self.problems += tried
        self.remarks += tried.warnings
        seconds = time.monotonic() - began
        self.checks += reward_checks(
            tried.graded, len(kept), len(tried), seconds, excused=tried.excused
        )

    def _unrewarded(self, reasons: list[TerminationReason], request: GradeRequest) -> str | None:
        """That the environment gives no reward, once one that came to its end gave none."""
        pool = self.environments
        given = [state for state in request.environments or () if "reward" in state]
        if pool is None or given or TerminationReason.ENV_DONE not in reasons:
            return None
        also = ", and its steps return none" if pool.contract.form == "step" else ""
        return (
            f"{pool.name} sets neither self.reward nor get_reward(){also}: every trajectory would "
            "be ungraded"
        )


def judge_environments(
    group: Group, name: str, *, step: bool, heard: Sequence[str] = ()
) -> tuple[list[Problem], list[str]]:
    """Problems and remarks on how a trial's environments ``name`` did.

    One that hangs, or all that fail, is a problem; some that fail are a remark. So it is with
    ``heard``, sentences on what was too long for the context.
    """
    count = len(group.trajectories)
    what = f"{name}.step" if step else f"a tool of {name}"
    errors = [
        t.error if name in t.error else f"{what}: {t.error}"
        for t in group.trajectories
        if t.error and t.reason not in LIMITS
    ]
    late = [error for error in errors if LATE in error]
    if late:
        hint = f"The start check waits {TRIAL_SECONDS:g} s at most for one call"
        return [Problem("environment", _sentence(late[0]), found="hangs", hint=hint)], []
    problems: list[Problem] = []
    remarks: list[str] = []
    hint = "Answer with less: what leaves no room for a reply ends the trajectory, TRUNCATION"
    long = [text.format(name=name, what=what) for text in heard]
    for found, told in ((errors, None), (long, hint)):
        if not found:
            continue
        text = _sentence(found[0])
        if len(found) >= count:
            problems.append(Problem("environment", text, found="every trajectory", hint=told))
        else:
            remarks.append(f"in {len(found)} of the trial's {count} trajectories: {text}")
    return problems, remarks


def _sentence(error: str) -> str:
    """An error's first line and the place that its traceback ends with."""
    first, _, trace = error.partition("\n")
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return first
    last = frames[-1]
    return f"{first} (line {last['line']} of {last['file']}, in {last['where']})"


class _Listener:
    """A conversation that notes what leaves no room in the context."""

    def __init__(self, conversation: Conversation, max_context: int) -> None:
        self._conversation = conversation
        self._most = max_context
        self.too_long: list[str] = []

    def _note(self, tokens: int, text: str) -> None:
        if tokens >= self._most:
            self.too_long.append(f"{text} {tokens:,} tokens, the context is {self._most:,}")

    def prompt(self, prompt: Any, addition: str | None) -> tuple[int, ...]:
        ids = self._conversation.prompt(prompt, addition)
        self._note(len(ids), "{name}.reset makes the prompt")
        return ids

    def reply(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return self._conversation.reply(token_ids)

    def observation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        ids = self._conversation.observation(messages)
        self._note(len(ids), "{what} returned")
        return ids
