"""Chat messages as text and as HTML, each with its role."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["as_turns", "turns_html"]


def as_turns(text: Any) -> Any:
    """A list of messages as one text: each with its role before it, tool calls in words.

    A single message is its content alone; what is no list of messages stays as it is.
    """
    messages = _messages(text)
    if messages is None:
        return text
    if len(messages) == 1 and not messages[0].get("tool_calls"):
        return messages[0].get("content")
    return "\n".join(f"{role}: {said}" for role, said in map(_said, messages))


def turns_html(text: Any) -> str:
    """The same as static HTML; every text is escaped."""
    messages = _messages(text)
    turns = [("", str(text))] if messages is None else [_said(message) for message in messages]
    return "".join(
        f'<div style="white-space:pre-wrap;margin:2px 0"><b>{html.escape(role)}</b> '
        f"{html.escape(said)}</div>"
        for role, said in turns
    )


def _messages(text: Any) -> list[Mapping[str, Any]] | None:
    listed = isinstance(text, list) and text and all(isinstance(m, Mapping) for m in text)
    return text if listed else None


def _said(message: Mapping[str, Any]) -> tuple[str, str]:
    """Role and content of a message; the name of a tool stands with its role."""
    role = str(message.get("role") or "?")
    if message.get("name"):
        role += f" ({message['name']})"
    parts = [_content(message.get("content"))]
    parts += [_call(call) for call in message.get("tool_calls") or ()]
    return role, "\n".join(part for part in parts if part)


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        return "\n".join(map(_part, content))
    return str(content)


def _part(part: Any) -> str:
    if isinstance(part, Mapping):
        return str(part.get("text", f"<{part.get('type')}>"))
    return str(part)


def _call(call: Any) -> str:
    called = call.get("function", call) if isinstance(call, Mapping) else {}
    if not isinstance(called, Mapping) or "name" not in called:
        return f"calls {call}"
    given = called.get("arguments")
    told = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    return f"calls {called['name']} {told}"
