"""A descriptor that goes on from a checkpoint: what must stay as it was."""

from __future__ import annotations

from collections.abc import Iterator

from nbtrain.errors import Problem
from nbtrain.plan.descriptor.document import OF_DESCRIPTOR, Document
from nbtrain.plan.descriptor.draft import Draft
from nbtrain.plan.fields import check, plain, show
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.registry import CheckpointInfo
from nbtrain.plan.rules import without_training_state

_PARENT = "parent_checkpoint_id"
# an adapter is loaded as it was saved; these decide its shape and scale
_ADAPTER = ("lora.rank", "lora.alpha", "lora.targetModules")
# data position, order and randomness are restored only into the same data, order and devices
_STATE = (
    "model.precision", "execution.gpus", "training.seed", "training.microBatchPerGpu",
    "training.gradientAccumulation", "data.shuffle", "data.packing", "data.truncation",
    "maxSeqLength", "rlHyperparams.groupSize", "rlHyperparams.promptsPerStep",
)  # fmt: skip


def start_step(draft: Draft) -> int:
    """The restored global step; 0 for a fresh run or weights alone."""
    parent = draft.refs.parent
    return 0 if parent is None or draft.load_weights_only else parent.step_index


def further(name: str, steps: int, before: int) -> str:
    """What ``name``, which counts from a run's beginning, is for ``steps`` more."""
    return f"{name}: {before + steps} is {show(steps)} more than this checkpoint's {show(before)}"


def no_further_steps(found: Document, parent: CheckpointInfo | None) -> Problem | None:
    """The refusal of ``num_steps`` where there is none, which says what counts as it would."""
    if found.further is None:
        return None
    name = "max_steps" if found.flat else "rlHyperparams.maxSteps"
    value, where, hint = found.further.value, found.further.where, f"Did you mean {name}?"
    only = found.load_weights_only
    if parent is not None and not (only is not None and only.value is True):
        steps = value if type(value) is int and 0 < value < 1_000_000 else 10
        told = further(name, steps, parent.step_index)
        hint += f" It counts from the run's beginning: {told}"
    found.bad.add(name)  # so that nothing is told of an end that is not meant
    message = f"num_steps is an option, and {OF_DESCRIPTOR}"
    if found.flat:
        message = "there is no option num_steps with algorithm sft"
    return Problem("num_steps", message, plain(value), where=where, hint=hint)


def refusals(draft: Draft, total: int) -> Iterator[Problem]:
    """Problems with the checkpoint. ``total`` is the global step at which the run ends."""
    yield from _switch(draft)
    parent, model = draft.refs.parent, draft.refs.base_model
    if parent is None or _PARENT in draft.found.bad:
        return
    short, where = parent.checkpoint_id[:12], draft.found.parent[0].where

    def of_parent(message: str, hint: str | None = None) -> Problem:
        text = f"{_PARENT}: checkpoint {short} {message}"
        return Problem(_PARENT, text, parent.checkpoint_id, where=where, hint=hint)

    only = "load_weights_only: true starts from its weights with fresh training state"
    warm, earlier = draft.refs.warm_start, draft.warm_before
    if warm is not None and (earlier is None or warm.model_id != earlier["model_id"]):
        yield of_parent("and warmStartModelId are two starts", "State one of them")
    if not parent.has_weights:
        yield of_parent("holds no weights")
    if model is not None and model.fingerprint != parent.base_fingerprint:
        yield of_parent(
            f"belongs to {parent.base_model_slug} ({parent.base_fingerprint[:12]}), the run's base "
            f"model is {model.slug} ({model.fingerprint[:12]})"
        )
    yield from _kept(draft, _ADAPTER, f"the adapter of checkpoint {short}", "Leave it out")
    if draft.load_weights_only:
        return
    if not parent.has_training_state:
        yield of_parent("holds no training state to resume from", without_training_state(parent))
        return
    yield from _kept(draft, _STATE, f"the training state of checkpoint {short}", only)
    dataset = draft.refs.dataset
    before = parent.resolved["dataset"]
    if dataset is not None and dataset.dataset_id != before["dataset_id"]:
        message = (
            f"{draft.called('dataset')} {dataset.dataset_id[:12]} is another one than that of "
            f"checkpoint {short}, {before['name'] or ''} {before['dataset_id'][:12]}: a resume "
            "goes on in the same rows"
        )
        yield draft.problem("dataset", message, before["dataset_id"], only)
    elif dataset is not None:
        yield from _same_slice(draft, parent, dataset.rows, only)
    longer: tuple[str, ...] = ("training.epochs", "training.maxSteps") if draft.supervised else (
        "rlHyperparams.epochs", "rlHyperparams.maxSteps",
    )  # fmt: skip
    if draft.smoke:
        longer = ("smoke.maxSteps",)
    if dataset is not None and total <= parent.step_index and draft.fine(*longer):
        name = longer[-1] if draft[longer[-1]] else longer[0]
        message = (
            f"{draft.said(name)}: the run ends at step {show(total)}, and checkpoint {short} is at "
            f"step {show(parent.step_index)}: no update remains"
        )
        count = "count" if len(longer) > 1 else "counts"
        hint = (
            f"{' and '.join(draft.called(each) for each in longer)} {count} from the beginning of "
            f"the run that was saved: {further(draft.called(longer[-1]), 10, parent.step_index)}"
        )
        yield draft.problem(name, message, hint=hint)


def _same_slice(draft: Draft, parent: CheckpointInfo, rows: int, hint: str) -> Iterator[Problem]:
    """A smoke check goes on in the slice that was trained on, and other runs in every row."""
    size, before = "smoke.sliceSize", parent.resolved.get("smoke")
    trained = rows if before is None else min(rows, before["slice_size"])
    if not draft.supervised or draft.rows == trained or not draft.fine(size):
        return

    def told(count: int) -> str:
        return f"all {show(rows)} rows" if count == rows else f"the first {show(count)} rows"

    message = (
        f"smoke: this run would train on {told(draft.rows)} of the dataset, checkpoint "
        f"{parent.checkpoint_id[:12]} was trained on {told(trained)}: a resume goes on in the "
        "same rows"
    )
    where = draft.where(size) or draft.found.where("smoke")
    yield Problem("smoke", message, draft.smoke or None, where=where, hint=hint)


def _switch(draft: Draft) -> Iterator[Problem]:
    statement, name = draft.found.load_weights_only, "load_weights_only"
    if statement is None or name in draft.found.bad:
        return
    value, problem = check(OPTIONS[name], statement.value, where=statement.where)
    if problem is not None:
        yield problem
    elif value and draft.refs.parent is None and _PARENT not in draft.found.bad:
        message = f"{name} is true, but there is no checkpoint to load from"
        hint = "State parent_checkpoint_id, or leave load_weights_only out"
        yield Problem(name, message, True, where=statement.where, hint=hint)


def _kept(draft: Draft, names: tuple[str, ...], what: str, hint: str) -> Iterator[Problem]:
    """Fields that must be as they were saved; those computed from others follow these."""
    saved = {
        name: draft.before[draft.fields[name].path][0]
        for name in names
        if name in draft.fields and draft.fields[name].path in draft.before
    }
    other = [name for name in saved if draft.fine(name) and draft[name] != saved[name]]
    stated = [name for name in other if draft.origins[name] != "computed"]
    follow = stated or not draft.fine(*names)
    for name in stated if follow else other:
        message = f"{draft.said(name)} does not fit {what}, saved with {show(saved[name])}"
        yield draft.problem(name, message, show(saved[name]), hint)
