"""What a ``%%train`` cell says: its line and body read together, every problem at once."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nbtrain.client import Client
from nbtrain.client.descriptors import is_descriptor
from nbtrain.client.resolved import ResolvedView
from nbtrain.errors import PlanRefused, Problem
from nbtrain.notebook.flags import TRAIN
from nbtrain.notebook.line import ParsedLine, Word, parse
from nbtrain.notebook.refusals import CellRefused
from nbtrain.plan import source
from nbtrain.plan.source import SourcedMapping

__all__ = ["Cell", "CellText", "read_cell", "value_of"]

_FIELDS = {flag.field: flag.name for flag in TRAIN if flag.field}


@dataclass(frozen=True, slots=True)
class CellText:
    """A cell as it was typed: ``%%train``, the line behind it and the body below."""

    line: str
    body: str
    magic: str = "%%train "

    @property
    def whole(self) -> str:
        """The cell's text; its first line is line 1 of every place."""
        return f"{self.magic}{self.line}\n{self.body}"


@dataclass(slots=True)
class Cell:
    """A cell that can be resolved: the body, what the line says of the plan, and what to do."""

    text: CellText
    body: Mapping[str, Any]
    beside: dict[str, Any] = field(default_factory=dict)
    into: str | None = None
    wait: bool = False
    dry_run: bool = False
    check: bool = False
    new: bool = False
    places: dict[str, Word] = field(default_factory=dict)

    def resolve(self, client: Client) -> ResolvedView:
        """The resolved plan. Raises :class:`CellRefused` with every problem."""
        stated: dict[str, Any] = {
            "descriptor" if is_descriptor(self.body) else "options": self.body
        }
        try:
            return client.training.resolve(**stated, **self.beside)
        except PlanRefused as error:
            raise self.refusal(error) from None

    def refusal(self, error: PlanRefused) -> CellRefused:
        """The plan's refusal with places in the cell."""
        return refused(self.text, [self._placed(p) for p in error.problems])

    def _placed(self, problem: Problem) -> Problem:
        """A problem without a place gets that of its key, else that of its word on the line."""
        if problem.where is not None:
            return problem
        if problem.field in self.body:
            body = self.body
            where = body.where_value(problem.field) if isinstance(body, SourcedMapping) else None
            return replace(problem, where=where)
        word = self.places.get(problem.field)
        if word is None:
            return problem
        # it was typed as a flag, so it is called by it
        said = problem.message.removeprefix(problem.field)
        flag = _FLAGS[problem.field]
        message = problem.message if said == problem.message else f"{flag}{said}"
        return replace(problem, message=message, where=word.where)


def read_cell(text: CellText, names: Mapping[str, object]) -> Cell:
    """Read line and body. ``names`` are the Python objects that ``$name`` may stand for.

    Raises :class:`CellRefused` with the problems of both.
    """
    line = parse(text.line, TRAIN, offset=len(text.magic))
    problems = list(line.problems)
    beside: dict[str, Any] = {}
    for flag in TRAIN:
        if flag.field and flag.name in line.values:
            beside[flag.field] = value_of(line.values[flag.name], names, problems)
        elif flag.field and line.has(flag.name):
            beside[flag.field] = True
    into = _variable(line, problems)
    if line.has("--check") and not line.has("--dry-run"):
        problems.append(_check_alone(line.switches["--check"]))
    if line.has("--dry-run"):
        idle = [line.switches[name] for name in ("--wait", "--new") if line.has(name)]
        problems += [_idle(word) for word in idle]
    try:
        body = source.parse(text.body, names=names, offset_lines=1, empty_ok=True, defer=True)
    except PlanRefused as error:
        raise refused(text, [*problems, *error.problems]) from None
    if problems:
        raise refused(text, [*problems, *body.problems])
    return Cell(
        text=text,
        body=body,
        beside={_ARGUMENTS[name]: value for name, value in beside.items()},
        into=into,
        wait=line.has("--wait"),
        dry_run=line.has("--dry-run"),
        check=line.has("--check"),
        new=line.has("--new"),
        places=_places(line, beside),
    )


_CALLED = {"base_model_slug": "baseModel", "algorithm": "method"}
"""What a descriptor calls that which the line states."""

_FLAGS = _FIELDS | {called: _FIELDS[name] for name, called in _CALLED.items()}
_ARGUMENTS = {
    "workload": "bench_id",
    "base_model_slug": "base_model_slug",
    "algorithm": "algorithm",
    "parent_checkpoint_id": "parent_checkpoint_id",
    "load_weights_only": "load_weights_only",
    "display_name": "display_name",
    "small": "small",
    "smoke": "smoke",
}


def _places(line: ParsedLine, beside: Mapping[str, Any]) -> dict[str, Word]:
    """Where the line states what refusals of options and of descriptors name."""
    places = {name: _place(line, flag) for name, flag in _FIELDS.items() if name in beside}
    return places | {_CALLED[name]: word for name, word in places.items() if name in _CALLED}


def _check_alone(word: Word) -> Problem:
    told = "--check needs --dry-run: together they run the start checks alone"
    hint = "A run that is started checks itself before its first update"
    return Problem("--check", told, where=word.where, hint=hint)


def _idle(word: Word) -> Problem:
    told = f"{word.flag} is stated with --dry-run, which starts nothing"
    return Problem(word.flag or "line", told, where=word.where, hint="Leave one of the two out")


def _place(line: ParsedLine, flag: str) -> Word:
    return line.values.get(flag) or line.switches[flag]


def value_of(word: Word, names: Mapping[str, object], problems: list[Problem]) -> Any:
    """The word's value: the Python object of a whole ``$name``, else its text.

    ``$$`` at the start is a literal dollar. An undefined name becomes a problem.
    """
    if word.text.startswith("$$"):
        return word.text[1:]
    name = source.name_in(word.text)
    if name is None:
        return word.text
    if name in names:
        return names[name]
    hint = source.undefined(word.text, names)
    told = f"the name {word.text} is not defined"
    problems.append(Problem("line", told, found=word.text, where=word.where, hint=hint))
    return None


_TAKEN = {*dir(builtins), "In", "Out", "get_ipython", "exit", "quit", "display", "open"}
_OWN = re.compile(r"_+|_i+|_i?[0-9]+|_(oh|dh|ih|sh|exit_code)|__\w+__")
"""Names that Python and IPython have for their own: builtins, histories, and what is dunder."""


def _variable(line: ParsedLine, problems: list[Problem]) -> str | None:
    word = line.values.get("--into")
    if word is None:
        return None
    if not word.text.isidentifier() or keyword.iskeyword(word.text):
        told = f"--into needs the name of a variable, found {word.text!r}"
        problems.append(Problem("--into", told, found=word.text, where=word.where))
    elif word.text in _TAKEN or _OWN.fullmatch(word.text):
        whose = "Python" if hasattr(builtins, word.text) else "IPython"
        told = f"--into would overwrite {word.text}, which is {whose}'s own"
        hint = "Any other name will do, such as run"
        problems.append(Problem("--into", told, word.text, where=word.where, hint=hint))
    return word.text


def refused(text: CellText, problems: list[Problem]) -> CellRefused:
    """The cell's refusal, problems in the order of the cell."""
    problems = [_no_expression(problem) for problem in problems]
    return CellRefused(source.in_order(problems), text.whole, "nothing was started")


def _no_expression(problem: Problem) -> Problem:
    """The problem; where ``$run.best()`` was found, with what to write instead."""
    hint = source.expression_in(problem.found) if isinstance(problem.found, str) else None
    return problem if hint is None else replace(problem, hint=hint)
