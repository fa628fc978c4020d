"""Which checkpoints keep what: pure functions of plain data.

Every adapter is kept. Training state, three times an adapter's size, is kept for the newest
checkpoints of a run, for the best one, and for every one that is referenced; the delete set is all
minus those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

KEEP_TRAINING_STATES = 2


@dataclass(frozen=True, slots=True)
class Kept:
    """A committed checkpoint as retention sees it."""

    checkpoint_id: str
    step: int
    training_state: bool
    pinned: bool = False
    held_out_reward: float | None = None
    """Of a complete validation round at its step, else ``None``."""


def sweep_training_states(
    checkpoints: Iterable[Kept],
    *,
    referenced: Collection[str] = (),
    keep: int = KEEP_TRAINING_STATES,
) -> list[str]:
    """Ids whose training state goes: all but the newest ``keep``, the best, pinned and referenced.

    ``referenced`` are the checkpoints that unfinished runs go on from.
    """
    holding = sorted((c for c in checkpoints if c.training_state), key=lambda c: c.step)
    newest = {c.checkpoint_id for c in holding[-keep:]} if keep else set()
    pinned = {c.checkpoint_id for c in holding if c.pinned}
    scored = [c for c in holding if c.held_out_reward is not None]
    # max() gives the first of equals, and they stand in the order of their steps: the earliest
    best = {max(scored, key=lambda c: c.held_out_reward or 0.0).checkpoint_id} if scored else set()
    kept = newest | best | pinned | set(referenced)
    return [c.checkpoint_id for c in holding if c.checkpoint_id not in kept]
