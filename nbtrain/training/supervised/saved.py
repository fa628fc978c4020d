"""What a checkpoint of a supervised run holds besides tensors, and going on from one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbtrain.errors import Problem
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.plan.schedule import schedule_of
from nbtrain.training.certificate import differences, exactness, restored
from nbtrain.training.supervised.order import Order, dropout_seed

__all__ = ["certificate", "data_order", "misfits", "plain_state"]

_IRRELEVANT = frozenset(
    {
        *("epochs", "max_steps", "save_every", "keep_adapters", "load_weights_only"),
        *("validation_frequency_steps", "gpus"),
    }
)
"""Settings that do not change what is trained at a step, or that are compared elsewhere."""


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
    changed = differences(state["order"], data_order(plan, order))
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


def certificate(
    state: Mapping[str, Any],
    *,
    total_steps: int,
    rate_after: float,
    environment: Mapping[str, Any],
    options: Mapping[str, Any],
    parent_options: Mapping[str, Any],
    parent_total_steps: int,
) -> str:
    """The sentence a resume leaves in the run's events.

    "Exact" means bit for bit what the straight run to ``total_steps`` gives, so the rates up to
    here have to be those of its schedule too.
    """
    text = restored(state, total_steps=total_steps, rate_after=rate_after)
    changed = differences(state["environment"], environment)
    changed += differences(
        {k: v for k, v in parent_options.items() if k not in _IRRELEVANT},
        {k: v for k, v in options.items() if k not in _IRRELEVANT},
    )
    changed += differences(
        _length(parent_options, parent_total_steps), _length(options, total_steps)
    )
    return exactness(text, changed)


def _length(options: Mapping[str, Any], total_steps: int) -> dict[str, Any]:
    """What the rates take from the length of the run; a constant one only its warm-up."""
    schedule = schedule_of(options, total_steps)
    found: dict[str, Any] = {"warm-up steps": schedule["warmup"]}
    if options["scheduler_kind"] != "constant":
        found["last step of the schedule"] = total_steps
    return found
