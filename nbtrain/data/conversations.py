"""The rules of a chat row: roles, contents, tool calls and their results.

Everything that is wrong with a row is told; nothing is changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from nbtrain.data.findings import Findings
from nbtrain.data.layouts import A_MESSAGE, Say, complain_of_messages, cut
from nbtrain.data.rows import Row, shape
from nbtrain.data.toolcalls import A_CALL, call_complaints, check_tools

__all__ = ["Conversations", "holds_json", "image_paths", "message_texts", "text_of"]

ROLES = ("system", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which an assistant's message keeps its thoughts."""

_MOST_COLUMNS = 1000
_MOST_TRIED = 100
_OPENING = re.compile(r"[{\[]")
_decoder = json.JSONDecoder()
_MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *REASONING})
_CALL_KEYS = frozenset({"id", "type", "function"})
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant",
                "ai": "assistant", "chatgpt": "assistant", "developer": "system",
                "function": "tool", "observation": "tool"}  # fmt: skip


class Conversations:
    """Checks rows, and counts what a plan has to know of them.

    ``facts`` maps ``images``, ``unanswered``, ``tools`` and ``answers_without_json`` to the number
    of such rows and the line of the first; ``columns`` are the keys besides ``messages``.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self.facts: dict[str, tuple[int, int]] = {}
        self.columns: set[str] = set()

    def check(self, row: Row, line: int) -> None:
        """Tell everything that is wrong with ``row``, which stands on ``line``."""
        if len(self.columns) <= _MOST_COLUMNS:
            self.columns.update(row)
        messages = row.get("messages")
        say: Say = partial(_add, self._findings, line)
        if not isinstance(messages, list) or not messages:
            complain_of_messages(row, say)
            return
        tools = row.get("tools") is not None
        if tools:
            check_tools(row["tools"], say)
        turns = _Turns(say)
        for place, message in enumerate(messages):
            turns.check(message, place)
        turns.end()
        if len(self.columns) > _MOST_COLUMNS:
            say(
                "columns",
                "row",
                f"rows have more than {_MOST_COLUMNS:,} different keys",
                "the same columns in most rows",
            )
        if tools or turns.tools:
            self._count("tools", line)
        if turns.images:
            self._count("images", line)
        if not turns.answered:
            self._count("unanswered", line)
        elif not self._findings.refused and not holds_json(text_of(messages[-1])):
            self._count("answers_without_json", line)

    def _count(self, fact: str, line: int) -> None:
        count, first = self.facts.get(fact, (0, line))
        self.facts[fact] = count + 1, first


def _add(
    findings: Findings,
    line: int,
    code: str,
    field: str,
    message: str,
    expected: str | None = None,
    **more: Any,
) -> None:
    findings.add(code, line, field, message, expected, **more)


class _Turns:
    """Goes through one row's messages."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._open: dict[str, str] = {}  # calls without a result, and where they stand
        self._known: set[str] = set()
        self.tools = False
        self.images = False
        self.answered = False

    def check(self, message: Any, place: int) -> None:
        """One message, the one at ``place`` from 0."""
        at = f"messages[{place}]"
        self.answered = False
        if type(message) is not dict:
            found = shape(message)
            self._say("message", at, f"{at} is {found}", A_MESSAGE, found=found)
            return
        role = message.get("role")
        if role not in ROLES:
            self._bad_role(message, at)
            return
        if role == "system" and place:
            self._say("system", at, f"{at} is a system message, but not the first", "only first")
        if message.keys() - _MESSAGE_KEYS:
            self._other_keys(message, at)
        calls = message.get("tool_calls")
        if role in ("user", "assistant"):
            self._results_are_there()
        if role == "tool":
            self._result(message, at)
        elif message.get("tool_call_id") is not None:
            self._note(f"{at}.tool_call_id", "tool_call_id", "Only a tool's message answers a call")
        if calls is not None:
            self._calls(calls, role, at)
        self._name(message, role, at)
        self._content(message, role, at, calls=bool(calls))
        self.answered = role == "assistant"

    def end(self) -> None:
        """After the last message: calls in the final answer need no result."""
        if not self.answered:
            self._results_are_there()

    def _bad_role(self, message: dict[str, Any], at: str) -> None:
        role = message.get("role")
        if role is None:
            keys = ", ".join(cut(key) for key in list(message)[:8]) or "none"
            hint = (
                "'from' is nearest to 'role', 'value' to 'content'" if "from" in message else None
            )
            said = f"{at} has no role; its keys are: {keys}"
            self._say("role", at, said, ", ".join(ROLES), found=keys, hint=hint)
            return
        found = cut(role) if isinstance(role, str) else shape(role)
        near = _OTHER_ROLES.get(role.lower()) if isinstance(role, str) else None
        hint = f"{near!r} is nearest" if near else None
        said = f"{at}.role is {found!r}" if isinstance(role, str) else f"{at}.role is {found}"
        self._say("role", f"{at}.role", said, ", ".join(ROLES), found=found, hint=hint)

    def _other_keys(self, message: dict[str, Any], at: str) -> None:
        for key in message.keys() - _MESSAGE_KEYS:
            if key == "function_call" and message[key] is not None:
                said = f"{at} has function_call, an older form of tool_calls"
                self._say("function_call", f"{at}.{key}", said, f"tool_calls: [{A_CALL}]")
                continue
            hint = None
            if key in ("loss", "weight", "train", "trainable", "mask", "loss_mask"):
                hint = "It does not change the loss; a mask column does, where a plan names one"
            self._note(f"{at}.{cut(key)}", cut(key), hint)

    def _note(self, field: str, key: str, hint: str | None = None) -> None:
        said = f"messages have the key {key!r}, which is kept and has no effect of its own"
        self._say("key", field, said, found=key, hint=hint, note=True)

    def _results_are_there(self) -> None:
        for at in self._open.values():
            said = f"{at} has no result before the next turn"
            self._say("unanswered-call", at, said, "a tool message with its tool_call_id")
        self._open.clear()

    def _result(self, message: dict[str, Any], at: str) -> None:
        self.tools = True
        ident = message.get("tool_call_id")
        field = f"{at}.tool_call_id"
        if not isinstance(ident, str) or not ident:
            found = shape(ident) if "tool_call_id" in message else "missing"
            said = f"{field} is {found}"
            self._say("result", field, said, "the id of the call it answers", found=found)
        elif self._open.pop(ident, None) is None:
            known = ident in self._known
            said = f"{field} names {'a call that has its result' if known else 'no earlier call'}"
            found = "answered" if known else "unknown"
            self._say("result", field, said, "the id of the call it answers", found=found)

    def _calls(self, calls: Any, role: str, at: str) -> None:
        field = f"{at}.tool_calls"
        if not isinstance(calls, list):
            found = shape(calls)
            self._say("calls", field, f"{field} is {found}", f"a list of {A_CALL}", found=found)
            return
        self.tools = self.tools or bool(calls)
        if calls and role != "assistant":
            said = f"{field} stands in a {role}'s message"
            self._say("calls", field, said, "calls in the assistant's messages only", found=role)
            return
        for place, call in enumerate(calls):
            where = f"{field}[{place}]"
            for inner, found in call_complaints(call):
                said = f"{where}{inner} is {found}"
                self._say("call", where + inner, said, A_CALL, found=found)
            if type(call) is not dict:
                continue
            for key in call.keys() - _CALL_KEYS:
                self._note(f"{where}.{cut(key)}", f"tool_calls[].{cut(key)}")
            ident = call.get("id")
            if not isinstance(ident, str):
                continue
            if ident in self._open:
                said = f"{where}.id is the id of another call that waits for its result"
                self._say("call", f"{where}.id", said, "an id of its own", found="twice")
            self._open[ident] = where
            self._known.add(ident)

    def _name(self, message: dict[str, Any], role: str, at: str) -> None:
        name = message.get("name")
        if name is None:
            return
        field = f"{at}.name"
        if not isinstance(name, str):
            found = shape(name)
            self._say("name", field, f"{field} is {found}", "text", found=found)
        elif role != "tool":  # where it is the tool's
            self._note(field, "name", "A chat template may show it; most do not")

    def _content(self, message: dict[str, Any], role: str, at: str, *, calls: bool) -> None:
        field = f"{at}.content"
        content = message.get("content")
        if isinstance(content, str):
            empty = not content or content.isspace()
        elif isinstance(content, list) and content:
            empty = not self._parts(content, role, field)
        elif content is None and calls:
            return
        else:
            found = shape(content) if "content" in message else "missing"
            expected = "text, or a list of parts"
            if content is None and role == "assistant":
                expected += "; null only beside tool_calls"
            self._say("content", field, f"{field} is {found}", expected, found=found)
            return
        thoughts = self._thoughts(message, at)
        if empty and role == "user":
            self._say("empty", field, f"{field} is empty", "text", found=role)
        elif empty and role == "assistant" and not calls and not thoughts:
            said = f"{at} has neither text nor tool calls nor thoughts"
            self._say("empty", field, said, "an answer to learn from", found=role)

    def _thoughts(self, message: dict[str, Any], at: str) -> bool:
        some = False
        for key in REASONING:
            value = message.get(key)
            if value is None:
                continue
            if not isinstance(value, str):
                found = shape(value)
                self._say("thoughts", f"{at}.{key}", f"{at}.{key} is {found}", "text", found=found)
            some = some or bool(value)
        return some

    def _parts(self, parts: list[Any], role: str, field: str) -> bool:
        """Whether the parts hold anything."""
        some = False
        for place, part in enumerate(parts):
            at = f"{field}[{place}]"
            kind = part.get("type") if type(part) is dict else None
            if kind == "text" and isinstance(part.get("text"), str):
                some = some or bool(part["text"].strip())
            elif kind == "image" and role in ("user", "tool"):
                some = self.images = True
                self._image(part, at)
            elif kind == "image":
                said = f"{at} is an image in a {role}'s message"
                self._say("part", at, said, "images in users' and tools' messages", found=role)
                some = self.images = True
            else:
                some = True
                self._bad_part(part, kind, at)
        return some

    def _bad_part(self, part: Any, kind: Any, at: str) -> None:
        expected = '{"type": "text", "text": …} or {"type": "image", "path": …}'
        if type(part) is not dict:
            found = shape(part)
        elif kind == "text":
            found = f"a text part whose text is {shape(part.get('text'))}"
        else:
            found = f"a part of type {cut(kind)!r}" if isinstance(kind, str) else "without a type"
        hint = None
        if kind in ("image_url", "input_image"):
            hint = "Save the image beside the rows and name its relative path"
        self._say("part", at, f"{at} is {found}", expected, found=found, hint=hint)

    def _image(self, part: dict[str, Any], at: str) -> None:
        path = _path_of(part)
        found = None
        if path is None:
            found = "without a path"
        elif "://" in path or path.startswith("data:"):
            found = "not a local path"
        elif path.startswith(("/", "~")) or ".." in path.replace("\\", "/").split("/"):
            found = "not a path below the rows' folder"
        if found is not None:
            said = f"{at}.path is {found}" if path is not None else f"{at} is an image {found}"
            self._say("image", f"{at}.path", said, "a relative path", found=found)


def _path_of(part: dict[str, Any]) -> str | None:
    return next((part[k] for k in ("path", "image") if isinstance(part.get(k), str)), None)


def image_paths(row: Row) -> Iterator[str]:
    """The relative paths of the row's images, in order."""
    for message in row["messages"]:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "image":
                path = _path_of(part)
                if path is not None:
                    yield path


def text_of(message: dict[str, Any]) -> str:
    """A message's text, its text parts joined; empty where it has none."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""


def holds_json(text: str) -> bool:
    """Whether a JSON object or list stands anywhere in a text.

    So does a text of a hundred braces and brackets that begin none: the others are not looked at.
    """
    for tried, opening in enumerate(_OPENING.finditer(text)):
        if tried >= _MOST_TRIED:
            return True
        try:
            _decoder.raw_decode(text, opening.start())
        except RecursionError:
            return True
        except ValueError:
            continue
        return True
    return False


def message_texts(row: Row) -> Iterator[str]:
    """Text and thoughts of every message of a checked row."""
    for message in row["messages"]:
        yield text_of(message)
        for key in REASONING:
            if message.get(key):
                yield message[key]
