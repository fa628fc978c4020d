"""Going on from a checkpoint: how far a run has to go, and the parent's weights and state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nbtrain.errors import Problem
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.store import Store
from nbtrain.training import checkpoints
from nbtrain.training.certificate import certificate, counted
from nbtrain.training.supervised.preparing import Prepared, naming
from nbtrain.training.supervised.rates import rates_of
from nbtrain.training.supervised.saved import misfits

__all__ = ["restore", "total_steps"]


def total_steps(plan: ResolvedPlan, ready: Prepared) -> int:
    """The last global step, which packing makes known only now; of a smoke check, its cap.

    Where nothing is left to train, that is added to the problems of ``ready``.
    """
    if ready.order is None:
        return plan.total_steps
    if plan.smoke is not None:
        total = plan.total_steps
    else:
        total = ready.order.total(epochs=plan["epochs"], max_steps=plan["max_steps"] or 0)
    if total <= plan.start_step:
        name = naming(plan)
        message = (
            f"nothing is left to train: the run ends at step {total}, and goes on from "
            f"step {plan.start_step}"
        )
        hint = f"Raise {name('epochs')} or {name('max_steps')}"
        ready.problems.append(Problem(name("epochs"), message, hint=hint))
    return total


def restore(
    store: Store,
    plan: ResolvedPlan,
    ready: Prepared,
    *,
    total: int,
    ranks: int,
    environment: Mapping[str, Any],
) -> tuple[str | None, dict[str, Tensor] | None]:
    """Load the parent checkpoint: what was restored, in a sentence, and the optimizer's state.

    ``environment`` is what exactness depends on here and now. Both are ``None`` without a parent.
    What keeps it from being restored is added to the problems of ``ready``.
    """
    parent = plan.parent
    if parent is None or ready.model is None or ready.order is None:
        return None, None
    try:
        loaded = checkpoints.load(
            Path(parent.path),
            checkpoint_id=parent.checkpoint_id,
            base_fingerprint=plan.base_model.fingerprint,
            tokenizer_fingerprint=ready.tokenizer_fingerprint,
            training_state=not plan["load_weights_only"],
        )
        ready.model.load_adapter_state(loaded.adapter)
    except (checkpoints.CheckpointError, ValueError) as error:
        ready.problems.append(Problem("parent_checkpoint_id", str(error)))
        return None, None
    if loaded.state is None or loaded.optimizer is None:
        return "restored weights only: fresh optimizer, schedule and data order", None
    ready.problems += misfits(loaded.state, plan, ready.order, ranks=ranks)
    if ready.problems:
        return None, None
    run = store.find_run(parent.run_id)
    said = certificate(
        loaded.state,
        total_steps=total,
        rate_after=rates_of(plan, total)(plan.start_step + 1),
        environment=environment,
        before=counted(ResolvedPlan.from_json(run.resolved), run.total_steps),
        after=counted(plan, total),
    )
    return said, loaded.optimizer
