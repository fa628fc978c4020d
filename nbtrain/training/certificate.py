"""A resume's certificate: what was restored, from where to where, and whether it is exact."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nbtrain.plan.descriptor.field import short
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.plan.schedule import schedule_of

__all__ = ["certificate", "counted", "counted_options", "differences", "exactness", "restored"]

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
        "micro_batch_sequences",
        "epochs",
        "max_steps",
        "save_every",
        "keep_adapters",
        "validation_frequency_steps",
        "max_seq_length",
    }
)
"""Options that do not change what is trained, or that a resume states anew by its nature."""


def certificate(
    state: Mapping[str, Any],
    *,
    total_steps: int,
    rate_after: float,
    environment: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    stale: bool = False,
) -> str:
    """The sentence a resume leaves in the run's events.

    ``state`` is the checkpoint's plain state, ``environment`` where it goes on, ``before`` and
    ``after`` what of its plan counts (:func:`counted`), ``stale`` whether trajectories run across
    updates. "Exact" means: everything that the bits depend on is as it was.
    """
    text = restored(state, total_steps=total_steps, rate_after=rate_after)
    if "collector" in state:
        text += _taken_along(state["collector"])
    changed = differences(state["environment"], environment) + differences(before, after)
    if stale:
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
    told = ", ".join(dict.fromkeys(changed))
    return f"{text}; not exact: {told}" if changed else f"{text}; exact"


def _taken_along(collector: Mapping[str, Any]) -> str:
    """What was finished and waited, and what was under way and starts again."""
    waiting, unfinished = len(collector["pending"]), sum(map(len, collector["unfinished"]))
    if not waiting and not unfinished:
        return ""
    return f"; {waiting} finished groups taken along, {unfinished} unfinished ones start again"


def counted(plan: ResolvedPlan, total_steps: int) -> dict[str, Any]:
    """What the bits of a run of ``plan`` that ends at step ``total_steps`` depend on, by name.

    Of a descriptor that is its whole ``config``, and what the door itself chose; what a checkpoint
    cannot be gone on from under another value of is among it all the same.
    """
    options = plan.options
    if plan.config is None:
        found = counted_options(options)
        kind = options.get("scheduler_kind")
    else:
        found = {short(path): value for path, value in _leaves(plan.config, "config")}
        kind = found["scheduler.kind"]
        found = {name: value for name, value in found.items() if name not in _ELSEWHERE}
        found |= {name: options[name] for name in _CHOSEN if name in options}
    if options.get("packing") or options.get("truncation") == "right":
        found["maxSeqLength"] = options["max_seq_length"]
    if kind is not None:
        found["warm-up steps"] = schedule_of(options, total_steps)["warmup"]
        if kind != "constant":
            found["last step of the schedule"] = total_steps
    return found


def counted_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a run by options that the bits depend on."""
    aside = ("val_", "max_total", "max_wall")
    return {k: v for k, v in options.items() if k not in IRRELEVANT and not k.startswith(aside)}


_CHOSEN = ("sampler", "max_concurrent_trajectories")
"""Options that a descriptor has no field for, and that the machine or the model decide."""
_ELSEWHERE = frozenset(
    {
        "model.precision",
        "maxSeqLength",
        "training.epochs",
        "training.maxSteps",
        "training.validationFrequencySteps",
        "data.validationDataset",
        "rlHyperparams.epochs",
        "rlHyperparams.maxSteps",
    }
)
"""Fields of a config that do not change what is trained at a step, or that are told elsewhere."""


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every value of nested mappings and lists, by its path."""
    inner: Iterable[tuple[str, Any]]
    if isinstance(tree, Mapping):
        inner = ((f"{path}.{key}", value) for key, value in tree.items())
    elif isinstance(tree, list | tuple) and any(isinstance(each, Mapping) for each in tree):
        inner = ((f"{path}[{index}]", value) for index, value in enumerate(tree))
    else:
        yield path, tree
        return
    for name, value in inner:
        yield from _leaves(value, name)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """``name before -> after`` for every value that differs."""
    names = sorted(before.keys() | after.keys())
    return [
        f"{name} {before.get(name)} -> {after.get(name)}"
        for name in names
        if before.get(name) != after.get(name)
    ]
