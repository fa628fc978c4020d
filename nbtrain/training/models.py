"""A completed run leaves its final adapter as a model, that others can start from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.store import Store, StoredRun
from nbtrain.training.checkpoints import ADAPTER

__all__ = ["register_final", "register_newest"]

_LORA = ("lora_rank", "lora_alpha", "lora_target_modules")


def register_newest(store: Store, run: StoredRun, plan: ResolvedPlan) -> str | None:
    """Register the newest checkpoint of ``run`` that holds weights; its model id, if it has one.

    Nothing for a smoke check. To be called when an update was applied.
    """
    found = [one for one in store.checkpoints(run.key) if one.weights]
    if plan.smoke is not None or not found:
        return None
    newest = max(found, key=lambda one: one.step)
    return register_final(
        store, run, newest.checkpoint_id, Path(newest.path), plan, step=newest.step
    )


def register_final(
    store: Store, run: StoredRun, checkpoint_id: str, path: Path, plan: ResolvedPlan, *, step: int
) -> str:
    """Register the adapter of a checkpoint as a model and return its id; twice is the same.

    ``path`` is the checkpoint's folder, which the store keeps from now on; ``step`` the global
    step it was saved at. Raises ``OSError`` when the weights cannot be read.
    """
    model_id = hashlib.sha256(f"model:{checkpoint_id}".encode()).hexdigest()
    with (path / ADAPTER).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    spec: dict[str, Any] = {name: plan[name] for name in _LORA}
    store.put_model(
        model_id,
        run=run.key,
        checkpoint_id=checkpoint_id,
        base_model_slug=plan.base_model.slug,
        base_fingerprint=plan.base_model.fingerprint,
        config_hash=plan.config_hash,
        workload_id=plan.workload.workload_id,
        weights_digest=digest,
        path=str(path),
        spec=spec | {"method": plan.method, "step": step},
    )
    return model_id
