"""What a descriptor refers to, looked up and held together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nbtrain.errors import Problem, Refused, Where
from nbtrain.plan.descriptor.document import Document
from nbtrain.plan.descriptor.draft import Found
from nbtrain.plan.descriptor.table import FIELDS
from nbtrain.plan.graders import parse_grader
from nbtrain.plan.references import any_model, find, look
from nbtrain.plan.registry import CheckpointInfo, DatasetInfo, Registry
from nbtrain.plan.resolved import Origin
from nbtrain.plan.statements import Statement

_PARENT = "parent_checkpoint_id"
RESERVED = ("prompt", "prompts", "completion", "completions")
"""Columns that a reward's arguments would hide."""


def look_up(found: Document, registry: Registry) -> Found:
    """Look up everything that is named; what fails or is missing becomes a problem."""
    found.references[_PARENT] = found.parent
    parent = find(found, _PARENT, registry.checkpoint, "checkpoint_id")
    refs = Found(registry.machine(), parent=parent)
    if parent is not None:
        _take_method(found, parent)
    elif _PARENT in found.bad and "config.method" not in found.options:
        found.unsure = True
    resolved = parent.resolved if parent is not None and _fits(found, parent) else {}
    refs.workload = _named(found, "workload", registry.workload, "workload_id")
    if parent is not None and refs.workload is None and resolved and not _said(found, "workload"):
        refs.workload = _implied(found, "workload", registry.workload, parent.workload_id)
    refs.dataset = _named(found, "config.dataset", registry.dataset, "dataset_id")
    if refs.dataset is None and resolved.get("dataset") and not _said(found, "config.dataset"):
        before = resolved["dataset"]["dataset_id"]
        refs.dataset = _implied(found, "config.dataset", registry.dataset, before)
    if found.method == "sft":
        path, config = "config.data.validationDataset", resolved.get("config") or {}
        refs.validation = _named(found, path, registry.dataset, "dataset_id")
        before = config.get("data", {}).get("validationDataset")
        if refs.validation is None and before and not _said(found, path):
            refs.validation = _implied(found, path, registry.dataset, before)
    else:
        refs.warm_start = _named(found, "warmStartModelId", registry.model, "model_id")
    _base_model(found, registry, refs)
    for problem in _missing(found, registry, refs):
        found.refuse(problem)
    return refs


def _called(found: Document, path: str) -> str:
    return found.called(FIELDS[path])


def _said(found: Document, path: str) -> bool:
    return bool(found.references.get(_called(found, path))) or _called(found, path) in found.bad


def _named(found: Document, path: str, registered: Any, identity: str) -> Any:
    name, beside = _called(found, path), found.references.pop(path, [])
    body = found.options.get(path)
    stated = [body] if body is not None and body.value is not None else []
    found.references[name] = stated + beside
    return find(found, name, registered, identity)


def _implied(found: Document, path: str, registered: Any, ref: object) -> Any:
    return look(found, _called(found, path), registered, Statement(ref))


def _base_model(found: Document, registry: Registry, refs: Found) -> None:
    """The stated one, else that of the checkpoint, the workload or the warm start."""
    refs.base_model = _named(found, "baseModel", registry.base_model, "slug")
    if refs.base_model is not None or _said(found, "baseModel"):
        return
    implied = None
    if refs.parent is not None:
        implied = refs.parent.base_model_slug
    elif refs.workload is not None and refs.workload.base_model is not None:
        implied = refs.workload.base_model
    elif refs.warm_start is not None:
        implied = refs.warm_start.base_model_slug
    if implied is not None:
        refs.base_model = _implied(found, "baseModel", registry.base_model, implied)


def _missing(found: Document, registry: Registry, refs: Found) -> Iterator[Problem]:
    bad = found.bad
    if found.unsure and refs.parent is not None:  # it may say what is missing
        return
    if refs.workload is None and not bad & {"workload", _PARENT}:
        hint = (
            "State the workload that the run belongs to, by name or id, or make one: "
            'client.workloads.create("NAME")'
        )
        yield Problem("workload", "workload is missing", hint=hint)
    dataset = _called(found, "config.dataset")
    if refs.dataset is None and not bad & {dataset, _PARENT}:
        hint = "State the dataset to train on, by name or id"
        yield Problem(dataset, f"{dataset} is missing", where=found.where("config"), hint=hint)
    base = _called(found, "baseModel")
    elsewhere = {base, "workload", _PARENT, "warmStartModelId"}
    if refs.base_model is None and refs.workload is not None and not bad & elsewhere:
        message = f"{base} is missing: the workload names no base model"
        yield Problem(base, message, allowed=any_model(registry))


