"""The collector: assembles one step's batch of eligible groups.

At ``max_staleness`` 0 collection follows a logical clock. Waves of whole groups are drawn in task
order, epoch after epoch; a wave is graded completely before the next is drawn; the batch is the
first ``batch_size`` eligible groups in the order they were drawn. Nothing is decided by the time
at which a grade arrives, so a run repeats, and resumes, bit for bit.

A wave draws exactly the groups that are missing. Drawing more would keep the last waves wider, but
what is eligible beyond the batch could never be used: its policy is gone after the update.

Task order is a permutation keyed by (seed, epoch), and every trajectory has a random stream keyed
by (seed, task, epoch, sample): the collector's whole state is a cursor and its counters.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbtrain.rollout.admission import (
    Admission,
    AdmissionRules,
    GroupOutcome,
    GroupVerdict,
    admit,
    advantages,
    judge,
)
from nbtrain.rollout.rollouts import Rollouts, Sampling, Spent
from nbtrain.rollout.types import Group, TaskView, TerminationReason

TRAINING_STREAM = 0
VALIDATION_STREAM = 1


@dataclass(slots=True)
class JudgedGroup:
    """A group with its verdict. The lists run parallel to ``group.trajectories``.

    ``advantages`` is 0 for trajectories that are not eligible; they are not in the batch.
    """

    group: Group
    admissions: list[Admission]
    verdict: GroupVerdict
    advantages: list[float]
    outcome: GroupOutcome
    why: str


@dataclass(slots=True)
class Batch:
    """What one collection brought: every completed group, the ones to train on, and its end.

    ``cut_short`` says why collection ended before ``batch_size`` eligible groups, else ``None``.
    ``barren`` is true when a full pass over the tasks ended it without one eligible group,
    ``grading_failed`` when that was because grades did not come.
    """

    step: int
    groups: list[JudgedGroup] = field(default_factory=list)
    cancelled: list[Group] = field(default_factory=list)
    cut_short: str | None = None
    barren: bool = False
    grading_failed: bool = False
    seconds: float = 0.0
    spent: Spent = field(default_factory=Spent)

    @property
    def used(self) -> list[JudgedGroup]:
        """The groups to train on, in the order drawn."""
        return [judged for judged in self.groups if judged.outcome is GroupOutcome.USED]


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """What the collector needs of the plan. Timeouts in seconds."""

    batch_size: int
    group_size: int
    max_in_flight: int
    batch_timeout: float
    seed: int
    rules: AdmissionRules
    sampling: Sampling


class Collector:
    """Draws tasks, has them sampled and graded, and admits groups until the batch is full."""

    def __init__(
        self,
        tasks: Sequence[TaskView],
        rollouts: Rollouts,
        settings: CollectorSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tasks = list(tasks)
        self._rollouts = rollouts
        self._settings = settings
        self._clock = clock
        self._cursor = 0
        self._groups = 0
        self._trajectories = 0
        self._order: tuple[int, list[int]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON: the cursor in the task order, and the counters of groups and trajectories."""
        return {
            "cursor": self._cursor,
            "groups": self._groups,
            "trajectories": self._trajectories,
            "tasks": len(self._tasks),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken. Raises ``ValueError`` for other tasks."""
        if state["tasks"] != len(self._tasks):
            msg = f"the state was saved over {state['tasks']} tasks, there are {len(self._tasks)}"
            raise ValueError(msg)
        self._cursor = state["cursor"]
        self._groups = state["groups"]
        self._trajectories = state["trajectories"]

    @property
    def started_groups(self) -> int:
        """Groups started over the whole run."""
        return self._groups

    def collect(self, step: int) -> Batch:
        """Assemble the batch of global step ``step`` under the current policy."""
        began = self._clock()
        self._rollouts.take_spent()  # of validation
        deadline = began + self._settings.batch_timeout
        batch = Batch(step)
        eligible = 0
        barren: set[int] = set()  # tasks tried since the last eligible group
        while eligible < self._settings.batch_size:
            left = len(self._tasks) - len(barren)
            wave = self._draw(min(self._settings.batch_size - eligible, left))
            in_time = self._run(wave, deadline)
            for group, _ in wave:
                if any(t.reason is TerminationReason.CANCELLED for t in group.trajectories):
                    batch.cancelled.append(group)
                    continue
                judged = judged_group(group, self._settings.rules)
                batch.groups.append(judged)
                admitted = judged.outcome is GroupOutcome.USED
                eligible += admitted
                if admitted:
                    barren.clear()
                else:
                    barren.add(group.task_index)
            if not in_time:
                batch.cut_short = (
                    f"batch_timeout_seconds ({self._settings.batch_timeout:g}) passed with "
                    f"{eligible} of {self._settings.batch_size} eligible groups"
                )
                break
            batch.cut_short = self._ungraded(batch)
            if batch.cut_short is not None:
                batch.grading_failed = eligible == 0
                break
            if len(barren) == len(self._tasks):
                batch.cut_short = (
                    f"a full pass over the {len(self._tasks)} tasks brought no eligible group"
                )
                batch.barren = eligible == 0
                break
        batch.seconds = self._clock() - began
        batch.spent = self._rollouts.take_spent()
        return batch

    def _ungraded(self, batch: Batch) -> str | None:
        """A sentence when none of the newest groups' trajectories is graded, and they are many.

        A grader that is down would otherwise cost a full pass over the tasks.
        """
        enough = min(2 * self._settings.batch_size, len(self._tasks))
        newest = batch.groups[-enough:]
        trajectories = [t for judged in newest for t in judged.group.trajectories]
        if len(newest) < enough or any(t.reward is not None for t in trajectories):
            return None
        errors = Counter(t.error.strip().splitlines()[0] for t in trajectories if t.error)
        text = f"{len(trajectories)} of {len(trajectories)} trajectories were not graded"
        return f"{text}, most often: {errors.most_common(1)[0][0]}" if errors else text

    def _run(self, wave: list[tuple[Group, TaskView]], deadline: float) -> bool:
        seed = self._settings.seed
        streams = [
            [
                (seed, TRAINING_STREAM, task.key, group.epoch, sample)
                for sample in range(self._settings.group_size)
            ]
            for group, task in wave
        ]
        in_time = self._rollouts.run(
            wave,
            streams,
            self._settings.sampling,
            max_in_flight=self._settings.max_in_flight,
            deadline=deadline,
        )
        for group, _ in wave:
            for trajectory in group.trajectories:
                self._trajectories += 1
                trajectory.trajectory_id = self._trajectories
        return in_time

    def _draw(self, count: int) -> list[tuple[Group, TaskView]]:
        wave = []
        for _ in range(count):
            epoch, position = divmod(self._cursor, len(self._tasks))
            if self._order is None or self._order[0] != epoch:
                self._order = (epoch, task_order(self._settings.seed, epoch, len(self._tasks)))
            index = self._order[1][position]
            task = self._tasks[index]
            self._cursor += 1
            self._groups += 1
            wave.append((Group(self._groups, index, task.task_id, epoch), task))
        return wave


def task_order(seed: int, epoch: int, count: int) -> list[int]:
    """The order in which epoch ``epoch`` visits ``count`` tasks."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))
    return [int(index) for index in rng.permutation(count)]


def judged_group(group: Group, rules: AdmissionRules) -> JudgedGroup:
    """Admit a completed group's trajectories, judge the group, and give its advantages."""
    admissions = [admit(trajectory, rules) for trajectory in group.trajectories]
    rewards = [a.reward for a in admissions if a.eligible and a.reward is not None]
    verdict = judge(rewards, rules)
    relative = iter(advantages(rewards))
    spread = [next(relative) if a.eligible else 0.0 for a in admissions]
    outcome = GroupOutcome.USED if verdict.outcome is None else verdict.outcome
    return JudgedGroup(group, admissions, verdict, spread, outcome, verdict.why)
