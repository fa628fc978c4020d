"""What is found in a dataset's rows: one finding for what is alike, counted exactly."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from nbtrain.errors import Problem, Where

__all__ = ["LINES_NAMED", "Finding", "Findings"]

LINES_NAMED = 10
"""Lines that a finding names; all of them are counted."""

_MOST_KINDS = 500
_MOST_LISTED = 50
_PLACE = re.compile(r"\[\d+\]")

Severity = Literal["refusal", "note"]
Unit = Literal["line", "row"]


@dataclasses.dataclass(slots=True)
class Finding:
    """One kind of thing that is wrong (``refusal``) or worth knowing (``note``).

    ``field`` and ``message`` are those of the first row it was found in; ``lines`` are the
    physical lines (rows, counted from 1, where there is no file) of at most ten rows, ``count``
    is exact: 0 where the finding is about the source as a whole.
    """

    code: str
    severity: Severity
    field: str
    message: str
    expected: str | None = None
    found: str | None = None
    hint: str | None = None
    column: int | None = None
    count: int = 0
    lines: list[int] = dataclasses.field(default_factory=list)
    unit: Unit = "line"

    def text(self) -> str:
        """The message with the number of rows and the lines of the first ones."""
        if self.count < 2:
            return self.message
        shown = ", ".join(f"{line:,}" for line in self.lines)
        more = " …" if self.count > len(self.lines) else ""
        return f"{self.message}; alike in {self.count:,} rows: {self.unit}s {shown}{more}"

    def problem(self, source: str | None) -> Problem:
        """The finding as what a refusal lists, placed at its first row in ``source``."""
        first = self.lines[0] if self.lines else None
        where = (
            Where(row=first, source=source)
            if self.unit == "row"
            else Where(line=first, column=self.column, source=source)
        )
        return Problem(self.field, self.text(), self.found, self.expected, where, self.hint)

    def to_json(self) -> dict[str, Any]:
        """The finding as plain values; :meth:`from_json` reads them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """The finding that :meth:`to_json` wrote."""
        return cls(**data)

    def __str__(self) -> str:
        return str(self.problem(None))


class Findings:
    """Collects findings; its memory does not grow with the number of rows."""

    def __init__(self, unit: Unit = "line") -> None:
        self._unit: Unit = unit
        self._kinds: dict[tuple[object, ...], Finding] = {}
        self._last: dict[tuple[object, ...], int] = {}
        self.refused = False
        """Whether something was found that stops the registration."""

    def add(
        self,
        code: str,
        line: int | None,
        field: str,
        message: str,
        expected: str | None = None,
        *,
        found: str | None = None,
        hint: str | None = None,
        column: int | None = None,
        note: bool = False,
    ) -> None:
        """Count one row. What has the same code, field (whatever the places) and ``found`` is
        alike, and a row counts once. ``line`` is ``None`` for the source as a whole.
        """
        self.refused = self.refused or not note
        key: tuple[object, ...] = (code, _PLACE.sub("[]", field), found)
        if key not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            key = (code,)
        kind = self._kinds.get(key)
        if kind is None:
            severity: Severity = "note" if note else "refusal"
            kind = Finding(code, severity, field, message, expected, found, hint, column)
            kind.unit = self._unit
            self._kinds[key] = kind
        if line is None or self._last.get(key) == line:
            return
        kind.count += 1
        self._last[key] = line
        if len(kind.lines) < LINES_NAMED:
            kind.lines.append(line)

    @property
    def refusals(self) -> list[Finding]:
        """What stops the registration, in the order first found."""
        return [kind for kind in self._kinds.values() if kind.severity == "refusal"]

    @property
    def notes(self) -> list[Finding]:
        """What is worth knowing, in the order first found."""
        return [kind for kind in self._kinds.values() if kind.severity == "note"]

    def problems(self, source: str | None) -> list[Problem]:
        """The refusals as problems; beyond fifty kinds the rest is counted in the last one."""
        return listed((kind.problem(source) for kind in self.refusals), "kinds of problems")


def listed(problems: Iterable[Problem], what: str) -> list[Problem]:
    """At most fifty problems; how many more ``what`` there are stands with the last."""
    told = list(problems)
    rest = len(told) - _MOST_LISTED
    if rest <= 0:
        return told
    last = told[_MOST_LISTED - 1]
    more = f"There are {rest:,} more {what}"
    hint = f"{last.hint}. {more}" if last.hint else more
    return [*told[: _MOST_LISTED - 1], dataclasses.replace(last, hint=hint)]
