"""What stands below the form: results of its buttons, and the run that it launched."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from nbtrain.errors import NbtrainError, first_line
from nbtrain.notebook import live
from nbtrain.notebook.form.inputs import close_all
from nbtrain.notebook.form.page import lines

if TYPE_CHECKING:
    from nbtrain.client import Run
    from nbtrain.notebook.form.inputs import Inputs

__all__ = ["Output"]


class Output:
    """A text for results, the live panel of the run, and its summary as an output of the cell.

    A handler must not display anything, for that would go to whatever cell runs: the place of the
    summary is made when the form is displayed, and filled in later by its display id.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._result = inputs.html()
        self._below = widgets.VBox()
        self._place: str | None = None
        self._publisher: Any = None
        self._shown: _Summary | None = None

    @property
    def widgets(self) -> tuple[widgets.DOMWidget, ...]:
        """What the form shows below its buttons."""
        return self._result, self._below

    def show(self, markup: str) -> None:
        """Show the result of a button; the text in it is escaped already."""
        self._result.value = markup

    def follow(self, run: Run, notes: tuple[str, ...]) -> None:
        """Show a run: what is said of it, its live panel, and its summary in its place."""
        told = [run.title, *notes]
        if self._place is not None:
            self._summary(run, notes)
            told += self._panel(run)
        self.show(lines(told, ""))

    def close(self) -> None:
        """Leave what is displayed as it is; the run's panel may be shown elsewhere and goes on."""
        self._place = None
        if self._shown is not None:
            self._shown.leave()
        panels = self._below.children
        self._below.children = ()
        close_all(self.widgets, keep=panels)

    def _panel(self, run: Run) -> list[str]:
        """Show the live panel; what is to be said where there is none."""
        try:
            self._below.children = (live.panel(run),)
        except NbtrainError as error:
            self._below.children = ()
            return [first_line(error)]
        return []

    def display(self, data: Mapping[str, Any], run: Run | None) -> None:
        """Display the form in the running cell, and below it the place of the summary."""
        from IPython import get_ipython

        shell = get_ipython()
        if shell is None:
            print(data["text/plain"])
            return
        self._publisher = shell.display_pub
        self._publisher.publish(data=dict(data), metadata={})
        self._place = f"nbtrain-{uuid.uuid4().hex}"
        if run is not None:
            self._summary(run, ())
            return
        waiting = "no run was launched from this form yet"
        markup = f'<div style="opacity:0.6;font-size:12px">{waiting}</div>'
        self._publisher.publish(
            data={"text/plain": waiting, "text/html": markup},
            metadata={},
            transient={"display_id": self._place},
        )

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
