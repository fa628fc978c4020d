"""A run in a cell: a static output that stays up to date and is whole in a saved notebook, and
beside it the live panel.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nbtrain.client import Run
from nbtrain.client.glance import READ_WITHIN
from nbtrain.errors import NbtrainError
from nbtrain.notebook.panel.views import Panels, Views
from nbtrain.notebook.poller import Poller

if TYPE_CHECKING:
    from nbtrain.notebook.panel.widget import RunPanel

__all__ = ["LiveSummary", "bring_up_to_date", "panel", "poller", "show", "show_ends", "views"]

_WORDS_BESIDE_A_PANEL = 15.0
_PICTURES_BESIDE_A_PANEL = 120.0
"""Seconds between two updates of the static output while a page shows a panel of the run, which
has the curve. A new phase and the end come at once."""

logger = logging.getLogger(__name__)

poller = Poller()
"""The one of this kernel."""


class LiveSummary:
    """One displayed output, with a display id of its own; every change replaces it in place.

    ``place`` is the display id of an output that is there already and becomes the summary.
    """

    def __init__(
        self, publisher: Any, run: Run, notes: tuple[str, ...] = (), place: str | None = None
    ) -> None:
        self.run = run
        self._publisher = publisher
        self._there = place is not None
        self._id = place or f"nbtrain-{uuid.uuid4().hex}"
        self._glance = run.glance()
        self._notes = notes
        self._lock = threading.Lock()
        self._shown: Mapping[str, Any] = {}
        self._phase = ""
        self._told_at = self._drawn_at = 0.0

    def show(self) -> None:
        """Show it for the first time; drawing is left to later looks, so that a cell returns."""
        with self._lock:
            self._glance.refresh()  # how it is now: in a terminal nothing follows
            self._shown = self._bundle()
            self._publish(update=self._there)

    def look_now(self) -> None:
        """Bring it up to date with what is recorded at this moment; errors are swallowed."""
        with suppress(Exception):
            self._glance.refresh()
        poller.look_now(self)

    def look(self) -> tuple[bool, bool]:
        """Bring the output up to date; whether it changed and whether the run is over."""
        with self._lock:
            now, redraw = time.monotonic(), True
            if views.seen(self.run):
                phase = self._glance.refresh(READ_WITHIN).phase
                if not self._glance.is_final:  # the panel tells more, and tells of the end
                    if phase == self._phase and now < self._told_at + _WORDS_BESIDE_A_PANEL:
                        return False, False
                    redraw = now >= self._drawn_at + _PICTURES_BESIDE_A_PANEL
                self._phase = phase
            bundle = self._bundle(redraw=redraw)
            self._told_at = now
            if redraw and "image/png" in bundle:
                self._drawn_at = now
            changed = bundle != self._shown
            if changed:
                self._shown = bundle
                self._publish(update=True)
            return changed, self._glance.is_final

    def _bundle(self, *, redraw: bool = True) -> Mapping[str, Any]:
        return self._glance.bundle(hurry=True, redraw=redraw, notes=self._notes)

    def _publish(self, *, update: bool) -> None:
        self._publisher.publish(
            data=dict(self._shown), metadata={}, transient={"display_id": self._id}, update=update
        )


def show(
    shell: Any, run: Run, notes: tuple[str, ...] = (), *, with_panel: bool = False
) -> LiveSummary:
    """Show the run's summary in the running cell and, in a kernel, keep it up to date.

    With ``with_panel`` the live panel is shown below it. A terminal has no outputs to update:
    there the summary is shown once, and no panel.
    """
    live = LiveSummary(shell.display_pub, run, notes)
    live.show()
    if getattr(shell, "kernel", None) is not None:
        poller.watch(live)
        if with_panel:
            _show_panel(shell, run)
    return live


def _show_panel(shell: Any, run: Run) -> None:
    try:
        data, metadata = panel(run).bundle()
    except NbtrainError:  # a source tree whose page was not built: the summary is enough
        logger.debug("no panel", exc_info=True)
        return
    shell.display_pub.publish(data=data, metadata=metadata)


def panel(run: Run) -> RunPanel:
    """The run's panel in this kernel: the one that is shown already, or a new one.

    Displayed again it stands in both places, and what is picked in one is picked in the other.
    Raises :class:`NbtrainError` in a source tree without its page.
    """
    shown = views.of(run).newest
    return shown if shown is not None else new_panel(run)  # type: ignore[return-value]


def new_panel(run: Run) -> RunPanel:
    """A panel with a pick of its own, beside any that is there."""
    # ipywidgets costs a third of a second, which a terminal never needs
    from nbtrain.notebook.panel.widget import RunPanel

    return RunPanel(run, views)


def bring_up_to_date(run: Run) -> None:
    """Bring every output of this run up to date in the calling thread."""
    for view in poller.views():
        if isinstance(view, LiveSummary) and view.run == run:
            view.look_now()
    try:
        views.tell_now(run)
    except Exception:  # a wait ends as the run did, whatever its panels can be told
        logger.debug("a panel could not be told how its run ended", exc_info=True)


def show_ends(_executed: object = None) -> None:
    """After a cell: what ended until then is shown as ended before the next cell begins.

    A notebook that waits in a loop of its own may be saved right after its last cell.
    """
    for run in {view.run for view in poller.views() if isinstance(view, LiveSummary | Panels)}:
        try:
            over = run.is_over
        except Exception:  # unreadable now: the poller goes on trying
            logger.debug("a run could not be looked at after a cell", exc_info=True)
        else:
            if over:
                bring_up_to_date(run)


def _hurry(run: Run) -> None:
    for view in poller.views():
        if isinstance(view, LiveSummary) and view.run == run:
            poller.watch(view, now=True)


views = Views(poller, when_over=_hurry)
"""The panels of this kernel."""
