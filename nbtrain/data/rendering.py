"""Rows as the model reads them: token ids exactly as the tokenizer's own chat template gives them.

Messages are only brought into the shape that the template takes, which probes find out once:
content as a text or as a list of parts, arguments of a call as an object or as JSON text. Both
spellings of a call give the same tokens, and missing content beside calls is the empty text.
Everything else in a message is handed on as it stands.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtrain.data.probing import SENTINELS, Habits, probe
from nbtrain.errors import Problem, Refused

__all__ = [
    "WRITES_DATE",
    "Conversation",
    "Renderer",
    "Rendering",
    "RowRefused",
    "end_ids_in",
    "writes_date",
]

WRITES_DATE = "the chat template writes today's date: tokens change from day to day"

Message = dict[str, Any]

_ALWAYS_COMPARED = 32
_COMPARED_EVERY = 64


class RowRefused(Refused):
    """A row cannot be trained on as it is; ``problems`` say why, without saying which row.

    What is wrong in the same way in several rows has the same field (but for its numbers) and the
    same message, so that rows can be counted by them.
    """

    head = "the row is refused"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A row's messages and tools in the shape that the template takes."""

    messages: tuple[Message, ...]
    tools: list[Any] | None = None

    @property
    def roles(self) -> str:
        """The roles in order, for sentences."""
        return ", ".join(str(message.get("role")) for message in self.messages)


@dataclass(frozen=True, slots=True)
class Rendering:
    """A row as text and as token ids.

    ``offsets[i]`` are the first character of token ``i`` in ``text`` and the one after its last.
    """

    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]


class Renderer:
    """Renders rows through one tokenizer's chat template.

    ``tokenizer`` is a fast tokenizer of transformers; ``ends`` the ids that end a reply (those of
    the model's generation config and the tokenizer's own), the tokenizer's alone by default.

    Raises ``Refused`` for a tokenizer without a chat template, without end ids, or one that does
    not know which characters a token covers.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int] | None = None) -> None:
        self.tokenizer = tokenizer
        own = getattr(tokenizer, "eos_token_id", None)
        self.ends: frozenset[int] = frozenset(
            ends if ends is not None else [] if own is None else [int(own)]
        )
        _check_tokenizer(tokenizer, self.ends)
        self.habits: Habits = probe(self.text)
        self._rendered = 0

    def text(
        self, messages: Sequence[Message], tools: list[Any] | None = None, prompt: bool = False
    ) -> str:
        """What the template writes for messages in its own shape, with or without the generation
        prompt. Raises what the template raises.
        """
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        return text

    def conversation(self, row: Mapping[str, Any]) -> Conversation:
        """The row in the template's shape; raises :class:`RowRefused` where it has none."""
        problems: list[Problem] = []
        messages = tuple(
            self._shaped(message, f"messages[{index}]", problems)
            for index, message in enumerate(row.get("messages") or ())
        )
        if not messages:
            problems.append(Problem("messages", "messages is empty; a conversation is needed"))
        if problems:
            raise RowRefused(problems)
        return Conversation(messages, list(row["tools"]) if row.get("tools") else None)

    def render(self, row: Mapping[str, Any]) -> Rendering:
        """Text, ids and offsets of a whole row; raises :class:`RowRefused`."""
        return self.render_conversation(self.conversation(row))

    def render_conversation(self, conversation: Conversation) -> Rendering:
        """Text, ids and offsets of a conversation; raises :class:`RowRefused`.

        The ids are those of ``apply_chat_template(messages, tools=tools, tokenize=True)``. That
        the text alone gives the same ids is seen for the first 32 rows and one in 64 after them.
        """
        messages = list(conversation.messages)
        try:
            text = self.text(messages, conversation.tools)
        except Exception as error:  # a template raises whatever it likes
            raise RowRefused([self._explained(error, conversation)]) from error
        try:
            encoded = self.tokenizer.apply_chat_template(
                messages,
                tools=conversation.tools,
                tokenize=True,
                add_generation_prompt=False,
                return_dict=True,
                tokenizer_kwargs={"return_offsets_mapping": True},
            )
        except Exception as error:  # half a surrogate pair, for one
            message = "the tokenizer cannot encode this row"
            raise RowRefused([Problem("messages", message, hint=_one_line(error))]) from error
        ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
        self._rendered += 1
        compared = self._rendered <= _ALWAYS_COMPARED or self._rendered % _COMPARED_EVERY == 0
        if (compared and self._encode(text) != ids) or (offsets and offsets[-1][1] > len(text)):
            message = "the tokenizer gives other ids for the rendered text than its template does"
            raise RowRefused([Problem("messages", message)])
        return Rendering(text, ids, offsets)

    def _encode(self, text: str) -> list[int]:
        # The template writes the special tokens itself.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    # --- the shape of a message

    def _shaped(self, message: Mapping[str, Any], place: str, problems: list[Problem]) -> Message:
        shaped = {key: value for key, value in message.items() if value is not None}
        calls = shaped.pop("tool_calls", None)
        shaped["content"] = self._content(shaped.get("content"), bool(calls), place, problems)
        if calls:
            shaped["tool_calls"] = [
                self._call(call, f"{place}.tool_calls[{index}]", problems)
                for index, call in enumerate(calls)
            ]
        return shaped

    def _content(self, content: Any, calls: bool, place: str, problems: list[Problem]) -> Any:
        field = f"{place}.content"
        if content is None:
            if not calls:
                message = "content is missing; only a message with tool calls may have none"
                problems.append(Problem(field, message, None, "a text"))
            content = ""
        if isinstance(content, list):
            if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
                message = "content has a part that is not text; training on it is not built yet"
                problems.append(Problem(field, message, allowed='parts of type "text"'))
                return ""
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str):
            kind = type(content).__name__
            problems.append(Problem(field, f"content is of type {kind}", kind, "a text"))
            return ""
        if not self.habits.parts:
            return content
        return [{"type": "text", "text": content}]

    def _call(self, call: Any, place: str, problems: list[Problem]) -> Any:
        if not isinstance(call, Mapping):
            problems.append(Problem(place, "a tool call is no object", allowed="an object"))
            return call
        function = call.get("function")
        holder = function if isinstance(function, Mapping) else call
        arguments = holder.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                arguments = None
        if arguments is None:
            arguments = {} if holder.get("arguments") is None else arguments
        if not isinstance(arguments, Mapping):
            message = "the arguments of a tool call are no JSON object"
            problems.append(Problem(place, message, allowed="an object, or its JSON text"))
            arguments = {}
        given: Any = dict(arguments)
        if self.habits.arguments == "text":
            given = json.dumps(given, ensure_ascii=False)
        filled = dict(holder) | {"arguments": given}
        return dict(call) | {"function": filled} if holder is function else filled

    # --- what the template refuses

    def _explained(self, error: Exception, conversation: Conversation) -> Problem:
        """Why the template does not render a conversation, found by what it does render."""
        hint = f"Roles: {conversation.roles}. The template says: {_one_line(error)}"
        without = [m for m in conversation.messages if m.get("role") != "system"]
        joined = _without_repeats(without)
        if len(without) < len(conversation.messages) and self._renders(without, conversation):
            message = "the model's chat template does not take the system message of this row"
            hint += ". Write its text into the first user message, or choose another model"
        elif len(joined) < len(without) and (
            self._renders(joined, conversation)
            or self._renders(_without_repeats(conversation.messages), conversation)
        ):
            message = "the chat template needs user and assistant to alternate"
        else:
            message = "the chat template does not render this conversation"
        return Problem("messages", message, hint=hint)

    def _renders(self, messages: Sequence[Message], conversation: Conversation) -> bool:
        try:
            self.text(messages, conversation.tools)
        except Exception:  # a template raises whatever it likes
            return False
        return True


