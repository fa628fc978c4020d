"""A first look: the smaller values that ``small`` gives to what a plan does not state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nbtrain.errors import Problem
from nbtrain.plan.fields import show

__all__ = ["VALUES", "hints", "in_words", "note", "of", "refusals"]

OPTIONS: Mapping[str, Any] = {
    "batch_size": 4, "group_size": 4, "val_num_tasks": 16, "val_interval_steps": 10,
}  # fmt: skip
"""16 trajectories a step in place of 256; a round of at most 16 every tenth step in place of 50
at each. ``num_steps`` stays: a run can be cancelled at any step, and its schedule would change."""

FIELDS: Mapping[str, Any] = {
    "training.maxSteps": 30, "training.validationFrequencySteps": 10,
    "rlHyperparams.maxSteps": 30, "rlHyperparams.promptsPerStep": 4,
}  # fmt: skip
"""Of a descriptor and of a supervised run, whose length else depends on the dataset's."""

VALUES: Mapping[str, Any] = {**OPTIONS, **FIELDS}
"""By the name of an option, or by what refusals call a descriptor's field."""


def of(name: str, default: Any) -> Any | None:
    """The small value of an unstated option or field; ``None`` where it keeps its default."""
    value = VALUES.get(name)
    return None if value == default else value


def note(default: Any) -> str:
    """What the resolved plan says beside a small value."""
    return f"in place of {show(default)}"


def refusals(*, smoke: bool, parent: bool) -> Iterator[Problem]:
    """Where a first look makes no sense: beside a smoke check, and from a checkpoint."""
    if smoke:
        message = "small is stated with smoke: a smoke check takes few rows anyway"
        yield Problem("small", message, hint="State one of them")
    if parent:
        message = (
            "small is for a run of its own: what goes on from a checkpoint inherits what is not "
            "stated"
        )
        yield Problem("small", message, hint="Leave it out, and state the smaller values")


def hints(origins: Mapping[str, str]) -> Iterator[str]:
    """That nothing was left to be smaller; ``origins`` are those of the whole plan."""
    if "small" not in origins.values():
        names = [name for name in VALUES if name in origins]
        told = "are stated, as small already, or of no effect"
        yield f"small changes nothing: {', '.join(names)} {told}"


def in_words() -> str:
    """The values, for help texts."""
    options = ", ".join(f"{name} {value}" for name, value in OPTIONS.items())
    fields = ", ".join(f"{name} {value}" for name, value in FIELDS.items())
    return f"{options}; of a supervised run and of a descriptor {fields}"
