"""Rules between options, and what the resolved plan says about them: refusals, notes, hints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nbtrain.errors import Problem
from nbtrain.plan.defaults import MAX_CONCURRENT, budgets, validation_on
from nbtrain.plan.fields import show
from nbtrain.plan.registry import BaseModelInfo, CheckpointInfo, SplitInfo, WorkloadInfo
from nbtrain.plan.resolved import Setting
from nbtrain.plan.statements import Statements

# an adapter is loaded as it was saved; these decide its shape and scale
_NAMED = 5  # checkpoints of a refusal, those nearest to the one that was meant
_ADAPTER = ("lora_rank", "lora_alpha", "lora_target_modules")

SAME_UPDATE = (
    "on-policy sampling: every ratio is 1, so GSPO and GRPO, and the clip range, give the same "
    "update"
)


def refusals(
    settings: Mapping[str, Setting], found: Statements, parent: CheckpointInfo | None
) -> Iterator[Problem]:
    """Problems between options. A rule keeps quiet when one of its options is bad already."""
    yield from _between(settings, found)
    yield from _density(settings, found, parent)
    yield from _with_parent(settings, found, parent)


def _refuse(
    found: Statements,
    setting: Setting,
    message: str,
    allowed: str | None,
    hint: str | None = None,
    also: str = "",
) -> Problem:
    """The problem, placed where the first of the two options stands in the text."""
    statement = found.options.get(setting.name) or found.options.get(also)
    where = statement.where if statement else None
    return Problem(setting.name, message, setting.value, allowed, where, hint)


def _said(setting: Setting) -> str:
    origin = "" if setting.origin == "stated" else f" ({setting.origin})"
    return f"{setting.name} {show(setting.value)}{origin}"


def _between(settings: Mapping[str, Setting], found: Statements) -> Iterator[Problem]:
    def fine(*names: str) -> bool:
        return not found.bad & set(names)

    small, size = settings["min_trajectories_per_group"], settings["group_size"]
    if fine(small.name, size.name) and small.value > size.value:
        message = f"{_said(small)} is more than {_said(size)}: no group could be used"
        yield _refuse(found, small, message, f"1 to {size.value}", also=size.name)
    batch, one = settings["batch_timeout_seconds"], settings["trajectory_timeout_seconds"]
    if fine(batch.name, one.name) and batch.value < one.value:
        message = f"{_said(batch)} is less than {_said(one)}: it must cover a trajectory"
        yield _refuse(found, batch, message, f"at least {show(one.value)}", also=one.name)
    enabled, interval = settings["val_enabled"], settings["val_interval_steps"]
    contradicts = enabled.value and enabled.origin == "stated" and interval.value == 0
    if fine(enabled.name, interval.name) and contradicts:
        message = f"val_enabled is true while {_said(interval)} turns validation off"
        hint = "Leave val_enabled out, or state a val_interval_steps of 1 to 100"
        yield _refuse(found, enabled, message, None, hint)


def _density(
    settings: Mapping[str, Setting], found: Statements, parent: CheckpointInfo | None
) -> Iterator[Problem]:
    """Tight budgets cut replies on purpose: what is cut must count, or the budgets teach nothing.

    A run that resumes with training state may go on as its parent was.
    """
    density, cut = settings["density_aware_training"], settings["train_on_truncation"]
    decided = {density.name, cut.name, "load_weights_only", "parent_checkpoint_id"}
    resumes = parent is not None and not settings["load_weights_only"].value
    if found.bad & decided or not density.value or cut.value or resumes:
        return
    message = f"{_said(cut)} contradicts {_said(density)}, whose budgets cut replies on purpose"
    hint = "Only a run that resumes a checkpoint with its training state may keep it false"
    yield _refuse(found, cut, message, "true", hint, also=density.name)


def conversation(
    workload: WorkloadInfo | None, model: BaseModelInfo | None, found: Statements
) -> Iterator[Problem]:
    """What the workload's environment says must be something that the model's template shows."""
    if workload is None or model is None or found.bad & {"workload", "base_model_slug"}:
        return
    form, template = workload.environment_form, model.template
    lacks = form is not None and template == "none"
    if not lacks and not (form == "tools" and template == "plain"):
        return
    whose = f"the environment of workload {workload.name or workload.workload_id[:12]}"
    if lacks:
        message = f"base_model_slug {model.slug} has no chat template, and {whose} speaks in chat"
        hint = "Take a model with a chat template"
    else:
        message = f"the chat template of {model.slug} shows no tools, and {whose} offers some"
        hint = "Take a model with a tool template, or write the environment in the step form"
    for name in ("base_model_slug", "workload"):
        where = next((s.where for s in found.references.get(name, []) if s.where), None)
        if where is not None:
            break
    yield Problem("base_model_slug", message, model.slug, None, where, hint)


def enough_tasks(ranks: Setting, split: SplitInfo, found: Statements) -> Iterator[Problem]:
    """Every rank owns tasks of its own."""
    if "gpus" not in found.bad and 0 < split.train < ranks.value:
        message = f"{_said(ranks)} is more than the {split.train} training tasks: a rank has none"
        yield _refuse(found, ranks, message, f"1 to {split.train}")


def _with_parent(
    settings: Mapping[str, Setting], found: Statements, parent: CheckpointInfo | None
) -> Iterator[Problem]:
    only_weights = settings["load_weights_only"].value
    if parent is None:
        if only_weights and not found.bad & {"load_weights_only", "parent_checkpoint_id"}:
            message = "load_weights_only is true, but there is no checkpoint to load from"
            hint = "State parent_checkpoint_id, or leave load_weights_only out"
            yield _refuse(found, settings["load_weights_only"], message, None, hint)
        return
    short = parent.checkpoint_id[:12]
    if not only_weights and not parent.has_training_state and "load_weights_only" not in found.bad:
        message = f"parent_checkpoint_id: checkpoint {short} holds no training state to resume from"
        hint = without_training_state(parent)
        where = found.references["parent_checkpoint_id"][0].where
        yield Problem("parent_checkpoint_id", message, parent.checkpoint_id, None, where, hint)
    before = parent.resolved["settings"].get("gpus", {"value": 1})["value"]  # older plans have none
    ranks = settings["gpus"]
    resumes = not only_weights and parent.has_training_state
    if resumes and ranks.value != before and not found.bad & {"load_weights_only", ranks.name}:
        message = (
            f"{_said(ranks)} does not fit checkpoint {short}, whose run had {show(before)}: "
            "training state is restored in as many ranks"
        )
        hint = f"load_weights_only: true starts from its weights, or state gpus: {show(before)}"
        yield _refuse(found, ranks, message, show(before), hint)
    for name in _ADAPTER:
        before = parent.resolved["settings"].get(name, {"value": settings[name].value})["value"]
        stated = name in found.options and name not in found.bad
        if stated and settings[name].value != before:
            message = (
                f"{name} {show(settings[name].value)} does not match the adapter of checkpoint "
                f"{short}, saved with {show(before)}"
            )
            yield _refuse(found, settings[name], message, show(before), "Leave it out")


def without_training_state(parent: CheckpointInfo) -> str:
    """What to go on from instead of a checkpoint that holds weights alone."""
    hint = "load_weights_only: true (--weights-only) starts from its weights with fresh state"
    if not parent.resumable:
        return f"{hint}; no checkpoint of its run holds training state"
    near = sorted(parent.resumable, key=lambda held: abs(held[0] - parent.step_index))
    told = ", ".join(f"step {step} ({ident[:12]})" for step, ident in sorted(near[:_NAMED]))
    more = f" and {len(near) - _NAMED} others" if len(near) > _NAMED else ""
    return f"{hint}; of its run, these hold training state: {told}{more}"


def same_tasks(
    split: SplitInfo, workload_id: str, parent: CheckpointInfo, found: Statements
) -> Problem | None:
    """A resume goes on in the parent's task order, so its training tasks must be the parent's."""
    before = parent.resolved["workload"]
    if workload_id == before["workload_id"] and split.train_digest == before["train_digest"]:
        return None
    if workload_id != before["workload_id"]:
        name, old = "workload", f"{before['name'] or before['workload_id'][:12]}"
        what = f"another workload ({workload_id[:12]}) than the checkpoint's ({old})"
    else:
        name = "val_enabled"
        what = f"{split.train} training tasks, the checkpoint's run on {before['train_tasks']}"
    statements = found.references.get("workload", [])
    where = statements[0].where if name == "workload" and statements else None
    message = f"{name}: a resume with training state goes on in the same task order; this is {what}"
    hint = "Keep workload and split, or start from the weights with load_weights_only: true"
    return Problem(name, message, where=where, hint=hint)


def notes(
    settings: Mapping[str, Setting], model: BaseModelInfo | None, total_steps: int
) -> Iterator[tuple[str, str]]:
    """(option, note) for values that need explaining."""
    value = {name: setting.value for name, setting in settings.items()}
    if value["max_staleness"] == 0:
        for name in ("algorithm", "clip_low", "clip_high"):
            yield name, SAME_UPDATE
    concurrent = settings["max_concurrent_trajectories"]
    wanted = value["batch_size"] * value["group_size"] * 2
    if concurrent.origin == "computed" and wanted > MAX_CONCURRENT:
        yield concurrent.name, f"clamped: batch_size x group_size x 2 is {wanted:,}"
    tokens = value["max_output_tokens_per_trajectory"]
    if model is not None and tokens > model.max_context:
        note = f"the context of {model.max_context:,} tokens ends a trajectory first"
        yield "max_output_tokens_per_trajectory", note
    effort = settings["reasoning_effort"]
    if effort.origin == "computed" and effort.value is not None:
        yield effort.name, "the lowest level that thinks"
    if settings["val_enabled"].origin == "computed":
        yield "val_enabled", "val_interval_steps is 0"
    decay_from = value["lr_warmup_steps"] + value["lr_hold_steps"]
    if value["lr_min_ratio"] < 1 and decay_from >= total_steps:
        note = (
            f"no decay: it would start after step {decay_from:,}, the run ends at {total_steps:,}"
        )
        yield "lr_hold_steps", note


def hints(
    settings: Mapping[str, Setting],
    split: SplitInfo,
    total_steps: int,
    start_step: int,
    weights: Sequence[float] = (),
) -> Iterator[str]:
    """Sentences on what will work but probably not as wanted; ``weights`` are the rewards'."""
    value = {name: setting.value for name, setting in settings.items()}
    batch = value["batch_size"] * value["group_size"]
    concurrent = value["max_concurrent_trajectories"]
    in_use = f"batch_size x group_size = {batch:,}"
    stale = value["max_staleness"]
    # on-policy nothing is sampled ahead: the value only bounds how many are sampled at a time
    if stale and concurrent <= batch:
        yield (
            f"max_concurrent_trajectories {concurrent:,} is not above {in_use}: "
            "collection cannot keep ahead of training"
        )
    most = (stale + 1) * batch
    if stale and concurrent > most:
        yield (
            f"max_concurrent_trajectories {concurrent:,} is above {most:,}, "
            f"{most // batch} times {in_use}: much of what is sampled will be discarded"
        )
    yield from _hints_of_filters(value, weights)
    if value["gpus"] > value["batch_size"]:
        yield (
            f"gpus {value['gpus']} is more than batch_size {value['batch_size']}: some ranks have "
            "no group to learn from in a step"
        )
    if value["temperature"] == 0:
        yield "temperature 0 is greedy: every group ties, so nothing is learned"
    least = settings["min_trajectories_per_group"]
    if least.value == 1 and least.origin != "computed":
        yield "min_trajectories_per_group 1 admits groups of one, which have no advantage"
    if split.train < value["batch_size"]:
        yield (
            f"batch_size {value['batch_size']} is more than the {split.train} training tasks: "
            "a step samples some tasks more than once"
        )
    if value["lr_warmup_steps"] > total_steps:
        yield (
            f"lr_warmup_steps {value['lr_warmup_steps']:,} is more than the final step "
            f"{total_steps:,}: the base rate is never reached; state lr_warmup_steps: 0"
        )
    if validation_on(value):
        tasks = min(value["val_num_tasks"], split.held_out)
        rounds = validation_rounds(start_step, total_steps, value["val_interval_steps"])
        sampled = rounds * tasks * value["val_trajectories_per_task"]
        trained = (total_steps - start_step) * batch
        if sampled > trained:
            yield (
                f"validation samples about {sampled:,} trajectories, more than the {trained:,} "
                "that training uses: raise val_interval_steps or lower val_num_tasks"
            )


def _hints_of_filters(value: Mapping[str, Any], weights: Sequence[float]) -> Iterator[str]:
    """On which rewards the filters rely, and whether the budgets can be told apart."""
    best = sum(weight for weight in weights if weight > 0)
    if weights and not value["train_on_all_pass"] and abs(best - 1) > 1e-6:
        so = "no group counts as all passed" if best < 1 else "less than full marks counts as 1"
        yield (
            f"the positive reward weights sum to {best:g}, and train_on_all_pass: false takes 1 "
            f"for a pass: {so}"
        )
    if not value["density_aware_training"]:
        return
    given = budgets(value["max_output_tokens_per_trajectory"])
    if value["batch_size"] < len(given):
        yield (
            f"batch_size {value['batch_size']} is less than the {len(given)} budgets of "
            "density_aware_training: a step never sees all of them"
        )
    if value["max_output_tokens_per_turn"] <= given[0]:
        yield (
            f"max_output_tokens_per_turn {value['max_output_tokens_per_turn']:,} is within the "
            f"smallest budget of density_aware_training, {given[0]:,}: a reply of one turn is the "
            "same under all of them; lower max_output_tokens_per_trajectory"
        )


def validation_rounds(start_step: int, total_steps: int, interval: int) -> int:
    """Rounds of a run: the starting policy, every multiple of ``interval``, the final policy."""
    between = (total_steps - 1) // interval - start_step // interval
    return between + 2
