"""What a chat template takes and how it writes a plain turn: found out once, by rendering probes.

Nothing here reads the template's source: what counts is what it renders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["SENTINELS", "Habits", "changed_part", "probe"]

Message = dict[str, Any]
Render = Callable[..., str]
"""``render(messages, tools=None, prompt=False)`` gives a text or raises what the template does."""

SENTINELS = ("Aq7zX", "Bw3kY")
"""Two stand-ins that share neither their first nor their last character.

Where a text begins with the first letter of one of them, the other one still differs from it, so
the part that changes is found exactly.
"""

_CALL_ID = "nbtrain12"  # nine letters and digits, which one family of templates insists on


@dataclass(frozen=True, slots=True)
class Habits:
    """How one template wants its input, and what it writes around a plain last reply.

    ``parts`` is true where content has to be a list of parts. ``lead`` stands between the
    generation prompt and the reply's text, ``tail`` after the text; both are ``None`` where the
    rendering does not begin with the generation prompt, or nothing could be rendered. ``prompt``
    is what the generation prompt adds.
    """

    parts: bool = False
    arguments: Literal["object", "text"] = "object"
    lead: str | None = None
    tail: str | None = None
    prompt: str = ""


def probe(render: Render) -> Habits:
    """The habits of the template behind ``render``."""
    parts = _wants_parts(render)
    arguments = _arguments(render, parts)
    user, reply = _message("user", "Why?", parts), SENTINELS[0]
    opened = _try(render, [user], prompt=True) or ""
    before = _try(render, [user]) or ""
    prompt = opened[len(before) :] if opened.startswith(before) else ""
    whole = _try(render, [user, _message("assistant", reply, parts)])
    other = _try(render, [user, _message("assistant", SENTINELS[1], parts)])
    if not opened or whole is None or other is None or not whole.startswith(opened):
        return Habits(parts, arguments, prompt=prompt)
    start, end = changed_part(whole, [other])
    if whole[start:end] != reply or start < len(opened):
        return Habits(parts, arguments, prompt=prompt)
    return Habits(parts, arguments, whole[len(opened) : start], whole[end:], prompt)


def changed_part(text: str, others: Sequence[str]) -> tuple[int, int]:
    """The smallest stretch of ``text`` outside of which all of ``others`` equal it.

    Start and end index. For an insertion both are the place where it goes.
    """
    start = min(_common(text, other) for other in others)
    end = start
    for other in others:
        most = min(len(text), len(other)) - start
        end = max(end, len(text) - _common(text[::-1], other[::-1], most))
    return start, end


def _common(text: str, other: str, most: int | None = None) -> int:
    """How many characters both begin with, by bisection: slices compare at memory speed."""
    low, high = 0, min(len(text), len(other)) if most is None else most
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _wants_parts(render: Render) -> bool:
    return not _renders_content(render, False) and _renders_content(render, True)


def _renders_content(render: Render, parts: bool) -> bool:
    said = ("Aq7zX", "Bw3kY", "Cv5mZ")
    roles = ("user", "assistant", "user")
    messages = [_message(role, text, parts) for role, text in zip(roles, said, strict=True)]
    text = _try(render, messages)
    # A list that is printed as it stands shows its keys.
    return text is not None and all(one in text for one in said) and "'type'" not in text


def _arguments(render: Render, parts: bool) -> Literal["object", "text"]:
    value = SENTINELS[0]
    as_object = _call(render, {"town": value}, parts)
    # A mapping that is printed as it stands shows single quotes.
    if as_object is not None and value in as_object and f"'{value}'" not in as_object:
        return "object"
    as_text = _call(render, f'{{"town": "{value}"}}', parts)
    return "text" if as_text is not None and f'"{value}"' in as_text else "object"


def _call(render: Render, arguments: object, parts: bool) -> str | None:
    function = {"name": "lookup", "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    asked = _message("user", "Why?", parts)
    answer = _message("assistant", "", parts) | {"tool_calls": [call]}
    result = _message("tool", "so", parts) | {"tool_call_id": _CALL_ID, "name": "lookup"}
    for messages in ([asked, answer], [asked, answer, result]):
        text = _try(render, messages)
        if text is not None:
            return text
    return None


def _message(role: str, text: str, parts: bool) -> Message:
    return {"role": role, "content": [{"type": "text", "text": text}] if parts else text}


def _try(render: Render, messages: list[Message], prompt: bool = False) -> str | None:
    try:
        return render(messages, prompt=prompt)
    except Exception:  # a template raises whatever it likes
        return None
