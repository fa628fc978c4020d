"""What panel and page say to each other, as content and buffers of the widget's messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbtrain.client.feed import Update
    from nbtrain.notebook.panel.program import Program

__all__ = ["TICK", "Asked", "Message", "as_asked", "code", "doing", "done", "update"]

Content = dict[str, Any]
Message = tuple[Content, list[memoryview]]

TICK: Message = ({"kind": "tick"}, [])
"""The kernel lives."""

_LONGEST_REQUEST = 200_000  # characters of what a page may send along with an action


@dataclass(frozen=True, slots=True)
class Asked:
    """What a page wants: ``code``, ``hello``, or ``do`` with an action of the id ``request``."""

    kind: str
    have: str | None = None
    request: int = 0
    action: str = ""
    args: Mapping[str, Any] | None = None


def as_asked(content: object) -> Asked | None:
    """What a page's message says; ``None`` for one that is none of the protocol."""
    if not isinstance(content, Mapping):
        return None
    match content.get("kind"):
        case "code":
            have = content.get("have")
            return Asked("code", have=have if isinstance(have, str) else None)
        case "hello":
            return Asked("hello")
        case "do":
            request, action = content.get("id"), content.get("action")
            if isinstance(request, bool) or not isinstance(request, int):
                return None
            args = content.get("args")
            named = action if isinstance(action, str) else ""
            sized = isinstance(args, Mapping) and len(str(args)) <= _LONGEST_REQUEST
            return Asked("do", request=request, action=named, args=args if sized else None)
    return None


def update(new: Update) -> Message:
    """New rows and parts; buffers: one per column, tables in order."""
    content: Content = {
        "kind": "update",
        "feed": new.feed,
        "serial": new.serial,
        "base": new.base,
        "tables": [
            {"name": table.name, "columns": list(table.columns), "rows": table.rows}
            for table in new.tables
        ],
        "state": dict(new.state),
    }
    buffers = [memoryview(values).cast("B") for table in new.tables for values in table.values]
    return content, buffers


def code(program: Program, have: str | None) -> Message:
    """The panel's program; without it where the page has it."""
    content: Content = {"kind": "code", "hash": program.hash}
    if have == program.hash:
        return content, []
    return content, [memoryview(program.module), memoryview(program.style)]


def doing(request: int, said: str) -> Message:
    """How far an action is."""
    return {"kind": "doing", "id": request, "said": said}, []


def done(request: int, said: str, *, ok: bool = True, result: Any = None) -> Message:
    """The end of an action."""
    content: Content = {"kind": "done", "id": request, "ok": ok, "said": said}
    if result is not None:
        content["result"] = result
    return content, []
