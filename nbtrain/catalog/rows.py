"""Task rows as a person hands them over, made plain: checked, converted, all problems at once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nbtrain.errors import Problem, Where

__all__ = ["Row", "UnusableError", "plain", "read_rows"]

Row = dict[str, Any]
PROMPT = "prompt"
_ROLES = ("system", "user", "assistant", "tool")
# More than this many problems are counted, not listed.
_MOST_LISTED = 50
_ROWS_LISTED = 10


class UnusableError(Exception):
    """A cell's value cannot stand in JSON; the message says why."""


def read_rows(
    table: object, *, field: str, raw: bool, empty_ok: bool = False
) -> tuple[list[Row], list[Problem]]:
    """Plain JSON rows from a DataFrame or a list of mappings, and everything wrong with them.

    NumPy scalars and arrays become Python values, tuples become lists. Each row must have a
    ``prompt``: chat messages or a text (only texts with ``raw``). Rows are counted from 1.
    """
    records, problems = _records(table, field)
    if problems:
        return [], problems
    if not records and not empty_ok:
        return [], [Problem(field, f"{field} is empty", allowed="at least one row")]
    missing = _column_problems(records, field)
    if missing:
        return [], missing
    rows: list[Row] = []
    for number, record in enumerate(records, 1):
        row, wrong = _read_row(record, Where(row=number), field, raw=raw)
        rows.append(row)
        problems += wrong
    return rows, shortened(problems, field)


def shortened(problems: list[Problem], field: str) -> list[Problem]:
    """One problem for what is wrong alike in several rows; the first ones, with the rest counted.

    The count stands with the last problem, so that it is no problem of its own.
    """
    groups: dict[tuple[object, ...], list[Problem]] = {}
    for problem in problems:
        alike = problem.field, problem.message, problem.allowed, problem.hint
        groups.setdefault(alike, []).append(problem)
    told = [_together(group) for group in groups.values()]
    rest = len(told) - _MOST_LISTED
    if rest <= 0:
        return told
    last = told[_MOST_LISTED - 1]
    more = f"{field} has {rest:,} more problems like these"
    hint = f"{last.hint}; {more}" if last.hint else more
    return [*told[: _MOST_LISTED - 1], replace(last, hint=hint)]


def _together(alike: list[Problem]) -> Problem:
    rows = [p.where.row for p in alike if p.where is not None and p.where.row is not None]
    if len(rows) < 2:
        return alike[0]
    shown = ", ".join(f"{row:,}" for row in rows[:_ROWS_LISTED])
    more = " …" if len(rows) > _ROWS_LISTED else ""
    message = f"{alike[0].message} in {len(rows):,} rows: {shown}{more}"
    return replace(alike[0], message=message, found=rows, where=None)


def _records(table: object, field: str) -> tuple[list[Mapping[str, Any]], list[Problem]]:
    to_dict = getattr(table, "to_dict", None)
    columns = getattr(table, "columns", None)
    if callable(to_dict) and columns is not None:
        names = list(columns)
        if len(set(map(str, names))) < len(names):
            twice = sorted({str(n) for n in names if names.count(n) > 1})
            message = f"{field} has columns of the same name: {', '.join(twice)}"
            return [], [Problem(field, message, found=twice)]
        table = to_dict("records")
    if isinstance(table, (str, bytes, Mapping)) or not isinstance(table, Iterable):
        found = type(table).__name__
        message = f"{field} is a {found}"
        return [], [Problem(field, message, found=found, allowed="a DataFrame or a list of dicts")]
    records = list(table)
    wrong = [n for n, record in enumerate(records, 1) if not isinstance(record, Mapping)]
    problems = [
        Problem(
            field,
            f"a row of {field} is a {type(records[n - 1]).__name__}",
            allowed="a dict",
            where=Where(row=n),
        )
        for n in wrong
    ]
    return records, shortened(problems, field)


def _column_problems(records: Sequence[Mapping[str, Any]], field: str) -> list[Problem]:
    """Problems of the table as a whole: no prompt column, bad names, rows of unequal columns."""
    names = list(dict.fromkeys(name for record in records for name in record))
    if not records:
        return []
    problems = [
        Problem(field, f"a column of {field} is named {name!r}", found=name, allowed="text")
        for name in names
        if not isinstance(name, str)
    ]
    if PROMPT not in names:
        known = ", ".join(map(str, names)) or "none"
        hint = "Rename the column that holds the task's text or chat messages to 'prompt'"
        problems.append(
            Problem(
                f"{field}.{PROMPT}",
                f"{field} has no column 'prompt'; its columns are: {known}",
                found=list(map(str, names)),
                hint=hint,
            )
        )
        return problems
    unequal = [
        Problem(
            f"{field}.{name}",
            f"a row of {field} has no {name!r}, which other rows have",
            where=Where(row=number),
        )
        for number, record in enumerate(records, 1)
        for name in names
        if name not in record
    ]
    return problems + shortened(unequal, field)


