"""Validation: a fixed selection of held-out tasks, sampled by one policy version.

Every round draws the same random streams, so two rounds differ by their policies alone.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from nbtrain.plan.picking import counted
from nbtrain.rollout.draws import VALIDATION_STREAM
from nbtrain.rollout.flight import Flight
from nbtrain.rollout.ledger import trajectory_row
from nbtrain.rollout.limits import Sampling
from nbtrain.rollout.ranks import Alone, Ranks
from nbtrain.rollout.types import Conversation, Group, TaskView, TerminationReason


class Identified(Protocol):
    """A task of any kind."""

    @property
    def task_id(self) -> str:
        """Equal for equal tasks."""
        ...


T = TypeVar("T", bound=Identified)


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
    """Runs rounds over at most ``num_tasks`` held-out tasks, shared out among the ranks.

    Training trajectories that are in flight go on meanwhile; no weight changes during a round.
    """

    def __init__(
        self,
        held_out: Sequence[TaskView],
        flight: Flight,
        settings: ValidationSettings,
        *,
        ranks: Ranks | None = None,
        conversation: Conversation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tasks = select(held_out, settings.num_tasks)
        self._flight = flight
        self._settings = settings
        self._ranks = ranks or Alone()
        self._clock = clock
        self._lane = flight.lane(
            max_in_flight=max(1, settings.max_in_flight // self._ranks.size),
            conversation=conversation,
        )

    def run(self, *, step: int, policy_version: int, seconds: float = math.inf) -> Round:
        """Sample and grade the selection, for at most so many ``seconds``.

        The round is complete when every sample was graded. Every rank makes the call; all get
        the whole round.
        """
        began = self._clock()
        self._flight.budgets.share(self._ranks)
        samples = self._settings.trajectories_per_task
        pairs = self._launch(samples)
        while self._lane.open:
            self._flight.advance()
            over = self._clock() - began > seconds
            if over or self._flight.budgets.spent_up() is not None:
                self._lane.abandon()
        self._lane.take()
        gathered = [rows for one in self._ranks.gather(self._rows(pairs, samples)) for rows in one]
        trajectories = sorted(gathered, key=lambda row: int(row["trajectory_id"]))
        scores = (counted(row["reward"], row["reason"]) for row in trajectories)
        rewards = [score for score in scores if score is not None]
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

    def _launch(self, samples: int) -> list[tuple[Group, TaskView]]:
        """Put this rank's share of the selection under way, as far as the budgets allow."""
        pairs = []
        for number, task in enumerate(self._tasks):
            if number % self._ranks.size != self._ranks.rank:
                continue
            if not self._flight.budgets.fits(len(self._lane.waiting) + samples):
                break
            group = Group(number, number, task.task_id, 0)
            seed = self._settings.seed
            streams = [(seed, VALIDATION_STREAM, task.key, 0, sample) for sample in range(samples)]
            self._lane.launch(group, task, streams, self._settings.sampling)
            pairs.append((group, task))
        return pairs

    def _rows(self, pairs: list[tuple[Group, TaskView]], samples: int) -> list[dict[str, Any]]:
        rows = []
        for group, task in pairs:
            for trajectory in group.trajectories:
                trajectory.trajectory_id = group.group_id * samples + trajectory.sample
                row = trajectory_row(trajectory, task.task_id, split="held_out", prompt=task.prompt)
                verdict = "held out: never trains"
                if trajectory.reason is TerminationReason.CANCELLED:
                    verdict = "cut off before it was graded"
                rows.append(row | {"eligible": False, "verdict": verdict})
        return rows


def select(held_out: Sequence[T], count: int) -> list[T]:
    """At most ``count`` distinct tasks, always the same ones: ordered by a hash of their ids."""
    distinct = {task.task_id: task for task in held_out}
    ordered = sorted(
        distinct.values(), key=lambda task: hashlib.sha256(task.task_id.encode()).hexdigest()
    )
    return ordered[:count]
