"""What a plan states: the body's keys and the arguments beside it, told apart and brought together.

Six settings can stand in the body and beside it (on the magic's line, as arguments of ``create``).
Stated twice, equal is fine and different is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbtrain.errors import Problem, Where
from nbtrain.plan.fields import describe, plain, spelt
from nbtrain.plan.naming import ONE_LINE, is_id_shaped, not_one_line
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.source import BROKEN, SourcedMapping

REFERENCES = ("workload", "base_model_slug", "parent_checkpoint_id")
"""Body keys that name something registered."""

BODY_KEYS = (*REFERENCES, "display_name", *OPTIONS)
"""Every key that a body may have."""

DESCRIPTOR_GROUPS = ("config", "execution", "smoke", "grader", "warmStartModelId", "submissionId")
"""Keys that only a descriptor has at its top."""

# what people write for a key that has another name here
_OTHER_NAMES = {
    "model": "base_model_slug", "base_model": "base_model_slug", "method": "algorithm",
    "from": "parent_checkpoint_id", "parent": "parent_checkpoint_id", "name": "display_name",
    "weights_only": "load_weights_only", "lr": "learning_rate", "steps": "num_steps",
    "max_steps": "num_steps", "bench_id": "workload", "num_generations": "group_size",
    "beta": "kl_beta", "epsilon": "clip_low", "epsilon_high": "clip_high",
    "max_completion_length": "max_output_tokens_per_turn", "loss_type": "algorithm",
    "use_vllm": "sampler", "save_steps": "checkpoint_interval_steps",
    "eval_steps": "val_interval_steps", "warmup_steps": "lr_warmup_steps",
}  # fmt: skip

# what has no counterpart of the same meaning: what to state instead
_INSTEAD = {
    "per_device_train_batch_size": "batch_size counts the groups of an update, group_size the "
    "trajectories of each",
    "gradient_accumulation_steps": "batch_size groups make one update, whatever memory there is",
    "num_train_epochs": "num_steps counts updates; a step takes batch_size tasks",
    "max_prompt_length": "Prompts are never cut: one that leaves no room for a reply is refused",
    "vllm_mode": "sampler: vllm samples with vLLM, in the run's own process",
    "warmup_ratio": "lr_warmup_steps counts steps",
    "lr_scheduler_type": "The rate rises over lr_warmup_steps, stays for lr_hold_steps and falls "
    "along a cosine to lr_min_ratio",
    "logging_steps": "Every step is recorded",
}


@dataclass(slots=True)
class Statement:
    """One thing stated, with its place where it came from a text."""

    value: Any
    where: Where | None = None


@dataclass(slots=True)
class Statements:
    """Everything stated, by key. References keep both statements when they may differ.

    ``bad`` names the keys that have a problem already, so that no rule complains again.
    """

    options: dict[str, Statement] = field(default_factory=dict)
    references: dict[str, list[Statement]] = field(default_factory=dict)
    display_name: Statement | None = None
    bad: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    small: bool = False
    """Whether what is not stated takes the smaller values of a first look."""

    def refuse(self, problem: Problem) -> None:
        """Keep a problem, and count its field as bad."""
        self.bad.add(problem.field)
        self.problems.append(problem)


def gather(options: object, beside: Mapping[str, Any], also: Container[str] = ()) -> Statements:
    """The statements of a body and of what stands beside it (``None`` there is unstated).

    Keys among ``also`` are left to another method's rules.

    A body that is no mapping, unknown keys (with the nearest known one), a descriptor's groups and
    settings stated twice differently become problems.
    """
    found = Statements()
    if options is None:
        options = {}
    if not isinstance(options, Mapping):
        message = f"options: a mapping is needed, found {describe(options)}"
        found.refuse(Problem("options", message, plain(options)))
        options = {}
    if isinstance(options, SourcedMapping):
        found.problems.extend(options.problems)
    for key, value in options.items():
        if value is BROKEN:
            found.bad.add(key)
        elif key in OPTIONS:
            found.options[key] = Statement(value, _where(options, key))
        elif key in REFERENCES:
            if value is not None:
                found.references[key] = [Statement(value, _where(options, key))]
        elif key == "display_name":
            found.display_name = Statement(value, _where(options, key))
        elif key not in also:
            found.refuse(unknown(options, key))
    for key, value in beside.items():
        if value is not None:
            _beside(found, key, Statement(value))
    check_name(found)
    return found


def _where(options: Mapping[str, Any], key: str) -> Where | None:
    return options.where_value(key) if isinstance(options, SourcedMapping) else None


def unknown(options: Mapping[str, Any], key: object) -> Problem:
    """The refusal of a key that is no option, with the nearest one."""
    where = options.where_key(str(key)) if isinstance(options, SourcedMapping) else None
    if key in DESCRIPTOR_GROUPS:
        return mixed(str(key), where)
    shown = spelt(key)
    near = nearest(shown)
    hint = f"Did you mean {near}?" if near else "%train options lists every option"
    hint = _INSTEAD.get(shown.lower(), hint)
    return Problem(shown, f"there is no option {shown}", shown, where=where, hint=hint)


def mixed(key: str, where: Where | None) -> Problem:
    """The refusal of a descriptor's group among options."""
    message = (
        f"{key} is a group of a descriptor, and a document without kind is options: it is one or "
        "the other, never a mix"
    )
    return Problem(key, message, key, where=where, hint="Write kind: run for a descriptor")


