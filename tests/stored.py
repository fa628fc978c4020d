"""Runs written straight into a real store, as a rank would write them."""

from __future__ import annotations

import math
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
    host(store, row.key, 1)
    return Run(store, row)


def host(store: Store, run_key: int, attempt: int) -> None:
    """Take up an attempt as if this very process were its host."""
    who = process_identity(os.getpid())
    assert who is not None
    assert store.start_attempt(
        run_key, attempt, host_pid=who.pid, host_start_time=who.start_time, boot_id=who.boot_id
    )


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


def validate(
    run: Run,
    number: int,
    reward: float | None,
    *,
    complete: bool = True,
    samples: Sequence[tuple[str, float | None, str]] = (),
) -> None:
    """A validation round; ``samples`` are (task id, reward, reason) of its trajectories."""
    writer(run).commit_validation(
        {
            "step": number,
            "policy_version": number,
            "held_out_reward": reward,
            "round_completed": complete,
            "completed_samples": 50 if complete else 20,
            "expected_samples": 50,
            "seconds": 1.5,
        },
        [
            {"task_id": task, "reward": value, "reason": reason, "status": "completed", "sample": n}
            for n, (task, value, reason) in enumerate(samples)
        ],
    )


def scored(run: Run, number: int, scores: Sequence[float]) -> None:
    """A complete round with one sample of each task, and a checkpoint at its step."""
    samples = [(f"task {n:03d}", value, "ENV_DONE") for n, value in enumerate(scores)]
    validate(run, number, sum(scores) / len(scores), samples=samples)
    save(run, number)


def save(run: Run, number: int, *, weights: bool = True, state: bool = True) -> str:
    """A committed checkpoint whose manifest lists no files."""
    row = row_of(run)
    checkpoint_id = new_id()
    path = run.folder / "checkpoints" / f"step-{number:06d}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text('{"weights": {}, "training_state": {}}')
    writer(run).commit_checkpoint(
        {
            "checkpoint_id": checkpoint_id,
            "step": number,
            "weights": weights,
            "training_state": state,
            "path": str(path),
            "size_bytes": 1000,
            "base_model_slug": row.base_model_slug,
            "base_fingerprint": row.resolved["base_model"]["fingerprint"],
            "workload_id": row.workload_id,
            "reason": "interval",
        }
    )
    return checkpoint_id


SFT_SETTINGS: dict[str, Any] = {
    "algorithm": "sft", "lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.0,
    "lora_target_modules": "default", "optimizer_kind": "adamw", "learning_rate": 1e-4,
    "weight_decay": 0.0, "max_grad_norm": 1.0, "scheduler_kind": "linear", "warmup_ratio": 0.0,
    "min_learning_rate_ratio": 0.0, "epochs": 2, "max_steps": 0, "micro_batch_per_gpu": 2,
    "micro_batch_sequences": None, "gradient_checkpointing": False,
    "attention_implementation": "sdpa", "packing": False,
    "gradient_accumulation": 4, "validation_frequency_steps": 10, "seed": 42,
    "max_seq_length": 2048, "precision": "bf16", "load_weights_only": False, "gpus": 1,
}  # fmt: skip


def create_supervised(
    client: Client,
    name: str | None = "tuned",
    *,
    validates: bool = True,
    smoke: bool = False,
    total_steps: int = 40,
    rows: int = 160,
    origin: str = "stated",
    **settings: Any,
) -> Run:
    """A supervised run of a descriptor that is recorded but has no job, as :func:`create`."""
    values = SFT_SETTINGS | settings
    data: dict[str, Any] = {
        "settings": {n: {"value": v, "origin": origin} for n, v in values.items()},
        "workload": {
            "workload_id": "ab" * 32, "name": "support-triage", "train_tasks": rows,
            "held_out_tasks": 20 if validates else 0,
            "split": "every row of dataset triage-train", "train_digest": "cd" * 32,
        },
        "base_model": {
            "slug": "nbtrain/tiny", "kind": "embedded", "location": "", "fingerprint": "ef" * 32,
            "max_context": 2048,
        },
        "parent": None, "display_name": name, "start_step": 0, "total_steps": total_steps,
        "config_hash": "12" * 32, "admission": "as_graded", "hints": [], "door": "descriptor",
        "dataset": {"dataset_id": "cd" * 32, "name": "triage-train", "rows": rows},
    }  # fmt: skip
    if validates:
        data["validation_dataset"] = {"dataset_id": "de" * 32, "name": "triage-val", "rows": 20}
    if smoke:
        data["smoke"] = {"slice_size": 8, "max_steps": 40, "threshold": 0.98}
    store = store_of(client)
    row = store.create_run(
        new_id(), plan={}, resolved=data, config_name="r8-e2", description="triage of mail"
    )
    host(store, row.key, 1)
    return Run(store, row)


def loss(run: Run, number: int, value: float | None, **figures: Any) -> None:
    """One step of a supervised run."""
    writer(run).commit_step(
        {
            "step": number, "loss": value, "learning_rate": 1e-4 * (1 - (number - 1) / 40),
            "update_applied": True, "grad_norm": 0.5 + number % 3 / 10, "epoch": number / 20,
            "trained_tokens": 400, "tokens": 1600, "sequences": 8,
            "row_ids": [(number * 8 + n) % 160 for n in range(8)],
            "seconds_loss": 1.5, "seconds_update": 0.25, **figures,
        }
    )  # fmt: skip


def read(run: Run, number: int, value: float, *, complete: bool = True, **more: Any) -> None:
    """One validation round of a supervised run."""
    writer(run).commit_validation(
        {
            "step": number, "policy_version": number, "loss": value,
            "perplexity": math.exp(value), "trained_tokens": 1000, "round_completed": complete,
            "completed_samples": 20 if complete else 8, "expected_samples": 20, "seconds": 0.5,
            **more,
        }
    )  # fmt: skip
