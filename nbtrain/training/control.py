"""What the loop looks at between decode steps and between micro-batches.

Of several ranks only rank 0 looks at commands, through :class:`Control`: were each to decide for
itself, they would leave at different places and wait for each other for ever. A cancelled rank 0
simply ends, wherever it is; its host then ends the others (:class:`FollowerControl`), which have
nothing to save.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import Any

from nbtrain.errors import StoreError

log = logging.getLogger("nbtrain.training")

COMMAND_SECONDS = 0.25
PROGRESS_SECONDS = 1.0
FOLLOWER_PROGRESS_SECONDS = 10.0


class Cancelled(BaseException):
    """The run was cancelled. Not an ``Exception``: nothing on the way may swallow it."""


class Terminated(BaseException):
    """SIGTERM came without a cancel. If its host sent it, the host knows why."""


class Control:
    """Polls commands and keeps the rank's heartbeat; call it as often as you like.

    ``commands`` lists the commands not yet answered, oldest first, and ``handled`` marks one as
    answered by its id. ``beat`` says that the loop is moving and, where that has changed since
    it said so last, what ``activity`` tells of it: a sentence, or an empty text for nothing.
    """

    def __init__(
        self,
        commands: Callable[[], list[dict[str, Any]]],
        handled: Callable[[int], object],
        beat: Callable[[str | None], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.activity: Callable[[], str | None] = _nothing
        """What the rank does now, in a sentence. To be set; asked with every heartbeat."""
        self._told = ""
        self._commands = commands
        self._handled = handled
        self._beat = beat
        self._clock = clock
        self._next_command = 0.0
        self._next_beat = 0.0
        self._sigterm = False

    def doing(self, activity: str, *, now: bool = False) -> None:
        """Say what is done from now on; ``now`` where it may take long without another look."""
        self.activity = lambda: activity
        if now:
            _patiently(self._say)

    def listen_for_sigterm(self) -> None:
        """From now on SIGTERM ends the rank at its next look instead of at once.

        Call it when there is something to leave in good order, that is when training begins.
        """

        def stop(number: int, frame: object) -> None:
            self._sigterm = True

        signal.signal(signal.SIGTERM, stop)

    def __call__(self) -> None:
        """Raise :class:`Cancelled` when the run is to stop, :class:`Terminated` after SIGTERM."""
        now = self._clock()
        if now >= self._next_beat:
            self._next_beat = now + PROGRESS_SECONDS
            _patiently(self._say)
        self.waiting()

    def waiting(self) -> None:
        """The same while other ranks are waited for, which is no progress of this one."""
        if self._sigterm:
            self._next_command = 0.0
        now = self._clock()
        if now >= self._next_command:
            self._next_command = now + COMMAND_SECONDS
            _patiently(self._look)
        if self._sigterm:
            msg = "stopped by SIGTERM from outside"
            raise Terminated(msg)

    def _say(self) -> None:
        now = self.activity() or ""
        self._beat(None if now == self._told else now)
        self._told = now

    def _look(self) -> None:
        for command in self._commands():
            self._handled(command["id"])
            if command["command"] == "cancel":
                msg = "cancelled on request"
                raise Cancelled(msg)


class FollowerControl:
    """The control of a rank other than 0: it shows progress, decides nothing, ends at SIGTERM.

    It ends with rank 0, by its host, and with its host, by the parent-death signal. ``beat`` is
    called now and then while the rank works, and not while it waits for others: when one rank
    hangs and all the others wait for it, the run shows no progress.
    """

    def __init__(
        self, beat: Callable[[], object], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.activity: Callable[[], str | None] = _nothing
        """Not asked: rank 0 speaks for all."""
        self._beat = beat
        self._clock = clock
        self._next_beat = clock() + FOLLOWER_PROGRESS_SECONDS

    def doing(self, activity: str, *, now: bool = False) -> None:
        """Nothing: rank 0 speaks for all."""

    def listen_for_sigterm(self) -> None:
        """Nothing to leave in good order: SIGTERM goes on ending it at once."""

    def __call__(self) -> None:
        """Show progress."""
        now = self._clock()
        if now >= self._next_beat:
            self._next_beat = now + FOLLOWER_PROGRESS_SECONDS
            _patiently(self._beat)

    def waiting(self) -> None:
        """Nothing to look at."""


def _nothing() -> str | None:
    return None


def _patiently(action: Callable[[], object]) -> None:
    """A store that is locked for a while is no reason to stop training."""
    try:
        action()
    except StoreError as error:
        log.warning("commands and heartbeat wait: %s", error)
