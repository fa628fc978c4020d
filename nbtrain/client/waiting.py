"""Waiting for a run: detaching, what its end means, and who is told while one waits."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from nbtrain.client.refusals import Detached, NoWeightChanged
from nbtrain.errors import RunEnded, WaitedTooLong

if TYPE_CHECKING:
    from nbtrain.client.glance import Glance
    from nbtrain.client.records import Progress

__all__ = ["Waited", "observers", "wait"]


class Waited(Protocol):
    """What waiting needs of a run."""

    id: str
    name: str | None

    @property
    def title(self) -> str:
        """Name and short id, for sentences."""
        ...

    @property
    def phase(self) -> str:
        """The fine state."""
        ...

    @property
    def status(self) -> str:
        """The coarse state."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether it ended, in any way."""
        ...

    @property
    def failure(self) -> str | None:
        """Why it failed."""
        ...

    @property
    def ended(self) -> str | None:
        """Why it ended early."""
        ...

    @property
    def progress(self) -> Progress:
        """How far it is."""
        ...

    def glance(self) -> Glance:
        """What one sees of it."""
        ...


observers: list[Callable[[Any], None]] = []
"""Called in the waiting thread when a wait ends, in any way; the notebook brings outputs up to date
here, so that they belong to the cell that waited. An observer must not raise."""

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 1.0


def wait(run: Waited, timeout: float | None) -> None:
    """Return when the run succeeded; that a smoke check failed is told by ``run.verdict``.

    Raises :class:`RunEnded` when it failed or was cancelled, :class:`WaitedTooLong` after
    ``timeout`` seconds, and :class:`Detached` on an interrupt; in the last two cases the run
    goes on.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = _FIRST_PAUSE
    try:
        while not run.is_over:
            left = _LONGEST_PAUSE if deadline is None else deadline - time.monotonic()
            if left <= 0:
                msg = (
                    f"{run.title} is {run.phase} after {timeout:g} s of waiting "
                    f"({run.glance().line()}); it goes on"
                )
                raise WaitedTooLong(msg)
            time.sleep(min(pause, left))
            pause = min(_LONGEST_PAUSE, pause * 1.3)
        _conclude(run)
    except KeyboardInterrupt:
        msg = (
            f"stopped waiting; {run.title} goes on in the background. To stop it: "
            f"run.cancel(), or %train cancel {run.name or run.id[:12]} in a notebook"
        )
        raise Detached(msg) from None
    finally:
        for observer in list(observers):
            observer(run)


def _conclude(run: Waited) -> None:
    status = run.status
    if status == "failed":
        msg = f"{run.title} failed: {run.failure or 'no reason was recorded'}"
        raise RunEnded(msg)
    if status == "cancelled":
        msg = f"{run.title} was cancelled" + (f": {run.ended}" if run.ended else "")
        raise RunEnded(msg)
    if run.progress.updates_applied == 0:
        told = f"no weight changed: {run.title} succeeded without a single update"
        if run.ended:
            told += f" ({run.ended})"
        warnings.warn(NoWeightChanged(told), stacklevel=4)
