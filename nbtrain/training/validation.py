"""Validation: a fixed selection of held-out tasks, sampled by one policy version.

Every round draws the same random streams, so two rounds differ by their policies alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nbtrain.rollout.collector import VALIDATION_STREAM
from nbtrain.rollout.ledger import trajectory_row
from nbtrain.rollout.rollouts import Rollouts, Sampling
from nbtrain.rollout.types import Group, TaskView


@dataclass(frozen=True, slots=True)
class ValidationSettings:
    """What a validation round needs of the plan."""

    num_tasks: int
    trajectories_per_task: int
    max_in_flight: int
    seed: int
    sampling: Sampling


@dataclass(slots=True)
class Round:
    """One validation round: its row for the store, and its trajectories' rows."""

    row: dict[str, Any]
    trajectories: list[dict[str, Any]]

    @property
    def held_out_reward(self) -> float | None:
        """Mean recorded reward of the graded samples; ``None`` when none was graded."""
        value = self.row["held_out_reward"]
        return None if value is None else float(value)


class Validator:
    """Runs rounds over at most ``num_tasks`` held-out tasks."""

    def __init__(
        self,
        held_out: Sequence[TaskView],
        rollouts: Rollouts,
        settings: ValidationSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tasks = select(held_out, settings.num_tasks)
        self._rollouts = rollouts
        self._settings = settings
        self._clock = clock

    def run(self, *, step: int, policy_version: int) -> Round:
        """Sample and grade the selection. The round is complete when every sample was graded."""
        began = self._clock()
        settings = self._settings
        samples = settings.trajectories_per_task
        pairs = [
            (Group(number, number, task.task_id, 0), task)
            for number, task in enumerate(self._tasks)
        ]
        streams = [
            [(settings.seed, VALIDATION_STREAM, task.key, 0, sample) for sample in range(samples)]
            for task in self._tasks
        ]
        self._rollouts.run(pairs, streams, settings.sampling, max_in_flight=settings.max_in_flight)
        trajectories = []
        for group, task in pairs:
            for trajectory in group.trajectories:
                trajectory.trajectory_id = group.group_id * samples + trajectory.sample
                row = trajectory_row(trajectory, task.task_id, split="held_out", prompt=task.prompt)
                trajectories.append(row | {"eligible": False, "verdict": "held out: never trains"})
        rewards = [row["reward"] for row in trajectories if row["reward"] is not None]
        expected = len(self._tasks) * samples
        row = {
            "step": step,
            "policy_version": policy_version,
            "held_out_reward": sum(rewards) / len(rewards) if rewards else None,
            "round_completed": len(rewards) == expected,
            "completed_samples": len(rewards),
            "expected_samples": expected,
            "seconds": self._clock() - began,
        }
        return Round(row, trajectories)


def select(held_out: Sequence[TaskView], count: int) -> list[TaskView]:
    """At most ``count`` distinct tasks, always the same ones: ordered by a hash of their ids."""
    distinct = {task.task_id: task for task in held_out}
    ordered = sorted(
        distinct.values(), key=lambda task: hashlib.sha256(task.task_id.encode()).hexdigest()
    )
    return ordered[:count]
