"""What stands below the form: results of its buttons, and the run that it launched."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbtrain.errors import NbtrainError, first_line
from nbtrain.notebook import live
from nbtrain.notebook.form.inputs import close_all
from nbtrain.notebook.form.page import lines

if TYPE_CHECKING:
    from ipywidgets import DOMWidget

    from nbtrain.client import Run
    from nbtrain.notebook.form.inputs import Inputs

__all__ = ["Output"]


class Output:
    """A text for results, and the run's summary and live panel as outputs of the cell.

    A handler must not display anything, for that would go to whatever cell runs: their places are
    made when the form is displayed, and filled in later by their display ids.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._result = inputs.html()
        self._place: str | None = None
        self._panel_place: str | None = None
        self._publisher: Any = None
        self._shown: _Summary | None = None

    @property
    def widgets(self) -> tuple[DOMWidget, ...]:
        """What the form shows below its buttons."""
        return (self._result,)

    def show(self, markup: str) -> None:
        """Show the result of a button; the text in it is escaped already."""
        self._result.value = markup

    def follow(self, run: Run, notes: tuple[str, ...]) -> None:
        """Show a run as a cell does: its summary with what is said of it, then its live panel."""
        if self._place is None:
            self.show(lines([run.title, *notes], ""))
            return
        self._summary(run, notes)
        self.show(lines([f"{run.title}: its output stands below the form", *self._panel(run)], ""))

    def close(self) -> None:
        """Leave what is displayed as it is; the run's panel may be shown elsewhere and goes on."""
        self._place = None
        if self._shown is not None:
            self._shown.leave()
        close_all(self.widgets)

    def _panel(self, run: Run) -> list[str]:
        """Show the live panel; what is to be said where there is none."""
        if self._panel_place is None:
            return []
        try:
            data, metadata = live.panel(run).bundle()
        except NbtrainError as error:
            self._publish(self._panel_place, "", "", update=True)
            return [first_line(error)]
        self._publisher.publish(
            data=data, metadata=metadata, transient={"display_id": self._panel_place}, update=True
        )
        return []

    def _publish(self, place: str, text: str, markup: str, *, update: bool = False) -> None:
        data = {"text/plain": text, "text/html": markup}
        transient = {"display_id": place}
        self._publisher.publish(data=data, metadata={}, transient=transient, update=update)

    def display(self, data: Mapping[str, Any], run: Run | None) -> None:
        """Display the form in the running cell, and below it the places of summary and panel."""
        from IPython import get_ipython

        shell = get_ipython()
        if shell is None:
            print(data["text/plain"])
            return
        self._publisher = shell.display_pub
        self._publisher.publish(data=dict(data), metadata={})
        self._place = f"nbtrain-{uuid.uuid4().hex}"
        waiting = "no run was launched from this form yet"
        markup = f'<div style="opacity:0.6;font-size:12px">{waiting}</div>'
        self._publish(self._place, waiting, markup)
        self._panel_place = None
        if getattr(shell, "kernel", None) is not None:  # a terminal has no panel
            self._panel_place = f"nbtrain-{uuid.uuid4().hex}"
            self._publish(self._panel_place, "", "")
        if run is not None:
            self._summary(run, ())
            self._panel(run)

    def _summary(self, run: Run, notes: tuple[str, ...]) -> None:
        if self._shown is not None:
            self._shown.leave()
        self._shown = _Summary(self._publisher, run, notes, place=self._place)
        self._shown.show()
        live.poller.watch(self._shown)


class _Summary(live.LiveSummary):
    """A run's summary that leaves its place to another run's."""

    _left = False

    def leave(self) -> None:
        """Never change the output any more."""
        with self._lock:
            self._left = True

    def look(self) -> tuple[bool, bool]:
        """As ever, until another run took the place."""
        return (False, True) if self._left else super().look()
