"""The boundary: what callers hand over becomes plain values once, here, and nowhere else.

NumPy scalars, 0-d arrays and tensors, ``Decimal``, enums and paths become Python's own numbers
and texts; NaN and infinity become ``None`` and their names are noted; anything else is refused
with the name of its key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from decimal import Decimal
from enum import Enum
from typing import Any

import zstandard
from sqlalchemy import JSON, Boolean, Float, Integer, Table

__all__ = ["RowShape", "pack_text", "plain", "unpack_text"]

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
    """The columns of a table and what each takes: turns a caller's mapping into a row."""

    def __init__(self, table: Table, defaults: Mapping[str, Any] | None = None) -> None:
        self.table = table
        self.names = [column.name for column in table.columns if column.name != "id"]
        self._empty = dict.fromkeys(self.names) | {"superseded": False} | dict(defaults or {})
        self._empty = {name: self._empty[name] for name in self.names}
        self._convert = {column.name: _converter(column.type) for column in table.columns}
        self._exact = {column.name: _exact(column.type) for column in table.columns}

    def row(self, given: Mapping[str, Any], where: str, nonfinite: list[str]) -> dict[str, Any]:
        """A full row: what is given converted, everything else at its default.

        Raises ``TypeError`` for a key that is no column and for a value that does not fit.
        """
        row = self._empty.copy()
        exact, convert = self._exact, self._convert
        for name, value in given.items():
            if name not in row:
                msg = f"{where}{name} is no column of {self.table.name}"
                raise TypeError(msg)
            # Most values are what the column takes already, and this runs for every cell
            kind = type(value)
            if value is not None and (
                kind is not exact[name]
                or (kind is float and value - value != 0.0)
                or (kind is str and not value.isascii())
                or (kind is int and value not in _INT64)
            ):
                value = convert[name](value, where + name, nonfinite)
            row[name] = value
        return row

    def rows(
        self, given: Iterable[Mapping[str, Any]], where: str, nonfinite: list[str]
    ) -> list[dict[str, Any]]:
        """Rows for many mappings; ``where`` and the index name the culprit."""
        return [self.row(item, f"{where}[{n}].", nonfinite) for n, item in enumerate(given)]


def _converter(kind: Any) -> Any:
    if isinstance(kind, JSON):
        return plain
    if isinstance(kind, Boolean):
        return _flag
    if isinstance(kind, Float):
        return _number
    return _integer if isinstance(kind, Integer) else _words


def _exact(kind: Any) -> type | None:
    if isinstance(kind, JSON):
        return None
    if isinstance(kind, Boolean):
        return bool
    if isinstance(kind, Float):
        return float
    return int if isinstance(kind, Integer) else str


_LEVEL = 1


def pack_text(text: Mapping[str, Any], name: str, nonfinite: list[str]) -> bytes:
    """A trajectory's texts as zstd-compressed JSON."""
    data = json.dumps(plain(text, name, nonfinite), allow_nan=False, separators=(",", ":"))
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data.encode("ascii"))


def unpack_text(data: bytes) -> dict[str, Any]:
    """What :func:`pack_text` packed."""
    found: dict[str, Any] = json.loads(zstandard.ZstdDecompressor().decompress(data))
    return found
