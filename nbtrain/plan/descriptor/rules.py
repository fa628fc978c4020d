"""Rules between the fields of a descriptor, and with its method, models and data."""

from __future__ import annotations

from collections.abc import Iterator

from nbtrain.errors import Problem
from nbtrain.plan.descriptor.document import Document
from nbtrain.plan.descriptor.draft import Draft
from nbtrain.plan.descriptor.field import short
from nbtrain.plan.descriptor.sizing import SEQUENCES, qualified_tokens
from nbtrain.plan.descriptor.table import FIELDS, Field
from nbtrain.plan.fields import brief, check, describe, plain, show

_OF_METHOD = {"config.hyperparams": ("sft",), "config.rlHyperparams": ("grpo", "gspo")}
_STATE = "State method: grpo"
_ONLY_DEFAULTS = ("config.data", "config.loss")


def method_refusals(found: Document) -> Iterator[Problem]:
    """Groups and fields that belong to the other kind of run."""
    if found.unsure:
        return
    if found.assumed:
        message = "rlHyperparams is for grpo and gspo, this run is sft, the default method"
        where = found.groups["config.rlHyperparams"]
        yield Problem("rlHyperparams", message, where=where, hint=_STATE)
        return
    unstated = "config.method" not in found.options
    for group, methods in _OF_METHOD.items():
        if group in found.groups and found.method not in methods:
            name = short(group)
            other = "rlHyperparams" if name == "hyperparams" else "hyperparams"
            message = f"{name} is for {' and '.join(methods)}, this run is {found.method}"
            hint = _STATE if name != "hyperparams" and unstated else f"State {other}"
            yield Problem(name, message, where=found.groups[group], hint=hint)
    if found.method == "sft":
        yield from _not_supervised(found)
        return
    if "smoke" in found.groups:
        yield Problem("smoke", only_supervised(found.method), where=found.groups["smoke"])
    for group in _ONLY_DEFAULTS:
        if group in found.groups:
            yield from _more_than_defaults(found, group)


def only_supervised(method: str) -> str:
    """Why a smoke check is refused of a reinforcement run."""
    return f"smoke is for sft, this run is {method}: there are no answers to reproduce"


def _not_supervised(found: Document) -> Iterator[Problem]:
    for path in ("config.reward", "warmStartModelId", "config.warmStartConfigHash"):
        statement = found.options.get(path)
        if statement is not None and statement.value is not None:
            name = short(path)
            message = f"{name} is for grpo and gspo, this run is sft"
            hint = _STATE if "config.method" not in found.options else None
            yield Problem(name, message, where=statement.where, hint=hint)


def _more_than_defaults(found: Document, group: str) -> Iterator[Problem]:
    """A group that a reinforcement run has no use for may only write out its defaults."""
    for path, statement in found.options.items():
        if not path.startswith(f"{group}."):
            continue
        one = FIELDS[path]
        value, problem = statement.value, None
        if not one.looked_up:
            value, problem = check(one.option, statement.value, where=statement.where)
        if problem is not None:
            yield problem
        elif value is not None if one.looked_up else value != one.option.default:
            said = describe(value) if one.looked_up else brief(show(value))
            message = (
                f"{one.name} {said} is for sft, this run is {found.method}, which takes its "
                "loss from the reward and reads its dataset as prompts"
            )
            allowed = show(one.option.default)
            where = statement.where
            yield Problem(one.name, message, plain(value), allowed, where, "Leave it out")


def refusals(draft: Draft) -> Iterator[Problem]:
    """Problems between fields. A rule keeps quiet when one of its fields is bad already."""
    yield from _schedule(draft)
    yield from _hash_of_warm_start(draft)
    if draft.supervised:
        yield from _sizes(draft)
        yield from _mask_column(draft)
    else:
        yield from _reinforcement(draft)
        yield from _prompts(draft)
        yield from _adapter(draft)


