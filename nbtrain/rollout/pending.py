"""Finished groups that wait for their step, as plain JSON and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nbtrain.rollout.types import Group, TerminationReason, Trajectory

__all__ = ["group_from_json", "group_to_json"]


def group_to_json(group: Group, *, owner: int) -> dict[str, Any]:
    """A group with its trajectories, tokens, versions and grades; ``owner`` is its rank."""
    plain = asdict(group)
    for trajectory in plain["trajectories"]:
        trajectory["reason"] = str(trajectory["reason"])
    return plain | {"owner": owner}


def group_from_json(plain: dict[str, Any]) -> tuple[Group, int]:
    """The group and the rank that :func:`group_to_json` was given."""
    fields = dict(plain)
    owner = int(fields.pop("owner"))
    trajectories = [_trajectory(one) for one in fields.pop("trajectories")]
    return Group(**fields, trajectories=trajectories), owner


def _trajectory(plain: dict[str, Any]) -> Trajectory:
    fields = dict(plain)
    fields["prompt_ids"] = tuple(fields["prompt_ids"])
    fields["observed"] = [(start, stop) for start, stop in fields["observed"]]
    fields["reason"] = TerminationReason(fields["reason"])
    return Trajectory(**fields)
