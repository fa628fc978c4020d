"""A sound draft as a resolved plan: settings, config, execution and hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nbtrain.plan import placement, rules, small
from nbtrain.plan.descriptor.draft import Draft
from nbtrain.plan.descriptor.hints import hints
from nbtrain.plan.descriptor.parent import start_step
from nbtrain.plan.descriptor.terms import Reward
from nbtrain.plan.identity import descriptor_hash
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.registry import DatasetInfo
from nbtrain.plan.resolved import (
    BaseModelRef,
    DatasetRef,
    ModelRef,
    Origin,
    ParentRef,
    ResolvedPlan,
    Setting,
    SmokeRef,
    WorkloadRef,
)
from nbtrain.plan.schedule import warm_up

# of a reinforcement run, whatever the descriptor says
_FIXED: dict[str, Any] = {
    "max_staleness": 0, "max_turns_per_trajectory": 1, "val_enabled": False,
    "min_trajectories_per_group": 1, "density_aware_training": False, "precision": "bf16",
    **dict.fromkeys((name for name in OPTIONS if name.startswith("train_on_")), True),
}  # fmt: skip


def total_steps(draft: Draft) -> int:
    """The global step at which the run ends; at most, where rows are packed."""
    if draft.smoke:
        return int(draft["smoke.maxSteps"])
    if not draft.supervised:
        capped = draft["rlHyperparams.maxSteps"]
        prompts = draft["rlHyperparams.promptsPerStep"]
        return int(capped or -(-draft.rows * draft["rlHyperparams.epochs"] // prompts))
    return draft.updates(draft["training.maxSteps"])


def build(draft: Draft, reward: Reward, grader: str | None, total: int) -> ResolvedPlan:
    """The plan of a draft in which nothing is wrong."""
    refs, found = draft.refs, draft.found
    model, workload, dataset, parent = (
        refs.base_model, refs.workload, refs.dataset, refs.parent,
    )  # fmt: skip
    if model is None or workload is None or dataset is None:
        msg = "a reference is missing and no problem says so"
        raise AssertionError(msg)
    config, start = _config(draft, reward), start_step(draft)
    settings = _supervised(draft) if draft.supervised else _reinforcement(draft, total, start)
    warm, validation = _warm_start(draft), draft.validation
    return ResolvedPlan(
        settings=settings,
        workload=_workload(draft, workload.workload_id, workload.name, dataset),
        base_model=BaseModelRef(
            model.slug, model.kind, model.location, model.fingerprint, model.max_context
        ),
        parent=None if parent is None else ParentRef(
            parent.checkpoint_id, parent.run_id, parent.step_index, parent.path
        ),
        display_name=found.display_name.value if found.display_name else None,
        start_step=start,
        total_steps=total,
        config_hash=descriptor_hash(
            config,
            base_fingerprint=model.fingerprint,
            warm_start=warm.weights_digest if warm is not None else None,
            parent_checkpoint_id=parent.checkpoint_id if parent is not None else None,
            weights_only=draft.load_weights_only,
        ),
        admission="filtered" if draft.supervised else "as_graded",
        hints=(
            *hints(draft, reward, total),
            *(small.hints(draft.origins) if draft.found.small else ()),
        ),
        door="descriptor",
        dataset=_dataset(dataset),
        validation_dataset=_dataset(validation) if validation is not None else None,
        reward=None if draft.supervised else {"terms": reward.terms, "origin": reward.origin},
        grader=grader,
        warm_start=warm,
        smoke=SmokeRef(*(draft[f"smoke.{key}"] for key in ("sliceSize", "maxSteps", "threshold")))
        if draft.smoke else None,
        config=config,
        execution=_tree(draft, "execution"),
        field_origins=_origins(draft, reward),
        description=draft["description"],
        config_name=draft["configName"],
        submission_id=draft["submissionId"],
        flat=draft.found.flat,
    )  # fmt: skip


def _warm_start(draft: Draft) -> ModelRef | None:
    """The model that the run starts from; of a resume, the one that its lineage did."""
    warm, earlier = draft.refs.warm_start, draft.warm_before
    if warm is None:
        return None if earlier is None else ModelRef(**earlier)
    return ModelRef(warm.model_id, warm.name, warm.config_hash, warm.weights_digest, warm.path)


def _dataset(dataset: DatasetInfo) -> DatasetRef:
    return DatasetRef(dataset.dataset_id, dataset.name, dataset.rows)


def _workload(
    draft: Draft, workload_id: str, name: str | None, dataset: DatasetInfo
) -> WorkloadRef:
    title = dataset.name or dataset.dataset_id[:12]
    whole = draft.rows == dataset.rows
    split = f"every row of dataset {title}" if whole else (
        f"the first {draft.rows} rows of dataset {title}"
    )  # fmt: skip
    held_out = draft.validation.rows if draft.validation is not None else 0
    return WorkloadRef(workload_id, name, draft.rows, held_out, split, dataset.dataset_id)


def _config(draft: Draft, reward: Reward) -> dict[str, Any]:
    """``config`` with every default, its names replaced by content hashes."""
    tree = _tree(draft, "config")
    refs = draft.refs
    tree["dataset"] = refs.dataset.dataset_id if refs.dataset is not None else None
    if draft.supervised:
        validation = refs.validation.dataset_id if refs.validation is not None else None
        tree["data"]["validationDataset"] = validation
    else:
        tree["reward"] = {"terms": reward.hashed}
        warm = _warm_start(draft)
        tree["warmStartConfigHash"] = warm.config_hash if warm is not None else None
    return tree


def _tree(draft: Draft, part: str) -> dict[str, Any]:
    """A part of the document, nested; what only verl could honour is left out."""
    tree: dict[str, Any] = {}
    for name, one in draft.fields.items():
        if one.part != part or one.by_verl:
            continue
        inner = tree
        *groups, key = one.path.split(".")[1:]
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[key] = draft[name]
    return tree


def _origins(draft: Draft, reward: Reward) -> dict[str, Origin]:
    origins: dict[str, Origin] = {
        one.path: draft.origins[name] for name, one in draft.fields.items() if not one.by_verl
    }
    if not draft.smoke:
        origins = {path: o for path, o in origins.items() if not path.startswith("smoke.")}
    if not draft.supervised:
        known: dict[str, Origin] = {
            "stated": "stated", "default": "default", "inherited": "inherited",
        }  # fmt: skip
        origins["config.reward"] = known.get(reward.origin, "computed")
        if draft.refs.warm_start is not None and not draft.stated("warmStartConfigHash"):
            origins["config.warmStartConfigHash"] = "computed"
        if draft.refs.warm_start is None and draft.warm_before is not None:
            origins["warmStartModelId"] = origins["config.warmStartConfigHash"] = "inherited"
    for path, ref in (("baseModel", draft.refs.base_model), ("workload", draft.refs.workload)):
        if ref is not None and origins[path] == "default":
            origins[path] = "inherited" if draft.refs.parent is not None else "computed"
    return origins


def _supervised(draft: Draft) -> dict[str, Setting]:
    settings = {}
    for name, one in draft.fields.items():
        if one.setting is None or one.looked_up:
            continue
        value = draft[name].lower() if one.setting == "precision" else draft[name]
        note = draft.notes.get(name)
        settings[one.setting] = Setting(one.setting, value, draft.origins[name], note)
    only = draft.load_weights_only
    origin: Origin = "stated" if draft.found.load_weights_only is not None else "default"
    settings["load_weights_only"] = Setting("load_weights_only", only, origin)
    return settings


def _reinforcement(draft: Draft, total: int, start: int) -> dict[str, Setting]:
    """The options of the loop, each from its field, from the door, or as options compute it."""
    given = _given(draft, total, start)
    values: dict[str, Any] = {}
    settings: dict[str, Setting] = {}
    model, machine = draft.refs.base_model, draft.refs.machine
    for name, option in OPTIONS.items():
        setting = given.get(name)
        if setting is None and name in _FIXED:
            setting = Setting(name, _FIXED[name], "computed", "of every descriptor")
        if setting is None and option.compute is not None:
            setting = Setting(name, option.compute(values, model), "computed", option.note)
        settings[name] = setting or Setting(name, option.default, "default")
        values[name] = settings[name].value
    ranks = values["gpus"]
    if model is not None:
        sampler = placement.choose_sampler(settings["sampler"], model, machine, ranks=ranks)
        settings["sampler"] = sampler
    for name in ("max_seq_length", "micro_batch_sequences"):
        settings[name] = given[name]
    for name, note in (*rules.notes(settings, model, total), *placement.notes(settings, machine)):
        if name != "val_enabled":
            settings[name] = replace(settings[name], note=note)
    return settings


def _given(draft: Draft, total: int, start: int) -> Mapping[str, Setting]:
    """What the descriptor's fields say, under the options' names."""
    given = {
        one.rl_setting: Setting(
            one.rl_setting, draft[name], draft.origins[name], draft.notes.get(name)
        )
        for name, one in draft.fields.items()
        if one.rl_setting is not None
    }

    def also(option: str, field: str, value: Any) -> None:
        given[option] = Setting(option, value, draft.origins[field], draft.notes.get(field))

    reply = "rlHyperparams.maxCompletionLength"
    also("max_output_tokens_per_trajectory", reply, draft[reply])
    capped = "rlHyperparams.maxSteps" if draft["rlHyperparams.maxSteps"] else (
        "rlHyperparams.epochs"
    )  # fmt: skip
    also("num_steps", capped, total - start)
    kind, warm = draft["scheduler.kind"], "scheduler.warmupRatio"
    also("lr_warmup_steps", warm, warm_up(draft[warm], total))
    also("lr_hold_steps", "scheduler.kind", total if kind == "constant" else 0)
    floor = "scheduler.minLearningRateRatio"
    also("lr_min_ratio", floor, draft[floor])
    if given["checkpoint_interval_steps"].value is None:
        note = "off: one checkpoint, at the end"
        given["checkpoint_interval_steps"] = Setting(
            "checkpoint_interval_steps", None, "computed", note
        )
    if draft.found.load_weights_only is not None:
        given["load_weights_only"] = Setting("load_weights_only", draft.load_weights_only, "stated")
    return given
