"""Supervised runs in a home of their own: a plan written out, a job run in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbtrain.catalog import Catalog
from nbtrain.data.datasets import DatasetRegistry
from nbtrain.jobs.environment import rank_environment
from nbtrain.plan.resolved import (
    BaseModelRef,
    DatasetRef,
    ParentRef,
    ResolvedPlan,
    Setting,
    WorkloadRef,
)
from nbtrain.processes import mark_of
from nbtrain.store import Store, StoredRun, new_id
from nbtrain.training.loop import Ending
from nbtrain.training.supervised.job import SupervisedJob

SETTINGS: dict[str, Any] = {
    "algorithm": "sft",
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_modules": "default",
    "optimizer_kind": "adamw",
    "learning_rate": 2e-3,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "scheduler_kind": "linear",
    "warmup_ratio": 0.0,
    "min_learning_rate_ratio": 0.0,
    "epochs": 3,
    "max_steps": 0,
    "micro_batch_per_gpu": 2,
    "gradient_accumulation": 1,
    "validation_frequency_steps": 100,
    "seed": 42,
    "max_seq_length": 200,
    "precision": "bf16",
    "gradient_checkpointing": False,
    "attention_implementation": "sdpa",
    "truncation": "error",
    "packing": False,
    "shuffle": True,
    "assistant_turns": "last",
    "train_on_tool_calls": True,
    "train_on_tool_results": False,
    "explicit_loss_mask_column": None,
    "gpus": 1,
    "micro_batch_sequences": None,
    "save_every": None,
    "keep_adapters": 5,
    "load_weights_only": False,
}


def chats(count: int = 10) -> list[dict[str, Any]]:
    """Short sums as conversations."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} + {n + 1}?"},
                {"role": "assistant", "content": f"It is {2 * n + 1}."},
            ]
        }
        for n in range(1, count + 1)
    ]


class World:
    """One store with datasets and supervised runs."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.datasets = DatasetRegistry(store)

    def plan(
        self,
        rows: object,
        *,
        validation: object = None,
        parent: StoredRun | None = None,
        step: int | None = None,
        model: object = "nbtrain/tiny",
        door: Any = "descriptor",
        **changes: Any,
    ) -> ResolvedPlan:
        """A plan over ``rows`` (a list or a file); it goes on from ``parent`` at ``step``."""
        unknown = changes.keys() - SETTINGS.keys()
        assert not unknown, unknown
        settings = SETTINGS | changes
        dataset = self.datasets.register("rows", rows)
        held_out = None if validation is None else self.datasets.register("held", validation)
        base = Catalog(self.store).base_model(model)
        per_update = settings["micro_batch_per_gpu"] * settings["gradient_accumulation"]
        total = settings["epochs"] * -(-dataset.rows // per_update)
        if settings["max_steps"]:
            total = min(total, settings["max_steps"])
        reference = None if parent is None else self.checkpoint(parent, step)
        fresh = reference is None or settings["load_weights_only"]
        return ResolvedPlan(
            settings={name: Setting(name, value, "stated") for name, value in settings.items()},
            workload=WorkloadRef(
                "b" * 64, "bare", dataset.rows, 0, "every row of dataset rows", dataset.dataset_id
            ),
            base_model=BaseModelRef(
                base.slug, base.kind, base.location, base.fingerprint, base.max_context
            ),
            parent=reference,
            display_name=None,
            start_step=0 if fresh or reference is None else reference.step,
            total_steps=total,
            config_hash="c" * 64,
            door=door,
            dataset=DatasetRef(dataset.dataset_id, "rows", dataset.rows),
            validation_dataset=None
            if held_out is None
            else DatasetRef(held_out.dataset_id, "held", held_out.rows),
        )

    def checkpoint(self, run: StoredRun, step: int | None = None) -> ParentRef:
        """A run's checkpoint of ``step``, by default its last."""
        saved = self.store.checkpoints(run.key)
        one = saved[-1] if step is None else next(c for c in saved if c.step == step)
        return ParentRef(one.checkpoint_id, run.run_id, one.step, one.path)

    def create(self, plan: ResolvedPlan) -> StoredRun:
        """A run of ``plan`` whose ranks may start."""
        run = self.store.create_run(new_id(), plan={}, resolved=plan)
        self.store.start_attempt(run.key, 1)
        self.store.move_phase(run.key, "QUEUED", attempt=1)
        return run

    def train(self, plan: ResolvedPlan) -> tuple[StoredRun, Ending]:
        """Run the job of ``plan`` here, to its end."""
        run = self.create(plan)
        ending = SupervisedJob(self.store, run, 1).run()
        return self.store.run(run.key), ending

    def start(self, run: StoredRun, *, ranks: int = 1) -> list[subprocess.Popen[bytes]]:
        """The processes of a run, as its host would start them; their output goes to a file."""
        started = []
        for rank in range(ranks):
            env = rank_environment(
                os.environ | {"NBTRAIN_HOME": str(self.store.home)},
                mark=mark_of(run.run_id, 1),
                threads=1,
                gpu=False,
                rank=rank,
                ranks=ranks,
            )
            command = [sys.executable, "-m", "nbtrain.training.main", "--run", run.run_id]
            with (self.store.home / f"rank{rank}.log").open("ab") as log:
                started.append(
                    subprocess.Popen([*command, "--attempt", "1"], env=env, stdout=log, stderr=log)
                )
        return started

    def steps(self, run: StoredRun) -> list[Any]:
        """The run's steps, oldest first."""
        return list(self.store.steps(run.key))


def write_jsonl(
    path: Path, rows: Sequence[Mapping[str, Any]], *, blank: Sequence[int] = ()
) -> Path:
    """``rows`` as JSONL, with a blank line before those of the given positions."""
    lines = []
    for position, row in enumerate(rows):
        lines += [""] * (position in blank) + [json.dumps(row)]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path
