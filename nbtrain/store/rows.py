"""Rows as readers get them: runs and checkpoints as records, everything else as plain dicts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from nbtrain.plan.phases import TERMINAL, Phase, Status, is_paused, status_of
from nbtrain.store.ids import short

__all__ = ["Row", "StoredCheckpoint", "StoredRun", "trajectory_ref"]

Row = dict[str, Any]
"""A row by column name; ``id`` is its key, to ask for the rows after it."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as it stood when it was read. ``key`` is what readers and writers take.

    Times are seconds since 1970; ``completed_steps``, ``saved_step`` and ``total_steps`` are
    global steps. ``saved_step`` is ``None`` until a checkpoint is committed.
    """

    key: int
    run_id: str
    name: str | None
    kind: str
    method: str
    workload_id: str
    workload_name: str | None
    base_model_slug: str
    config_hash: str
    phase: Phase
    created_at: float
    started_at: float | None
    ended_at: float | None
    ended: str | None
    failure: str | None
    parent_run_id: str | None
    parent_checkpoint_id: str | None
    start_step: int
    total_steps: int
    completed_steps: int
    saved_step: int | None
    updates_applied: int
    attempted_trajectories: int
    graded_trajectories: int
    output_tokens: int
    attempt: int
    description: str | None
    config_name: str | None
    plan_text: str | None = field(repr=False)
    resolved_text: str | None = field(repr=False)
    checks_text: str | None = field(default=None, repr=False)
    verdict_text: str | None = field(default=None, repr=False)

    @property
    def short_id(self) -> str:
        """The first 12 digits of the id."""
        return short(self.run_id)

    @property
    def status(self) -> Status:
        """The coarse status of the phase."""
        return status_of(self.phase)

    @property
    def paused(self) -> bool:
        """Whether the run waits to be resumed."""
        return is_paused(self.phase)

    @property
    def ended_for_good(self) -> bool:
        """Whether the phase is terminal."""
        return self.phase in TERMINAL

    @property
    def plan(self) -> Any:
        """The plan as it was given."""
        return None if self.plan_text is None else json.loads(self.plan_text)

    @property
    def resolved(self) -> dict[str, Any]:
        """The resolved plan, as ``ResolvedPlan.to_json`` wrote it; empty when there is none."""
        found: dict[str, Any] = json.loads(self.resolved_text or "{}")
        return found

    @property
    def checks(self) -> list[dict[str, Any]]:
        """What the start checks measured, as ``Check.to_json`` wrote each; empty before them."""
        found: list[dict[str, Any]] = json.loads(self.checks_text or "[]")
        return found

    @property
    def verdict(self) -> dict[str, Any] | None:
        """What a smoke check found, ``None`` for every other run and before its end."""
        found: dict[str, Any] | None = json.loads(self.verdict_text or "null")
        return found


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A committed checkpoint. ``run`` is the key and ``run_id`` the id of the run that wrote it."""

    key: int
    checkpoint_id: str
    run: int
    run_id: str
    attempt: int
    step: int
    superseded: bool
    weights: bool
    training_state: bool
    path: str
    size_bytes: int | None
    manifest_digest: str | None
    base_model_slug: str | None
    base_fingerprint: str | None
    workload_id: str | None
    reason: str | None
    pinned: bool
    created_at: float

    @property
    def short_id(self) -> str:
        """The first 12 digits of the id."""
        return short(self.checkpoint_id)


def trajectory_ref(run_id: str, row: Row) -> str:
    """The public id of a trajectory row: its run's first 12 digits, a dash, the row's key.

    The key rather than the number within the run, which an attempt that repeats steps gives
    out again.
    """
    return f"{short(run_id)}-{row['id']}"
