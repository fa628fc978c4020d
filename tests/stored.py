"""Runs written straight into a real store, as a rank would write them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from nbtrain.client import Client, Run
from nbtrain.plan.phases import Phase
from nbtrain.processes import process_identity
from nbtrain.store import RunWriter, Store, StoredRun, new_id

OPTIONS = {"num_steps": 8, "batch_size": 2, "group_size": 4}


def store_of(client: Client) -> Store:
    return client._parts.store


def row_of(run: Run) -> StoredRun:
    return run._store.run(run._key)


def create(
    client: Client, name: str | None = "first", *, parent: Any = None, **options: Any
) -> Run:
    """A run that is recorded but has no job; its host seems to be this very process."""
    view = client.training.resolve(
        options={**OPTIONS, **options} if parent is None else options,
        bench_id="sums" if parent is None else None,
        parent_checkpoint_id=parent,
        display_name=name,
    )
    store = store_of(client)
    row = store.create_run(new_id(), plan={}, resolved=view.plan)
    who = process_identity(os.getpid())
    assert who is not None
    store.start_attempt(
        row.key, 1, host_pid=who.pid, host_start_time=who.start_time, boot_id=who.boot_id
    )
    return Run(store, row)


def writer(run: Run) -> RunWriter:
    return RunWriter(run._store, run._key, 1)


def train(run: Run) -> None:
    run._store.move_phase(run._key, Phase.TRAINING, attempt=1)


def finish(run: Run, phase: Phase = Phase.COMPLETED, **more: Any) -> None:
    if phase is Phase.COMPLETED:
        train(run)
    assert run._store.move_phase(run._key, phase, attempt=1, **more)


def step(
    run: Run,
    number: int,
    reward: float | None = 0.5,
    *,
    rewards: Sequence[float | None] = (0.0, 1.0),
    errors: Sequence[str | None] = (),
    text: bool = True,
    **figures: Any,
) -> None:
    """One step of one group; ``rewards`` are those of its trajectories."""
    row = {
        "step": number,
        "avg_reward": reward,
        "used_reward": reward,
        "loss": 0.1,
        "learning_rate": 1e-4,
        "completed_groups": 3,
        "used_groups": 2,
        "no_signal_groups": 1,
        "filtered_groups": 0,
        "too_small_groups": 0,
        "discarded_groups": 0,
        "pending_groups": 0,
        "started_groups": 3,
        "in_flight_groups": 0,
        "cancelled_groups": 0,
        "update_applied": True,
        **figures,
    }
    trajectories = [
        {
            "trajectory_id": number * 100 + n,
            "group_id": number,
            "sample": n,
            "task_id": "ab" * 8,
            "status": "completed" if value is not None else "failed",
            "reason": "ENV_DONE",
            "reward": value,
            "eligible": value is not None,
            "verdict": "trained on",
            "output_tokens": 5,
            "error": errors[n] if errors else None,
            **({"text": _text(number, n)} if text else {}),
        }
        for n, value in enumerate(rewards)
    ]
    writer(run).commit_step(row, [{"group_id": number, "size": len(rewards)}], trajectories)


def _text(number: int, sample: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"question {number}"}],
        "completion": f"answer {number}.{sample}",
        "terms": {"exact": float(sample)},
        "error": None,
    }


def validate(run: Run, number: int, reward: float | None, *, complete: bool = True) -> None:
    writer(run).commit_validation(
        {
            "step": number,
            "policy_version": number,
            "held_out_reward": reward,
            "round_completed": complete,
            "completed_samples": 50 if complete else 20,
            "expected_samples": 50,
            "seconds": 1.5,
        }
    )


def save(run: Run, number: int, *, weights: bool = True, state: bool = True) -> str:
    """A committed checkpoint without files."""
    row = row_of(run)
    checkpoint_id = new_id()
    writer(run).commit_checkpoint(
        {
            "checkpoint_id": checkpoint_id,
            "step": number,
            "weights": weights,
            "training_state": state,
            "path": f"checkpoints/step-{number:06d}",
            "size_bytes": 1000,
            "base_model_slug": row.base_model_slug,
            "base_fingerprint": row.resolved["base_model"]["fingerprint"],
            "workload_id": row.workload_id,
            "reason": "interval",
        }
    )
    return checkpoint_id
