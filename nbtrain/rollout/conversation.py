"""Chat templates as seen from a trajectory of several turns.

What was sampled stays as it was sampled, id by id. Of what a template writes only two pieces are
used: the prompt, and the text between the end of a reply and the beginning of the next, which is
taken from a rendering of a stand-in conversation, since the real one would be tokenized anew.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema

from nbtrain.environments import Tool
from nbtrain.errors import Problem
from nbtrain.rollout.tokens import decode_completion, render_prompt

__all__ = ["ChatConversation", "tool_schemas"]

Message = dict[str, Any]

_ASKED, _THOUGHT, _SAID, _SEEN = "nbtrainasked", "nbtrainthought", "nbtrainsaid", "nbtrainseen"
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_MARK = re.compile(r"nbtrainmark(\d+)x")
_CALL_ID = "000000000"  # nine digits: some templates insist


def tool_schemas(tools: Sequence[Tool]) -> tuple[list[Message], list[Problem]]:
    """The tools as chat templates take them: JSON schemas made by transformers."""
    schemas: list[Message] = []
    problems = []
    for tool in tools:
        try:
            schemas.append(get_json_schema(tool.as_function()))
        except Exception as error:  # of several classes, some of them not exported
            message = f"tool {tool.name!r} cannot be described to the model: {error}"
            problems.append(Problem("environment", message, found=tool.name))
    return schemas, problems


class ChatConversation:
    """Between messages and token ids. Implements ``rollout.types.Conversation``.

    Parameters
    ----------
    tokenizer
        With a chat template, unless ``raw``.
    tools
        JSON schemas that the template shows to the model; ``None``: replies call no tools.
    ends
        Ids that end a reply.
    raw
        Prompts are plain text that no template wraps; then there are no observations.
    template_kwargs
        Further variables of the template, such as ``enable_thinking``.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Message] | None = None,
        ends: Collection[int],
        raw: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools) if tools else None
        self._ends = frozenset(ends)
        texts = [tokenizer.decode([token]) for token in sorted(self._ends)]
        self._end_texts = [text for text in texts if text]
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._control_names = [token.content for token in added if token.special]
        self._raw = raw or not getattr(tokenizer, "chat_template", None)
        self._template_kwargs = dict(template_kwargs or {})
        self._parse = self._own_parser() if self._tools else None

    # --- prompts

    def prompt(self, prompt: Any, addition: str | None = None) -> tuple[int, ...]:
        """Ids of a task's prompt; ``addition`` is appended to its last user message.

        Raises ``ValueError`` for messages without a template, and whatever the template raises.
        """
        if self._raw:
            text = prompt + (addition or "") if isinstance(prompt, str) else prompt
            return render_prompt(self._tokenizer, text, raw=True)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if addition and self._controls(addition):
            marked = _with_addition(messages, _mark(0))
            text = self._render(marked, generation=True, tools=self._tools)
            return tuple(self._encode_marked(text, [addition]))
        text = self._render(_with_addition(messages, addition), generation=True, tools=self._tools)
        return tuple(self._encode(text))

    # --- replies

    def reply(self, token_ids: Sequence[int]) -> Message:
        """The assistant message of sampled ids: ``role``, ``content``, maybe ``tool_calls``.

        A call that cannot be read is ``{"type": "malformed", "error": …}``: the environment
        answers it with that error and executes nothing.
        """
        content = decode_completion(self._tokenizer, token_ids, self._ends)
        if self._tools is None:
            return {"role": "assistant", "content": content}
        if self._parse is not None:
            return self._parsed(self._parse, list(token_ids), content)
        # The marks of a call may be special tokens, which the plain text leaves out.
        kept = list(token_ids[:-1] if token_ids and token_ids[-1] in self._ends else token_ids)
        text = self._tokenizer.decode(kept, clean_up_tokenization_spaces=False)
        calls = [_read_call(body, closed) for body, closed in _CALL.findall(text)]
        if not calls:
            return {"role": "assistant", "content": content}
        spoken = _CALL.sub("", text).strip()
        return {"role": "assistant", "content": spoken, "tool_calls": calls}

    def _own_parser(self) -> Callable[[list[int]], Any] | None:
        """The tokenizer's response parsing where it has one, whichever way its version does it."""
        parse = getattr(self._tokenizer, "parse_response", None)
        names = ("response_template", "response_schema")
        if parse is None or not any(getattr(self._tokenizer, n, None) for n in names):
            return None
        takes = inspect.signature(parse).parameters
        given: dict[str, Any] = {}
        if "prefix" in takes:
            given["prefix"] = self._render([_user()], generation=True)
        if "tools" in takes:
            given["tools"] = self._tools
        return lambda ids: parse(ids, **given)

    def _parsed(
        self, parse: Callable[[list[int]], Any], token_ids: list[int], content: str
    ) -> Message:
        try:
            message = parse(token_ids)
            calls = [_checked_call(call) for call in message.get("tool_calls") or ()]
        except Exception as error:  # whatever a schema makes of a text it does not fit
            calls = [_malformed(f"{type(error).__name__}: {error}")]
            return {"role": "assistant", "content": content, "tool_calls": calls}
        spoken = message.get("content")
        read: Message = {"role": "assistant", "content": spoken if isinstance(spoken, str) else ""}
        for end in self._end_texts:
            read["content"] = read["content"].removesuffix(end)
        for kept in ("thinking", "reasoning_content"):
            if message.get(kept):
                read[kept] = message[kept]
        return {**read, "tool_calls": calls} if calls else read

    # --- observations

    def observation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids from behind a reply's end token to where the next reply begins.

        What the messages say stays text: the name of a control token in it ends no turn.

        Raises ``ValueError`` when the template cannot take such messages there.
        """
        said = [dict(message) for message in messages]
        contents = [str(message.get("content") or "") for message in said]
        if any(map(self._controls, contents)):
            marked = [m | {"content": _mark(n)} for n, m in enumerate(said)]
            text, cut = self._around(marked)
            return self._encode_marked(text[cut:], contents)
        text, cut = self._around(said)
        ids = self._encode(text)
        # As many end tokens as the stand-in has, since the messages may hold some themselves.
        count = sum(token in self._ends for token in self._encode(text[:cut]))
        places = [place for place, token in enumerate(ids) if token in self._ends]
        if not 0 < count <= len(places):
            msg = "the chat template's end of a reply is not one of the tokens that end replies"
            raise ValueError(msg)
        return ids[places[count - 1] + 1 :]

    def _around(self, messages: list[Message]) -> tuple[str, int]:
        """A stand-in conversation that goes on with ``messages``, and where its reply ends."""
        failure: Exception | None = None
        for standing_in, following in _stand_ins(messages):
            try:
                before = self._render(standing_in, generation=False)
                text = self._render([*standing_in, *following], generation=True)
            except Exception as error:  # a template raises what it likes
                failure = failure or error
                continue
            cut = self._end_of_reply(before, text, messages)
            if cut is not None:
                return text, cut
        roles = ", ".join(dict.fromkeys(str(message.get("role")) for message in messages))
        msg = "the chat template does not close a reply with a token that ends replies"
        if failure is not None:
            msg = f"the chat template takes no message of role {roles} after a reply: {failure}"
        raise ValueError(msg)

    def _end_of_reply(self, before: str, text: str, messages: Sequence[Message]) -> int | None:
        """Where the stand-in's reply ends in ``text``; ``before`` is the stand-in alone."""
        start = text.find(_SAID)
        if start < 0:  # some templates leave out what is said beside a call
            start = text.find(str(messages[0].get("name") or _SAID), text.find(_ASKED))
        if start < 0:
            return None
        last = max(
            (at + len(end) for end in self._end_texts if (at := before.rfind(end)) >= 0), default=0
        )
        if last > start and text.startswith(before[:last]):
            return last
        # The template rewrites the reply once something follows.
        found = [at + len(end) for end in self._end_texts if (at := text.find(end, start)) >= 0]
        return min(found, default=None)

    # --- the start check

    def check(self) -> tuple[list[Problem], list[str]]:
        """What keeps this template from several turns, and what a person should know of it."""
        if self._raw:
            message = "the environment needs a chat template, and the tokenizer has none"
            return [Problem("environment", message, hint="Choose a chat model")], []
        problems = []
        role = "tool" if self._tools else "user"
        seen: Message = {"role": role, "content": _SEEN}
        if self._tools:
            names = [str(tool["function"]["name"]) for tool in self._tools]
            seen["name"] = names[0]
            problems += self._hidden(names)
        try:
            if _SEEN not in self._tokenizer.decode(self.observation([seen])):
                message = f"the chat template leaves out messages of role {role}"
                problems.append(Problem("environment", message, found=role, hint=_HINT_TOOLS))
        except ValueError as error:
            problems.append(Problem("environment", str(error), found=role, hint=_HINT_TOOLS))
        return problems, ([] if problems else self._remarks(seen))

    def _hidden(self, names: Sequence[str]) -> list[Problem]:
        try:
            shown = self._render([_user()], generation=True, tools=self._tools)
        except Exception as error:
            message = f"the chat template cannot show the model its tools: {error}"
            return [Problem("environment", message, hint=_HINT_TOOLS)]
        hidden = [name for name in names if name not in shown]
        if not hidden:
            return []
        message = f"the chat template does not show the model its tools: {', '.join(hidden)}"
        return [Problem("environment", message, hidden, hint=_HINT_TOOLS)]

    def _remarks(self, seen: Message) -> list[str]:
        """Sentences on how the template rewrites what was said."""
        thought = f"<think>\n{_THOUGHT}\n</think>\n\n{_SAID}"
        conversation = [_user(), _assistant(thought), seen]
        try:
            text = self._render(conversation, generation=True)
        except Exception:  # it takes observations only behind calls; those are checked already
            return []
        opening = self._render([_user()], generation=True)
        if _THOUGHT not in text:
            what = "drops the thinking of earlier replies"
        elif thought not in text:
            what = "writes earlier replies differently from how they were sampled"
        elif not text.startswith(opening):
            what = "opens a reply with text that it leaves out of earlier ones"
        else:
            return []
        return [
            f"the chat template {what}; in trajectories every sampled token stays in the context "
            "and counts, so later turns are trained on more than a conversation that is rendered "
            "anew for each turn would show"
        ]

    # --- rendering

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation: bool,
        tools: list[Message] | None = None,
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=tools,
            tokenize=False,
            add_generation_prompt=generation,
            **self._template_kwargs,
        )
        return text

    def _encode(self, text: str) -> list[int]:
        # The template writes the special tokens itself.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _controls(self, content: str) -> bool:
        """Whether a text holds the name of a control token."""
        return any(name in content for name in self._control_names)

    def _encode_marked(self, text: str, contents: Sequence[str]) -> list[int]:
        """Ids of a rendering in which marks stand for what was said, said as text and no more."""
        ids: list[int] = []
        for number, piece in enumerate(_MARK.split(text)):
            if number % 2 == 0:
                ids += self._encode(piece)
            else:
                plain = self._tokenizer(
                    contents[int(piece)], add_special_tokens=False, split_special_tokens=True
                )
                ids += plain["input_ids"]
        return ids


