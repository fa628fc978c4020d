"""What is under way, told in one output of the cell that changes in place."""

from __future__ import annotations

import html
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Told", "telling"]


class Told:
    """Called with a sentence, it shows that behind ``head``, in place of the one before."""

    def __init__(self, shell: Any, head: str) -> None:
        self._publisher = shell.display_pub
        self._head = head
        self._place = f"nbtrain-{uuid.uuid4().hex}"
        self._there = False

    @property
    def is_there(self) -> bool:
        """Whether anything was told."""
        return self._there

    def __call__(self, said: str) -> None:
        """Show a sentence, as text."""
        text = f"{self._head}: {said}"
        self.show(text, f"<div>{html.escape(text)}</div>")

    def show(self, text: str, markup: str) -> None:
        """Put something else in its place; ``markup`` is HTML."""
        self._publisher.publish(
            data={"text/plain": text, "text/html": markup},
            metadata={},
            transient={"display_id": self._place},
            update=self._there,
        )
        self._there = True


@contextmanager
def telling(shell: Any, head: str) -> Iterator[Told]:
    """Something to tell progress with, that says at the end how long it took or that it stopped.

    Where nothing was told there is no output at all.
    """
    told, begun = Told(shell, head), time.monotonic()
    try:
        yield told
    except BaseException:
        if told.is_there:
            told("stopped")
        raise
    if told.is_there:
        told(f"done in {time.monotonic() - begun:,.1f} s")
