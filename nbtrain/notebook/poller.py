"""One daemon thread per kernel that keeps live outputs up to date.

It never prints and never raises: text printed by a thread lands under whichever cell was run
last, and an error in a thread has no cell at all. What goes wrong is told to the module's logger
at debug level and the view is looked at less often.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

FASTEST = 0.3  # seconds between two looks at a run that moves: at most about 3 updates a second
SLOWEST = 1.0  # between two looks at one that does not
_AFTER_AN_ERROR = 10.0
_BACK_OFF = 1.4
_SHARE = 0.005  # of one core that looking at a view may take,
_LONGEST_REST = 4.0  # but no longer a rest than so many seconds for it

logger = logging.getLogger(__name__)


class View(Protocol):
    """Something shown that follows a run."""

    def look(self) -> tuple[bool, bool]:
        """Bring it up to date. Returns whether anything changed and whether it is final."""
        ...


class Poller:
    """Looks at views at 2 to 4 Hz while they move, once a second while they do not.

    The thread starts with the first view and ends with the last. ``look_now`` does the same in
    the caller's thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: dict[View, _Due] = {}
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stopping = False

    def watch(self, view: View, *, least: float = 0.0, now: bool = False) -> None:
        """Follow the view until it is final.

        It is looked at ``least`` seconds apart at the least, and first of all ``now`` or after
        that pause. One that is followed already goes on; ``now`` hurries it.
        """
        with self._lock:
            due = self._views.get(view)
            if due is None:
                due = self._views[view] = _Due(least)
            if now:
                due.at = time.monotonic()
            self._begin()
        self._wake.set()

    def _begin(self) -> None:
        """Start the thread where there is none; the lock is held."""
        if self._stopping or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._run, name="nbtrain-poller", daemon=True)
        self._thread.start()

    @property
    def watching(self) -> int:
        """How many views are followed."""
        with self._lock:
            return len(self._views)

    def views(self) -> list[View]:
        """The views followed now."""
        with self._lock:
            return list(self._views)

    def look_now(self, view: View) -> None:
        """Bring one view up to date in the calling thread; errors are swallowed as ever."""
        self._look(view)

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread, waiting for it up to ``timeout`` seconds.

        What is followed, now or later, is looked at again once :meth:`resume` is called.
        """
        with self._lock:
            self._stopping = True
            thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def resume(self) -> None:
        """After :meth:`stop`, look at everything that is followed, at once."""
        with self._lock:
            if not self._stopping:
                return
            self._stopping = False
            for due in self._views.values():
                due.at = time.monotonic()
            if self._views:
                self._begin()
        self._wake.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopping or not self._views:
                    # a later watch() finds no thread and starts one
                    if self._thread is threading.current_thread():
                        self._thread = None
                    return
                now = time.monotonic()
                due = [view for view, when in self._views.items() if when.at <= now]
                soonest = min(when.at for when in self._views.values())
            if not due:
                self._wake.wait(max(0.01, soonest - now))
                self._wake.clear()
            for view in due:
                self._look(view)

    def _look(self, view: View) -> None:
        begun = time.thread_time()
        try:
            changed, final = view.look()
        except Exception:
            logger.debug("a live output could not be brought up to date", exc_info=True)
            changed, final, failed = False, False, True
        else:
            failed = False
        with self._lock:
            when = self._views.get(view)
            if when is None:
                return
            if final:
                del self._views[view]
                return
            when.move(changed=changed, failed=failed, took=time.thread_time() - begun)


class _Due:
    """When a view is looked at next, and how far apart the looks are."""

    def __init__(self, least: float = 0.0) -> None:
        self.least = max(FASTEST, least)
        self.pause = self.least
        self.at = time.monotonic() + self.pause

    def move(self, *, changed: bool, failed: bool, took: float = 0.0) -> None:
        """Set the next look; ``took`` is what the last one cost, in CPU seconds."""
        if failed:
            self.pause = _AFTER_AN_ERROR
        elif changed:
            self.pause = self.least
        else:
            slowest = max(SLOWEST, self.least)
            self.pause = min(slowest, max(self.least, self.pause) * _BACK_OFF)
        self.at = time.monotonic() + max(self.pause, min(_LONGEST_REST, took / _SHARE))
