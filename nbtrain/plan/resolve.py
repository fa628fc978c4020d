"""Options, catalog and checkpoints into a ResolvedPlan, or into every refusal at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nbtrain.errors import PlanRefused, Problem
from nbtrain.plan import placement, rules, small
from nbtrain.plan.defaults import validation_on
from nbtrain.plan.descriptor.document import FLAT
from nbtrain.plan.descriptor.references import another_kind
from nbtrain.plan.descriptor.resolve import resolve_descriptor, resolve_flat, resolve_further
from nbtrain.plan.descriptor.rules import only_supervised
from nbtrain.plan.descriptor.table import FIELDS, METHODS
from nbtrain.plan.fields import Option, check
from nbtrain.plan.identity import config_hash
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.references import References, divide, find, look, look_up
from nbtrain.plan.registry import (
    BaseModelInfo,
    CheckpointInfo,
    MachineInfo,
    Registry,
    SplitInfo,
    WorkloadInfo,
)
from nbtrain.plan.resolved import BaseModelRef, ParentRef, ResolvedPlan, Setting, WorkloadRef
from nbtrain.plan.source import SourcedMapping, in_order
from nbtrain.plan.statements import Statement, Statements, gather


def resolve(
    options: Mapping[str, Any] | None,
    *,
    registry: Registry,
    workload: object = None,
    base_model: object = None,
    parent: object = None,
    display_name: str | None = None,
    algorithm: str | None = None,
    load_weights_only: bool | None = None,
    first_look: bool = False,
    smoke: bool = False,
) -> ResolvedPlan:
    """The plan that this document makes, every value filled in, each with its origin.

    A document with ``kind`` is a descriptor; ``algorithm: sft``, there or beside it, makes options
    those of a supervised run (see :mod:`nbtrain.plan.descriptor.resolve` for both). Otherwise
    these are the options of a reinforcement run; from a checkpoint of one by a descriptor a
    descriptor goes on, whose ``kind`` may then be left out.

    ``options`` may also have the keys ``workload``, ``base_model_slug``, ``parent_checkpoint_id``
    and ``display_name``. The arguments say the same from outside the body; stated twice, equal is
    fine and different is refused. References are names, ids, prefixes or the objects themselves.

    With a parent checkpoint every unstated option is taken over from the parent's plan, what was
    computed there computed anew; ``num_steps`` (further steps) and ``load_weights_only`` are not.
    Null leaves an option out, but where null is a value of its own. ``first_look`` gives what is
    not stated the smaller values of :mod:`nbtrain.plan.small`; ``smoke`` makes a supervised run a
    smoke check.

    Raises :class:`PlanRefused` with everything that is wrong, in the order of the text. Nothing
    is started or stored either way.
    """
    switches = {"small": first_look, "smoke": smoke}
    wrong = list(_no_switches(switches))
    given = {
        "workload": workload, "base_model_slug": base_model, "parent_checkpoint_id": parent,
        "display_name": display_name, "algorithm": algorithm,
        "load_weights_only": load_weights_only,
    }  # fmt: skip
    if not wrong:
        return _resolve(options, registry, given, switches)
    told: list[Problem] = []
    try:
        _resolve(options, registry, given, dict.fromkeys(switches, False))
    except PlanRefused as refused:
        told += refused.problems
    raise PlanRefused(in_order([*told, *wrong]))


def _no_switches(switches: Mapping[str, object]) -> Iterator[Problem]:
    """What is stated as a switch and is none; ``None`` is unstated."""
    for name, value in switches.items():
        option = Option(name, "boolean", "", "run", nullable=True)
        problem = check(option, value)[1]
        if problem is not None:
            hint = problem.hint
            if name == "smoke" and isinstance(value, Mapping):
                hint = "State smoke=True, and its fields in a descriptor's smoke"
            yield replace(problem, allowed="true or false", hint=hint)


def _resolve(
    options: Mapping[str, Any] | None,
    registry: Registry,
    beside: Mapping[str, Any],
    switches: Mapping[str, bool],
) -> ResolvedPlan:
    body = options if isinstance(options, Mapping) else {}
    first_look, smoke = bool(switches["small"]), bool(switches["smoke"])
    if "kind" in body:
        return resolve_descriptor(
            body, registry, workload=beside["workload"], base_model=beside["base_model_slug"],
            parent=beside["parent_checkpoint_id"], display_name=beside["display_name"],
            load_weights_only=beside["load_weights_only"], algorithm=beside["algorithm"],
            first_look=first_look, smoke=smoke,
        )  # fmt: skip
    method = _method(body, beside, registry)
    if method is None:
        raise PlanRefused(in_order(_of_no_method(body, beside, registry)))
    if method == "sft":
        return resolve_flat(body, registry, {**beside, **switches})
    before = _parent(body, beside, registry)
    if before is not None and _algorithm(before) == "sft":
        named = isinstance(body, SourcedMapping) and body.where_value("parent_checkpoint_id")
        this = f"options of method {method}"
        problem = another_kind(before, "method sft", this, method, named or None)
        raise PlanRefused(in_order([problem, *_of_no_method(body, beside, registry)]))
    if before is not None and _by_descriptor(before):
        return resolve_further(options, registry, {**beside, **switches}, _algorithm(before))
    found = gather(options, beside)
    found.small = first_look
    for problem in _switched(found, method, smoke=smoke):
        found.refuse(problem)
    references = look_up(found, registry)
    settings = _fill(found, references)
    machine = registry.machine()
    model = references.base_model
    if model is not None:
        settings["sampler"] = placement.choose_sampler(
            settings["sampler"], model, machine, ranks=settings["gpus"].value
        )
    for problem in (
        *rules.refusals(settings, found, references.parent),
        *rules.conversation(references.workload, model, found),
        *placement.refusals(settings, found, model, machine),
    ):
        found.refuse(problem)
    split = _split(found, references, settings)
    if found.problems:
        raise PlanRefused(in_order(found.problems))
    return _build(found, references, settings, split, machine)


def _switched(found: Statements, method: str, *, smoke: bool) -> Iterator[Problem]:
    if smoke:
        yield Problem("smoke", only_supervised(method))
    if found.small:
        yield from small.refusals(smoke=smoke, parent="parent_checkpoint_id" in found.references)


def _method(body: Mapping[str, Any], beside: Mapping[str, Any], registry: Registry) -> str | None:
    """The stated method, else the parent's, else the default; ``None`` where it cannot be told."""
    stated = [a for a in (body.get("algorithm"), beside["algorithm"]) if a is not None]
    if stated:
        known = [a for a in stated if isinstance(a, str) and a in METHODS]
        return known[0] if len(known) == len(stated) and len(set(known)) == 1 else None
    if _parent_named(body, beside) is None:
        return str(OPTIONS["algorithm"].default)
    before = _parent(body, beside, registry)
    return None if before is None else _algorithm(before)


