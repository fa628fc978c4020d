"""Which ranks of a job have ended, how, and how long the others may go on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from nbtrain.jobs.exits import Exit, RankEnd
from nbtrain.training.outcome import Outcome

__all__ = ["RankWatch"]

log = logging.getLogger("nbtrain.host")

SETTLE_SECONDS = 2.0
"""A rank that failed for want of another may be so much quicker than that one."""
FINISH_SECONDS = 10.0
"""From the good end of rank 0 to that of the others."""


class _Process(Protocol):
    pid: int
    log: Path

    def poll(self) -> Exit | None: ...


class RankWatch:
    """The ranks of one attempt. ``said`` reads a rank's own word, by its number.

    ``ends`` are those that have ended, in that order, ``living`` the numbers of the others. Set
    ``by_host`` once the host has begun to stop them.
    """

    def __init__(self, ranks: Sequence[_Process], said: Callable[[int], Outcome | None]) -> None:
        self._processes = dict(enumerate(ranks))
        self._said = said
        self._stop_at = math.inf
        self.ends: list[RankEnd] = []
        self.by_host = False

    @property
    def living(self) -> list[int]:
        """Numbers of the ranks that have not ended, as far as was looked."""
        return sorted(self._processes)

    def look(self, now: float) -> bool:
        """Poll all ranks at ``now``, in seconds of a monotonic clock; whether any lives."""
        for rank, process in list(self._processes.items()):
            ended = process.poll()
            if ended is None:
                continue
            log.info("rank %d (pid %d) ended with %d", rank, process.pid, ended.code)
            end = RankEnd(rank, ended, self._said(rank), process.log, self.by_host)
            self.ends.append(end)
            del self._processes[rank]
            self._stop_at = min(self._stop_at, now + _patience(end))
        return bool(self._processes)

    def to_stop(self, now: float) -> bool:
        """Whether the ranks that live are to be stopped now, since others have ended."""
        return self.by_host or now >= self._stop_at


def _patience(end: RankEnd) -> float:
    """Seconds that the other ranks may go on after this one's end."""
    if end.failed:
        return SETTLE_SECONDS if end.lost_rank else 0.0
    if end.rank:
        return math.inf
    completed = end.outcome is not None and end.outcome.result == "completed"
    return FINISH_SECONDS if completed else 0.0
