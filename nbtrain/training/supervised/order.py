"""Which rows an update trains on: a pure function of rows, seed and global step.

Every epoch has an order of its own, drawn from the seed and the epoch's number; unshuffled, every
epoch is in file order. What a straight run trains on at a step is therefore what a resumed one
does, wherever it was interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Order", "Place", "dropout_seed"]

Sequence_ = tuple[int, ...]
"""Rows of one sequence: one row, or several that are packed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an update stands: ``epoch`` and its number in it, both from 0."""

    epoch: int
    update: int


class Order:
    """The updates of a run.

    Parameters
    ----------
    sequences
        Rows of each sequence, in the order of an unshuffled epoch.
    seed
        Of the run.
    shuffle
        Whether every epoch has an order drawn from ``seed`` and its number.
    per_pass
        Sequences in one forward and backward pass on one device, as the plan states it.
    passes
        Passes summed into one update, over all devices.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence_],
        *,
        seed: int,
        shuffle: bool,
        per_pass: int,
        passes: int,
    ) -> None:
        self.sequences = sequences
        self._seed, self._shuffle = seed, shuffle
        self._per_pass = per_pass
        self.per_update = per_pass * passes
        self.updates_per_epoch = math.ceil(len(sequences) / self.per_update)
        self._drawn: tuple[int, list[int]] | None = None

    def total(self, *, epochs: int, max_steps: int) -> int:
        """Updates of the whole run; ``max_steps`` 0 is no cap."""
        whole = epochs * self.updates_per_epoch
        return min(whole, max_steps) if max_steps > 0 else whole

    def place(self, step: int) -> Place:
        """Of global step ``step``, from 1."""
        return Place(*divmod(step - 1, self.updates_per_epoch))

    def update(self, step: int) -> list[Sequence_]:
        """The sequences of global step ``step``; the last of an epoch may have fewer."""
        place = self.place(step)
        order = self._epoch(place.epoch)
        first = place.update * self.per_update
        return [self.sequences[at] for at in order[first : first + self.per_update]]

    def passes(
        self, step: int, *, rank: int = 0, ranks: int = 1, cap: int | None = None
    ) -> list[list[Sequence_]]:
        """What rank ``rank`` runs of ``step``, pass by pass; ``cap`` sequences at most in each.

        The passes of an update are dealt out to the ranks in turn, so a short update may leave
        one without any. ``cap`` splits passes; the update stays the sum of the same sequences.
        """
        sequences = self.update(step)
        whole = [
            sequences[at : at + self._per_pass] for at in range(0, len(sequences), self._per_pass)
        ][rank::ranks]
        size = self._per_pass if cap is None else min(cap, self._per_pass)
        return [one[at : at + size] for one in whole for at in range(0, len(one), size)]

    def _epoch(self, epoch: int) -> Sequence[int]:
        count = len(self.sequences)
        if not self._shuffle:
            return range(count)
        if self._drawn is None or self._drawn[0] != epoch:
            draws = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._drawn = epoch, draws.permutation(count).tolist()
        return self._drawn[1]


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """What dropout of global step ``step`` is drawn from on ``rank``: below 2**63."""
    state = np.random.SeedSequence([seed, 1, step, rank]).generate_state(2, np.uint32)
    return (int(state[0]) << 31) ^ int(state[1])
