"""A plan as the text of a ``%%train`` cell that reads back as the same plan."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nbtrain.plan.fields import as_python

__all__ = ["as_cell", "line_word", "yaml_text"]

_PLAIN = re.compile(r"[A-Za-z][\w./-]*(?: [\w./-]+)*", re.ASCII)
# what some YAML reads as something else than text
_WORDS = frozenset(("null", "true", "false", "yes", "no", "on", "off", "y", "n"))
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_IDS = ("checkpoint_id", "workload_id", "dataset_id", "model_id", "bundle_id", "slug")


def as_cell(
    body: Mapping[str, object],
    *,
    workload: object = None,
    model: object = None,
    method: str | None = None,
    parent: object = None,
    weights_only: bool = False,
    name: str | None = None,
    into: str | None = None,
    smoke: bool = False,
    small: bool = False,
) -> str:
    """The cell that states ``body`` (options, or a descriptor) and what stands on its line.

    Registered objects are written as their ids. Raises ``ValueError`` for a value on the line that
    is empty or has a line break, ``TypeError`` for what no text can state, such as a function.
    """
    said = {
        "--workload": workload, "--model": model, "--method": method, "--from": parent,
        "--name": name, "--into": into,
    }  # fmt: skip
    words = ["%%train"]
    for flag, value in said.items():
        if value is not None:
            words += [flag, _word(flag, _identified(value))]
    switches = {"--weights-only": weights_only, "--small": small, "--smoke": smoke}
    words += [flag for flag, on in switches.items() if on]
    return " ".join(words) + "\n" + "".join(f"{line}\n" for line in _mapping(body, 0))


def _identified(value: object) -> object:
    for name in _IDS:
        if isinstance(found := getattr(value, name, None), str):
            return found
    return value


def _word(flag: str, value: object) -> str:
    """A value as the magic's splitter reads it: in quotes where it is not one bare word."""
    if not isinstance(value, str):
        msg = f"{flag} needs text or a registered object, found {type(value).__name__}"
        raise TypeError(msg)
    if not value or len(value.splitlines()) > 1 or value.splitlines() != [value]:
        msg = f"{flag} needs one line of text, found {value!r}"
        raise ValueError(msg)
    return line_word(f"${value}" if value.startswith("$") else value)


def line_word(text: str) -> str:
    """One word of a magic's line that is taken as ``text``."""
    if not text or any(map(str.isspace, text)) or text[0] in "\"'#-":
        return "'" + text.replace("'", "''") + "'"
    return text


def _mapping(mapping: Mapping[str, object], depth: int) -> Iterator[str]:
    lead = "  " * depth
    for key, value in mapping.items():
        value = as_python(_identified(value))
        named = f"{lead}{yaml_text(str(key), key=True)}:"
        if isinstance(value, Mapping) and value:
            yield named
            yield from _mapping(value, depth + 1)
        elif _is_list(value) and any(isinstance(item, Mapping) and item for item in value):
            yield named
            yield from _items(value, depth + 1)
        else:
            yield f"{named} {_scalar(value)}"


def _items(items: Sequence[Any], depth: int) -> Iterator[str]:
    lead = "  " * depth
    for item in items:
        if isinstance(item, Mapping) and item:
            first, *rest = _mapping(item, depth + 1)
            yield f"{lead}- {first.lstrip(' ')}"
            yield from rest
        else:
            yield f"{lead}- {_scalar(item)}"


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _scalar(value: Any) -> str:
    """A scalar in YAML 1.2, or a collection on one line."""
    value = as_python(_identified(value))
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        return yaml_text(value)
    if isinstance(value, Mapping):
        inner = (f"{_quoted(str(key))}: {_scalar(item)}" for key, item in value.items())
        return "{" + ", ".join(inner) + "}"
    if _is_list(value):
        return "[" + ", ".join(_scalar(item) for item in value) + "]"
    msg = f"a cell cannot state an object of type {type(value).__name__}: name it with $"
    raise TypeError(msg)


def _number(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    return re.sub(r"e([-+])0(\d)", r"e\1\2", repr(value))


def yaml_text(text: str, *, key: bool = False) -> str:
    """Text, in quotes unless every reader of YAML takes it for the same text.

    A value that begins with a dollar gets a second one: else it could be the name of an object.
    """
    if text.startswith("$") and not key:
        text = f"${text}"
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return _quoted(text)


def _quoted(text: str) -> str:
    return '"' + "".join(map(_character, text)) + '"'


def _character(char: str) -> str:
    if char in _SHORT:
        return _SHORT[char]
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08x}"
