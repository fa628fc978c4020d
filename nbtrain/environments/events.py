"""What an environment answers with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["EnvironmentEvent", "EnvironmentEventKind"]


class EnvironmentEventKind(StrEnum):
    """What an environment answers with."""

    OPENED = "opened"
    """Constructed and reset."""
    OBSERVED = "observed"
    """It took an action."""
    CLOSED = "closed"
    """It told its state and is gone."""
    FAILED = "failed"
    """It raised, hung or died, and is gone; ``error`` says how."""


@dataclass(frozen=True, slots=True)
class EnvironmentEvent:
    """An answer of the environment of the trajectory ``key``.

    ``text`` is what reset adds to the last message of the prompt. ``messages`` are what the
    environment says to an action, none when it says nothing; ``done`` ends the trajectory.
    ``state`` is what rewards may read of it after it closed. ``seconds`` is the time of the call
    itself. The first line of ``error`` is a sentence; ``timed_out`` tells that it was killed
    at its limit.
    """

    key: int
    kind: EnvironmentEventKind
    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    done: bool = False
    state: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    timed_out: bool = False
