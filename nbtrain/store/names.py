"""Names of registered things: what can be one, what moved, and what an unknown one meant.

A workload, dataset, bundle or model is known by an id; a name points at one and may be moved.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from nbtrain.errors import NotFound, Problem
from nbtrain.plan.fields import describe
from nbtrain.plan.naming import is_id_shaped
from nbtrain.store.ids import short

__all__ = ["moved", "name_problems", "unknown"]

_NAME = re.compile(r"\w[\w.-]{0,99}")
_ALLOWED = (
    "up to 100 letters, digits, '_', '-' and '.', the first a letter, digit or '_', and not the "
    "beginning of an id"
)
_SHOWN = 20


def name_problems(thing: str, name: object) -> list[Problem]:
    """Why ``name`` cannot be the name of a ``thing``; empty when it can."""
    if isinstance(name, str) and _NAME.fullmatch(name) and not is_id_shaped(name):
        return []
    found = name if name is None or isinstance(name, str | int | float) else str(name)
    return [Problem("name", f"{name!r} cannot be a {thing}'s name", found, _ALLOWED)]


def moved(name: str, before: str | None, now: str) -> str | None:
    """That a name meant the id ``before`` and now means another; ``None`` where it does not."""
    if before is None or before == now:
        return None
    return f"{name} now means {short(now)}; before {short(before)}"


def unknown(ref: object, thing: str, names: Iterable[str], also: str = "") -> NotFound:
    """The error for a name that no ``thing`` goes by, with the nearest and the known ones.

    ``also`` is what could be named besides.
    """
    known = list(names)
    msg, near = f"{describe(ref)} is no {thing}", []
    if isinstance(ref, str):
        msg = f"no {thing} is called {ref!r}"
        near = difflib.get_close_matches(ref, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    shown = ", ".join(known[:_SHOWN]) or "none yet"
    more = " …" if len(known) > _SHOWN else ""
    return NotFound(f"{msg}; {hint}known here: {shown}{more}{also}")
