"""What earlier runs took for a trajectory, and what a run will take at such a rate."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Measured", "Ranges", "Rate", "Spent"]


@dataclass(frozen=True, slots=True)
class Rate:
    """What a run took: output tokens and seconds of a trajectory.

    ``surplus`` are the trajectories sampled for one that a step used, at least 1.
    """

    tokens: float
    seconds: float
    surplus: float = 1.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates of earlier runs of the base model on this machine, newest first, at least one.

    With ``same_workload`` they had this workload, sampler and number of ranks; else they had the
    same model, and replies of one turn or several as this workload has.
    """

    rates: tuple[Rate, ...]
    same_workload: bool = True

    @property
    def runs(self) -> int:
        """How many runs."""
        return len(self.rates)

    @property
    def mean(self) -> Rate:
        """Their mean, each run counting half as much as the next newer one."""
        weights = [0.5**age for age in range(len(self.rates))]
        total = sum(weights)
        figures = zip(*((r.tokens, r.seconds, r.surplus) for r in self.rates), strict=True)
        return Rate(
            *(sum(w * f for w, f in zip(weights, one, strict=True)) / total for one in figures)
        )

    @property
    def told(self) -> str:
        """Where the figures come from, in words."""
        runs = "1 earlier run" if self.runs == 1 else f"{self.runs} earlier runs"
        if self.same_workload:
            return f"from {runs} of this workload"
        return f"from {runs} of this model with another workload, sampler or number of ranks"


@dataclass(frozen=True, slots=True)
class Spent:
    """What a run samples in all, training and validation; ``None`` is unknown."""

    sampled: float
    tokens: float | None = None
    seconds: float | None = None

    @classmethod
    def by(cls, rate: Rate, train: int, held_out: int, longest: int) -> Spent:
        """At ``rate``, for so many trajectories of updates and of validation.

        ``longest`` are the output tokens that a trajectory can have.
        """
        sampled = train * rate.surplus + held_out
        each = min(rate.tokens, longest)
        shorter = each / rate.tokens if rate.tokens else 1.0
        return cls(sampled, sampled * each, sampled * rate.seconds * shorter)

    def times(self, share: float) -> Spent:
        """A share of all of it."""
        return Spent(
            self.sampled * share,
            None if self.tokens is None else self.tokens * share,
            None if self.seconds is None else self.seconds * share,
        )


@dataclass(frozen=True, slots=True)
class Ranges:
    """Least and most of what is expected, over the single runs gone by."""

    sampled: tuple[float, float]
    output_tokens: tuple[float, float]
    seconds: tuple[float, float]
