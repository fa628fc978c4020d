"""nbtrain: train language models from a notebook.

Importing this module is cheap: torch, pandas, SQLAlchemy and JupyterLab load when first needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbtrain import rewards as rewards
    from nbtrain.client import Client as Client
    from nbtrain.client import Run as Run
    from nbtrain.client import attach as attach
    from nbtrain.client import workload as workload
    from nbtrain.notebook.form import panel as panel

__version__ = "0.1.0"
__all__ = ["Client", "Run", "__version__", "attach", "panel", "rewards", "workload"]

_LAZY = {
    "Client": "nbtrain.client",
    "Run": "nbtrain.client",
    "attach": "nbtrain.client",
    "panel": "nbtrain.notebook.form",
    "workload": "nbtrain.client",
}


def __getattr__(name: str) -> Any:
    if name == "rewards":
        return importlib.import_module("nbtrain.rewards")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    msg = f"module 'nbtrain' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext nbtrain``: register ``%%train`` and ``%train``."""
    from nbtrain.notebook import load

    load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """``%unload_ext nbtrain``: take the magics and the poller away again."""
    from nbtrain.notebook import unload

    unload(ipython)
