"""Which checkpoints keep what: pure functions of plain data.

Every adapter is kept. Training state, three times an adapter's size, is kept for the newest
checkpoints of a run and for every one that is referenced; the delete set is all minus those.
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


def sweep_training_states(
    checkpoints: Iterable[Kept],
    *,
    referenced: Collection[str] = (),
    keep: int = KEEP_TRAINING_STATES,
) -> list[str]:
    """Ids whose training state goes: all but the newest ``keep``, pinned and referenced ones.

    ``referenced`` are the checkpoints that unfinished runs go on from.
    """
    holding = sorted((c for c in checkpoints if c.training_state), key=lambda c: c.step)
    newest = {c.checkpoint_id for c in holding[-keep:]} if keep else set()
    kept = newest | set(referenced) | {c.checkpoint_id for c in holding if c.pinned}
    return [c.checkpoint_id for c in holding if c.checkpoint_id not in kept]
