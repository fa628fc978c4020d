"""Which checkpoints keep what: pure functions of plain data.

Training state, three times an adapter's size, is kept for the newest checkpoints of a run, for
the best ones, and for every one that is referenced; the delete set is all minus those. Adapters
are all kept, unless the run keeps only so many of the newest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from nbtrain.plan.picking import Candidate, Scores, pick

KEEP_TRAINING_STATES = 2
KEEP_TIES = 8
"""Training states kept of the earliest checkpoints that tie with the top.

``run.best()`` is the earliest of them. As the top rises, that one falls behind and the next is
best, which then must still have its own. In simulated runs of 21 checkpoints that learn, the best
one ended without training state in 38 of 100 with 1 kept and in 3 with 4 or 8 (rounds of 50
tasks), in 60, 33 (4) and 8 (8) with rounds of 16.
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """A committed checkpoint as retention sees it."""

    checkpoint_id: str
    step: int
    training_state: bool
    pinned: bool = False
    held_out_reward: float | None = None
    """Of a complete validation round at its step, else ``None``."""
    scores: Scores = field(default_factory=dict)
    """That round's mean rewards by task."""


def sweep_training_states(
    checkpoints: Iterable[Kept],
    *,
    referenced: Collection[str] = (),
    keep: int = KEEP_TRAINING_STATES,
    ties: int = KEEP_TIES,
) -> list[str]:
    """Ids whose training state goes: all but the newest ``keep``, the top, the earliest ``ties``
    that tie with it, pinned and referenced.

    ``referenced`` are the checkpoints that unfinished runs go on from.
    """
    holding = sorted((c for c in checkpoints if c.training_state), key=lambda c: c.step)
    # The top has never lost its own, so that those that hold one are enough to find it
    return _all_but(holding, keep, referenced, holding, ties)


def sweep_checkpoints(
    checkpoints: Iterable[Kept], *, referenced: Collection[str] = (), keep: int | None
) -> list[str]:
    """Ids of the checkpoints that go as a whole; none when ``keep`` is ``None``.

    Kept are the first of the run and the newest ``keep``, besides the top, the earliest that ties
    with it, pinned and referenced.
    """
    if keep is None:
        return []
    ordered = sorted(checkpoints, key=lambda c: c.step)
    return _all_but(ordered[1:], max(keep, 1), referenced, ordered, 1)


def _all_but(
    ordered: list[Kept],
    newest: int,
    referenced: Collection[str],
    competing: list[Kept],
    ties: int,
) -> list[str]:
    """Ids of ``ordered`` (by step) but for the newest, the best of ``competing``, the wanted."""
    stay = {c.checkpoint_id for c in ordered[-newest:]} if newest else set()
    stay |= {c.checkpoint_id for c in ordered if c.pinned}
    stay |= set(referenced)
    if all(c.checkpoint_id in stay for c in ordered):
        return []
    stay |= _best(competing, ties)
    return [c.checkpoint_id for c in ordered if c.checkpoint_id not in stay]


def _best(competing: list[Kept], ties: int) -> set[str]:
    """Ids of the top and of the earliest ``ties`` among it and those that tie with it."""
    scored = [
        (c.checkpoint_id, Candidate(c.step, c.held_out_reward, c.scores))
        for c in competing
        if c.held_out_reward is not None
    ]
    picked = pick([candidate for _, candidate in scored])
    if picked is None:
        return set()
    alike = sorted({picked.top, *picked.ties}, key=lambda n: scored[n][1].step)
    return {scored[n][0] for n in (picked.top, *alike[:ties])}
