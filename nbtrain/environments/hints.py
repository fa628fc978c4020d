"""Type hints of tools as plain JSON and back, so that a tool can be described far from its code."""

from __future__ import annotations

import functools
import operator
import types
import typing
from typing import Any, Literal, Union

__all__ = ["ALLOWED_HINTS", "hint_from_json", "hint_to_json"]

ALLOWED_HINTS = "int, float, str, bool, None, Any, list, tuple, dict, Literal, and unions of them"

_BASIC = {
    "int": int, "float": float, "str": str, "bool": bool, "null": type(None),
    "any": Any, "list": list, "tuple": tuple, "dict": dict,
}  # fmt: skip
_NAMES = {kind: name for name, kind in _BASIC.items()}


def hint_to_json(hint: Any) -> Any:
    """A type hint as JSON. Raises ``TypeError`` for one that says nothing about JSON values."""
    hint = type(None) if hint is None else hint
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None and isinstance(hint, (type, typing._SpecialForm)) and hint in _NAMES:
        return _NAMES[hint]
    if origin is Literal:
        if all(isinstance(a, (int, float, str, bool, type(None))) for a in arguments):
            return {"literal": list(arguments)}
    elif origin in (Union, types.UnionType):
        return {"union": [hint_to_json(a) for a in arguments]}
    elif origin in (list, dict) or (origin is tuple and ... not in arguments):
        return {_NAMES[origin]: [hint_to_json(a) for a in arguments]}
    msg = f"{hint!r} is no type of a JSON value"
    raise TypeError(msg)


def hint_from_json(data: Any) -> Any:
    """The type hint that :func:`hint_to_json` described."""
    if isinstance(data, str):
        return _BASIC[data]
    ((name, arguments),) = data.items()
    if name == "literal":
        return Literal[tuple(arguments)]
    inner = tuple(hint_from_json(a) for a in arguments)
    if name == "union":
        return functools.reduce(operator.or_, inner)
    return _BASIC[name][inner]  # type: ignore[index]
