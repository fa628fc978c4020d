"""Errors as a cell shows them: the sentence, the cell's line with a caret, no traceback.

IPython asks an exception for ``_render_traceback_``; programs that execute notebooks still see
the cell fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbtrain.errors import NbtrainError, Problem, Refused

_LONGEST_LINE = 160  # characters of the cell's line shown around the caret


class CellRefused(Refused):
    """What the cell asks for is refused; every problem is shown with its line of the cell.

    ``problems`` holds them, ``cell`` the whole cell, its first line being the magic's.
    """

    def __init__(self, problems: Sequence[Problem], cell: str, head: str = "refused") -> None:
        super().__init__(problems)
        self.cell = cell
        self.head = head

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.problems, self.cell, self.head)

    def _lines(self) -> list[str]:
        count = len(self.problems)
        lines = [self.head + (f", {count} problems:" if count > 1 else ":")]
        for problem in self.problems:
            lines.append(str(problem))
            lines += caret(problem, self.cell)
        return lines


class CellError(NbtrainError, RuntimeError):
    """Any other error that nbtrain raises on purpose, told in a sentence."""


def interrupted() -> KeyboardInterrupt:
    """The interrupt of a line or a cell, shown in one word and not by where in nbtrain that was.

    It stays a ``KeyboardInterrupt``, by which name programs that execute notebooks know it.
    """
    error = KeyboardInterrupt()
    error._render_traceback_ = lambda: ["interrupted"]  # type: ignore[attr-defined]
    return error


def caret(problem: Problem, cell: str) -> list[str]:
    """The line the problem stands on and a caret under its column; nothing without a place.

    What would move the text or hide some of it (control characters, changes of the reading
    direction) is written as an escape.
    """
    where = problem.where
    lines = cell.split("\n")
    if where is None or where.line is None or not 1 <= where.line <= len(lines):
        return []
    line = lines[where.line - 1].replace("\t", " ")
    column = min((where.column or 1) - 1, len(line))
    start = max(0, column - _LONGEST_LINE // 2)
    before, behind = _plain(line[start:column]), _plain(line[column : start + _LONGEST_LINE])
    return [f"    {before}{behind}", "    " + " " * len(before) + "^"]


def _plain(text: str) -> str:
    """The text with an escape for each character that is no visible one."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )
