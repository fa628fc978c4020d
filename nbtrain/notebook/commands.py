"""A line of ``%train``: its verb, its words and its flags, and what is wrong with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nbtrain.client import Run, default_client
from nbtrain.errors import NotFound, Problem, Refused
from nbtrain.notebook.cell import CellText, value_of
from nbtrain.notebook.line import ParsedLine, Word, parse
from nbtrain.notebook.names import Names
from nbtrain.notebook.refusals import CellRefused
from nbtrain.notebook.verbs import FLAGS, USE, VERBS, Verb, unknown
from nbtrain.plan.fields import counted
from nbtrain.plan.source import in_order

__all__ = ["run_command", "wrong_line"]


def run_command(shell: Any, text: CellText) -> Any:
    """Do what the line says and return what the cell should show or assign."""
    names = Names(shell)
    line = parse(text.line, FLAGS, offset=len(text.magic), positional=True)
    if not line.rest and not line.problems and not line.values:
        print(USE)
        return None
    word, *rest = line.rest or [Word("", len(text.magic) + 1)]
    verb = VERBS.get(word.text)
    if verb is None:
        raise wrong_line(text, line.problems or [unknown(word.text, word.where)])
    problems = _misplaced(verb, text)
    if line.problems:
        raise wrong_line(text, problems)
    problems += _miscounted(verb, word, rest)
    values = [_reference(item, names, problems) for item in rest]
    if problems:
        raise wrong_line(text, problems)
    if not values and verb.at_hand:
        values = [_run_at_hand(names)]
    try:
        return verb.do(shell, values, line)
    except Refused as error:
        if isinstance(error, CellRefused):
            raise
        raise wrong_line(text, [_placed(p, line) for p in error.problems]) from None
    except NotFound as error:
        for value in values:
            if isinstance(value, str) and isinstance(names.get(value), Run):
                msg = f"{error}; the variable {value} holds a run: %train {word.text} ${value}"
                raise NotFound(msg) from None
        raise


def wrong_line(text: CellText, problems: list[Problem]) -> CellRefused:
    """The refusal of a line that starts no run anyway."""
    return CellRefused(in_order(problems), text.whole)


def _misplaced(verb: Verb, text: CellText) -> list[Problem]:
    """What is wrong with the line's flags, those of other verbs included."""
    whose = f"%train {verb.name}"
    offset = len(text.magic)
    return parse(text.line, verb.flags, offset=offset, positional=True, whose=whose).problems


def _miscounted(verb: Verb, word: Word, rest: list[Word]) -> list[Problem]:
    """Too few or too many words."""
    if verb.least <= len(rest) <= verb.most:
        return []
    found = counted(len(rest), "word")
    told = f"%train {verb.name} takes {verb.needs}, found {found}"
    at = rest[verb.most] if len(rest) > verb.most else (rest or [word])[-1]
    return [Problem("line", told, where=at.where)]


def _placed(problem: Problem, line: ParsedLine) -> Problem:
    """A problem with a setting that was given by a flag stands under that flag's value."""
    flag = f"--{problem.field.replace('_', '-')}"
    word = line.values.get(flag)
    if problem.where is not None or word is None:
        return problem
    said = problem.message.removeprefix(problem.field)
    message = problem.message if said == problem.message else f"{flag}{said}"
    return replace(problem, message=message, where=word.where)


def _reference(word: Word, names: Names, problems: list[Problem]) -> Any:
    """The word's value; ``_`` is the run that a cell without ``--into`` leaves there."""
    if word.text != "_":
        return value_of(word, names, problems)
    last = names.get("_")
    if not isinstance(last, Run):
        told = "_ is no run: it is the value of the last cell that had one"
        problems.append(Problem("line", told, found="_", where=word.where))
    return last


def _run_at_hand(names: Names) -> Run:
    """The run of a command that names none: ``_``, else the newest; it says which."""
    last = names.get("_")
    if isinstance(last, Run):
        print(f"{last.title}, the last cell's")
        return last
    newest = default_client().training.runs.list(1).items
    if not newest:
        msg = "there is no run yet: a cell that begins with %%train starts one"
        raise NotFound(msg)
    print(f"{newest[0].title}, the newest")
    return newest[0]
