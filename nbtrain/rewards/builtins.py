"""Built-in rewards: small, exact, and 1 or 0.

Each call returns a picklable function of one sample with a ``name`` and an ``identity`` that is
part of the recipe's hash.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar

from nbtrain.errors import Problem, Refused

__all__ = ["environment", "exact", "format", "length", "numeric", "regex"]

# A sign belongs to a number only where a number can begin: "10-12" ends in 12, "= -12" in -12.
_NUMBER = re.compile(
    r"(?<!\d)(?<!\d\.)[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
)


class BuiltIn:
    """A reward of one sample that says what it is."""

    name: ClassVar[str]

    def identity(self) -> dict[str, Any]:
        """Kind and parameters, as plain JSON."""
        return {"kind": self.name, **asdict(self)}  # type: ignore[call-overload]

    def why_ungraded(self, task: Mapping[str, Any]) -> str | None:
        """A clause on why it gives no grade for ``task``; None where it cannot tell."""
        column = getattr(self, "column", None)
        null = column is not None and task.get(column) is None
        return f"the column {column!r} is null" if null else None


@dataclass(frozen=True, slots=True)
class _Exact(BuiltIn):
    column: str
    name: ClassVar[str] = "exact"

    def __call__(self, completion: str, task: Mapping[str, Any]) -> float | None:
        gold = gold_of(task, self.column)
        return None if gold is None else float(completion.strip() == str(gold).strip())


@dataclass(frozen=True, slots=True)
class _Numeric(BuiltIn):
    column: str
    tolerance: float
    name: ClassVar[str] = "numeric"

    def __call__(self, completion: str, task: Mapping[str, Any]) -> float | None:
        gold = gold_of(task, self.column)
        if gold is None:
            return None
        wanted = last_number(str(gold))
        if wanted is None:
            msg = f"the column {self.column!r} holds no number: {gold!r}"
            raise ValueError(msg)
        return float(_close(last_number(completion), wanted, self.tolerance))


@dataclass(frozen=True, slots=True)
class _Regex(BuiltIn):
    pattern: str
    name: ClassVar[str] = "regex"

    def __call__(self, completion: str) -> float:
        return float(re.search(self.pattern, completion) is not None)


@dataclass(frozen=True, slots=True)
class _Format(BuiltIn):
    pattern: str
    name: ClassVar[str] = "format"

    def __call__(self, completion: str) -> float:
        return float(re.fullmatch(self.pattern, completion.strip(), re.DOTALL) is not None)


@dataclass(frozen=True, slots=True)
class _Length(BuiltIn):
    max_chars: int
    name: ClassVar[str] = "length"

    def __call__(self, completion: str) -> float:
        return float(len(completion) <= self.max_chars)


@dataclass(frozen=True, slots=True)
class _Environment(BuiltIn):
    name: ClassVar[str] = "environment"

    def __call__(self, completion: str, environment: Any) -> float | None:
        found = getattr(environment, "reward", None)
        if not isinstance(found, (int, float)):
            return None
        try:
            number = float(found)
        except OverflowError:  # a whole number beyond floats
            return None
        return number if math.isfinite(number) else None


def environment() -> _Environment:
    """The environment's own reward: its attribute ``reward`` after its end.

    A trajectory whose environment has no such attribute, or no finite number in it, is ungraded.
    """
    return _Environment()


def exact(column: str) -> _Exact:
    """1 when the completion equals the task's ``column`` as text, both stripped, else 0.

    A task whose column is None is left ungraded.
    """
    return _Exact(checked_column("exact", column))


def numeric(column: str, tolerance: float = 0.0) -> _Numeric:
    """1 when the completion's last number is within ``tolerance`` of the last one in ``column``.

    Numbers are compared as decimals, so 0.10 equals 0.1 and 1,234 equals 1234. A completion
    without a number scores 0; a task whose column is None is left ungraded.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        refused = _refused("numeric", "tolerance", tolerance, "a number of at least 0")
        raise refused
    return _Numeric(checked_column("numeric", column), float(tolerance))


def regex(pattern: str) -> _Regex:
    """1 when ``pattern`` is found anywhere in the completion (``re.search``), else 0."""
    return _Regex(_pattern("regex", pattern))


def format(pattern: str) -> _Format:
    """1 when ``pattern`` matches the whole stripped completion, else 0; ``.`` matches newlines."""
    return _Format(_pattern("format", pattern))


def length(max_chars: int) -> _Length:
    """1 when the completion has at most ``max_chars`` characters, else 0."""
    if isinstance(max_chars, bool) or not isinstance(max_chars, int) or max_chars < 0:
        refused = _refused("length", "max_chars", max_chars, "a whole number of at least 0")
        raise refused
    return _Length(max_chars)


def last_number(text: str) -> Decimal | None:
    """The last number in a text, or None."""
    # U+2212 is the minus sign of typeset formulas.
    for found in reversed(_NUMBER.findall(text.replace("\u2212", "-"))):
        try:
            return Decimal(found.replace(",", ""))
        except InvalidOperation:
            continue
    return None


def _close(got: Decimal | None, wanted: Decimal, tolerance: float) -> bool:
    if got is None or got == wanted or tolerance == 0:
        return got == wanted
    try:
        return abs(got - wanted) <= Decimal(str(tolerance))
    except ArithmeticError:
        # A model may well write 1e999999999: too far away, not an error of the reward.
        return False


def gold_of(task: Mapping[str, Any], column: str) -> Any:
    """The task's column. Raises ``LookupError`` naming those there are."""
    if column not in task:
        have = ", ".join(sorted(map(str, task)))
        msg = f"the task has no column {column!r}; it has: {have}"
        raise LookupError(msg)
    return task[column]


def checked_column(reward: str, column: object) -> str:
    """The name of a column. Raises ``Refused`` for what is none."""
    if not isinstance(column, str) or not column:
        raise _refused(reward, "column", column, "the name of a column of the tasks")
    return column


def _pattern(reward: str, pattern: object) -> str:
    if not isinstance(pattern, str):
        raise _refused(reward, "pattern", pattern, "a regular expression")
    try:
        re.compile(pattern)
    except re.error as error:
        raise _refused(reward, "pattern", pattern, f"a regular expression ({error})") from None
    return pattern


def _refused(reward: str, field: str, found: object, allowed: str) -> Refused:
    message = f"{reward}: {field} is {found!r}"
    return Refused([Problem(f"{reward}.{field}", message, found=found, allowed=allowed)])
