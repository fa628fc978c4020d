"""Rewards: terms and their contract, built-ins, packing, and scoring in killable workers.

Importing this is cheap; cloudpickle and the pool load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nbtrain.rewards.builtins import environment, exact, format, length, numeric, regex
from nbtrain.rewards.contract import (
    Grade,
    GradeRequest,
    GroupGrades,
    RewardTerm,
    as_terms,
    check_columns,
)
from nbtrain.rewards.labels import json_label_match

if TYPE_CHECKING:
    from nbtrain.rewards.packing import pack as pack
    from nbtrain.rewards.pool import RewardPool as RewardPool
    from nbtrain.rewards.trials import trial as trial

__all__ = [
    "Grade",
    "GradeRequest",
    "GroupGrades",
    "RewardPool",
    "RewardTerm",
    "as_terms",
    "check_columns",
    "environment",
    "exact",
    "format",
    "json_label_match",
    "length",
    "numeric",
    "pack",
    "regex",
    "trial",
]

_LAZY = {
    "RewardPool": "nbtrain.rewards.pool",
    "pack": "nbtrain.rewards.packing",
    "trial": "nbtrain.rewards.trials",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    msg = f"module 'nbtrain.rewards' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
