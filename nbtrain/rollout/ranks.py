"""The ranks of a job as collection and updates see them: who am I, what do all the others have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Alone", "Ranks"]


class Ranks(Protocol):
    """Processes that train together. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value``, in the order of ranks, on every rank."""
        ...

    def sum(self, tensors: Sequence[Any]) -> None:
        """Add up each tensor over all ranks, in place, on every rank alike."""
        ...


class Alone:
    """One rank."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """``value`` alone."""
        return [value]

    def sum(self, tensors: Sequence[Any]) -> None:
        """Nothing to add."""
