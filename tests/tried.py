"""Checkpoints with real adapters on the embedded model, saved as a job saves them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from stored import OPTIONS, host, row_of, store_of, writer

from nbtrain.catalog import tokenizer_digest
from nbtrain.client import Client, Run
from nbtrain.client.records import Checkpoint
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.store import new_id
from nbtrain.training import checkpoints
from nbtrain.training.adapted import AdaptedModel, attach_adapter, load_tokenizer
from nbtrain.training.base_weights import load_base
from nbtrain.training.prepare_model import weights_folder

CPU = torch.device("cpu")


def base_folder(run: Run) -> Path:
    return weights_folder(run.plan, run._store.home)


def adapted(plan: ResolvedPlan, folder: Path, seed: int, scale: float) -> AdaptedModel:
    """The plan's base under an adapter that does something."""
    dtype = torch.float32 if plan["precision"] == "fp32" else torch.bfloat16
    model = attach_adapter(
        load_base(folder, dtype=dtype, device=CPU),
        lora_rank=plan["lora_rank"],
        lora_alpha=plan["lora_alpha"],
        target_modules=plan["lora_target_modules"],
        seed=seed,
    )
    model.eval()
    made = AdaptedModel(model, CPU)
    random = torch.Generator().manual_seed(seed)
    for name, parameter in made.trainable.items():
        parameter.data = parameter.data.to(torch.float32)
        if "lora_B" in name:
            parameter.data.normal_(0, scale, generator=random)
    return made


def save(run: Run, step: int, *, seed: int = 0, scale: float = 0.05, **more: Any) -> Checkpoint:
    """A committed checkpoint of ``run`` with files, and its record."""
    plan = ResolvedPlan.from_json(row_of(run).resolved)
    folder = base_folder(run)
    made = adapted(plan, folder, seed, scale)
    identity = checkpoints.Identity(
        run.id,
        1,
        step,
        plan.base_model.slug,
        plan.base_model.fingerprint,
        _digest(folder),
        plan.workload.workload_id,
        plan.config_hash,
    )
    saved = checkpoints.save(
        run.folder / "checkpoints",
        identity,
        adapter=made.adapter_state(),
        adapter_config=made.adapter_config(),
        optimizer={},
        state={"environment": {"device": "cpu"}},
    )
    writer(run).commit_checkpoint(
        {
            "checkpoint_id": saved.checkpoint_id,
            "step": step,
            "weights": True,
            "training_state": True,
            "path": str(saved.path),
            "size_bytes": saved.size_bytes,
            "base_model_slug": plan.base_model.slug,
            "base_fingerprint": plan.base_model.fingerprint,
            "workload_id": plan.workload.workload_id,
            "reason": "interval",
            **more,
        }
    )
    return next(c for c in run.checkpoint_list() if c.checkpoint_id == saved.checkpoint_id)


def run_on(client: Client, workload_id: str, **options: Any) -> Run:
    """A run on a workload, as :func:`stored.create` makes one."""
    view = client.training.resolve(
        options={**OPTIONS, **options}, bench_id=workload_id, base_model_slug="nbtrain/tiny"
    )
    store = store_of(client)
    row = store.create_run(new_id(), plan={}, resolved=view.plan)
    host(store, row.key, 1)
    return Run(store, row)


@cache
def _digest(folder: Path) -> str:
    return tokenizer_digest(folder)


def tokenizer_of(run: Run) -> Any:
    return load_tokenizer(base_folder(run))