def _take_method(found: Document, parent: CheckpointInfo) -> None:
    """An unstated method is the parent's."""
    if "config.method" not in found.options and "method" not in found.bad:
        found.method = str(parent.resolved["settings"]["algorithm"]["value"])
        found.assumed = False


def _fits(found: Document, parent: CheckpointInfo) -> bool:
    """Whether a descriptor can go on from this checkpoint: one of the same kind of run."""
    before = str(parent.resolved["settings"]["algorithm"]["value"])
    options = parent.resolved.get("door", "options") == "options"
    if found.unsure:
        return not options
    if not options and (before == "sft") == (found.method == "sft"):
        return True
    if _PARENT not in found.bad:
        what = "options" if options else f"method {before}"
        this = f"{'options' if found.flat else 'a descriptor'} of method {found.method}"
        found.refuse(another_kind(parent, what, this, found.method, found.parent[0].where))
    return False


def another_kind(
    parent: CheckpointInfo, what: str, this: str, method: str, where: Where | None
) -> Problem:
    """The refusal of a checkpoint of a run by ``what`` for a run by ``this``, of ``method``."""
    short = parent.checkpoint_id[:12]
    message = f"{_PARENT}: checkpoint {short} is of a run by {what}, this one is by {this}"
    hint = "A descriptor's warmStartModelId starts a reinforcement run from a registered model"
    if method == "sft":
        hint = "Leave the method out: the run then goes on as the checkpoint's did"
    return Problem(_PARENT, message, parent.checkpoint_id, where=where, hint=hint)


def values_before(refs: Found, found: Document) -> dict[str, tuple[Any, Origin]]:
    """A parent's ``config`` and ``execution`` by path, with origins; empty without one."""
    parent = refs.parent
    if parent is None or _PARENT in found.bad:
        return {}
    resolved = parent.resolved
    origins = resolved.get("field_origins") or {}
    values = _flat(resolved.get("config") or {}, "config")
    values |= _flat(resolved.get("execution") or {}, "execution")
    return {path: (value, origins.get(path, "default")) for path, value in values.items()}


def _flat(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}"
        if isinstance(value, Mapping) and path not in FIELDS:
            found |= _flat(value, path)
        else:
            found[path] = value
    return found


def dataset_problems(found: Document, refs: Found) -> Iterator[Problem]:
    """What a dataset holds that the method cannot train on, and datasets that are one."""
    data = (("config.dataset", refs.dataset), ("config.data.validationDataset", refs.validation))
    for path, dataset in data:
        if dataset is not None:
            yield from _facts(found, path, dataset)
    one, two = refs.dataset, refs.validation
    if one is not None and two is not None and one.dataset_id == two.dataset_id:
        path = "config.data.validationDataset"
        name, training = _called(found, path), _called(found, "config.dataset")
        message = f"{name} is the training dataset: {_title(one)} has the same rows as {training}"
        yield Problem(name, message, two.name or two.dataset_id, where=found.where(path))


def _title(dataset: DatasetInfo) -> str:
    return f"dataset {dataset.name or dataset.dataset_id[:12]}"


def _facts(found: Document, path: str, dataset: DatasetInfo) -> Iterator[Problem]:
    name, rl = _called(found, path), found.method != "sft"
    where, title = found.where(path), _title(dataset)
    if dataset.rows < 1:
        yield Problem(name, f"{name}: {title} has no rows", 0, "at least 1", where)
    if found.unsure:
        return
    images = "reinforcement runs cannot train on images" if rl else (
        "images are not built yet: text only"
    )  # fmt: skip
    said = {"images": f"{{}} with images; {images}"}
    if rl:
        said["tools"] = (
            "{} with tools; reinforcement runs over a dataset with tools are not built yet"
        )
    else:
        said["unanswered"] = (
            "{} whose last message is not the assistant's, so that nothing is learned from"
        )
    for fact, told in said.items():
        count, line = dataset.facts.get(fact, (0, 0))
        if count:
            rows = f"{count:,} row" + ("s" if count > 1 else "") + f" (the first on line {line:,})"
            message = f"{name}: {title} has {told.format(rows)}"
            yield Problem(name, message, dataset.name or dataset.dataset_id, where=where)
    for column in RESERVED if rl else ():
        if column in dataset.columns:
            message = (
                f"{name}: {title} has a column {column}, which rewards get under that name from "
                "the run"
            )
            hint = "Give the column another name"
            yield Problem(name, message, column, where=where, hint=hint)


def grader_problem(found: Document) -> Problem | None:
    """The refusal of a grader that has none of the forms."""
    statement = found.options.get("grader")
    if statement is None or statement.value is None or "grader" in found.bad:
        return None
    try:
        parse_grader(statement.value)
    except Refused as error:
        return replace(error.problems[0], where=statement.where)
    return None
