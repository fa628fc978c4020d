"""The start checks of a form's plan, beside everything else: they may take minutes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from nbtrain.errors import NbtrainError, first_line
from nbtrain.notebook.form.page import lines

if TYPE_CHECKING:
    from nbtrain.client import Client
    from nbtrain.client.resolved import ResolvedView

__all__ = ["Checking"]


class _Stopped(Exception):
    """The person does not want to know any more."""


class Checking:
    """One round of start checks in a thread of its own.

    ``show`` gets what is to be shown, as HTML, and ``over`` is called at the end. Stopping takes
    effect before the next check; nothing is left running then.
    """

    def __init__(
        self,
        client: Client,
        view: ResolvedView,
        show: Callable[[str], None],
        over: Callable[[], None],
    ) -> None:
        self._client, self._view = client, view
        self._show, self._over = show, over
        self._stop = threading.Event()
        self._head = f"start checks of config {view.config_hash[:12]}"
        self._thread = threading.Thread(target=self._run, name="nbtrain-checks", daemon=True)
        show(lines([f"{self._head} …"], ""))
        self._thread.start()

    def stop(self) -> None:
        """End it before the next check."""
        self._stop.set()
        self._show(lines([f"{self._head}: stopping before the next one …"], ""))

    def join(self, timeout: float | None = None) -> None:
        """Wait until it is over."""
        self._thread.join(timeout)

    def _told(self, line: str) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._show(lines([f"{self._head}: {line.removeprefix('start checks: ')}"], ""))

    def _run(self) -> None:
        try:
            report = self._client.training.check(self._view, self._told)
            self._show(report._repr_html_())
        except _Stopped:
            self._show(lines([f"{self._head}: stopped; nothing is left running"], ""))
        except (NbtrainError, OSError) as error:
            self._show(lines([f"{self._head}: {first_line(error)}"], "nbtrain-refused"))
        finally:
            self._over()
