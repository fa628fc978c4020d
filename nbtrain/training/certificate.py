"""A resume's certificate: what was restored, from where to where, and whether it is exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

IRRELEVANT = frozenset(
    {
        "num_steps",
        "load_weights_only",
        "keep_checkpoints",
        "checkpoint_interval_steps",
        "reward_timeout_seconds",
        "trajectory_timeout_seconds",
        "batch_timeout_seconds",
        "gpus",
        "reward_workers",
        "environment_workers",
    }
)
"""Options that do not change what is trained, or that a resume states anew by its nature."""


def certificate(
    state: Mapping[str, Any],
    *,
    total_steps: int,
    rate_after: float,
    environment: Mapping[str, Any],
    options: Mapping[str, Any],
    parent_options: Mapping[str, Any],
) -> str:
    """The sentence a resume leaves in the run's events.

    ``state`` is the checkpoint's plain state, ``environment`` where it goes on, ``options`` and
    ``parent_options`` what it trains under now and did before. "Exact" means: everything that the
    bits depend on is as it was.
    """
    text = restored(state, total_steps=total_steps, rate_after=rate_after)
    text += _taken_along(state["collector"])
    changed = differences(state["environment"], environment)
    changed += differences(
        {k: v for k, v in parent_options.items() if _counts(k)},
        {k: v for k, v in options.items() if _counts(k)},
    )
    if options["max_staleness"]:
        changed.append("trajectories run across updates, so that timing counts")
    return exactness(text, changed)


def restored(state: Mapping[str, Any], *, total_steps: int, rate_after: float) -> str:
    """What was restored of ``state``, from which step to which, and the learning rate there."""
    step = state["step"]
    return (
        f"restored adapter, optimizer ({state['updates_applied']} updates), schedule, random state "
        f"and data position: step {step} to {total_steps}, {total_steps - step} updates, learning "
        f"rate {state['schedule']['learning_rate']:.3g} -> {rate_after:.3g}"
    )


def exactness(text: str, changed: Sequence[str]) -> str:
    """``text`` with whether what goes on is exact; not where anything has ``changed``."""
    return f"{text}; not exact: {', '.join(changed)}" if changed else f"{text}; exact"


def _taken_along(collector: Mapping[str, Any]) -> str:
    """What was finished and waited, and what was under way and starts again."""
    waiting, unfinished = len(collector["pending"]), sum(map(len, collector["unfinished"]))
    if not waiting and not unfinished:
        return ""
    return f"; {waiting} finished groups taken along, {unfinished} unfinished ones start again"


def _counts(option: str) -> bool:
    return option not in IRRELEVANT and not option.startswith(("val_", "max_total", "max_wall"))


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """``name before -> after`` for every value that differs."""
    names = sorted(before.keys() | after.keys())
    return [
        f"{name} {before.get(name)} -> {after.get(name)}"
        for name in names
        if before.get(name) != after.get(name)
    ]