def _parent_named(body: Mapping[str, Any], beside: Mapping[str, Any]) -> object:
    named = (body.get("parent_checkpoint_id"), beside["parent_checkpoint_id"])
    return next((ref for ref in named if ref is not None), None)


def _parent(
    body: Mapping[str, Any], beside: Mapping[str, Any], registry: Registry
) -> CheckpointInfo | None:
    """The checkpoint that is gone on from; ``None`` also for one that has a refusal to come."""
    named = _parent_named(body, beside)
    if named is None:
        return None
    name = "parent_checkpoint_id"
    found: CheckpointInfo | None = look(Statements(), name, registry.checkpoint, Statement(named))
    return found


def _algorithm(parent: CheckpointInfo) -> str:
    return str(parent.resolved["settings"]["algorithm"]["value"])


def _by_descriptor(parent: CheckpointInfo) -> bool:
    """Whether its run is a reinforcement run by a descriptor."""
    return parent.resolved.get("door") == "descriptor" and _algorithm(parent) != "sft"


def _of_no_method(
    body: Mapping[str, Any], beside: Mapping[str, Any], registry: Registry
) -> list[Problem]:
    """What is wrong whatever the method: itself, names, keys and values that no method has."""
    found = gather(body, beside, also=FLAT)
    option = replace(FIELDS["config.method"].option, name="algorithm")
    for statement in (found.options.get("algorithm"), Statement(beside["algorithm"])):
        if statement is not None and statement.value is not None and "algorithm" not in found.bad:
            problem = check(option, statement.value, where=statement.where)[1]
            if problem is not None:
                found.refuse(problem)
    for key, statement in found.options.items():
        if key != "algorithm" and key not in found.bad and statement.value is not None:
            tables = [OPTIONS[key], *([FLAT[key].option] if key in FLAT else [])]
            wrong = [check(o, statement.value, where=statement.where)[1] for o in tables]
            if wrong[0] is not None and all(wrong):
                found.refuse(wrong[0])
    for key, registered, identity in (
        ("parent_checkpoint_id", registry.checkpoint, "checkpoint_id"),
        ("workload", registry.workload, "workload_id"),
        ("base_model_slug", registry.base_model, "slug"),
    ):
        find(found, key, registered, identity)
    return found.problems


