"""What the notebook above lends to the client: the panel that ``Run.panel`` shows.

The client knows nothing of widgets; loading the extension puts the maker here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbtrain.errors import NbtrainError

if TYPE_CHECKING:
    from nbtrain.client.client import Client
    from nbtrain.client.run import Run

__all__ = ["client_of", "panel", "panels"]

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
    if not panels:
        msg = "a panel needs a notebook; in a terminal, run.plot() and print(run) show a run"
        raise NbtrainError(msg)
    return panels[-1](run)


def client_of(run: Run) -> Client:
    """A client on the run's own store, which need not be the default one."""
    from nbtrain.client.client import Client

    store = run._store
    client = Client(store.home, store.url)
    client._parts.__dict__["store"] = store  # the one that is open already
    return client
