"""What a process may answer to a call. It runs user code, so nothing of it is taken on trust."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from nbtrain.environments.channel import ChannelError
from nbtrain.environments.contract import Contract
from nbtrain.environments.halves import half_in
from nbtrain.rewards.scoring import ERROR_LIMIT

__all__ = ["DEEPEST", "LARGEST_INT_BITS", "CallKind", "read_answer"]

CallKind = Literal["open", "act", "close", "drop", "probe"]

DEEPEST = 64
"""Levels of lists and dicts in one value."""

LARGEST_INT_BITS = 1023
"""A whole number beyond it fits no float, and far beyond it cannot be printed."""

_MOST_VALUES = 1_000_000


def read_answer(kind: CallKind, answer: object) -> dict[str, Any]:
    """The answer to a call of ``kind``, once everything that is read of it has its type.

    Raises :class:`~nbtrain.environments.channel.ChannelError` with a clause on what is wrong.
    """
    if not isinstance(answer, dict):
        msg = f"its answer is a {type(answer).__name__}"
        raise ChannelError(msg)
    seconds = answer.get("seconds")
    if not isinstance(seconds, float) or not 0 <= seconds < math.inf:
        msg = "its answer lacks its seconds"
        raise ChannelError(msg)
    error = answer.get("error")
    if error is not None:
        _check("error", error, _is_text)
        return {"seconds": seconds, "error": error[:ERROR_LIMIT]}
    read: dict[str, Any] = {"seconds": seconds}
    for name, holds in _FIELDS[kind].items():
        value = read[name] = answer.get(name)
        _check(name, value, holds)
        if kind != "close" and (half := half_in(value)):  # a state is for code, not for a tokenizer
            msg = f"{name!r} in its answer holds half a character, {half}"
            raise ChannelError(msg)
    return read


def _check(name: str, value: object, holds: Callable[[Any], bool]) -> None:
    if not holds(value):
        msg = f"{name!r} in its answer is not what it has to be"
        raise ChannelError(msg)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(message, dict) for message in value)
        and all(isinstance(m.get(name), str) for m in value for name in ("role", "content"))
        and all(isinstance(name, str) for message in value for name in message)
        and _is_plain(value)
    )


def _is_state(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(n, str) for n in value) and _is_plain(value)


def _is_contract(value: object) -> bool:
    if not isinstance(value, Mapping) or not _is_plain(value):
        return False
    try:
        for tool in Contract.from_json(value).tools:
            tool.as_function()
    except Exception:  # whatever reading it raises, it is none
        return False
    return True


def _is_plain(value: object) -> bool:
    """Whether a value is plain data, neither deep nor endless: what follows walks through it."""
    level = [value]
    seen = 0
    for _ in range(DEEPEST + 2):
        deeper: list[object] = []
        for one in level:
            if isinstance(one, int) and one.bit_length() > LARGEST_INT_BITS:
                return False
            if isinstance(one, dict):
                if any(isinstance(key, (tuple, frozenset, bytes)) for key in one):
                    return False
                deeper += one.values()
            elif isinstance(one, (list, tuple)):
                deeper += one
            elif one is not None and not isinstance(one, (bool, int, float, str)):
                return False
            if seen + len(deeper) > _MOST_VALUES:
                return False
        if not deeper:
            return True
        seen += len(deeper)
        level = deeper
    return False


_FIELDS: dict[CallKind, dict[str, Callable[[Any], bool]]] = {
    "open": {"text": _is_text_or_none},
    "act": {"messages": _are_messages, "done": _is_bool},
    "close": {"state": _is_state},
    "drop": {},
    "probe": {"contract": _is_contract},
}
