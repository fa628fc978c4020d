"""Clicks arrive while a cell runs."""

from __future__ import annotations

from typing import Any

__all__ = ["answer_at_once"]


def answer_at_once(comm: Any) -> None:
    """Handle what a page sends on this comm in the subshell that the page chose.

    JupyterLab sends a widget's messages over a subshell, so that they are handled beside a running
    cell. From ipykernel 7.4 on a comm overrides that: a message goes to the shell that last sent
    something on the comm, which for a widget made in a cell is the main one, and there it waits
    for the end of the cell. A panel sends from a thread and waits for no answer, so the page's
    choice holds. The method is private; without it there is nothing to do. A test notices when
    this is no longer needed.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda _, chosen: chosen
