"""The panels of each run as one thing that the kernel's poller looks at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

from nbtrain.client.glance import READ_WITHIN
from nbtrain.notebook.panel import messages
from nbtrain.notebook.poller import Poller

if TYPE_CHECKING:
    from nbtrain.client import Run
    from nbtrain.client.feed import Feed

__all__ = ["Panels", "Shown", "Views"]

TICK = 3.0
"""Seconds between two signs of life."""
PAUSE = 0.5
"""Least seconds between two updates, and between two times that a panel is sent everything."""

_UNSEEN = 2.0  # seconds for which a reading is new enough where no page shows a panel


class Shown(Protocol):
    """A panel, as far as it is kept up to date here."""

    def deliver(self, message: messages.Message) -> None:
        """Send a message to its pages; it never raises."""
        ...

    def tell(self, text: str) -> None:
        """Say in its own state, which is saved with the notebook, how the run stands."""
        ...


class Panels:
    """All panels of one run. What they show is read once, and only while a page shows one."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._glance = run.glance()
        self._feed: Feed | None = None
        self._serial = 0
        self._lock = threading.RLock()
        self._all: WeakSet[Shown] = WeakSet()
        self._asking: WeakSet[Shown] = WeakSet()
        self._following: WeakSet[Shown] = WeakSet()
        self._told: WeakSet[Shown] = WeakSet()
        self._whole_at: WeakKeyDictionary[Shown, float] = WeakKeyDictionary()
        self._newest: ref[Shown] | None = None
        self._phase: object = None

    def add(self, panel: Shown) -> None:
        """Take a panel in; what it tells is brought up to date at the next look."""
        with self._lock:
            self._all.add(panel)
            self._newest = ref(panel)

    @property
    def newest(self) -> Shown | None:
        """The panel that was made for the run, or turned to it, last; ``None`` without any."""
        with self._lock:
            newest = self._newest() if self._newest is not None else None
            return newest if newest in self._all else next(iter(self._all), None)

    def drop(self, panel: Shown) -> None:
        """Forget a panel."""
        with self._lock:
            for group in (self._all, self._asking, self._following, self._told):
                group.discard(panel)

    def ask(self, panel: Shown) -> bool:
        """A page that has just drawn itself wants everything; false where it waits already."""
        with self._lock:
            if panel not in self._all or panel in self._asking:
                return False
            self._asking.add(panel)
            return True

    @property
    def seen(self) -> bool:
        """Whether a page shows any of the panels."""
        with self._lock:
            return bool(self._following or self._asking)

    def look(self) -> tuple[bool, bool]:
        """Send what is new. Returns whether anything was, and whether that was the last of it."""
        with self._lock:
            if not self._all:
                return False, True
            self._tell()
            if not self.seen:
                return False, self._glance.is_final
            if self._feed is None:
                from nbtrain.client.feed import Feed

                self._feed = Feed(self.run)
            now = time.monotonic()
            answered = [p for p in self._asking if now >= self._whole_at.get(p, -PAUSE) + PAUSE]
            asking: WeakSet[Shown] = WeakSet(answered)
            following = self._following - asking
            new = self._feed.news(self._serial) if following else None
            if new is not None:
                self._send(following, messages.update(new))
            if answered:
                # As of the same moment, so that the next news builds on both
                whole = self._feed.whole(read=not following)
                self._send(asking, messages.update(whole))
                self._following |= asking
                self._asking -= asking
                self._whole_at.update(dict.fromkeys(answered, now))
            self._serial = self._feed.serial
            waiting = bool(self._asking)
            changed = new is not None or bool(answered) or waiting
            return changed, self._feed.is_final and not waiting

    def tell_now(self) -> None:
        """Bring what a saved notebook says of the run up to this moment."""
        with self._lock:
            self._glance.refresh()
            self._told.clear()
            self._tell()

    def tick(self) -> None:
        """Let pages know that the kernel lives."""
        with self._lock:
            self._send(self._following, messages.TICK)

    def _send(self, panels: WeakSet[Shown], message: messages.Message) -> None:
        for panel in list(panels):
            panel.deliver(message)

    def _tell(self) -> None:
        """What a saved notebook says of the run; told rarely, as each time is a message."""
        within = READ_WITHIN if self.seen else _UNSEEN
        summary = self._glance.refresh(within)
        if summary.phase != self._phase:
            self._phase = summary.phase
            self._told.clear()
        new = self._all - self._told
        if new:
            text = self._glance.brief(within)
            for panel in new:
                panel.tell(text)
            self._told |= new


class Views:
    """The panels of every run in this kernel, followed by its one poller."""

    def __init__(self, poller: Poller, when_over: Callable[[Run], None]) -> None:
        self._poller = poller
        self._when_over = when_over
        self._lock = threading.Lock()
        self._by_run: WeakValueDictionary[Run, _Followed] = WeakValueDictionary()

    def of(self, run: Run) -> Panels:
        """The panels of this run. They are kept by whoever holds them, and while looked at."""
        with self._lock:
            found = self._by_run.get(run)
            if found is None:
                found = self._by_run[run] = _Followed(run, self._when_over)
            return found

    def follow(self, panels: Panels, *, now: bool = False) -> None:
        """Look at the panels until there is nothing more to tell; with ``now`` at once."""
        self._poller.watch(panels, least=PAUSE, now=now)
        if panels.seen:
            self._poller.watch(self, least=TICK)

    def seen(self, run: Run) -> bool:
        """Whether a page shows a panel of this run, and with it the run's curve."""
        found = self._there(run)
        return found is not None and found.seen

    def tell_now(self, run: Run) -> None:
        """Bring what the run's panels say in a saved notebook up to this moment."""
        if (found := self._there(run)) is not None:
            found.tell_now()

    def _there(self, run: Run) -> Panels | None:
        with self._lock:
            return self._by_run.get(run)

    def look(self) -> tuple[bool, bool]:
        """Give a sign of life to every page; the poller calls it, as long as there is any."""
        with self._lock:
            shown = [panels for panels in self._by_run.values() if panels.seen]
        for panels in shown:
            panels.tick()
        return False, not shown


class _Followed(Panels):
    """Panels whose end is told to whatever else shows the run."""

    def __init__(self, run: Run, when_over: Callable[[Run], Any]) -> None:
        super().__init__(run)
        self._when_over = when_over
        self._was_over = False

    def look(self) -> tuple[bool, bool]:
        changed, final = super().look()
        over = self._glance.is_final
        if over and not self._was_over:
            self._when_over(self.run)
        self._was_over = over
        return changed, final
