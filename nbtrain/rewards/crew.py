"""The worker processes of a reward pool: pebble's pool, its renewal, and how a worker died."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from pebble import ProcessPool

from nbtrain.rewards import worker

__all__ = ["Closing", "Crew", "how_it_died"]


class Closing:
    """A pool that ends once, at the latest with its ``with``; :meth:`_end` says how."""

    _closed = False

    def _end(self) -> None:
        raise NotImplementedError

    def close_all(self) -> None:
        """Kill every process, running calls included. What was not taken is lost."""
        if not self._closed:
            self._closed = True
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close_all()


class Crew:
    """``workers`` processes that have the packed rewards at ``path`` loaded; output to ``pipe``."""

    def __init__(self, path: str, workers: int, pipe: Connection) -> None:
        self._arguments = (path, pipe)
        self._workers = workers
        self.load_seconds: float | None = None
        """Longest time seen from starting workers to the first that was ready."""
        self._pool = self._start()

    def schedule(
        self, function: Callable[..., Any], *arguments: Any, limit: float | None = None
    ) -> Future[Any]:
        """Have a worker call ``function``, for at most ``limit`` seconds.

        The future, or this call, raises ``RuntimeError`` when pebble gave its pool up, as it does
        when an idle worker is killed; :meth:`renew` is the answer to both.
        """
        future: Future[Any] = self._pool.schedule(function, args=arguments, timeout=limit)
        return future

    def renew(self) -> None:
        """Kill all workers and start new ones. Futures of before say nothing any more."""
        self.stop()
        self._pool = self._start()

    def stop(self) -> None:
        """Kill all workers."""
        self._pool.stop()
        self._pool.join()

    def _start(self) -> ProcessPool:
        pool = ProcessPool(
            max_workers=self._workers,
            initializer=worker.initialize,
            initargs=self._arguments,
            context=worker.Context(),
        )
        begun = time.monotonic()

        def loaded(hello: Future[Any]) -> None:
            if hello.exception() is None:
                self.load_seconds = max(self.load_seconds or 0.0, time.monotonic() - begun)

        # Starts the workers now, not with the first group.
        pool.schedule(worker.hello).add_done_callback(loaded)
        return pool


def how_it_died(code: int) -> str:
    """A clause on a worker's exit code."""
    if code == worker.EXITED_WITH_ZERO:
        return "it ended its process with status 0"
    if code >= 0:
        return f"it ended its process with status {code}"
    name = signal.Signals(-code).name if -code in list(signal.Signals) else "unknown"
    likely = "; if nobody did it, the system ran out of memory" if -code == signal.SIGKILL else ""
    return f"its process was killed by signal {-code} ({name}){likely}"
