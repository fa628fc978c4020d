"""Plans of reinforcement runs by descriptor, written by hand, and runs of them in this process."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbtrain.client import Client
from nbtrain.data.datasets import Dataset
from nbtrain.plan.resolved import DatasetRef, ModelRef, ResolvedPlan, Setting
from nbtrain.store import Store, StoredRun, new_id
from nbtrain.training.job import Job
from nbtrain.training.loop import Ending

EXACT = [{"kind": "exact", "weight": 1.0}]
SETTINGS: dict[str, Any] = {
    "algorithm": "grpo",
    "batch_size": 2,
    "group_size": 4,
    "num_steps": 3,
    "learning_rate": 1e-3,
    "kl_beta": 0.04,
    "temperature": 0.7,
    "max_output_tokens_per_turn": 8,
    "max_output_tokens_per_trajectory": 8,
    "max_turns_per_trajectory": 1,
    "max_staleness": 0,
    "min_trajectories_per_group": 1,
    "val_enabled": False,
    "checkpoint_interval_steps": None,
    "max_seq_length": 256,
    "micro_batch_sequences": None,
}


def sums(count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} + 3?"},
                {"role": "assistant", "content": f"<answer>{n + 3}</answer>"},
            ]
        }
        for n in range(10, 10 + count)
    ]


def plan_of(
    dataset: Dataset,
    *,
    terms: Sequence[dict[str, Any]] = EXACT,
    warm_start: ModelRef | None = None,
    **changes: Any,
) -> ResolvedPlan:
    """As a descriptor resolves: every option, two more, a dataset and reward terms."""
    given = SETTINGS | changes
    flat = Client().training.resolve(bench_id="sums", base_model_slug="nbtrain/tiny").plan
    settings = dict(flat.settings) | {name: Setting(name, v, "stated") for name, v in given.items()}
    return replace(
        flat,
        settings=settings,
        admission="as_graded",
        door="descriptor",
        dataset=DatasetRef(dataset.dataset_id, dataset.name, dataset.rows),
        workload=replace(flat.workload, train_tasks=dataset.rows, train_digest=dataset.dataset_id),
        reward={"terms": list(terms)},
        warm_start=warm_start,
        total_steps=given["num_steps"],
    )


def run_here(store: Store, plan: ResolvedPlan) -> tuple[StoredRun, Ending]:
    """A whole run of ``plan`` in this process; its row, and how it ended."""
    run = store.create_run(new_id(), plan={}, resolved=plan)
    before = signal.getsignal(signal.SIGTERM)
    try:
        ending = Job(store, run, 1).run()
    finally:
        signal.signal(signal.SIGTERM, before)
    return store.run(run.key), ending


def model_ref(row: dict[str, Any]) -> ModelRef:
    """How a plan names a registered model."""
    names = ("model_id", "config_hash", "weights_digest", "path")
    return ModelRef(name=None, **{name: row[name] for name in names})


def adapter_of(path: str | Path) -> Path:
    return Path(path) / "adapter_model.safetensors"
