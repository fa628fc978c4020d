"""What stands below the importance ratio: the log-probs under the policy that sampled a token.

A token of the current policy version is compared with itself, so its ratio is exactly 1 at any
temperature and in any dtype. An older token's log-prob is the sampler's where the model computes
in fp32. Below that the sampler's and the trainer's differ by more than GSPO's clip range: the
trainer scores the token again with the adapter of its version, in the very layout in which it is
trained so that rounding cancels, and the gap to the sampler becomes an importance weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nbtrain.rollout.types import Trajectory
from nbtrain.training.history import AdapterHistory
from nbtrain.training.packing import Packable, Part, Unit

__all__ = ["Below", "Member", "OldPolicies"]

Scored = Callable[[Unit], Iterator[tuple[Part, Tensor, Tensor]]]


@dataclass(frozen=True, slots=True)
class Member:
    """A trajectory that trains: its layout, advantage, and by sampled token log-prob and lag."""

    item: Packable
    advantage: float
    sampler: list[float]
    lags: list[int]

    @classmethod
    def of(cls, trajectory: Trajectory, advantage: float, version: int) -> Member:
        """The sampled part of ``trajectory``, which must hold at least one sampled token.

        Raises
        ------
        ValueError
            When a token claims a policy version after ``version``.
        """
        item = Packable(
            trajectory.prompt_ids,
            tuple(trajectory.token_ids),
            tuple((start, stop) for start, stop in trajectory.observed),
        )
        places = item.sampled
        lags = [version - trajectory.versions[place] for place in places]
        if min(lags) < 0:
            msg = (
                f"trajectory {trajectory.trajectory_id} holds tokens of policy version "
                f"{version - min(lags)}, but the weights are of version {version}"
            )
            raise ValueError(msg)
        return cls(item, advantage, [trajectory.logprobs[place] for place in places], lags)


@dataclass(frozen=True, slots=True)
class Below:
    """A part's denominators, all (T,); ``old`` and ``mismatch`` as the loss takes them.

    ``gap`` sums the absolute difference between trainer and sampler over ``compared`` tokens,
    those whose own policy the trainer has scored. ``recomputed`` is true for those of them that
    are older than the policy, ``None`` where none is. ``unkept`` counts the tokens whose adapter
    is gone: they had to do with the sampler's log-prob.
    """

    old: Tensor | None
    mismatch: Tensor | None
    gap: float
    compared: int
    recomputed: Tensor | None = None
    unkept: int = 0


class OldPolicies:
    """Denominators for the parts of one update.

    ``exact`` tells that the model computes in fp32 or better. ``scored`` runs a unit without
    gradients; it is used once for each older version that a unit holds tokens of.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        version: int,
        history: AdapterHistory | None,
        exact: bool,
    ) -> None:
        self._members = members
        self._version = version
        self._history = history
        self._exact = exact
        self._again: dict[int, Tensor] = {}

    def recompute(self, units: Sequence[Unit], scored: Scored) -> None:
        """Score older tokens under their own adapters, one version after the other."""
        if self._exact or self._history is None:
            return
        for version in sorted(set(self._history.versions)):
            lag = self._version - version
            chosen = [unit for unit in units if lag > 0 and self._holds(unit, lag)]
            if not chosen:
                continue
            with self._history.using(version), torch.no_grad():
                for unit in chosen:
                    for part, logprobs, _ in scored(unit):
                        known = self._again.setdefault(
                            id(part), torch.full_like(logprobs, torch.nan)
                        )
                        known.copy_(torch.where(self._lags(part) == lag, logprobs, known))

    def below(self, part: Part, new: Tensor) -> Below:
        """The denominators of ``part``, whose tokens score ``new`` (T,) now."""
        new = new.detach()
        flat = [value for number in part.members for value in self._members[number].sampler]
        sampler = torch.tensor(flat, dtype=new.dtype, device=new.device)
        if not any(any(self._members[number].lags) for number in part.members):
            return Below(None, None, float((new - sampler).abs().sum()), len(flat))
        current = self._lags(part) == 0
        again = self._again.get(id(part), torch.full_like(new, torch.nan))
        again = torch.where(current, new, again)
        known = ~again.isnan()
        gaps = torch.where(known, again - sampler, 0.0)
        recomputed = known & ~current
        return Below(
            old=torch.where(known, again, sampler),
            mismatch=torch.where(recomputed, gaps, 0.0) if recomputed.any() else None,
            gap=float(gaps.abs().sum()),
            compared=int(known.sum()),
            recomputed=recomputed if recomputed.any() else None,
            unkept=0 if self._exact else int((~known).sum()),
        )

    def _lags(self, part: Part) -> Tensor:
        lags = [lag for number in part.members for lag in self._members[number].lags]
        return torch.tensor(lags, device=part.targets.device)

    def _holds(self, unit: Unit, lag: int) -> bool:
        return any(
            lag in self._members[number].lags for part in unit.parts for number in part.members
        )
