"""The client: everything a person can ask, as objects and DataFrames.

``Client`` for programs; ``attach`` and ``workload`` are the same through a client of this
process.
"""

from __future__ import annotations

import os
from typing import Any

from nbtrain.client.client import Client
from nbtrain.client.records import Checkpoint
from nbtrain.client.refusals import Detached, NotBuiltYet, NoWeightChanged, SubmittedBefore
from nbtrain.client.run import Run
from nbtrain.client.workloads import WorkloadItem

__all__ = [
    "Checkpoint",
    "Client",
    "Detached",
    "NoWeightChanged",
    "NotBuiltYet",
    "Run",
    "SubmittedBefore",
    "WorkloadItem",
    "attach",
    "default_client",
    "workload",
]

_clients: dict[tuple[str | None, str | None], Client] = {}


def default_client() -> Client:
    """The client of this process; another one when NBTRAIN_HOME or NBTRAIN_STORE_URL changed."""
    where = (os.environ.get("NBTRAIN_HOME"), os.environ.get("NBTRAIN_STORE_URL"))
    if where not in _clients:
        _clients[where] = Client()
    return _clients[where]


def attach(run: Run | str) -> Run:
    """The run that a name (its newest run), an id or a prefix means, live again.

    Raises :class:`~nbtrain.errors.NotFound`, and
    :class:`~nbtrain.errors.AmbiguousReference` for a prefix that fits several.
    """
    return default_client().training.runs.get(run)


def workload(
    name: str,
    *,
    tasks: Any = None,
    rewards: Any = None,
    environment: Any = None,
    base_model: Any = None,
    held_out: Any = 0.1,
    raw: bool = False,
    dataset: Any = None,
    grader: Any = None,
) -> WorkloadItem:
    """Register a workload and let ``name`` mean it.

    ``tasks`` is a DataFrame or a list of dicts with a ``prompt`` column (chat messages, or text)
    and the columns that the rewards read. ``rewards`` is a reward, or a list of rewards and
    ``(reward, weight)``: built-ins of ``nbtrain.rewards``, ``f(completion, task) -> float``, or
    TRL's ``f(prompts, completions, **columns) -> list``. ``held_out`` is the fraction of prompts
    that never trains, or those tasks themselves; with ``raw`` no chat template is applied.
    ``environment`` is a class that answers the model between its turns, by ``reset`` and tools or
    ``step`` (:mod:`nbtrain.environments.contract`); without ``rewards`` its own reward counts.
    Without ``tasks`` it is a bare workload, for descriptors, which bring their own dataset:
    ``dataset`` is a registered one that belongs to it, ``grader`` what its evaluations grade
    with. Raises :class:`~nbtrain.errors.Refused` with every problem at once.
    """
    return default_client().workloads.create(
        name,
        tasks=tasks,
        rewards=rewards,
        environment=environment,
        base_model=base_model,
        held_out=held_out,
        raw=raw,
        dataset=dataset,
        grader=grader,
    )
