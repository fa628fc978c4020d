"""Everything nbtrain raises. One root; every refusal says what, where and how to mend it.

All classes pickle, so that an error raised in a worker process arrives whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "AmbiguousReference",
    "NbtrainError",
    "NotFound",
    "NotWritten",
    "PlanRefused",
    "Problem",
    "Refused",
    "RunEnded",
    "StartChecksFailed",
    "StoreError",
    "WaitedTooLong",
    "Where",
    "first_line",
]


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class NbtrainError(Exception):
    """Root of every error that nbtrain raises on purpose.

    A notebook shows it as its sentence, without a traceback: it tells what to do, not where in
    nbtrain it was raised. Everywhere else it is an exception like any other.
    """

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a text: 1-based ``line`` and ``column``, or a 1-based ``row`` of a data set."""

    line: int | None = None
    column: int | None = None
    row: int | None = None
    source: str | None = None

    def __str__(self) -> str:
        parts = []
        if self.source:
            parts.append(self.source)
        if self.row is not None:
            parts.append(f"row {self.row}")
        if self.line is not None:
            place = f"line {self.line}"
            if self.column is not None:
                place += f", column {self.column}"
            parts.append(place)
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the field, what was found, what is allowed, where, and a hint.

    ``message`` is a whole sentence that names the field; the other parts are there for
    programs and for forms that show the refusal beside the field.
    """

    field: str
    message: str
    found: object = None
    allowed: str | None = None
    where: Where | None = None
    hint: str | None = None

    def __str__(self) -> str:
        text = self.message
        if self.allowed:
            text += f"; allowed: {self.allowed}"
        if self.where is not None and str(self.where):
            text += f" ({self.where})"
        if self.hint:
            text += f". {self.hint}"
        return text


def _numbered(head: str, problems: Sequence[Problem]) -> str:
    if len(problems) == 1:
        return f"{head}: {problems[0]}"
    lines = [f"{head}, {len(problems)} problems:"]
    lines += [f"  {n}. {problem}" for n, problem in enumerate(problems, 1)]
    return "\n".join(lines)


class Refused(NbtrainError, ValueError):
    """Something was refused before anything was spent; ``problems`` lists all of it at once."""

    head = "refused"
    status = 422

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__(_numbered(self.head, self.problems))

    def __reduce__(self) -> tuple[type, tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class PlanRefused(Refused):
    """The plan cannot be trained: no run was created (status 422 over HTTP)."""

    head = "the plan is refused"


class StartChecksFailed(Refused):
    """A start check failed in the job before its first update."""

    head = "start checks failed"


class NotFound(NbtrainError, LookupError):
    """No run, checkpoint, workload or model goes by this name, id or prefix."""


class AmbiguousReference(NotFound):
    """An id prefix fits several things; give more digits."""


class StoreError(NbtrainError, RuntimeError):
    """The store cannot be used: newer than this version, not writable, or damaged."""


class NotWritten(NbtrainError, OSError):
    """A file or folder that a person named cannot be written; what was begun there is gone.

    An ``OSError`` with the system's ``errno``; its ``strerror`` is the whole sentence.
    """

    def __init__(self, errno: int | None, sentence: str) -> None:
        super().__init__(errno, sentence)

    def __str__(self) -> str:
        return str(self.strerror)


class WaitedTooLong(NbtrainError, TimeoutError):
    """The time for waiting is up; the run goes on."""


class RunEnded(NbtrainError, RuntimeError):
    """A run that was waited for ended FAILED or CANCELLED; the message holds the reason."""
