"""A lane: one user's trajectories in a flight, and what a flight needs of those around it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nbtrain.rewards.contract import GradeRequest, GroupGrades
from nbtrain.rollout.limits import Sampling
from nbtrain.rollout.types import Conversation, Group, TaskView
from nbtrain.rollout.underway import Open, Rollout

if TYPE_CHECKING:
    from nbtrain.rollout.flight import Flight

__all__ = ["Decode", "Grader", "Lane", "Spent"]


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
        self.waiting: deque[Rollout] = deque()
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
