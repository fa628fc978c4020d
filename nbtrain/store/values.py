"""The boundary: what callers hand over becomes plain values once, here, and nowhere else.

NumPy scalars, 0-d arrays and tensors, ``Decimal``, enums and paths become Python's own numbers
and texts; NaN and infinity become ``None`` and their names are noted; anything else is refused
with the name of its key.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from itertools import chain
from typing import Any

from sqlalchemy import JSON, Boolean, Float, Integer, Table

__all__ = ["RowShape", "plain"]

_INT64 = range(-(2**63), 2**63)


def plain(value: Any, name: str, nonfinite: list[str]) -> Any:
    """``value`` as strict JSON can hold it: mappings and sequences copied, scalars converted.

    Names of values that were NaN or infinite are appended to ``nonfinite``; they become ``None``.
    Raises ``TypeError`` naming the key of what cannot be converted.
    """
    kind = type(value)
    if value is None or kind is str or kind is int or kind is bool:
        return value
    if kind is float:
        if value - value == 0.0:  # false for NaN and both infinities
            return value
        nonfinite.append(name)
        return None
    if isinstance(value, Mapping):
        return {
            _key(key, name): plain(item, f"{name}.{key}" if name else str(key), nonfinite)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{name}[{n}]", nonfinite) for n, item in enumerate(value)]
    return plain(_scalar(value, name), name, nonfinite)


def _key(key: Any, name: str) -> str:
    if isinstance(key, Enum):
        key = key.value
    if isinstance(key, str):
        return str(key)
    if isinstance(key, int):
        return str(int(key))
    msg = f"{name or 'a mapping'} has a key of type {type(key).__name__}; JSON keys are texts"
    raise TypeError(msg)


def _scalar(value: Any, name: str) -> Any:
    """A plain scalar for anything that stands for one."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (float, Decimal)):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item = getattr(value, "item", None)  # NumPy and torch alike, and neither is imported
    if callable(item):
        try:
            found = item()
        except (TypeError, ValueError, RuntimeError):
            found = value
        if isinstance(found, (str, int, float, bool)):
            return found
    msg = (
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which is no plain value"
    )
    raise TypeError(msg)


def _number(value: Any, name: str, nonfinite: list[str]) -> float | None:
    value = plain(value, name, nonfinite)
    if value is None or isinstance(value, (int, float)):
        return None if value is None else float(value)
    raise _unfit(value, name, "a number")


def _integer(value: Any, name: str, nonfinite: list[str]) -> int | None:
    value = plain(value, name, nonfinite)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or (isinstance(value, int) and value in _INT64):
        return None if value is None else int(value)
    raise _unfit(value, name, "a whole number of 64 bits")


def _flag(value: Any, name: str, nonfinite: list[str]) -> bool | None:
    value = plain(value, name, nonfinite)
    if value is None or value in (0, 1):
        return None if value is None else bool(value)
    raise _unfit(value, name, "true or false")


def _words(value: Any, name: str, nonfinite: list[str]) -> str | None:
    value = plain(value, name, nonfinite)
    if value is None or isinstance(value, str):
        # Lone surrogates, as in file names of another code page, have no UTF-8 form
        return value if value is None else value.encode("utf-8", "replace").decode("utf-8")
    raise _unfit(value, name, "a text")


def _unfit(value: Any, name: str, wanted: str) -> TypeError:
    return TypeError(f"{name} is {value!r:.80}, which is not {wanted}")


