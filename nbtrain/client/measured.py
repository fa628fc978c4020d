"""What earlier runs took, read from the store: the only ground for saying how long one takes."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from nbtrain.client.machine import free_bytes
from nbtrain.plan.memory import ranks_of
from nbtrain.plan.preflight import Estimate, Measured, estimate

if TYPE_CHECKING:
    from nbtrain.client.parts import Parts
    from nbtrain.plan.resolved import ResolvedPlan
    from nbtrain.store import Store, StoredRun

__all__ = ["earlier_runs", "estimate_here"]

_LOOK_AT, _USE = 50, 5  # newest runs of the store, and of those that count


def estimate_here(parts: Parts, plan: ResolvedPlan) -> Estimate:
    """What ``plan`` will take on this machine."""
    registry = parts.registry
    machine = registry.machine()
    free = free_bytes(machine)
    if free is not None and not machine.gpus:
        free //= ranks_of(plan)  # ranks on the CPU share its memory
    workload = registry.workload(plan.workload.workload_id)
    return estimate(
        plan,
        registry.base_model(plan.base_model.slug),
        measured=earlier_runs(parts.store, plan.base_model.fingerprint),
        free_bytes=free,
        turns=workload.environment_identity is not None,
    )


def earlier_runs(store: Store, fingerprint: str) -> Measured | None:
    """Averages over the newest runs of this base model that trained on this machine and ended.

    ``None`` without any. Time is what passed from the first step's sampling to the end,
    validation and saving included.
    """
    seconds = sampled = tokens = trained = used = 0.0
    found = 0
    for row in store.runs(_LOOK_AT):
        settings = row.resolved.get("settings", {})
        steps = row.completed_steps - row.start_step
        if found == _USE or not _counts(store, row, fingerprint) or steps < 1:
            continue
        rounds = store.validation_rounds(row.key)
        held_out = sum(each["completed_samples"] or 0 for each in rounds)
        found += 1
        seconds += (row.ended_at or 0.0) - (row.started_at or 0.0)
        sampled += row.attempted_trajectories + held_out
        tokens += row.output_tokens
        trained += row.attempted_trajectories
        used += steps * settings["batch_size"]["value"] * settings["group_size"]["value"]
    if not trained:
        return None
    return Measured(found, tokens / trained, seconds / sampled, max(1.0, trained / used))


def _counts(store: Store, row: StoredRun, fingerprint: str) -> bool:
    same = row.resolved.get("base_model", {}).get("fingerprint") == fingerprint
    if not same or row.started_at is None or row.ended_at is None:
        return False
    here = store.attempt(row.key, row.attempt)["hostname"]
    return row.attempt == 1 and here in (None, socket.gethostname())
