"""Reading a run descriptor: a mapping, a file, or JSON or YAML text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbtrain.errors import PlanRefused, Problem, Refused
from nbtrain.plan.fields import describe, plain
from nbtrain.plan.source import SourcedMapping, parse
from nbtrain.store import usable_path

__all__ = ["is_descriptor", "read_descriptor"]

_SUFFIXES = (".json", ".yaml", ".yml")
_HINT = "A descriptor begins with kind: run; options are stated as options={…}"


def is_descriptor(body: object) -> bool:
    """Whether a document says that it is a descriptor."""
    return isinstance(body, Mapping) and "kind" in body


def read_descriptor(given: object) -> Mapping[str, Any]:
    """The mapping of a descriptor that is a mapping, a path to a file, or its text.

    A text of one line that ends in ``.json``, ``.yaml`` or ``.yml`` is a path. Keys and values of
    files and texts remember where they stand. Raises :class:`PlanRefused`: for a file that cannot
    be read, broken text, and a document without ``kind``.
    """
    if isinstance(given, os.PathLike) or (isinstance(given, str) and _is_path(given)):
        try:
            given = _read_file(usable_path(given, "descriptor"))
        except Refused as refused:
            raise PlanRefused(refused.problems) from None
    elif isinstance(given, str):
        given = parse(given, source="descriptor", defer=True)
    if not isinstance(given, Mapping):
        message = f"a descriptor is a mapping, a path or its text, found {describe(given)}"
        raise PlanRefused([Problem("descriptor", message, plain(given))])
    if "kind" not in given:
        deferred = given.problems if isinstance(given, SourcedMapping) else ()
        missing = Problem("kind", "kind is missing", allowed="run", hint=_HINT)
        raise PlanRefused([missing, *deferred])
    return given


def _is_path(text: str) -> bool:
    return "\n" not in text and text.strip().lower().endswith(_SUFFIXES)


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        message = f"descriptor: {path} cannot be read: {reason}"
        raise PlanRefused([Problem("descriptor", message, str(path))]) from None
    return parse(text, source=path.name, defer=True)