def _schedule(draft: Draft) -> Iterator[Problem]:
    kind, floor = "scheduler.kind", "scheduler.minLearningRateRatio"
    if not draft.supervised and draft[kind] == "linear" and draft.fine(kind):
        message = f"{draft.said(kind)}: reinforcement runs follow a constant or cosine schedule"
        yield draft.problem(kind, message, "constant or cosine")
    elif draft.fine(kind, floor) and draft[floor] > 0 and draft[kind] != "cosine":
        message = f"{draft.said(floor)} with {draft.said(kind)}: only a cosine falls to a floor"
        hint = f"State {draft.called(kind)}: cosine, or leave {draft.called(floor)} out"
        yield draft.problem(floor, message, "0", hint, also=(kind,))


def _hash_of_warm_start(draft: Draft) -> Iterator[Problem]:
    name = "warmStartConfigHash"
    if draft.supervised or draft.values.get(name) is None or not draft.fine(name):
        return
    model = draft.refs.warm_start
    if model is None and not draft.fine("warmStartModelId"):
        return
    earlier = draft.warm_before
    if model is None and earlier is not None and earlier["config_hash"] == draft[name]:
        return
    if model is None or model.config_hash != draft[name]:
        of = "there is no warmStartModelId" if model is None else (
            f"the recipe of warmStartModelId is {model.config_hash[:12]}"
        )  # fmt: skip
        message = f"{name} {str(draft[name])[:12]} does not fit: {of}"
        allowed = None if model is None else model.config_hash
        yield draft.problem(name, message, allowed, "Leave it out: it is set from warmStartModelId")


