"""What a checkpoint of a supervised run holds besides tensors, and going on from one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbtrain.errors import Problem
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.training.certificate import differences
from nbtrain.training.supervised.order import Order, dropout_seed

__all__ = ["data_order", "misfits", "plain_state"]


def data_order(plan: ResolvedPlan, order: Order) -> dict[str, Any]:
    """Everything that decides which rows a global step trains on."""
    assert plan.dataset is not None
    found = {
        "dataset": plan.dataset.dataset_id,
        "sequences": len(order.sequences),
        "sequences_per_update": order.per_update,
        "seed": plan["seed"],
        "shuffle": plan["shuffle"],
        "packing": plan["packing"],
        "smoke_rows": None if plan.smoke is None else plan.smoke.slice_size,
    }
    if plan["packing"]:
        found["max_seq_length"] = plan["max_seq_length"]
    return found


def _told(saved: Mapping[str, Any], plan: ResolvedPlan) -> dict[str, Any]:
    """A data order in words, a slice as the rows of the dataset that it has."""
    assert plan.dataset is not None
    told = dict(saved)
    rows, most = told.pop("smoke_rows", None), plan.dataset.rows
    told["rows"] = most if rows is None else min(rows, most)
    return {name.replace("_", " "): value for name, value in told.items()}


def plain_state(
    plan: ResolvedPlan,
    order: Order,
    *,
    step: int,
    rate: float,
    environment: Mapping[str, Any],
    ranks: int,
) -> dict[str, Any]:
    """The state after global step ``step`` as plain JSON.

    Row order and dropout are drawn anew for each update from what stands here, so there is no
    generator whose inner state would have to be kept: ``rng`` is what the next update of every
    rank draws from.
    """
    place = order.place(step + 1)
    return {
        "method": "sft",
        "step": step,
        "policy_version": step,
        "updates_applied": step,
        "order": data_order(plan, order),
        "position": {"epoch": place.epoch, "update": place.update},
        "rng": [{"dropout": dropout_seed(plan["seed"], step + 1, rank)} for rank in range(ranks)],
        "schedule": {"learning_rate": rate},
        "environment": dict(environment),
    }


def misfits(
    state: Mapping[str, Any], plan: ResolvedPlan, order: Order, *, ranks: int
) -> list[Problem]:
    """Why the run cannot go on from ``state``: each with what was saved and what is here."""
    if state.get("method") != "sft":
        message = "the checkpoint's training state is that of a reinforcement run"
        hint = "load_weights_only: true starts from its weights"
        return [Problem("parent_checkpoint_id", message, hint=hint)]
    problems = []
    before = state["environment"].get("ranks", 1)
    if before != ranks:
        message = f"the checkpoint was saved with {before} devices, this run has {ranks}"
        problems.append(Problem("gpus", message, ranks, str(before)))
    changed = differences(_told(state["order"], plan), _told(data_order(plan, order), plan))
    if changed:
        message = f"the checkpoint was trained on rows in another order: {', '.join(changed)}"
        hint = "State what the checkpoint's run did, or load_weights_only: true"
        problems.append(Problem("parent_checkpoint_id", message, hint=hint))
    elif not problems:
        mine = [{"dropout": dropout_seed(plan["seed"], state["step"] + 1, r)} for r in range(ranks)]
        if mine != state["rng"]:
            message = "this version draws dropout in another way than the checkpoint's did"
            problems.append(Problem("parent_checkpoint_id", message))
    return problems
