"""Values of user code as plain data: what of it travels to the pool, to rewards and templates."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from nbtrain.environments.answers import DEEPEST, LARGEST_INT_BITS

__all__ = ["NotPlainError", "TooLargeError", "exact_text", "measured", "plain"]

_ITEM = 8  # bytes that a number, or a place in a list or dict, counts for


class NotPlainError(TypeError):
    """A value of another kind than plain data."""


class TooLargeError(ValueError):
    """Plain data beyond its limit in bytes, depth or digits."""


def plain(value: Any) -> Any:
    """Numbers, text, booleans, None, and lists and dicts of them, as Python's own types.

    Tuples become lists, NumPy's scalars numbers. Raises :class:`NotPlainError` for anything else,
    :class:`TooLargeError` for what is too deep or a whole number beyond floats, and whatever a
    value raises that is looked at.
    """
    return measured(value, math.inf)[0]


def measured(value: Any, limit: float) -> tuple[Any, int]:
    """A value as :func:`plain` reads it, and about how many bytes it has, at most ``limit``.

    Raises as :func:`plain` does, :class:`TooLargeError` as soon as the limit is passed.
    """
    reader = _Reader(limit)
    return reader.read(value, 0), reader.size


def exact_text(text: str) -> str:
    """A text of Python's own type."""
    return str.__str__(text)


class _Reader:
    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.size = 0

    def read(self, value: Any, depth: int) -> Any:
        if depth > DEEPEST:
            msg = f"lists and dicts more than {DEEPEST} deep"
            raise TooLargeError(msg)
        if isinstance(value, str):
            text = exact_text(value)
            self._count(len(text))  # before a copy is made
            if not text.isascii():
                self._count(len(text.encode("utf-8", "surrogatepass")) - len(text))
            return text
        self._count(_ITEM)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, numbers.Integral):
            return _whole(value)
        if isinstance(value, numbers.Real):
            return float(value)
        if isinstance(value, Mapping):
            items = value.items()
            return {self._key(key, depth): self.read(item, depth + 1) for key, item in items}
        if isinstance(value, (list, tuple)):
            return [self.read(item, depth + 1) for item in value]
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            return self.read(value.item(), depth + 1)
        msg = f"a {type(value).__name__} is no plain data"
        raise NotPlainError(msg)

    def _key(self, key: Any, depth: int) -> Any:
        found = self.read(key, depth + 1)
        if isinstance(found, (dict, list)):
            msg = "a key is no plain value"
            raise NotPlainError(msg)
        return found

    def _count(self, size: int) -> None:
        self.size += size
        if self.size > self._limit:
            msg = f"more than {self._limit} bytes"
            raise TooLargeError(msg)


def _whole(value: Any) -> int:
    number = int(value)
    if number.bit_length() > LARGEST_INT_BITS:
        msg = f"a whole number of {number.bit_length()} bits"
        raise TooLargeError(msg)
    return number
