"""One row as text and as values: JSON exactly as ``json.loads`` reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

from nbtrain.data.findings import Findings
from nbtrain.data.formats import is_cut_off

__all__ = ["MOST_DEPTH", "Row", "decode", "encode", "shape"]

Row = dict[str, Any]

MOST_DEPTH = 200
"""Levels of objects and lists in one row."""

AN_OBJECT = "one JSON object a line"
_MOST_DIGITS = 4300
_encoder = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
)


class _TwiceError(ValueError):
    """A key stands twice in an object."""


class _Pairs(list[tuple[str, Any]]):
    """An object's keys and values as they stand."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _TwiceError
    return found


_loads = json.JSONDecoder(object_pairs_hook=_once).decode


def decode(text: str, line: int, findings: Findings) -> Row | None:
    """The row in ``text``; ``None`` when it is none, which is then among the findings."""
    try:
        row = _loads(text)
    except _TwiceError:
        _twice(text, line, findings)
        return None
    except json.JSONDecodeError as error:
        _not_json(text, error, line, findings)
        return None
    except ValueError:  # the only other one: more digits than Python turns into a number
        _too_many_digits(line, findings)
        return None
    except RecursionError:
        _too_deep(line, findings)
        return None
    if type(row) is not dict:
        message = f"the row is {shape(row)}"
        findings.add("row", line, "row", message, AN_OBJECT, found=shape(row))
        return None
    return cast("Row", row)


def _twice(text: str, line: int, findings: Findings) -> None:
    try:
        place, key = _first_twice(json.loads(text, object_pairs_hook=_Pairs))
    except json.JSONDecodeError as error:  # what comes after the pair is worse
        _not_json(text, error, line, findings)
        return
    except RecursionError:
        _too_deep(line, findings)
        return
    except ValueError:
        _too_many_digits(line, findings)
        return
    message = f"the key {_short(key)} stands twice in {place or 'the row'}"
    findings.add("twice", line, place or key, message, "each key once", found=_short(key))


def _not_json(text: str, error: json.JSONDecodeError, line: int, findings: Findings) -> None:
    column = error.pos + 1
    if is_cut_off(text, error):
        message = "the row is cut off: the line ends inside an object"
        findings.add("cut-off", line, "row", message, AN_OBJECT, column=column)
    elif error.msg == "Extra data":
        message = "more stands on the line after the row's end"
        findings.add("extra", line, "row", message, AN_OBJECT, column=column)
    else:
        message = f"the row is not JSON: {error.msg[0].lower()}{error.msg[1:]}"
        findings.add("json", line, "row", message, AN_OBJECT, found=error.msg, column=column)


def encode(row: Row, line: int, findings: Findings) -> bytes | None:
    """The row as one compact line with its end; ``None`` when a value has no JSON text."""
    try:
        data = _encoder.encode(row).encode() + b"\n"
    except UnicodeEncodeError:
        place = _first(row, lambda value: isinstance(value, str) and _has_surrogate(value))
        message = f"{place} holds half of a surrogate pair, which is not text"
        findings.add("surrogate", line, place, message, "valid Unicode")
        return None
    except RecursionError:
        _too_deep(line, findings)
        return None
    except ValueError:
        place = _first(row, lambda value: isinstance(value, float) and not math.isfinite(value))
        if not place:
            _too_many_digits(line, findings)
            return None
        message = f"{place} is no finite number"
        findings.add("finite", line, place, message, "a finite number, or null")
        return None
    # Braces in texts count too: only a row that has many is measured.
    if data.count(b"{") + data.count(b"[") > MOST_DEPTH and _depth(row) > MOST_DEPTH:
        _too_deep(line, findings)
        return None
    return data


def shape(value: object) -> str:
    """What kind of JSON value it is, in words."""
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, str):
        return "text" if value else "empty text"
    names = {type(None): "null", bool: "a truth value", int: "a number", float: "a number",
             dict: "an object"}  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")


def _too_deep(line: int, findings: Findings) -> None:
    message = f"the row is nested more than {MOST_DEPTH} levels deep"
    findings.add("depth", line, "row", message, f"at most {MOST_DEPTH} levels")


def _too_many_digits(line: int, findings: Findings) -> None:
    message = f"a whole number has more than {_MOST_DIGITS:,} digits"
    findings.add("digits", line, "row", message, f"at most {_MOST_DIGITS:,} digits")


def _short(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else text[: most - 1] + "…")


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _inner(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, _Pairs)):
        for key, inner in value.items() if isinstance(value, dict) else value:
            yield f"{place}.{key}" if place else key, inner
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield f"{place}[{number}]", inner


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Every value with its place, without recursion."""
    waiting = [("", value)]
    while waiting:
        place, value = waiting.pop()
        yield place, value
        waiting += reversed(list(_inner(value, place)))


def _first(row: Row, wanted: Callable[[Any], bool]) -> str:
    for place, value in _walk(row):
        if wanted(value):
            return place
        if isinstance(value, dict):
            for key in value:
                if wanted(key):
                    return f"a key of {place or 'the row'}"
    return ""


def _first_twice(row: Any) -> tuple[str, str]:
    for place, value in _walk(row):
        if isinstance(value, _Pairs):
            seen: set[str] = set()
            for key, _ in value:
                if key in seen:
                    return place, key
                seen.add(key)
    return "", ""


def _depth(row: Any) -> int:
    deepest = 0
    waiting: list[tuple[Any, int]] = [(row, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, (dict, list)):
            deepest = max(deepest, depth)
            inner = value.values() if isinstance(value, dict) else value
            waiting += [(one, depth + 1) for one in inner]
    return deepest
