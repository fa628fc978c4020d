"""Which tokens of a row are trained on.

A trained assistant turn is what the model has to write itself: from where the generation prompt
ends, with its reasoning and its tool calls, through its end-of-turn token, which has to be a token
that ends a reply. What the template writes into the generation prompt too, such as the opening of
a thought, is not trained. System and user tokens never are, whatever the template does, and a
token that only partly belongs to a trained part is not either.

A row that cannot be trained on as it stands is refused with everything that is wrong with it: a
template that does not render it, leaves out tools, calls, results or a part of a trained turn,
or writes no end-of-turn token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from nbtrain.data.regions import content_text
from nbtrain.data.rendering import Conversation, Renderer, Rendering, RowRefused
from nbtrain.data.spans import Finder, Reply
from nbtrain.errors import Problem

__all__ = ["LossRules", "MaskedRow", "Span", "cut", "mask_row"]

_SURELY_ITS_OWN = 16
"""From how many characters on a text that stands in a rendering is not there by chance."""

AssistantTurns = Literal["last", "all"]


@dataclass(frozen=True, slots=True)
class LossRules:
    """Which of a conversation's tokens the loss is taken over.

    ``assistant_turns`` selects the assistant messages: the last one or all. ``tool_calls`` tells
    whether the calls of a selected message count; under ``last`` a call that is followed by an
    answer is therefore never trained, and one that ends its row is. ``tool_results`` adds the
    text of every tool message. ``mask_column`` names a column that holds one boolean (or 0 and 1)
    per message: where a row carries it, it alone decides, and a chosen assistant message is
    trained whole.
    """

    assistant_turns: AssistantTurns = "last"
    tool_calls: bool = True
    tool_results: bool = False
    mask_column: str | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Characters ``start`` to ``end`` (exclusive) that are trained, of one message.

    ``part`` is ``reply`` or ``tool_result``; ``message`` counts from 0.
    """

    message: int
    part: Literal["reply", "tool_result"]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A row as token ids, with ``trained[i]`` telling whether token ``i`` is in the loss.

    ``text`` is the rendering, ``offsets[i]`` the characters of token ``i`` in it, ``spans`` what
    is trained as characters, in order.
    """

    ids: list[int]
    trained: list[bool]
    spans: tuple[Span, ...]
    text: str
    offsets: list[tuple[int, int]]

    @property
    def trained_tokens(self) -> int:
        """How many tokens are in the loss; at least one."""
        return sum(self.trained)

    @property
    def trained_texts(self) -> list[str]:
        """The characters of each trained span, as the template wrote them."""
        return [self.text[span.start : span.end] for span in self.spans]


def mask_row(renderer: Renderer, row: Mapping[str, Any], rules: LossRules) -> MaskedRow:
    """The ids of a row and which of them are trained.

    Raises :class:`RowRefused` with every problem of the row, without its line.
    """
    conversation = renderer.conversation(row)
    chosen = _chosen(conversation, row, rules)
    rendering = renderer.render_conversation(conversation)
    finder = Finder(renderer, conversation, rendering)
    problems = _left_out(renderer, conversation, rendering, finder)
    spans: list[Span] = []
    replies: dict[int, Reply] = {}
    for index in chosen:
        if conversation.messages[index]["role"] == "assistant":
            found = finder.reply(index)
            if isinstance(found, Problem):
                problems.append(found)
            else:
                replies[index] = found
                runs = [(found.start, found.end)] if _whole(rules, row) else found.apart
                spans += [Span(index, "reply", *run) for run in runs or ()]
                if runs is None:
                    problems.append(_mixed(index))
        elif (region := finder.region(index)) is not None:
            spans.append(Span(index, "tool_result", region.start, region.end))
    problems += _removed(replies)
    if problems:
        raise RowRefused(_unlike(problems))
    spans.sort(key=lambda span: span.start)
    trained = _tokens_in(spans, rendering)
    if not any(trained):
        raise RowRefused([_nothing_trained(conversation, rules)])
    return MaskedRow(rendering.ids, trained, tuple(spans), rendering.text, rendering.offsets)


def cut(masked: MaskedRow, max_length: int, how: Literal["error", "right"]) -> MaskedRow:
    """The row at no more than ``max_length`` tokens.

    A longer row is refused with ``error``. With ``right`` tokens are dropped from its end, unless
    one of them is trained: then it is refused too. Raises :class:`RowRefused`.
    """
    length = len(masked.ids)
    if length <= max_length:
        return masked
    hint = f"The row has {length:,} tokens"
    lost = sum(masked.trained[max_length:])
    if how == "error":
        message = f"a row is longer than maxSeqLength {max_length:,}"
        hint += ". Raise maxSeqLength or shorten the row"
        if not lost:
            hint += ", or drop what is not trained at its end with data.truncation: right"
        raise RowRefused([Problem("messages", message, length, f"<= {max_length:,}", hint=hint)])
    if lost:
        message = f"cutting a row at maxSeqLength {max_length:,} would drop trained tokens"
        hint += f", {lost:,} trained ones past the limit. Raise maxSeqLength or shorten the row"
        raise RowRefused([Problem("messages", message, length, f"<= {max_length:,}", hint=hint)])
    return replace(
        masked,
        ids=masked.ids[:max_length],
        trained=masked.trained[:max_length],
        offsets=masked.offsets[:max_length],
    )


# --- what is trained


def _chosen(conversation: Conversation, row: Mapping[str, Any], rules: LossRules) -> list[int]:
    """The messages that are trained, by the row's own mask or else by the rules."""
    roles = [message.get("role") for message in conversation.messages]
    column = rules.mask_column
    if column is not None and row.get(column) is not None:
        return _by_mask(row[column], column, roles)
    assistants = [index for index, role in enumerate(roles) if role == "assistant"]
    if rules.assistant_turns == "last":
        assistants = assistants[-1:]
    results = [index for index, role in enumerate(roles) if role == "tool" and rules.tool_results]
    return sorted([*assistants, *results])


