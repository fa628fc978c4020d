"""Which task comes next: a seeded order, epoch after epoch, dealt out to the ranks.

Everything follows from a draw's position: its task, its epoch, its rank, its groups' ids and
their random streams. So a run's whole data position is a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nbtrain.rollout.types import Group, TaskView

__all__ = ["TRAINING_STREAM", "VALIDATION_STREAM", "Draw", "Draws", "task_order"]

TRAINING_STREAM = 0
VALIDATION_STREAM = 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One task drawn, and its empty groups with a random stream for each trajectory."""

    position: int
    task: TaskView
    groups: tuple[tuple[Group, tuple[tuple[int, ...], ...]], ...]


class Draws:
    """Turns positions into draws.

    ``budgets`` are the output-token budgets that each task is sampled under, each a group of its
    own; empty for one group under the plan's limit.
    """

    def __init__(
        self, tasks: Sequence[TaskView], *, seed: int, group_size: int, budgets: tuple[int, ...]
    ) -> None:
        self._tasks = list(tasks)
        self._seed = seed
        self._group_size = group_size
        self._budgets = budgets
        self._order: tuple[int, list[int]] | None = None

    @property
    def groups_each(self) -> int:
        """Groups of one draw."""
        return max(1, len(self._budgets))

    def at(self, position: int) -> Draw:
        """The draw at ``position``, counted from 0 over all epochs."""
        epoch, place = divmod(position, len(self._tasks))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, task_order(self._seed, epoch, len(self._tasks)))
        index = self._order[1][place]
        task = self._tasks[index]
        groups = []
        for number, budget in enumerate(self._budgets or (None,)):
            group_id = position * self.groups_each + number + 1
            group = Group(group_id, index, task.task_id, epoch, budget=budget)
            groups.append((group, tuple(self._streams(task, epoch, number))))
        return Draw(position, task, tuple(groups))

    def number_in_draw(self, group_id: int) -> int:
        """Which of its draw's groups a group is, from 0."""
        return (group_id - 1) % self.groups_each

    def number(self, group: Group) -> None:
        """Give a group's trajectories their ids."""
        for trajectory in group.trajectories:
            first = (group.group_id - 1) * self._group_size + 1
            trajectory.trajectory_id = first + trajectory.sample

    def _streams(self, task: TaskView, epoch: int, number: int) -> Iterator[tuple[int, ...]]:
        under = (number,) if self._budgets else ()
        for sample in range(self._group_size):
            yield (self._seed, TRAINING_STREAM, task.key, epoch, *under, sample)


def task_order(seed: int, epoch: int, count: int) -> list[int]:
    """The order in which epoch ``epoch`` visits ``count`` tasks."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))
    return [int(index) for index in rng.permutation(count)]
