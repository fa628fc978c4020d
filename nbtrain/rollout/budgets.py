"""Hard budgets of a run: trajectories, output tokens, seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from nbtrain.rollout.ranks import Ranks

__all__ = ["Budgets"]


@dataclass(slots=True)
class Budgets:
    """What a run may spend and has spent, training and validation together.

    ``None`` is no limit. Ranks share a budget: after each :meth:`share` every rank may spend its
    part of what is left, and :meth:`exhausted` says the same on all of them.
    """

    max_trajectories: int | None = None
    max_tokens: int | None = None
    max_seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    trajectories: int = 0
    """Started by this rank."""
    tokens: int = 0
    """Sampled by this rank."""
    others: tuple[int, int] = (0, 0)
    ranks: int = 1
    began: float | None = None
    late: bool = False
    _shared: tuple[int, int] = (0, 0)

    def start(self) -> None:
        """The seconds count from now."""
        self.began = self.clock()

    def share(self, ranks: Ranks) -> None:
        """Tell the other ranks what was spent here, and agree on whether time is up."""
        spent = ranks.gather((self.trajectories, self.tokens, self._over_time()))
        self._shared = (self.trajectories, self.tokens)
        self.others = (
            sum(one[0] for one in spent) - self.trajectories,
            sum(one[1] for one in spent) - self.tokens,
        )
        self.ranks = ranks.size
        self.late = any(one[2] for one in spent)

    def fits(self, trajectories: int) -> bool:
        """Whether this rank may start so many more of its part."""
        if self.max_trajectories is None:
            return True
        left = self._part(self.max_trajectories, 0) - (self.trajectories - self._shared[0])
        return trajectories <= left

    def spent_up(self) -> str | None:
        """A sentence when what this rank has under way must stop: its tokens or time are up."""
        if self.max_tokens is not None:
            left = self._part(self.max_tokens, 1) - (self.tokens - self._shared[1])
            if left <= 0:
                return f"max_total_output_tokens ({self.max_tokens:,}) was reached"
        return self._time_up() if self.late or self._over_time() else None

    def exhausted(self, trajectories: int) -> str | None:
        """The cap that keeps so many trajectories of all ranks from starting, in a sentence.

        ``None`` while none does. It looks at what was shared last, so that all ranks agree.
        """
        started, sampled = (
            mine + other for mine, other in zip(self._shared, self.others, strict=True)
        )
        if self.max_trajectories is not None and started + trajectories > self.max_trajectories:
            return f"max_total_trajectories ({self.max_trajectories:,}) was reached"
        # Parts of less than a token each are nothing that could be sampled
        if self.max_tokens is not None and self.max_tokens - sampled < self.ranks:
            return f"max_total_output_tokens ({self.max_tokens:,}) was reached"
        return self._time_up() if self.late else None

    def _part(self, most: int, which: int) -> int:
        return (most - self._shared[which] - self.others[which]) // self.ranks

    def _time_up(self) -> str:
        return f"max_wall_clock_seconds ({self.max_seconds:,}) was reached"

    def _over_time(self) -> bool:
        if self.max_seconds is None or self.began is None:
            return False
        return self.clock() - self.began >= self.max_seconds