_HINT_TOOLS = (
    "Choose a model whose chat template takes tools, or write the environment in the step form, "
    "answering with user messages"
)


def _mark(number: int) -> str:
    return f"nbtrainmark{number}x"


def _user() -> Message:
    return {"role": "user", "content": _ASKED}


def _assistant(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def _with_addition(messages: Sequence[Mapping[str, Any]], addition: str | None) -> list[Message]:
    added = [dict(message) for message in messages]
    if addition:
        users = [m for m in added if m.get("role") == "user"]
        last = (users or added)[-1]
        last["content"] = str(last["content"]) + addition
    return added


def _stand_ins(messages: list[Message]) -> Iterator[tuple[list[Message], list[Message]]]:
    """Conversations that ``messages`` may follow, the most natural one first."""
    if messages and messages[0].get("role") == "tool":
        # A template may take the name from the call, insist on ids, or want arguments as text.
        function = {"name": str(messages[0].get("name") or "tool"), "arguments": {}}
        with_ids = [{**message, "tool_call_id": _CALL_ID} for message in messages]
        for written in (function, {**function, "arguments": "{}"}):
            call: Message = {"type": "function", "function": written}
            yield [_user(), _assistant(_SAID, tool_calls=[call])], messages
            yield [_user(), _assistant(_SAID, tool_calls=[{"id": _CALL_ID, **call}])], with_ids
    yield [_user(), _assistant(_SAID)], messages


# --- calls in text ---------------------------------------------------------------------------


def _read_call(body: str, closed: str) -> Message:
    if not closed:
        return _malformed("the tool call is not closed")
    try:
        call = json.loads(body)
    except ValueError as error:
        return _malformed(f"the tool call is no JSON: {error}")
    return _checked_call({"type": "function", "function": call})


def _checked_call(call: Any) -> Message:
    """A call of one shape, or a malformed one."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return _malformed('the tool call has no name; expected {"name": …, "arguments": {…}}')
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return _malformed(f"the arguments of {function['name']} are no JSON: {error}")
    if not isinstance(arguments, Mapping | None):
        return _malformed(f"the arguments of {function['name']} are no JSON object")
    read = {"name": function["name"], "arguments": dict(arguments or {})}
    return {"type": "function", "function": read}


def _malformed(error: str) -> Message:
    return {"type": "malformed", "error": error}
