"""A message's own text in a rendering: what changes when the message is replaced.

Each part of a message (its content, its reasoning, the arguments of each call) is replaced by two
stand-ins; the characters in which the rendering then differs are that part's. No text is searched
for, so repeated and overlapping answers are told apart, and index 0 is a place like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nbtrain.data.probing import SENTINELS, changed_part
from nbtrain.data.rendering import Conversation, Renderer, Rendering

__all__ = ["REASONING", "Region", "Regions", "content_text", "has_reasoning", "is_rich"]

Message = dict[str, Any]

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message carries its reasoning."""


@dataclass(frozen=True, slots=True)
class Region:
    """Characters ``start`` to ``end`` (exclusive) of a rendering."""

    start: int
    end: int


class Regions:
    """Finds messages in one rendering by rendering the conversation with one of them replaced."""

    def __init__(self, renderer: Renderer, conversation: Conversation, whole: Rendering) -> None:
        self._renderer = renderer
        self._messages = list(conversation.messages)
        self._tools = conversation.tools
        self._whole = whole

    def _prefix(self, length: int, prompt: bool = False) -> str | None:
        return self._render(self._messages[:length], prompt)

    def _render(self, messages: Sequence[Message], prompt: bool = False) -> str | None:
        try:
            return self._renderer.text(messages, self._tools, prompt)
        except Exception:  # a part of a conversation may be none that the template takes
            return None

    @cached_property
    def regions(self) -> list[Region | None]:
        """Each message's own text in the rendering; ``None`` where it has none."""
        return [
            self._region(self._messages, index, self._whole.text)
            for index in range(len(self._messages))
        ]

    def region(self, index: int) -> Region | None:
        """One message's own text, ``None`` where the rendering has none of it."""
        if "regions" in self.__dict__:
            return self.regions[index]
        return self._region(self._messages, index, self._whole.text)

    def _region(
        self, messages: Sequence[Message], index: int, text: str, prompt: bool = False
    ) -> Region | None:
        found = [
            region
            for variants in self._variants(messages[index])
            if (region := self._changed(messages, index, variants, text, prompt)) is not None
        ]
        if not found:
            return None
        return Region(min(r.start for r in found), max(r.end for r in found))

    def _changed(
        self,
        messages: Sequence[Message],
        index: int,
        variants: Sequence[Message],
        text: str,
        prompt: bool = False,
    ) -> Region | None:
        rendered = [
            self._render([*messages[:index], variant, *messages[index + 1 :]], prompt)
            for variant in variants
        ]
        others = [one for one in rendered if one is not None and one != text]
        return Region(*changed_part(text, others)) if others else None

    def _changed_whole(self, index: int, variants: Sequence[Message]) -> Region | None:
        return self._changed(self._messages, index, variants, self._whole.text)

    def _variants(self, message: Message) -> Iterator[list[Message]]:
        """For each part of a message: the message with that part replaced, twice."""
        if content_text(message) or not is_rich(message):
            yield self._with_text(message)
        if has_reasoning(message):
            yield self._with_reasoning(message)
        for call in range(len(message.get("tool_calls") or ())):
            yield self._with_arguments(message, call)

    def _with_text(self, message: Message) -> list[Message]:
        return [message | {"content": self._said(stand_in)} for stand_in in SENTINELS]

    def _with_reasoning(self, message: Message) -> list[Message]:
        carried = [key for key in REASONING if message.get(key)]
        return [message | dict.fromkeys(carried, stand_in) for stand_in in SENTINELS]

    def _said(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self._renderer.habits.parts else text

    def _with_arguments(self, message: Message, call: int) -> list[Message]:
        changed = []
        for stand_in in SENTINELS:
            arguments: Any = {stand_in: stand_in}
            if self._renderer.habits.arguments == "text":
                arguments = f'{{"{stand_in}": "{stand_in}"}}'
            calls = list(message["tool_calls"])
            holder = calls[call].get("function")
            if isinstance(holder, dict):
                calls[call] = calls[call] | {"function": holder | {"arguments": arguments}}
            else:
                calls[call] = calls[call] | {"arguments": arguments}
            changed.append(message | {"tool_calls": calls})
        return changed

    def left_out_call(self, index: int) -> bool:
        """Whether the rendering lacks one of a message's tool calls."""
        message = self._messages[index]
        return any(
            self._changed_whole(index, self._with_arguments(message, call)) is None
            for call in range(len(message.get("tool_calls") or ()))
        )


def content_text(message: Message) -> str:
    """A message's content as one text, whatever form the template takes it in."""
    content = message.get("content", "")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content)


def has_reasoning(message: Message) -> bool:
    """Whether a message carries reasoning in a field of its own."""
    return any(message.get(key) for key in REASONING)


def is_rich(message: Message) -> bool:
    """Whether a message has more than its content: calls or reasoning."""
    return bool(message.get("tool_calls")) or has_reasoning(message)
