"""Making workloads: tasks, rewards and environment, checked, and the one against the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtrain.errors import Problem, Refused
from nbtrain.plan.fields import plain

if TYPE_CHECKING:
    from nbtrain.catalog import DatasetName, WorkloadSpec
    from nbtrain.environments import Contract
    from nbtrain.rewards import RewardTerm

__all__ = ["HELD_OUT", "build", "calculator", "sums", "support_triage"]

HELD_OUT = 0.1
"""The fraction of prompts that is split off where nothing is stated."""
_TASKS = "State tasks=… as well, or leave it out"


def build(
    name: str,
    *,
    tasks: object,
    rewards: object = None,
    environment: object = None,
    base_model: Any = None,
    held_out: object = HELD_OUT,
    raw: bool = False,
    dataset: DatasetName | None = None,
    grader: str | None = None,
) -> WorkloadSpec:
    """Check all parts, and the one against the other; raises with all problems at once.

    Without tasks, rewards and environment it is a bare workload.
    """
    from nbtrain.catalog import build_workload
    from nbtrain.environments import check_columns as check_reset
    from nbtrain.rewards import check_columns

    problems: list[Problem] = []
    if tasks is None and not (rewards is None and environment is None):
        message = "tasks is missing: rewards and an environment belong to tasks"
        hint = "Leave rewards and environment out for a bare workload, for descriptors"
        raise Refused([Problem("tasks", message, hint=hint)])
    base_model = getattr(base_model, "slug", base_model)
    if tasks is None and rewards is None and environment is None:
        return _bare(
            held_out, raw, name=name, base_model=base_model, dataset=dataset, grader=grader
        )
    terms, packed, identity = _rewards(rewards, environment, problems)
    contract, packed_environment, environment_identity = _environment(environment, raw, problems)
    try:
        spec = build_workload(
            name,
            tasks=tasks,
            rewards=packed,
            reward_identity=identity,
            base_model=base_model,
            held_out=held_out,
            raw=raw,
            environment=packed_environment,
            environment_identity=environment_identity,
            environment_form=contract.form if contract else None,
            dataset=dataset,
            grader=grader,
        )
    except Refused as error:
        raise Refused([*problems, *error.problems]) from None
    columns = [column for column in spec.rows[0] if column != "prompt"]
    problems += check_columns(terms, columns, environment=environment is not None)
    problems += check_reset(contract, columns)
    if problems:
        raise Refused(problems)
    return spec


def _bare(held_out: object, raw: object, **parts: Any) -> WorkloadSpec:
    """A workload without tasks; what says how tasks are taken says nothing then."""
    from nbtrain.catalog import bare_workload

    stated = {"held_out": (held_out, HELD_OUT), "raw": (raw, False)}
    problems = [
        Problem(field, f"{field} is stated, and there are no tasks", plain(value), hint=_TASKS)
        for field, (value, default) in stated.items()
        if not (isinstance(value, int | float) and value == default)
    ]
    try:
        spec = bare_workload(**parts)
    except Refused as error:
        problems = [*error.problems, *problems]
    if problems:
        raise Refused(problems)
    return spec


def _rewards(
    rewards: object, environment: object, problems: list[Problem]
) -> tuple[list[RewardTerm], bytes, list[dict[str, Any]]]:
    from nbtrain.rewards import as_terms, pack
    from nbtrain.rewards import environment as own_reward

    if rewards is None and environment is not None:
        rewards = own_reward()
    try:
        terms = as_terms(rewards)
        return terms, *pack(terms)
    except Refused as error:
        problems += error.problems
        return [], b"", []


def _environment(
    environment: object, raw: bool, problems: list[Problem]
) -> tuple[Contract | None, bytes | None, dict[str, Any] | None]:
    from nbtrain.environments import pack

    if environment is None:
        return None, None, None
    if raw is True:
        message = "raw is True, and an environment speaks in chat messages"
        problems.append(Problem("raw", message, found=True, allowed="False with an environment"))
    try:
        packed, identity, contract = pack(environment)
    except Refused as error:
        problems += error.problems
        return None, None, None
    return contract, packed, identity


def sums() -> WorkloadSpec:
    """The sample workload ``sums``: additions, rewarded for the exact reply."""
    from nbtrain.catalog import SUMS, SUMS_BASE_MODEL, sums_rows
    from nbtrain.rewards import exact

    train, held_out = sums_rows()
    return build(
        SUMS, tasks=train, rewards=[exact("answer")], base_model=SUMS_BASE_MODEL, held_out=held_out
    )


def calculator() -> WorkloadSpec:
    """The sample workload ``calculator``: additions in two turns, by way of a tool."""
    from nbtrain.catalog import CALCULATOR, SUMS_BASE_MODEL, calculator_rows
    from nbtrain.environments.calculator import Calculator

    train, held_out = calculator_rows()
    return build(
        CALCULATOR,
        tasks=train,
        environment=Calculator,
        base_model=SUMS_BASE_MODEL,
        held_out=held_out,
    )


def support_triage() -> WorkloadSpec:
    """The sample workload ``support-triage``: letters that a descriptor's datasets hold."""
    from nbtrain.catalog import SUPPORT_TRIAGE

    return build(SUPPORT_TRIAGE, tasks=None, grader="json-label-match")
