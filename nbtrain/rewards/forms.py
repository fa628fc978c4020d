"""The three forms a reward function can have, told apart by its parameters' names.

- one sample: ``f(completion, task)``, the completion's text and the task's columns as a dict (its
  prompt under ``"prompt"``); ``task`` may be left out, and ``environment`` may be asked for;
- TRL's: ``f(prompts, completions, **columns)``, all by keyword, each a list as long as the group;
  message lists for chat tasks, text for raw ones; of the columns a function gets those it names,
  or all with ``**columns``; ``environments`` are those of the completions, where there are any;
- verl's: ``compute_score(data_source, solution_str, ground_truth, extra_info)``, one sample.

Any of them may be ``async``. Where an environment answers, a completion has several messages:
TRL's form gets all of them, the other two the text of the last reply. An environment reaches a
reward as an object with its public plain state after its end, and nothing else of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["ALLOWED_FORMS", "Form", "Signature", "classify", "read_signature"]

ALLOWED_FORMS = (
    "f(completion, task), f(prompts, completions, **columns) "
    "or compute_score(data_source, solution_str, ground_truth, extra_info)"
)

_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


class Form(StrEnum):
    """How a reward function is called."""

    SAMPLE = "sample"
    """Once per completion: ``f(completion, task)``."""
    GROUP = "group"
    """Once per group: ``f(prompts, completions, **columns)``."""
    VERL = "verl"
    """Once per completion: ``compute_score(data_source, solution_str, …)``."""

    @property
    def per_sample(self) -> bool:
        """Whether one call scores one completion."""
        return self is not Form.GROUP


@dataclass(frozen=True, slots=True)
class Signature:
    """What a reward function takes: its form, the names it can be given, those it must get."""

    form: Form
    names: frozenset[str]
    required: frozenset[str]
    any_name: bool

    @property
    def needs_environment(self) -> bool:
        """Whether the function cannot be called where there is no environment."""
        return bool(self.required & {"environment", "environments"})

    def missing(self, columns: Sequence[str] | Mapping[str, Any]) -> list[str]:
        """Columns the function cannot do without and ``columns`` does not hold."""
        if self.form is Form.GROUP:
            return sorted(self.required - {"prompts", "completions", "environments", *columns})
        if self.form is Form.VERL and "ground_truth" in self.required:
            known = set(columns) & {"ground_truth", "reward_model"}
            return [] if known else ["ground_truth"]
        return []


def read_signature(function: Any) -> Signature | str:
    """The function's signature, or a clause that says why it cannot be a reward."""
    if inspect.isclass(function):
        return "is a class; pass an instance of it"
    if not callable(function):
        return "cannot be called"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return "does not say which parameters it takes"
    if any(
        inspect.isasyncgenfunction(f) or inspect.isgeneratorfunction(f) for f in faces(function)
    ):
        return "is a generator; return the scores instead of yielding them"
    return classify(parameters)


def faces(function: Any) -> Iterator[Any]:
    """The function itself, what a partial wraps, and an object's ``__call__``."""
    while hasattr(function, "func") and hasattr(function, "keywords"):
        yield function
        function = function.func
    yield function
    if not inspect.isroutine(function):
        yield type(function).__call__


def classify(parameters: list[inspect.Parameter]) -> Signature | str:
    """The signature of a function with these parameters, or a clause on why it can be none."""
    by_position = [p for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    shown = ", ".join(str(p).split(":")[0].split("=")[0] for p in parameters) or "nothing"
    required = frozenset(name for name, p in named.items() if p.default is p.empty)
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    marks = [name for name in ("completion", "completions", "solution_str") if name in named]
    if by_position or len(marks) != 1:
        return f"takes ({shown})"
    form = {"completion": Form.SAMPLE, "completions": Form.GROUP, "solution_str": Form.VERL}[
        marks[0]
    ]
    sample = {"completion", "task", "environment"}
    allowed = {Form.SAMPLE: sample, Form.VERL: set(_VERL)}.get(form)
    if allowed is not None and required - allowed:
        return f"takes ({shown}): nothing can be given for {', '.join(sorted(required - allowed))}"
    return Signature(form, frozenset(named), required, any_name)
