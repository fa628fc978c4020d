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

    ``None`` is no limit. Ranks share a budget; what the others have spent is known from the last
    :meth:`share`.
    """

    max_trajectories: int | None = None
    max_tokens: int | None = None
    max_seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    trajectories: int = 0
    tokens: int = 0
    others: tuple[int, int] = (0, 0)
    began: float | None = None
    late: bool = False

    def start(self) -> None:
        """The seconds count from now."""
        self.began = self.clock()

    def share(self, ranks: Ranks) -> None:
        """Tell the other ranks what was spent here: after it, all ranks say the same."""
        spent = ranks.gather((self.trajectories, self.tokens, self._over_time()))
        self.others = (
            sum(one[0] for one in spent) - self.trajectories,
            sum(one[1] for one in spent) - self.tokens,
        )
        self.late = any(one[2] for one in spent)

    def fits(self, trajectories: int) -> bool:
        """Whether so many more trajectories may start."""
        if self.max_trajectories is None:
            return True
        return self.trajectories + self.others[0] + trajectories <= self.max_trajectories

    def spent_up(self) -> str | None:
        """A sentence when what is under way must stop at once: tokens or seconds are used up."""
        if self.max_tokens is not None and self.tokens + self.others[1] >= self.max_tokens:
            return f"max_total_output_tokens ({self.max_tokens:,}) was reached"
        if self.late or self._over_time():
            return f"max_wall_clock_seconds ({self.max_seconds:,}) was reached"
        return None

    def exhausted(self, trajectories: int) -> str | None:
        """The cap that keeps so many trajectories from starting, in a sentence, else ``None``."""
        if not self.fits(trajectories):
            return f"max_total_trajectories ({self.max_trajectories:,}) was reached"
        return self.spent_up()

    def _over_time(self) -> bool:
        if self.max_seconds is None or self.began is None:
            return False
        return self.clock() - self.began >= self.max_seconds
