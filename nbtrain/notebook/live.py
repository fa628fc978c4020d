"""A run's summary as a cell output that stays up to date and is whole in a saved notebook."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from typing import Any

from nbtrain.client import Run
from nbtrain.notebook.poller import Poller

__all__ = ["LiveSummary", "bring_up_to_date", "poller", "show"]

poller = Poller()
"""The one of this kernel."""


class LiveSummary:
    """One displayed output, with a display id of its own; every change replaces it in place."""

    def __init__(self, publisher: Any, run: Run, notes: tuple[str, ...] = ()) -> None:
        self.run = run
        self._publisher = publisher
        self._id = f"nbtrain-{uuid.uuid4().hex}"
        self._glance = run.glance()
        self._notes = notes
        self._lock = threading.Lock()
        self._shown: Mapping[str, Any] = {}

    def show(self) -> None:
        """Show it for the first time; drawing is left to later looks, so that a cell returns."""
        with self._lock:
            self._shown = self._bundle()
            self._publish(update=False)

    def look(self) -> tuple[bool, bool]:
        """Bring the output up to date; whether it changed and whether the run is over."""
        with self._lock:
            bundle = self._bundle()
            changed = bundle != self._shown
            if changed:
                self._shown = bundle
                self._publish(update=True)
            return changed, self._glance.is_final

    def _bundle(self) -> Mapping[str, Any]:
        return self._glance.bundle(hurry=True, notes=self._notes)

    def _publish(self, *, update: bool) -> None:
        self._publisher.publish(
            data=dict(self._shown), metadata={}, transient={"display_id": self._id}, update=update
        )


def show(shell: Any, run: Run, notes: tuple[str, ...] = ()) -> LiveSummary:
    """Show the run's summary in the running cell and, in a kernel, keep it up to date.

    A terminal has no outputs to update: there it is shown once.
    """
    live = LiveSummary(shell.display_pub, run, notes)
    live.show()
    if getattr(shell, "kernel", None) is not None:
        poller.watch(live)
    return live


def bring_up_to_date(run: Run) -> None:
    """Bring every output of this run up to date in the calling thread."""
    for view in poller.views():
        if isinstance(view, LiveSummary) and view.run == run:
            poller.look_now(view)
