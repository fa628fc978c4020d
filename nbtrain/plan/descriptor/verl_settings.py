"""Settings that a descriptor gives verl: known by name, kind and range, and refused with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nbtrain.errors import Problem, Where
from nbtrain.plan.descriptor.document import SETTINGS, Document
from nbtrain.plan.fields import Option, Type, check, describe, plain, spelt
from nbtrain.plan.source import BROKEN, SourcedMapping

__all__ = ["ENGINE_SETTINGS", "engine_refusals"]


def _setting(name: str, kind: Type, text: str, default: Any = None, **more: Any) -> Option:
    return Option(name, kind, text, "engine", default, **more)


ENGINE_SETTINGS: dict[str, Option] = {
    option.name: option
    for option in (
        _setting("engine.forward_prefetch", "boolean", "Fetch the next layer's weights while the "
                 "current one computes.", False),
        _setting("engine.reshard_after_forward", "boolean", "Free each layer's gathered weights "
                 "after the forward pass.", True),
        _setting("engine.pad_to_length", "boolean", "Pad each pass to a multiple of the bucket.",
                 False),
        _setting("engine.pad_to_length_bucket", "integer", "The multiple, in tokens.", 1024, min=1,
                 max=1_048_576),
        _setting("rollout.enable_chunked_prefill", "boolean", "Split the prefill of a long "
                 "prompt.", True),
        _setting("rollout.enable_prefix_caching", "boolean", "Reuse the cache of prompts that "
                 "start alike.", True),
        _setting("rollout.enforce_eager", "boolean", "Sample without CUDA graphs.", False),
        _setting("rollout.max_num_seqs", "integer", "Sequences sampled at once.", min=1,
                 max=1_048_576),
        _setting("rollout.max_num_batched_tokens", "integer", "Tokens of one batch.", min=1,
                 max=1_073_741_824),
    )
}  # fmt: skip
"""What a run may set, by name; ``rollout.`` settings belong to reinforcement runs."""

_NEVER = {
    "seed": "the seed is hyperparams.training.seed",
    "path": "a path is never set this way",
    "code": "code is never set this way",
    "lr": "the plan decides it",
    "batch": "the plan decides it",
    "length": "the plan decides it",
}


def engine_refusals(found: Document) -> Iterator[Problem]:
    """Every problem of ``engineSettings``; without any other, that verl is not built yet."""
    if "config.engineSettings" not in found.groups:
        return
    where = found.groups["config.engineSettings"]
    yield from _settings(found)
    engine = found.options.get("config.engineSettings.engine")
    if engine is None and "engineSettings.engine" not in found.bad:
        message = "engineSettings.engine is missing: the settings are for one engine"
        yield Problem("engineSettings.engine", message, None, "verl", where)
    message = "engineSettings needs verl, which is not built yet"
    yield Problem("engineSettings", message, where=where, hint="Leave it out")


def _settings(found: Document) -> Iterator[Problem]:
    statement, name = found.options.get(SETTINGS), "engineSettings.settings"
    if statement is None:
        if name not in found.bad:
            where = found.groups["config.engineSettings"]
            yield Problem(name, f"{name} is missing: each setting's value by its name", where=where)
        return
    given = statement.value
    if not isinstance(given, Mapping):
        message = f"{name} needs a mapping, found {describe(given)}"
        yield Problem(name, message, plain(given), "a mapping", statement.where)
        return
    for key, value in given.items():
        if value is not BROKEN:
            at = given.where_value(key) if isinstance(given, SourcedMapping) else statement.where
            shown = spelt(key)
            problem = _one(found, f"{name}.{shown}", shown, value, at)
            if problem is not None:
                yield problem


def _one(found: Document, name: str, key: str, value: Any, where: Where | None) -> Problem | None:
    option = ENGINE_SETTINGS.get(key)
    if option is None:
        near = difflib.get_close_matches(key, ENGINE_SETTINGS, n=1, cutoff=0.75)
        words = key.lower().replace(".", "_").split("_")
        never = next((why for word, why in _NEVER.items() if word in words), None)
        hint = f"Did you mean {near[0]}?" if near else None
        message = f"{name} is not a setting that a run may set"
        if not near and never:
            message += f": {never}"
        return Problem(name, message, plain(value), " or ".join(ENGINE_SETTINGS), where, hint)
    if key.startswith("rollout.") and found.method == "sft":
        message = f"{name} is for the rollout engine, which a supervised run does not have"
        return Problem(name, message, plain(value), where=where)
    return check(replace(option, name=name), value, where=where)[1]