def nearest(key: str) -> str | None:
    """The known key that an unknown one most likely means."""
    snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in key).replace("-", "_")
    snake = snake.strip("_")
    if snake in BODY_KEYS:
        return snake
    if snake in _OTHER_NAMES:
        return _OTHER_NAMES[snake]
    close = difflib.get_close_matches(snake, BODY_KEYS, n=1, cutoff=0.7)
    if close:
        return close[0]
    # A name cut short ("stesp" for num_steps): compare with the ends of names, shortest first.
    ends: dict[str, str] = {}
    for name in sorted(BODY_KEYS, key=len):
        words = name.split("_")
        for first in range(1, len(words)):
            ends.setdefault("_".join(words[first:]), name)
    close = difflib.get_close_matches(snake, ends, n=1, cutoff=0.75)
    return ends[close[0]] if close else None


def _beside(found: Statements, key: str, statement: Statement) -> None:
    if key in found.bad:
        return
    if key in REFERENCES:
        found.references.setdefault(key, []).append(statement)
        return
    in_body = found.display_name if key == "display_name" else found.options.get(key)
    if in_body is not None and in_body.value is not None and not same(in_body, statement):
        found.refuse(stated_twice(key, in_body, statement))
    elif key == "display_name":
        found.display_name = statement
    elif in_body is None or in_body.value is None:
        found.options[key] = statement


def same(one: Statement, two: Statement) -> bool:
    """Whether two statements plainly say the same."""
    a, b = one.value, two.value
    if a is b:
        return True
    return isinstance(a, str | bool | int | float) and type(a) is type(b) and bool(a == b)


def stated_twice(key: str, body: Statement, beside: Statement) -> Problem:
    """The refusal of a setting whose two statements differ."""
    message = (
        f"{key} is stated twice, differently: {describe(body.value)} in the body, "
        f"{describe(beside.value)} beside it"
    )
    return Problem(key, message, plain(body.value), where=body.where, hint="State it once")


def check_name(found: Statements) -> None:
    """Refuse a display name that is not one short line, or would be taken for an id."""
    if found.display_name is None or found.display_name.value is None:
        found.display_name = None
        return
    value, where = found.display_name.value, found.display_name.where
    hint = None
    if not isinstance(value, str):
        message = f"display_name needs text, found {describe(value)}"
        hint = "Put it in quotes" if isinstance(value, int | float) else None
    elif broken := not_one_line(value):
        message = f"display_name {broken}, found {describe(value)}"
    elif is_id_shaped(value):
        message = f"display_name looks like the beginning of an id, found {describe(value)}"
        hint = "Put something else in front of it, such as run-"
    else:
        return
    allowed = f"{ONE_LINE}, and not the beginning of an id"
    found.refuse(Problem("display_name", message, plain(value), allowed, where, hint))