def _by_mask(mask: Any, column: str, roles: list[Any]) -> list[int]:
    if not isinstance(mask, list) or any(
        not isinstance(one, bool) and one not in (0, 1) for one in mask
    ):
        message = f"the mask column {column} is no list of booleans"
        raise RowRefused(
            [Problem(column, message, allowed="one true or false (or 1 or 0) per message")]
        )
    if len(mask) != len(roles):
        message = f"the mask column {column} has not one value per message"
        hint = f"It has {len(mask)}, the row has {len(roles)} messages"
        raise RowRefused([Problem(column, message, len(mask), hint=hint)])
    chosen = [index for index, one in enumerate(mask) if one]
    refused = [
        Problem(
            f"{column}[{index}]",
            f"the mask column {column} trains on a {roles[index]} message, which is never trained",
            allowed="true for assistant and tool messages only",
        )
        for index in chosen
        if roles[index] not in ("assistant", "tool")
    ]
    if refused:
        raise RowRefused(_unlike(refused))
    return chosen


def _whole(rules: LossRules, row: Mapping[str, Any]) -> bool:
    """Whether replies are trained with their calls."""
    explicit = rules.mask_column is not None and row.get(rules.mask_column) is not None
    return rules.tool_calls or explicit


def _mixed(index: int) -> Problem:
    message = "the chat template writes text into a tool call, which cannot be left out of the loss"
    return Problem(f"messages[{index}]", message, hint="Train on tool calls too")


def _tokens_in(spans: Iterable[Span], rendering: Rendering) -> list[bool]:
    """Which tokens lie wholly within a span. Spans are in order and apart."""
    trained = [False] * len(rendering.ids)
    position, offsets = 0, rendering.offsets
    for span in spans:
        while position < len(offsets) and offsets[position][0] < span.start:
            position += 1
        while position < len(offsets) and offsets[position][0] < span.end:
            trained[position] = offsets[position][1] <= span.end
            position += 1
    return trained


# --- what is refused


def _left_out(
    renderer: Renderer, conversation: Conversation, rendering: Rendering, finder: Finder
) -> list[Problem]:
    """What the template does not show of tools and messages, whether trained or not."""
    problems = []
    if conversation.tools and _same_without_tools(renderer, conversation, rendering):
        message = "the chat template ignores the tools of this row"
        hint = "Choose a model whose chat template takes tools, or take the column out"
        problems.append(Problem("tools", message, hint=hint))
    place = 0
    for index, said_by in enumerate(conversation.messages):
        role, field = said_by.get("role"), f"messages[{index}]"
        if role == "assistant":
            if said_by.get("tool_calls") and finder.left_out_call(index):
                problems.append(Problem(field, "the chat template leaves out tool calls"))
            continue
        said = content_text(said_by).strip()
        # What a template turns into JSON, and words that its own text may hold, are rendered anew.
        sure = role in ("system", "user") and len(said) >= _SURELY_ITS_OWN
        found = rendering.text.find(said, place) if sure else -1
        if found >= 0:
            place = found + len(said)
        elif said and finder.region(index) is None:
            problems.append(Problem(field, f"the chat template leaves out a {role} message"))
    return problems


def _same_without_tools(
    renderer: Renderer, conversation: Conversation, rendering: Rendering
) -> bool:
    try:
        return renderer.text(conversation.messages) == rendering.text
    except Exception:  # calls without tools may be refused: then the tools matter
        return False


def _removed(replies: Mapping[int, Reply]) -> list[Problem]:
    """One problem for each kind of thing that is missing from trained turns."""
    problems = []
    for what in ("reasoning", "text", "tool calls"):
        turns = [index for index, reply in replies.items() if what in reply.missing]
        if turns:
            message = f"{what} removed from {len(turns)} of {len(replies)} trained turns"
            hint = "The chat template leaves it out of " + ", ".join(
                f"messages[{index}]" for index in turns
            )
            if what == "reasoning" and len(replies) > 1:
                hint += "; train the last turn alone (assistantTurns: last), or split the row"
            problems.append(Problem(f"messages[{turns[0]}]", message, hint=hint))
    return problems


def _unlike(problems: Iterable[Problem]) -> list[Problem]:
    """The first of each message: a row is counted once for one thing."""
    return list({problem.message: problem for problem in reversed(list(problems))}.values())[::-1]


def _nothing_trained(conversation: Conversation, rules: LossRules) -> Problem:
    hint = f"Roles: {conversation.roles}"
    if not rules.tool_calls:
        hint += ". The reply may be a tool call alone, and trainOnToolCalls is off"
    return Problem("messages", "no token of this row is trained", 0, ">= 1", hint=hint)
