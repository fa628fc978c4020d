"""A descriptor, or the flat form of a supervised run, into a ResolvedPlan or all refusals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nbtrain.errors import PlanRefused, Problem
from nbtrain.plan import small
from nbtrain.plan.descriptor.build import build, total_steps
from nbtrain.plan.descriptor.document import (
    REWARD,
    Document,
    read_descriptor,
    read_flat,
    read_further,
)
from nbtrain.plan.descriptor.draft import fill
from nbtrain.plan.descriptor.machine import refusals as machine_refusals
from nbtrain.plan.descriptor.machine import take_profile
from nbtrain.plan.descriptor.parent import no_further_steps
from nbtrain.plan.descriptor.parent import refusals as parent_refusals
from nbtrain.plan.descriptor.references import (
    dataset_problems,
    grader_problem,
    look_up,
    values_before,
)
from nbtrain.plan.descriptor.rules import method_refusals, take_shape
from nbtrain.plan.descriptor.rules import refusals as field_refusals
from nbtrain.plan.descriptor.table import FIELDS
from nbtrain.plan.descriptor.terms import Reward, grader_with_id, read_reward, reward_before
from nbtrain.plan.descriptor.verl_settings import engine_refusals
from nbtrain.plan.fields import check
from nbtrain.plan.registry import Registry
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.plan.source import in_order
from nbtrain.plan.statements import Statement

__all__ = ["resolve_descriptor", "resolve_flat", "resolve_further"]


def resolve_descriptor(
    document: Mapping[str, Any],
    registry: Registry,
    *,
    workload: object = None,
    base_model: object = None,
    parent: object = None,
    load_weights_only: bool | None = None,
    display_name: str | None = None,
    algorithm: str | None = None,
    first_look: bool = False,
    smoke: bool = False,
) -> ResolvedPlan:
    """The plan that a descriptor makes, every field filled in, each with its origin.

    The arguments say what may also stand beside the document; stated twice, equal is fine and
    different is refused. With a ``parent`` checkpoint every unstated field of ``config`` and
    ``execution`` is taken over from its run; ``epochs`` and ``maxSteps`` count from that run's
    beginning, and the new one ends where it would have; ``load_weights_only`` starts at step 0.

    Raises :class:`PlanRefused` with everything that is wrong, in the order of the text.
    """
    beside = {
        "workload": workload, "base_model_slug": base_model, "parent_checkpoint_id": parent,
        "load_weights_only": load_weights_only, "display_name": display_name,
        "algorithm": algorithm, "small": first_look, "smoke": smoke,
    }  # fmt: skip
    return _resolve(read_descriptor(document, beside), registry)


def resolve_flat(
    options: Mapping[str, Any], registry: Registry, beside: Mapping[str, Any]
) -> ResolvedPlan:
    """The same for the flat form of a supervised run; ``beside`` has options' own names."""
    return _resolve(read_flat(options, beside), registry)


def resolve_further(
    document: object, registry: Registry, beside: Mapping[str, Any], method: str
) -> ResolvedPlan:
    """The same for what goes on from a checkpoint of a run of ``method`` by a descriptor."""
    return _resolve(read_further(document, beside, method), registry)


def _resolve(found: Document, registry: Registry) -> ResolvedPlan:
    kind = found.options.get("kind")
    if (
        kind is not None and isinstance(kind.value, str) and kind.value == "pipeline"
    ):  # nothing else of it would make sense
        problem = check(FIELDS["kind"].option, kind.value, where=kind.where)[1]
        raise PlanRefused([problem] if problem is not None else [])
    refs = look_up(found, registry)
    counted = no_further_steps(found, refs.parent)
    if counted is not None:
        found.refuse(counted)
    before = values_before(refs, found)
    draft = fill(found, refs, before)
    take_shape(draft)
    take_profile(draft)
    for problem in (*method_refusals(found), *_first_look(found)):
        found.refuse(problem)
    reward = Reward()
    grader_statement = found.options.get("grader")
    bad_grader = grader_problem(found)
    if bad_grader is not None:
        found.refuse(bad_grader)
    workload_grader = refs.workload.grader if refs.workload is not None else None
    grader = None
    if bad_grader is None:
        stated = grader_statement is not None and grader_statement.value is not None
        recorded = grader_statement if stated else Statement(workload_grader)
        if not stated and before and refs.parent is not None and refs.parent.resolved.get("grader"):
            recorded = Statement(refs.parent.resolved["grader"])
            draft.origins["grader"] = "inherited"
        if recorded is not None and recorded.value is not None and "grader" not in found.bad:
            grader = grader_with_id(found, registry, recorded, "grader")
        # unstated, it depends on the workload, which already has its refusal
        told = "workload" not in found.bad or found.options.get(REWARD) is not None
        if not draft.supervised and told:
            earlier = reward_before(refs.parent.resolved) if before and refs.parent else None
            reward = read_reward(found, registry, refs.dataset, workload_grader, earlier)
    total = total_steps(draft)
    for problem in (
        *dataset_problems(found, refs),
        *engine_refusals(found),
        *field_refusals(draft),
        *machine_refusals(draft),
        *parent_refusals(draft, total),
    ):
        found.refuse(problem)
    if found.problems:
        raise PlanRefused(in_order(found.problems))
    return build(draft, reward, grader, total)


def _first_look(found: Document) -> Iterator[Problem]:
    if found.small:
        yield from small.refusals(smoke="smoke" in found.groups, parent=bool(found.parent))
