"""Which checkpoints keep what: pure functions of plain data.

Training state, three times an adapter's size, is kept for the newest checkpoints of a run, for
the best one, and for every one that is referenced; the delete set is all minus those. Adapters are
all kept, unless the run keeps only so many of the newest.
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
    return _all_but(holding, keep, referenced)


def sweep_checkpoints(
    checkpoints: Iterable[Kept], *, referenced: Collection[str] = (), keep: int | None
) -> list[str]:
    """Ids of the checkpoints that go as a whole; none when ``keep`` is ``None``.

    Kept are the first of the run and the newest ``keep``, besides the best, pinned and referenced.
    """
    if keep is None:
        return []
    ordered = sorted(checkpoints, key=lambda c: c.step)
    return _all_but(ordered[1:], max(keep, 1), referenced, ordered)


def _all_but(
    ordered: list[Kept],
    newest: int,
    referenced: Collection[str],
    competing: list[Kept] | None = None,
) -> list[str]:
    """Ids of ``ordered`` (by step) but for the newest, the best of ``competing``, the wanted."""
    stay = {c.checkpoint_id for c in ordered[-newest:]} if newest else set()
    stay |= {c.checkpoint_id for c in ordered if c.pinned}
    scored = [c for c in competing or ordered if c.held_out_reward is not None]
    if scored:
        # max() gives the first of equals, and they stand in the order of their steps
        stay.add(max(scored, key=lambda c: c.held_out_reward or 0.0).checkpoint_id)
    stay |= set(referenced)
    return [c.checkpoint_id for c in ordered if c.checkpoint_id not in stay]
