"""The config hash: what a recipe is, in canonical form.

Hashed is what changes the trained weights. Values are hashed as resolved, so a stated default
and an omitted one, or 2e-5 and 0.00002, are the same recipe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import rfc8785

from nbtrain.plan.options import OPTIONS
from nbtrain.plan.resolved import ResolvedPlan

VERSION = 2
"""Of the hashed form; a change of the form changes every hash, so it is part of it."""


def canonical(data: Any) -> bytes:
    """RFC 8785 JSON: equal values give equal bytes."""
    text: bytes = rfc8785.dumps(data)
    return text


def hashed_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are part of the hash, of resolved values by name."""
    stale = values["max_staleness"] > 0
    return {
        name: values[name]
        for name, option in OPTIONS.items()
        if option.hashed == "always" or (option.hashed == "with staleness" and stale)
    }


def config_hash(
    values: Mapping[str, Any],
    *,
    base_fingerprint: str,
    workload_id: str,
    train_digest: str,
    parent_checkpoint_id: str | None,
    admission: str = "filtered",
) -> str:
    """SHA-256 (64 hex digits) of the recipe."""
    recipe = {
        "version": VERSION,
        "options": hashed_options(values),
        "base_model": base_fingerprint,
        "workload": {"id": workload_id, "train": train_digest},
        "parent": parent_checkpoint_id,
        "admission": admission,
    }
    return hashlib.sha256(canonical(recipe)).hexdigest()


def descriptor_hash(
    config: Mapping[str, Any],
    *,
    base_fingerprint: str,
    warm_start: str | None,
    parent_checkpoint_id: str | None,
    weights_only: bool,
) -> str:
    """SHA-256 (64 hex digits) of a descriptor's recipe.

    ``config`` is the resolved one with content hashes for names, ``warm_start`` the digest of the
    weights that a reinforcement run starts from. Nothing else of the document is hashed.
    """
    recipe = {
        "version": VERSION,
        "door": "descriptor",
        "config": config,
        "base_model": base_fingerprint,
        "warm_start": warm_start,
        "parent": parent_checkpoint_id,
        "weights_only": weights_only,
    }
    return hashlib.sha256(canonical(recipe)).hexdigest()


def same_plan(one: ResolvedPlan, two: ResolvedPlan) -> bool:
    """Whether two plans would train and validate alike: every value equal, hashed or not.

    Names, origins, notes and hints do not count.
    """

    def essence(plan: ResolvedPlan) -> tuple[object, ...]:
        return (
            plan.config_hash, plan.options, plan.workload.workload_id, plan.workload.held_out_tasks,
            plan.base_model.fingerprint, plan.start_step, plan.total_steps, plan.execution,
            plan.grader, plan.smoke,
        )  # fmt: skip

    return essence(one) == essence(two)