def end_ids_in(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Ids that end a reply: those of the generation config (the model's own where there is none)
    and the tokenizer's.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            read = json.loads((folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        declared = read.get("eos_token_id", (read.get("text_config") or {}).get("eos_token_id"))
        if declared is not None:
            found.update(declared if isinstance(declared, list) else [declared])
        break
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(found if own is None else found | {int(own)})


def writes_date(tokenizer: Any) -> bool:
    """Whether the chat template writes today's date: two dates give two renderings, or it asks for
    the date and does not render a plain question and answer.
    """
    template = tokenizer.chat_template
    texts = [template] if isinstance(template, str) else list((template or {}).values())
    if not any("strftime_now" in text for text in texts):
        return False
    talk = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    try:
        shown = {
            tokenizer.apply_chat_template(
                talk, tokenize=False, strftime_now=lambda form, date=date: date
            )
            for date in SENTINELS
        }
    except Exception:  # a template raises whatever it likes
        return True
    return len(shown) > 1


def _check_tokenizer(tokenizer: Any, ends: Collection[int]) -> None:
    if not getattr(tokenizer, "chat_template", None):
        message = "the tokenizer has no chat template, so a conversation has no form to train in"
        hint = "Choose the model's instruct version, whose tokenizer brings one"
        raise Refused([Problem("baseModel", message, hint=hint)])
    if not getattr(tokenizer, "is_fast", False):
        message = "the tokenizer cannot say which characters a token covers"
        hint = "Choose a model with a tokenizer.json"
        raise Refused([Problem("baseModel", message, hint=hint)])
    if not ends:
        message = "neither the tokenizer nor the generation config names a token that ends a reply"
        raise Refused([Problem("baseModel", message)])


def _without_repeats(messages: Sequence[Message]) -> list[Message]:
    """The messages without those whose role is that of the message before."""
    return [
        message
        for index, message in enumerate(messages)
        if index == 0 or message.get("role") != messages[index - 1].get("role")
    ]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
