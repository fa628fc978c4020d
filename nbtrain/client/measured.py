"""What earlier runs took, read from the store: the only ground for saying how long one takes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from nbtrain.client.machine import free_bytes
from nbtrain.client.readings import SFT
from nbtrain.errors import NotFound
from nbtrain.plan.memory import ranks_of
from nbtrain.plan.preflight import Estimate, estimate
from nbtrain.plan.rates import Measured, Rate
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.plan.supervised_estimate import (
    SupervisedEstimate,
    UpdateRate,
    UpdateRates,
    estimate_supervised,
    sequences_of,
)

if TYPE_CHECKING:
    from nbtrain.client.parts import Parts
    from nbtrain.store import Store, StoredRun

__all__ = ["earlier_runs", "earlier_supervised", "estimate_here"]

_LOOK_AT, _USE = 100, 5  # newest runs of the store, and of those that count
_LEAST = 10  # updates of a run whose median counts
_STEPS = 20  # last steps of a run whose tokens are counted


def estimate_here(parts: Parts, plan: ResolvedPlan) -> Estimate | SupervisedEstimate:
    """What ``plan`` will take on this machine."""
    registry = parts.registry
    machine = registry.machine()
    free = free_bytes(machine)
    if free is not None and not machine.gpus:
        free //= ranks_of(plan)  # ranks on the CPU share its memory
    model = registry.base_model(plan.base_model.slug)
    if plan.method == SFT:
        measured = earlier_supervised(parts, plan)
        return estimate_supervised(plan, model, measured=measured, free_bytes=free)
    workload = registry.workload(plan.workload.workload_id)
    return estimate(
        plan,
        model,
        measured=earlier_runs(parts, plan),
        free_bytes=free,
        turns=workload.environment_identity is not None,
    )


def earlier_runs(parts: Parts, plan: ResolvedPlan) -> Measured | None:
    """Rates of the newest runs that trained the plan's base model on this machine and ended.

    Those with the plan's workload, sampler and ranks where there are any, else all whose
    trajectories have one turn or several as the plan's have. ``None`` without any. Time is what
    passed from the first step's sampling to the end, validation and saving included.
    """
    same: list[Rate] = []
    others: list[Rate] = []
    turns = _Turns(parts)
    for row in parts.store.runs(_LOOK_AT):
        if len(same) == _USE:
            break
        if row.method == SFT or not _counts(parts.store, row, plan.base_model.fingerprint):
            continue
        alike = _conditions(row.resolved) == _conditions(plan.to_json())
        if not alike and (same or len(others) == _USE):
            continue
        if not alike and turns.of(row.workload_id) != turns.of(plan.workload.workload_id):
            continue
        rate = _rate(parts.store, row)
        if rate is not None:
            (same if alike else others).append(rate)
    found = same or others
    return Measured(tuple(found), same_workload=bool(same)) if found else None


def earlier_supervised(parts: Parts, plan: ResolvedPlan) -> UpdateRates | None:
    """Rates of the newest supervised runs of the plan's base model on this machine that ended.

    Those with the plan's dataset and updates where there are any, else all others, of which only
    seconds per token carry over. ``None`` without any. Time is what passed from the first update
    to the end, validation and saving included. A smoke check has neither, and may make very many
    updates: of runs of at least 10 updates it takes the median one's time, the first left out.
    """
    same: list[UpdateRate] = []
    others: list[UpdateRate] = []
    wanted = _updates(plan)
    for row in parts.store.runs(_LOOK_AT):
        if len(same) == _USE:
            break
        if row.method != SFT or not _counts(parts.store, row, plan.base_model.fingerprint):
            continue
        alike = _updates(ResolvedPlan.from_json(row.resolved)) == wanted
        enough = not alike and len(others) == _USE
        rate = None if enough else _update_rate(parts.store, row, smoke=plan.smoke is not None)
        if rate is not None:
            (same if alike else others).append(rate)
    found = same or others
    return UpdateRates(tuple(found), alike=bool(same)) if found else None


def _updates(plan: ResolvedPlan) -> tuple[Any, ...]:
    """What makes the updates of two plans cost the same."""
    names = ("max_seq_length", "precision", "packing", "gpus", "gradient_checkpointing")
    dataset = plan.dataset.dataset_id if plan.dataset else None
    return dataset, sequences_of(plan), *(plan.options.get(name) for name in names)


def _update_rate(store: Store, row: StoredRun, *, smoke: bool) -> UpdateRate | None:
    steps = row.completed_steps - row.start_step
    last = store.steps_at(row.key, range(row.completed_steps - _STEPS, row.completed_steps + 1))
    read, trained = (
        [found[name] for step in last if (found := step["metrics"] or {}).get(name)]
        for name in ("tokens", "trained_tokens")
    )
    if steps < 1 or not read or not trained:
        return None
    each = ((row.ended_at or 0.0) - (row.started_at or 0.0)) / steps
    if smoke:
        took = [_step_seconds(step) for step in last if step["step"] > row.start_step + 1]
        if steps < _LEAST or not took:
            return None
        each = median(took)
    return UpdateRate(each, sum(read) / len(read), sum(trained) / len(trained))


def _step_seconds(step: Mapping[str, Any]) -> float:
    """Of an update alone, without the saving and validation before it."""
    metrics = step["metrics"] or {}
    parts = {name: v for name, v in metrics.items() if name.startswith("seconds_")}
    beside = {"seconds_validation", "seconds_saving"}
    return sum(float(seconds or 0) for name, seconds in parts.items() if name not in beside)


class _Turns:
    """Whether a workload's trajectories have several turns; ``None`` for one that is gone."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._known: dict[str, bool | None] = {}

    def of(self, workload_id: str) -> bool | None:
        if workload_id not in self._known:
            try:
                found = self._parts.catalog.workload(workload_id).environment_identity
                self._known[workload_id] = found is not None
            except NotFound:
                self._known[workload_id] = None
        return self._known[workload_id]


def _conditions(resolved: Mapping[str, Any]) -> tuple[Any, ...]:
    """Workload, sampler and ranks of a resolved plan; older ones name neither of the last two."""
    settings = resolved["settings"]
    sampler, gpus = (settings.get(name, {}).get("value") for name in ("sampler", "gpus"))
    return resolved["workload"]["workload_id"], sampler, gpus or 1


def _rate(store: Store, row: StoredRun) -> Rate | None:
    settings = row.resolved["settings"]
    steps = row.completed_steps - row.start_step
    trained = row.attempted_trajectories
    if steps < 1 or not trained:
        return None
    held_out = sum(each["completed_samples"] or 0 for each in store.validation_rounds(row.key))
    used = steps * settings["batch_size"]["value"] * settings["group_size"]["value"]
    seconds = (row.ended_at or 0.0) - (row.started_at or 0.0)
    return Rate(
        row.output_tokens / trained, seconds / (trained + held_out), max(1.0, trained / used)
    )


def _counts(store: Store, row: StoredRun, fingerprint: str) -> bool:
    same = row.resolved.get("base_model", {}).get("fingerprint") == fingerprint
    if not same or row.started_at is None or row.ended_at is None:
        return False
    here = store.attempt(row.key, row.attempt)["hostname"]
    return row.attempt == 1 and here in (None, socket.gethostname())