class RowShape:
    """The columns of a table and what each takes: turns callers' mappings into whole rows."""

    def __init__(self, table: Table, defaults: Mapping[str, Any] | None = None) -> None:
        self.table = table
        self.names = tuple(column.name for column in table.columns if column.name != "id")
        empty = {"superseded": False} | dict(defaults or {})
        self._empty = {name: empty.get(name) for name in self.names}
        self._kinds = {name: _kind(table.c[name].type) for name in self.names}
        self._needed = tuple(name for name in self.names if not table.c[name].nullable)

    def row(self, given: Mapping[str, Any], where: str, nonfinite: list[str]) -> dict[str, Any]:
        """A whole row: what is given converted, everything else at its default.

        ``where`` stands before the key's name in complaints and in ``nonfinite``. Raises
        ``TypeError`` for a key that is no column, for a value that does not fit and for a
        missing one that the table needs.
        """
        row = self._empty | self.some(given, where, nonfinite)
        for name in self._needed:
            if row[name] is None:
                raise self._missing(where, name)
        return row

    def some(self, given: Mapping[str, Any], where: str, nonfinite: list[str]) -> dict[str, Any]:
        """Only what is given, converted: for changing a row. Raises as :meth:`row` does."""
        found = {}
        for name, value in given.items():
            if name not in self._kinds:
                raise self._unknown(where, name)
            found[name] = self._kinds[name].convert(value, where + name, nonfinite)
        return found

    def columns(
        self,
        given: Sequence[Mapping[str, Any]],
        everywhere: Mapping[str, Any],
        nonfinite: list[str],
        *,
        aside: str | None = None,
    ) -> dict[str, list[Any]]:
        """Many rows at once, as a list of converted values per column; see :meth:`row`.

        ``everywhere`` holds values that all rows share; the key ``aside`` is passed over. A
        column is looked at as a whole first, since nearly always every value is already what the
        column takes: this is what keeps a step's trajectories cheap.
        """
        count, where = len(given), self.table.name
        columns = {name: [value] * count for name, value in self._empty.items()}
        for name in dict.fromkeys(chain.from_iterable(given)):
            if name == aside:
                continue
            if name not in columns:
                raise self._unknown(where, "[…].", name)
            empty, kind = self._empty[name], self._kinds[name]
            values = [item.get(name, empty) for item in given]
            if not kind.all_fit(values):
                values = [
                    kind.convert(value, f"{where}[{n}].{name}", nonfinite)
                    for n, value in enumerate(values)
                ]
            columns[name] = values
        columns |= {name: [value] * count for name, value in everywhere.items()}
        for name in self._needed:
            if None in columns[name]:
                raise self._missing(where, [columns[name].index(None)], ".", name)
        return columns

    def changes(
        self,
        names: Sequence[str],
        given: Sequence[Mapping[str, Any]],
        where: str,
        keys: Sequence[Any],
        nonfinite: list[str],
    ) -> list[list[Any]]:
        """The values of these columns of many rows that all have them, a list per column.

        ``keys`` name the rows in complaints. Raises as :meth:`row` does.
        """
        columns = []
        for name in names:
            kind = self._kinds[name]
            values = [item[name] for item in given]
            if not kind.all_fit(values):
                values = [
                    kind.convert(value, f"{where}[{key}].{name}", nonfinite)
                    for key, value in zip(keys, values, strict=True)
                ]
            columns.append(values)
        return columns

    def _unknown(self, *name: object) -> TypeError:
        return TypeError(f"{''.join(map(str, name))} is no column of {self.table.name}")

    def _missing(self, *name: object) -> TypeError:
        return TypeError(f"{''.join(map(str, name))} is missing; {self.table.name} needs it")


class _Kind:
    """What one type of column takes."""

    def __init__(self, exact: type, convert: Callable[[Any, str, list[str]], Any]) -> None:
        self._types = {exact, type(None)}
        self._exact = exact
        self.convert = convert

    def all_fit(self, values: Sequence[Any]) -> bool:
        """Whether no value needs converting."""
        types = set(map(type, values))
        if not types <= self._types:
            return False
        if self._exact not in types:
            return True
        present = [value for value in values if value is not None] if len(types) > 1 else values
        if self._exact is float:
            return all(map(math.isfinite, present))
        if self._exact is int:
            return min(present) in _INT64 and max(present) in _INT64
        if self._exact is str:
            return all(map(str.isascii, present))
        return self._exact is bool


_NUMBER, _INTEGER, _FLAG, _WORDS = (
    _Kind(float, _number),
    _Kind(int, _integer),
    _Kind(bool, _flag),
    _Kind(str, _words),
)
_ANY = _Kind(object, plain)


def _kind(column_type: Any) -> _Kind:
    if isinstance(column_type, JSON):
        return _ANY
    if isinstance(column_type, Boolean):
        return _FLAG
    if isinstance(column_type, Float):
        return _NUMBER
    return _INTEGER if isinstance(column_type, Integer) else _WORDS
