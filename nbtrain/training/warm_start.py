"""Starting from a registered adapter: loaded strictly, or refused with all that is wrong."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from nbtrain.errors import Problem, StartChecksFailed
from nbtrain.plan.resolved import ModelRef, ResolvedPlan
from nbtrain.store import Store
from nbtrain.training.adapted import AdaptedModel
from nbtrain.training.checkpoints import ADAPTER, ADAPTER_CONFIG

__all__ = ["load_warm_start", "starts_warm"]

_FIELD = "warmStartModelId"
_CONFIG = {"r": "lora_rank", "lora_alpha": "lora_alpha"}


def starts_warm(plan: ResolvedPlan) -> ModelRef | None:
    """The adapter that a run starts from; ``None`` where it goes on from a training state.

    That state holds both the adapter and the reference of the KL.
    """
    if plan.parent is not None and not plan["load_weights_only"]:
        return None
    return plan.warm_start


def load_warm_start(store: Store, plan: ResolvedPlan, model: ModelRef, into: AdaptedModel) -> None:
    """Load the adapter ``model`` into the policy ``into``.

    Raises
    ------
    StartChecksFailed
        When its files are gone or not those that were registered, when it belongs to another
        base model, or when rank, scale or target modules are not the plan's.
    """
    folder = Path(model.path)
    try:
        found = hashlib.sha256((folder / ADAPTER).read_bytes()).hexdigest()
        config = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StartChecksFailed([_problem(model, f"cannot be read: {error}")]) from error
    problems = []
    if found != model.weights_digest:
        problems.append(
            _problem(model, "has other weights than were registered", found, model.weights_digest)
        )
    row = store.model(model.model_id)
    base = plan.base_model
    if row is not None and row["base_fingerprint"] != base.fingerprint:
        text = f"belongs to {row['base_model_slug']}, not to {base.slug} as it is now"
        problems.append(_problem(model, text, row["base_fingerprint"], base.fingerprint))
    for name, option in _CONFIG.items():
        if config.get(name) != plan[option]:
            text = f"was trained with another {option}"
            problems.append(_problem(model, text, config.get(name), plan[option]))
    if not problems:
        try:
            into.load_adapter_state(load_file(folder / ADAPTER))
        except ValueError as error:
            problems.append(_problem(model, str(error)))
    if problems:
        raise StartChecksFailed(problems)


def _problem(model: ModelRef, said: str, found: Any = None, allowed: Any = None) -> Problem:
    name = f"{model.name} ({model.model_id[:12]})" if model.name else model.model_id[:12]
    shown, wanted = (None if value is None else str(value)[:12] for value in (found, allowed))
    return Problem(_FIELD, f"the model {name} {said}", shown, wanted)
