"""Making workloads: tasks and rewards, checked and the one against the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtrain.errors import Problem, Refused

if TYPE_CHECKING:
    from nbtrain.catalog import WorkloadSpec
    from nbtrain.rewards import RewardTerm

__all__ = ["build", "sums"]


def build(
    name: str,
    *,
    tasks: object,
    rewards: object,
    base_model: Any = None,
    held_out: object = 0.1,
    raw: bool = False,
) -> WorkloadSpec:
    """Check tasks and rewards, and the one against the other; raises with all problems at once."""
    from nbtrain.catalog import build_workload
    from nbtrain.rewards import as_terms, check_columns, pack

    problems: list[Problem] = []
    packed = b""
    identity: list[dict[str, Any]] = []
    terms: list[RewardTerm] = []
    try:
        terms = as_terms(rewards)
        packed, identity = pack(terms)
    except Refused as error:
        problems += error.problems
    try:
        spec = build_workload(
            name,
            tasks=tasks,
            rewards=packed,
            reward_identity=identity,
            base_model=getattr(base_model, "slug", base_model),
            held_out=held_out,
            raw=raw,
        )
    except Refused as error:
        raise Refused([*problems, *error.problems]) from None
    columns = [column for column in spec.rows[0] if column != "prompt"]
    problems += check_columns(terms, columns)
    if problems:
        raise Refused(problems)
    return spec


def sums() -> WorkloadSpec:
    """The sample workload ``sums``: additions, rewarded for the exact reply."""
    from nbtrain.catalog import SUMS, SUMS_BASE_MODEL, sums_rows
    from nbtrain.rewards import exact

    train, held_out = sums_rows()
    return build(
        SUMS, tasks=train, rewards=[exact("answer")], base_model=SUMS_BASE_MODEL, held_out=held_out
    )
