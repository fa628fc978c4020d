"""What the loop looks at between decode steps and between micro-batches."""

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


class Cancelled(BaseException):
    """The run was cancelled. Not an ``Exception``: nothing on the way may swallow it."""


class Control:
    """Polls commands and keeps the rank's heartbeat; call it as often as you like.

    ``commands`` lists the commands not yet answered, oldest first, ``handled`` marks one as
    answered by its id, and ``beat`` says that the loop is moving. SIGTERM, which the host sends to
    stop its ranks, cancels at the next call.
    """

    def __init__(
        self,
        commands: Callable[[], list[dict[str, Any]]],
        handled: Callable[[int], object],
        beat: Callable[[], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._commands = commands
        self._handled = handled
        self._beat = beat
        self._clock = clock
        self._next_command = 0.0
        self._next_beat = 0.0
        self._stop: str | None = None

    def listen_for_sigterm(self) -> None:
        """Turn SIGTERM into a cancel at the next look."""

        def stop(number: int, frame: object) -> None:
            self._stop = "its host asked it to stop (SIGTERM)"

        signal.signal(signal.SIGTERM, stop)

    def __call__(self) -> None:
        """Raise :class:`Cancelled` when the run is to stop."""
        if self._stop is not None:
            raise Cancelled(self._stop)
        try:
            self._look()
        except StoreError as error:
            # A store that is locked for a while is no reason to stop training.
            log.warning("commands and heartbeat wait: %s", error)

    def _look(self) -> None:
        now = self._clock()
        if now >= self._next_beat:
            self._next_beat = now + PROGRESS_SECONDS
            self._beat()
        if now < self._next_command:
            return
        self._next_command = now + COMMAND_SECONDS
        for command in self._commands():
            self._handled(command["id"])
            if command["command"] == "cancel":
                msg = "cancelled on request"
                raise Cancelled(msg)