def _read_row(
    record: Mapping[str, Any], where: Where, field: str, *, raw: bool
) -> tuple[Row, list[Problem]]:
    row: Row = {}
    problems = []
    for name, value in record.items():
        try:
            row[name] = plain(value)
        except UnusableError as error:
            message = f"column {name!r} of {field} holds {error}"
            problems.append(
                Problem(f"{field}.{name}", message, allowed="a JSON value", where=where)
            )
    if PROMPT in row:
        problems += [
            Problem(f"{field}.{PROMPT}", message, allowed=allowed, where=where)
            for message, allowed in _prompt_complaints(row[PROMPT], raw=raw)
        ]
    return row, problems


def plain(value: Any) -> Any:
    """``value`` as ``json.loads`` would give it. Raises :class:`UnusableError` with the reason."""
    if value is None or isinstance(value, (bool, int)):
        # NumPy's bool is no bool, but a subclass of int (an enum) becomes a plain int.
        return value if value is None or isinstance(value, bool) else int(value)
    if isinstance(value, float):
        if math.isnan(value):
            msg = "NaN (a missing cell?)"
            raise UnusableError(msg)
        if math.isinf(value):
            msg = "an infinite number"
            raise UnusableError(msg)
        return float(value)
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            msg = "text that is not valid Unicode"
            raise UnusableError(msg) from None
        return str(value)
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) for key in value):
            msg = "a mapping whose keys are not all text"
            raise UnusableError(msg)
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return _plain_numpy(value)


def _plain_numpy(value: Any) -> Any:
    # NumPy is recognised by its methods, so that nothing here imports it. Dates have no JSON
    # form that would come back as a date: they are named, not guessed at.
    kind = type(value).__name__
    if kind in {"NAType", "NaTType"}:
        msg = "a missing value"
        raise UnusableError(msg)
    tolist = getattr(value, "tolist", None)
    if type(value).__module__.split(".")[0] == "numpy" and callable(tolist):
        made = tolist()
        if type(made) is not type(value):
            return plain(made)
    msg = f"a {kind}, which has no JSON form"
    raise UnusableError(msg)


def _prompt_complaints(prompt: Any, *, raw: bool) -> list[tuple[str, str]]:
    if isinstance(prompt, str):
        return [] if prompt.strip() else [("the prompt is empty", "text or chat messages")]
    if raw:
        return [(f"the prompt is {_shape(prompt)} in a raw workload", "text")]
    if not isinstance(prompt, list):
        return [(f"the prompt is {_shape(prompt)}", "text or a list of chat messages")]
    if not prompt:
        return [("the prompt is empty", "text or chat messages")]
    complaints = [c for n, message in enumerate(prompt, 1) for c in _message_complaints(message, n)]
    if complaints:
        return complaints
    if prompt[-1]["role"] not in {"user", "tool"}:
        last = prompt[-1]["role"]
        return [(f"the prompt's last message is the {last}'s", "a last message of user or tool")]
    return []


def _message_complaints(message: Any, number: int) -> list[tuple[str, str]]:
    shape = '{"role": …, "content": …}'
    if not isinstance(message, dict):
        return [(f"message {number} of the prompt is {_shape(message)}", shape)]
    complaints = []
    if message.get("role") not in _ROLES:
        found = json.dumps(message.get("role"))
        complaints.append(
            (f"message {number} of the prompt has the role {found}", ", ".join(_ROLES))
        )
    content = message.get("content")
    if not isinstance(content, str):
        complaints.append(
            (f"message {number} of the prompt has {_shape(content)} as content", "text")
        )
    elif not content.strip() and message.get("role") == "user":
        complaints.append((f"message {number} of the prompt is empty", "text"))
    return complaints


def _shape(value: Any) -> str:
    names = {type(None): "null", bool: "a truth value", int: "a number", float: "a number",
             str: "text", list: "a list", dict: "a mapping"}  # fmt: skip
    return names.get(type(value), type(value).__name__)
