"""When a run validates and saves, by global step: pure functions."""

from __future__ import annotations


def checkpoint_due(step: int, *, interval: int | None, start: int, total: int) -> bool:
    """Whether a checkpoint is saved after global step ``step``: start, every interval, final.

    Without an ``interval`` the final one is the only one; at 0 the first stands beside it.
    """
    if interval is None:
        return step == total
    return step in (start, total) or (interval > 0 and step % interval == 0)


def validation_due(step: int, *, enabled: bool, interval: int, start: int, total: int) -> bool:
    """Whether a validation round runs after ``step``: starting policy, every interval, final."""
    if not enabled or interval == 0:
        return False
    return step in (start, total) or step % interval == 0