def _fill(found: Statements, references: References) -> dict[str, Setting]:
    """Every option's setting; a refused value is replaced by its default, so that all go on."""
    model, parent = references.base_model, references.parent
    before = parent.resolved["settings"] if parent is not None else {}
    values: dict[str, Any] = {}
    settings: dict[str, Setting] = {}
    for option in OPTIONS.values():
        statement = None if option.name in found.bad else found.options.get(option.name)
        if statement is not None and statement.value is None and _null_is_unstated(option, before):
            statement = None
        setting = _unstated(option, values, model, before.get(option.name))
        lower = small.of(option.name, setting.value) if found.small else None
        if lower is not None and setting.origin == "default":
            setting = Setting(option.name, lower, "small", small.note(setting.value))
        if statement is not None:
            setting = _stated(option, statement, found, model) or setting
        settings[option.name] = setting
        values[option.name] = setting.value
    enabled = settings["val_enabled"]
    if settings["val_interval_steps"].value == 0 and enabled.value and enabled.origin != "stated":
        settings["val_enabled"] = Setting("val_enabled", False, "computed")
    return settings


def _null_is_unstated(option: Option, before: Mapping[str, Any]) -> bool:
    """A stated null asks for the computed value or the parent's, where it is no value itself."""
    inherits = option.inherited and option.name in before
    return option.compute is not None or (inherits and not option.nullable)


def _unstated(
    option: Option,
    values: Mapping[str, Any],
    model: BaseModelInfo | None,
    before: Mapping[str, Any] | None,
) -> Setting:
    if before is not None and option.inherited and before["origin"] != "computed":
        return Setting(option.name, before["value"], "inherited")
    if option.compute is not None:
        return Setting(option.name, option.compute(values, model), "computed", option.note)
    return Setting(option.name, option.default, "default")


def _stated(
    option: Option,
    statement: Statement,
    found: Statements,
    model: BaseModelInfo | None,
) -> Setting | None:
    """The setting that the plan states, or ``None`` for one whose value is unsound."""
    value, problem = check(option, statement.value, model=model, where=statement.where)
    if problem is not None:
        found.refuse(problem)
        return None
    return Setting(option.name, value, "stated")


def _split(
    found: Statements, references: References, settings: Mapping[str, Setting]
) -> SplitInfo | None:
    values = {name: setting.value for name, setting in settings.items()}
    validation = validation_on(values)
    decided = not found.bad & {"val_enabled", "val_interval_steps", "load_weights_only"}
    split = divide(found, references, validation=validation and decided)
    parent, workload = references.parent, references.workload
    resumes = parent is not None and not values["load_weights_only"]
    if split and parent and workload and resumes and decided and "workload" not in found.bad:
        problem = rules.same_tasks(split, workload.workload_id, parent, found)
        if problem is not None:
            found.refuse(problem)
    if split is not None and "workload" not in found.bad:
        for problem in rules.enough_tasks(settings["gpus"], split, found):
            found.refuse(problem)
    return split


def _build(
    found: Statements,
    references: References,
    settings: dict[str, Setting],
    split: SplitInfo | None,
    machine: MachineInfo,
) -> ResolvedPlan:
    workload, model, parent = references.workload, references.base_model, references.parent
    if workload is None or model is None or split is None:
        msg = "a reference is missing and no problem says so"
        raise AssertionError(msg)
    start = 0
    if parent is not None and not settings["load_weights_only"].value:
        start = parent.step_index
    total = start + settings["num_steps"].value
    for name, note in (*rules.notes(settings, model, total), *placement.notes(settings, machine)):
        settings[name] = replace(settings[name], note=note)
    values = {name: setting.value for name, setting in settings.items()}
    return ResolvedPlan(
        settings=settings,
        workload=_workload_ref(workload, split),
        base_model=BaseModelRef(
            model.slug, model.kind, model.location, model.fingerprint, model.max_context
        ),
        parent=_parent_ref(parent) if parent is not None else None,
        display_name=found.display_name.value if found.display_name else None,
        start_step=start,
        total_steps=total,
        config_hash=config_hash(
            values,
            base_fingerprint=model.fingerprint,
            workload_id=workload.workload_id,
            train_digest=split.train_digest,
            parent_checkpoint_id=parent.checkpoint_id if parent is not None else None,
        ),
        hints=(
            *rules.hints(settings, split, total, start, _weights(workload)),
            *(small.hints({s.name: s.origin for s in settings.values()}) if found.small else ()),
        ),
    )


def _weights(workload: WorkloadInfo) -> list[float]:
    return [float(term["weight"]) for term in workload.reward_identity]


def _workload_ref(workload: WorkloadInfo, split: SplitInfo) -> WorkloadRef:
    return WorkloadRef(
        workload.workload_id,
        workload.name,
        split.train,
        split.held_out,
        split.description,
        split.train_digest,
    )


def _parent_ref(parent: CheckpointInfo) -> ParentRef:
    return ParentRef(parent.checkpoint_id, parent.run_id, parent.step_index, parent.path)
