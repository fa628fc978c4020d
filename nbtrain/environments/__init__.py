"""Environments: what answers a model between its turns, each in a killable process of its own.

Importing this is cheap; cloudpickle and the pool load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nbtrain.environments.contract import Contract, Tool, check_columns, read_contract
from nbtrain.environments.events import EnvironmentEvent, EnvironmentEventKind

if TYPE_CHECKING:
    from nbtrain.environments.packing import pack as pack
    from nbtrain.environments.pool import EnvironmentPool as EnvironmentPool

__all__ = [
    "Contract",
    "EnvironmentEvent",
    "EnvironmentEventKind",
    "EnvironmentPool",
    "Tool",
    "check_columns",
    "pack",
    "read_contract",
]

_LAZY = {"EnvironmentPool": "nbtrain.environments.pool", "pack": "nbtrain.environments.packing"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    msg = f"module 'nbtrain.environments' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
