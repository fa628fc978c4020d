"""Where the cursor stands in a ``%%train`` cell or on a line of ``%train``: pure text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nbtrain.notebook.line import Word, split

__all__ = ["BodyPlace", "LinePlace", "body_place", "cell_head", "line_place", "statement"]

_CELL = re.compile(r"%%train(?=\s|$)")
_LINE = re.compile(r"\s*(?:[^\W\d]\w*\s*=\s*)?%train(?=\s|$)")
_KEY = re.compile(r"(?P<lead>[ ]*(?:- +)?)(?P<key>[\w.]*)$")
_VALUE = re.compile(
    r"(?P<lead>[ ]*(?:- +)?)(?P<key>[\w.]+):[ ]+"
    r"(?P<typed>\"[^\"]*|'[^']*|[^\s\"'{\[#]\S*|)$"
)
_STATED = re.compile(r"(?P<lead>[ ]*(?:- +)?)(?P<key>[\w.]+):(?=\s|$)(?P<rest>.*)$")
_JSON_WORD = re.compile(r"[\w.+$/-]*\Z")


@dataclass(frozen=True, slots=True)
class LinePlace:
    """A word of a magic's line: the words before it, what of it is typed, and its flag."""

    words: tuple[Word, ...]
    typed: str
    flag: str | None = None
    """The ``--flag=`` that the typed word is the value of."""

    @property
    def pending(self) -> str | None:
        """The flag whose value it is if that takes one: by ``=``, or the word before it."""
        if self.flag is not None:
            return self.flag
        return self.words[-1].flag if self.words and not self.words[-1].value else None


@dataclass(frozen=True, slots=True)
class BodyPlace:
    """A key or a value in the body: the keys above it, what is typed, what its mapping has."""

    what: Literal["key", "value"]
    path: tuple[str, ...]
    typed: str
    key: str = ""
    present: frozenset[str] = field(default=frozenset())
    json: bool = False


def cell_head(lines: Sequence[str]) -> int | None:
    """The row of ``%%train``, the first line that is not blank; ``None`` in any other cell."""
    for row, line in enumerate(lines):
        if line.strip():
            return row if _CELL.match(line) else None
    return None


def statement(line: str, cell: bool) -> int | None:
    """The column behind the magic's word, where the line begins with it."""
    found = (_CELL if cell else _LINE).match(line)
    return found.end() if found else None


def line_place(before: str) -> LinePlace | None:
    """The place at the end of ``before``, a magic's line up to the cursor; ``None`` in a comment.

    ``before`` begins behind the magic's word.
    """
    if before and not before[0].isspace():
        return None
    words, _ = split(before)
    further = split(f"{before} x")[0]
    begins_anew = len(further) == len(words) + 1
    if not before or (before[-1].isspace() and begins_anew):
        return LinePlace(tuple(words), "")
    if further == words:
        return None  # a comment
    *earlier, last = words
    typed = before[last.column - 1 :]
    return LinePlace(tuple(earlier), typed, last.flag if last.value else None)


def body_place(lines: Sequence[str], row: int, column: int) -> BodyPlace | None:
    """The place in a body, of which ``row`` and ``column`` count from 0; ``None`` elsewhere."""
    first = next((line for line in lines if line.strip() and not line.lstrip().startswith("#")), "")
    if first.lstrip().startswith("{"):
        return _json_place("\n".join([*lines[:row], lines[row][:column]]), "\n".join(lines))
    return _yaml_place(lines, row, lines[row][:column])


def _yaml_place(lines: Sequence[str], row: int, before: str) -> BodyPlace | None:
    if found := _KEY.match(before):
        path = _above(lines, row, found["lead"])
        return BodyPlace("key", path, found["key"], present=_beside(lines, row, found["lead"]))
    if found := _VALUE.match(before):
        path = _above(lines, row, found["lead"])
        return BodyPlace("value", path, found["typed"], found["key"])
    return None


def _above(lines: Sequence[str], row: int, lead: str) -> tuple[str, ...]:
    """The keys that a line stands under, outermost first."""
    # an item may begin in the column of the key that has the list
    inside = lead.index("-") + 1 if "-" in lead else len(lead)
    path: list[str] = []
    for found in filter(None, map(_STATED.match, reversed(lines[:row]))):
        dash, column = found["lead"].find("-"), len(found["lead"])
        if dash >= 0 and column == inside:
            inside = dash + 1
        elif column < inside and found["rest"].partition("#")[0].strip() == "":
            path.append(found["key"])
            inside = dash + 1 if dash >= 0 else column
    return tuple(reversed(path))


def _beside(lines: Sequence[str], row: int, lead: str) -> frozenset[str]:
    """The keys that the mapping of this line states on its other lines."""
    mine, found = len(lead), set[str]()
    for line in reversed(lines[:row]) if "-" not in lead else ():
        stated = _STATED.match(line)
        column = len(stated["lead"]) if stated else _indent(line)
        if stated and column == mine:
            found.add(stated["key"])
        if column < mine or (stated and column == mine and "-" in stated["lead"]):
            break
    for line in lines[row + 1 :]:
        stated = _STATED.match(line)
        if _indent(line) < mine:
            break
        if stated and len(stated["lead"]) == mine:
            found.add(stated["key"])
    return frozenset(found)


def _indent(line: str) -> int:
    """The column of the first character; that of a blank line or a comment ends nothing."""
    text = line.lstrip(" ")
    return len(line) - len(text) if text.strip() and not text.startswith("#") else 10**6


@dataclass(slots=True)
class _Container:
    mapping: bool
    key: str = ""
    value: bool = False
    """Whether a value is due, behind a colon or in a list."""
    present: set[str] = field(default_factory=set)


def _json_place(before: str, whole: str) -> BodyPlace | None:
    """The place at the end of a JSON text that need not be complete."""
    stack: list[_Container] = []
    at, end = 0, len(before)
    while at < end:
        char = before[at]
        if char == '"':
            closing = _closing(before, at)
            if closing is None:
                return _in_json(stack, before[at:], whole)
            if stack and stack[-1].mapping and not stack[-1].value:
                stack[-1].key = before[at + 1 : closing]
                stack[-1].present.add(stack[-1].key)
            at = closing
        elif char in "{[":
            stack.append(_Container(char == "{", value=char == "["))
        elif char in "}]":
            if not stack:
                return None
            stack.pop()
        elif char == ":" and stack:
            stack[-1].value = True
        elif char == "," and stack:
            stack[-1].value = not stack[-1].mapping
        at += 1
    word = _JSON_WORD.search(before)
    return _in_json(stack, word[0] if word else "", whole)


def _closing(text: str, at: int) -> int | None:
    """Where the string that opens at ``at`` closes."""
    at += 1
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == '"':
            return at
        at += 1
    return None


def _in_json(stack: list[_Container], typed: str, whole: str) -> BodyPlace | None:
    if not stack or "\n" in typed:
        return None
    path = tuple(outer.key for outer in stack[:-1] if outer.mapping)
    inner = stack[-1]
    if not inner.mapping:
        return None
    if inner.value:
        return BodyPlace("value", path, typed, inner.key, json=True)
    present = set(inner.present)
    if len(stack) == 1:
        present |= set(re.findall(r'"(\w+)"\s*:', whole))
    return BodyPlace("key", path, typed, present=frozenset(present), json=True)
