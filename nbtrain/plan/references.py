"""What a plan refers to: checkpoint, base model and workload, looked up and held together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nbtrain.errors import NotFound, Problem, Refused
from nbtrain.plan.fields import describe, halved, plain
from nbtrain.plan.registry import (
    BaseModelInfo,
    CheckpointInfo,
    Registry,
    SplitInfo,
    WorkloadInfo,
)
from nbtrain.plan.statements import Statement, Statements, same, stated_twice

_LONGEST = 500  # characters of a name, an id or a path
_NO_REFERENCES = (bool, int, float, complex, bytes, list, tuple, dict, set, type)
_NAMES = ("base_model_slug", "workload", "dataset", "model", "bundle")  # as catalogs call them


@dataclass(slots=True)
class References:
    """What was found; ``None`` where nothing is stated or the lookup failed."""

    workload: WorkloadInfo | None = None
    base_model: BaseModelInfo | None = None
    parent: CheckpointInfo | None = None


def look_up(found: Statements, registry: Registry) -> References:
    """Look up everything that a plan refers to; what fails becomes a problem.

    The base model is the stated one, else the checkpoint's, else the workload's; the workload is
    the stated one, else the checkpoint's.
    """
    parent: CheckpointInfo | None = find(
        found, "parent_checkpoint_id", registry.checkpoint, "checkpoint_id"
    )
    workload: WorkloadInfo | None = find(found, "workload", registry.workload, "workload_id")
    if workload is None and parent is not None and "workload" not in found.references:
        workload = look(found, "workload", registry.workload, Statement(parent.workload_id))
    base_model: BaseModelInfo | None = find(found, "base_model_slug", registry.base_model, "slug")
    if "base_model_slug" not in found.references | dict.fromkeys(found.bad):
        implied = None
        if parent is not None:
            implied = parent.base_model_slug
        elif workload is not None:
            implied = workload.base_model
        if implied is not None:
            base_model = look(found, "base_model_slug", registry.base_model, Statement(implied))
    references = References(workload, base_model, parent)
    _require(found, references, registry)
    _match_parent(found, references)
    return references


def find(
    found: Statements, key: str, registered: Callable[[object], Any], identity: str
) -> Any | None:
    """What the statements of ``key`` name, or ``None``; two must mean the same ``identity``."""
    statements = found.references.get(key, [])
    if len(statements) == 2 and same(*statements):
        statements = statements[:1]
    results = [look(found, key, registered, statement) for statement in statements]
    if any(result is None for result in results):
        return None
    if len(results) == 2 and getattr(results[0], identity) != getattr(results[1], identity):
        found.refuse(stated_twice(key, *statements))
        return None
    return results[0] if results else None


def look(
    found: Statements, key: str, registered: Callable[[object], Any], statement: Statement
) -> Any | None:
    """What one statement names; what fails becomes a problem of ``key``."""
    value, where = statement.value, statement.where
    # registries take names, ids and objects; what plainly is neither never reaches them
    unusable = isinstance(value, str) and not (0 < len(value) <= _LONGEST and not halved(value))
    if unusable or isinstance(value, _NO_REFERENCES):
        hint = "Put it in quotes" if isinstance(value, int | float) else None
        if isinstance(value, list) and key.lower().endswith("dataset"):
            hint = 'Register it first: client.datasets.register("NAME", data)'
        message = f"{key} needs a name or an id, found {describe(value)}"
        found.refuse(Problem(key, message, plain(value), where=where, hint=hint))
        return None
    try:
        repr(value)  # a registry tells what it was asked for
    except Exception:
        message = f"{key} needs a name or an id, found {describe(value)}"
        found.refuse(Problem(key, message, describe(value), where=where))
        return None
    try:
        return registered(value)
    except NotFound as error:
        found.refuse(Problem(key, f"{key}: {error}", plain(value), where=where))
    except Refused as error:
        found.bad.add(key)
        found.problems.extend(
            replace(_renamed(p, key), where=p.where or where) for p in error.problems
        )
    return None


def _renamed(problem: Problem, key: str) -> Problem:
    """A catalog's refusal under the name that this document has for what it refuses."""
    name = problem.field
    if name == key or name not in _NAMES:
        return problem
    message = problem.message
    if message.startswith(name):
        message = key + message[len(name) :]
    return replace(problem, field=key, message=message)


def _require(found: Statements, references: References, registry: Registry) -> None:
    bad = found.bad
    if references.workload is None and not bad & {"workload", "parent_checkpoint_id"}:
        message = "workload is missing: what to train on"
        hint = "State it, such as workload: sums, or register one with nbtrain.workload(...)"
        found.refuse(Problem("workload", message, hint=hint))
    elsewhere = {"base_model_slug", "parent_checkpoint_id", "workload"}
    if references.base_model is None and not found.bad & elsewhere:
        message = "base_model_slug is missing: the workload names no base model"
        found.refuse(Problem("base_model_slug", message, allowed=any_model(registry)))


def any_model(registry: Registry) -> str:
    """What may be stated as the base model."""
    offered = sorted(model.slug for model in registry.base_models())
    return ", ".join([*offered, "or any repository or local folder"])


def _match_parent(found: Statements, references: References) -> None:
    parent, model = references.parent, references.base_model
    if parent is None:
        return
    short = parent.checkpoint_id[:12]
    where = found.references["parent_checkpoint_id"][0].where
    if not parent.has_weights:
        message = f"parent_checkpoint_id: checkpoint {short} holds no weights"
        found.refuse(Problem("parent_checkpoint_id", message, parent.checkpoint_id, where=where))
    if model is None or model.fingerprint == parent.base_fingerprint:
        return
    if "base_model_slug" in found.references:
        where = found.references["base_model_slug"][0].where
    if model.slug != parent.base_model_slug:
        message = (
            f"base_model_slug {model.slug} does not match checkpoint {short}, "
            f"which belongs to {parent.base_model_slug}"
        )
        hint = "Leave it out: the checkpoint names its base model"
    else:
        message = (
            f"base_model_slug {model.slug} has changed since checkpoint {short} was saved: "
            f"fingerprint {model.fingerprint[:12]}, the checkpoint's {parent.base_fingerprint[:12]}"
        )
        hint = "The checkpoint fits only the weights that it was trained on"
    problem = Problem("base_model_slug", message, model.slug, parent.base_model_slug, where, hint)
    found.refuse(problem)


def divide(found: Statements, references: References, *, validation: bool) -> SplitInfo | None:
    """How the workload's tasks divide; a side that has no task and needs one is a problem."""
    workload = references.workload
    if workload is None:
        return None
    try:
        split = workload.split_info(validation=validation)
    except Refused as error:
        found.bad.add("workload")
        found.problems.extend(error.problems)
        return None
    name = workload.name or workload.workload_id[:12]
    where = found.references["workload"][0].where if "workload" in found.references else None
    if split.train < 1:
        message = f"workload {name} has no task to train on"
        found.refuse(Problem("workload", message, name, "at least 1", where, split.description))
    if validation and split.held_out < 1:
        message = f"val_enabled: workload {name} has no held-out task to validate on"
        hint = "Give it held-out tasks, or set val_interval_steps: 0"
        found.refuse(Problem("val_enabled", message, split.held_out, where=where, hint=hint))
    return split