def _sizes(draft: Draft) -> Iterator[Problem]:
    micro, passes = "training.microBatchPerGpu", "training.gradientAccumulation"
    gpus, length, model = "execution.gpus", "maxSeqLength", draft.refs.base_model
    if not draft.fine(micro, passes):
        return
    update = draft[micro] * draft[passes]
    sized = [name for name in (micro, passes) if draft.origins[name] == "computed"]
    if len(sized) == 1 and update != SEQUENCES:
        stated = passes if sized[0] == micro else micro
        message = (
            f"{draft.said(stated)} does not divide the {SEQUENCES} sequences of an update, so that "
            f"{draft.called(sized[0])} cannot be sized"
        )
        hint = f"State {draft.called(sized[0])} too, and the update has their product"
        yield draft.problem(stated, message, "1, 2, 4 or 8", hint)
        return
    if draft.fine(gpus) and draft[passes] % draft[gpus]:
        said = f"{draft.called(passes)} {draft[passes]} / {draft.called(gpus)} {draft[gpus]}"
        message = (
            f"{said} is not whole: an update of {draft[micro]} x {draft[passes]} = {update} "
            f"sequences cannot be shared by {draft[gpus]} devices"
        )
        fit = max(n for n in range(1, draft[gpus] + 1) if draft[passes] % n == 0)
        whole = -(-draft[passes] // draft[gpus]) * draft[gpus]
        hint = f"State {draft.called(gpus)}: {fit}, or {draft.called(passes)}: {whole}"
        if draft.origins[micro] == "computed" and SEQUENCES % whole:
            hint += (
                f" with {draft.called(micro)}: {draft[micro]}, for updates of "
                f"{draft[micro] * whole} sequences"
            )
        yield draft.problem(gpus, message, None, hint, also=(passes,))
    if model is not None and draft.fine(length) and draft[micro] > 1:
        tokens, most = draft[micro] * draft[length], qualified_tokens(model)
        if tokens > most:
            message = (
                f"{draft.said(micro)} x {draft.said(length)} = {show(tokens)} tokens, more than "
                f"the {show(most)} that {model.slug} is qualified at in one pass"
            )
            fit = max(1, most // draft[length])
            hint = f"Sequences beyond it go into more passes: state {draft.called(passes)}"
            yield draft.problem(micro, message, f"1 to {fit}", hint, also=(passes, length))


def _mask_column(draft: Draft) -> Iterator[Problem]:
    name, dataset = "loss.explicitLossMaskColumn", draft.refs.dataset
    column = draft[name]
    if column is None or dataset is None or not draft.fine(name, "dataset"):
        return
    if column not in dataset.columns:
        whose = f"dataset {dataset.name or dataset.dataset_id[:12]}"
        allowed = " or ".join(dataset.columns) or "null: it has no other column"
        yield draft.problem(name, f"{draft.said(name)} is no column of {whose}", allowed)


def _reinforcement(draft: Draft) -> Iterator[Problem]:
    """What the reinforcement loop does not have."""
    method, stale = draft.found.method, "rlHyperparams.stalenessThreshold"
    for name, why in (
        ("lora.dropout", "reinforcement runs train the adapter without dropout"),
        (stale, "every step trains on rollouts of the current weights"),
    ):
        if draft.fine(name) and draft[name] > 0:
            hint = f"Leave {draft.called(name)} out, or state 0"
            yield draft.problem(name, f"{draft.said(name)} is not supported: {why}", "0", hint)
    for name, only in (
        ("model.precision", "BF16"),
        ("model.gradientCheckpointing", False),
        ("model.attentionImplementation", "sdpa"),
    ):
        if draft.fine(name) and draft[name] != only:
            message = f"{draft.said(name)} is not built yet for {method}"
            yield draft.problem(name, message, show(only))


def _prompts(draft: Draft) -> Iterator[Problem]:
    prompts, gpus = "rlHyperparams.promptsPerStep", "execution.gpus"
    reply, length = "rlHyperparams.maxCompletionLength", "maxSeqLength"
    if draft.fine(prompts, gpus) and draft[prompts] < draft[gpus]:
        message = f"{draft.said(prompts)} is less than {draft.said(gpus)}: a device has no prompt"
        hint = f"State a multiple of {draft[gpus]}, or execution.gpus: {draft[prompts]} or less"
        allowed = f"at least {draft[gpus]}"
        yield draft.problem(prompts, message, allowed, hint, also=(gpus,))
    if draft.fine(reply, length) and draft[reply] >= draft[length]:
        message = f"{draft.said(reply)} leaves no room for a prompt in {draft.said(length)}"
        allowed = f"1 to {max(1, draft[length] - 1)}"
        yield draft.problem(reply, message, allowed, also=(length,))
    if draft.fine(gpus, "dataset") and 0 < draft.rows < draft[gpus]:
        message = f"{draft.said(gpus)} is more than the {draft.rows} prompts: a device has none"
        yield draft.problem(gpus, message, f"1 to {draft.rows}")


def _adapter(draft: Draft) -> Iterator[Problem]:
    """A warm start fits its base model and keeps its adapter's shape."""
    adapter, model = draft.refs.warm_start, draft.refs.base_model
    if adapter is None:
        return
    whose = f"model {adapter.name or adapter.model_id[:12]}"
    if model is not None and model.fingerprint != adapter.base_fingerprint:
        message = (
            f"warmStartModelId: {whose} belongs to {adapter.base_model_slug} "
            f"({adapter.base_fingerprint[:12]}), the run's base model is {model.slug} "
            f"({model.fingerprint[:12]})"
        )
        yield draft.problem("warmStartModelId", message, adapter.base_model_slug)
    for one in _shape(draft):
        value = adapter.lora.get(str(one.rl_setting))
        if value is not None and draft.stated(one.name) and draft[one.name] != value:
            message = f"{draft.said(one.name)} does not match {whose}, saved with {show(value)}"
            yield draft.problem(one.name, message, show(value), "Leave it out")


def _shape(draft: Draft) -> list[Field]:
    return [draft.fields[f"lora.{key}"] for key in ("rank", "alpha", "targetModules")]


def take_shape(draft: Draft) -> None:
    """The shape of a warm start's adapter stands where none is stated."""
    adapter = draft.refs.warm_start
    if adapter is None or draft.supervised:
        return
    for one in _shape(draft):
        value = adapter.lora.get(str(one.rl_setting))
        if value is not None and not draft.stated(one.name):
            draft.values[one.name], draft.origins[one.name] = value, "inherited"
            draft.notes[one.name] = "the shape of the adapter that the run starts from"
