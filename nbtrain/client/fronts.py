"""What the notebook above lends to the client: the panel that ``Run.panel`` shows.

The client knows nothing of widgets; loading the extension puts the maker here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbtrain.errors import NbtrainError

if TYPE_CHECKING:
    from nbtrain.client.run import Run

__all__ = ["panel", "panels"]

panels: list[Callable[[Run], Any]] = []
"""The maker of live panels, once ``%load_ext nbtrain`` put it here."""


def panel(run: Run) -> Any:
    """The live panel of a run. Raises :class:`NbtrainError` where no notebook could show it."""
    if not panels:
        from IPython import get_ipython

        shell = get_ipython()
        if shell is None:
            msg = "a panel needs a notebook; here, run.plot() and print(run) show a run"
            raise NbtrainError(msg)
        shell.extension_manager.load_extension("nbtrain")
    return panels[-1](run)
