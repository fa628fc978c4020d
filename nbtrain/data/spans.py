"""Which characters of a rendering are a message's: found by rendering, never by marker text.

The quick way renders the conversation up to a reply, with the generation prompt: the rest of the
rendering is then the reply and what follows it. Where a template rewrites earlier turns, or writes
a generation prompt that it leaves out of the whole, a message's own text is what changes when the
message is replaced by two different stand-ins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbtrain.data.probing import SENTINELS
from nbtrain.data.regions import (
    REASONING,
    Region,
    Regions,
    content_text,
    has_reasoning,
    is_rich,
)
from nbtrain.errors import Problem

__all__ = ["Finder", "Reply"]

Message = dict[str, Any]

_TAGS = re.compile(r"</?think>")


@dataclass(frozen=True, slots=True)
class Reply:
    """The generated part of an assistant message: what the model has to write itself.

    From where the generation prompt ends (``start``) through the end-of-turn token (``ending`` to
    ``end``). ``said`` is where the message's own text ends. ``apart`` are the stretches that are
    no tool call, in order: text and reasoning with what the template writes before them, or from
    them to the end where they stand after the calls; empty for calls alone, and ``None`` where
    the template writes text into a call. ``missing`` names the parts of the message that the
    template leaves out.
    """

    start: int
    said: int
    ending: int
    end: int
    apart: tuple[tuple[int, int], ...] | None
    missing: tuple[str, ...] = ()


class Finder(Regions):
    """Finds messages in one rendering; renders more only where it has to."""

    # --- replies

    def reply(self, index: int) -> Reply | Problem:
        """The generated part of the assistant message ``index``, or why there is none."""
        return self._quick(index) or self._thorough(index)

    def _quick(self, index: int) -> Reply | None:
        """A plain reply that is all that stands between its prompt and what follows it."""
        message, habits = self._messages[index], self._renderer.habits
        if habits.lead is None or not habits.tail or index == 0 or is_rich(message):
            return None
        text = self._whole.text
        opened = self._prefix(index, prompt=True)
        through = text if index == len(self._messages) - 1 else self._prefix(index + 1)
        if not opened or not through or not text.startswith(opened):
            return None
        if not through.endswith(habits.tail) or not text.startswith(through):
            return None
        said = len(through) - len(habits.tail)
        inner, content = text[len(opened) : said], content_text(message).strip()
        if inner.strip() != content and (
            not inner.startswith(habits.lead) or inner[len(habits.lead) :].strip() != content
        ):
            return None
        end = self._end_token(said, len(through))
        return None if end is None else _plain(len(opened), said, *end)

    def _thorough(self, index: int) -> Reply | Problem:
        own = self.regions[index]
        field = f"messages[{index}]"
        if own is None:
            return Problem(field, "the chat template leaves out an assistant message")
        start = self._generated_from(index, own)
        others = [
            region for j, region in enumerate(self.regions) if j != index and region is not None
        ]
        bound = min((r.start for r in others if r.start >= own.end), default=len(self._whole.text))
        end = self._end_token(own.end, bound)
        if end is None:
            return Problem(
                field,
                "the chat template writes no end-of-turn token after an assistant message that is "
                "trained",
                allowed="a token that ends a reply",
                hint="A model trained on it would not learn to stop; train the last turn alone "
                "(assistantTurns: last) if only earlier turns lack it",
            )
        if any(region.start < end[1] and region.end > start for region in others):
            message = "the chat template mixes an assistant message with the text of another one"
            return Problem(field, message)
        missing = tuple(self._missing(index, self._whole.text[start : end[1]]))
        if not self._messages[index].get("tool_calls"):
            return _plain(start, own.end, *end, missing)
        return Reply(start, own.end, *end, self._apart(index, start, *end), missing)

    def _end_token(self, said: int, bound: int) -> tuple[int, int] | None:
        """The characters of the first end token after ``said``, which starts before ``bound``."""
        ends, offsets = self._renderer.ends, self._whole.offsets
        for position in range(_first_after(offsets, said), len(offsets)):
            start, end = offsets[position]
            if start >= bound:
                return None
            if end > said and self._whole.ids[position] in ends:
                return max(start, said), end
        return None

    def _generated_from(self, index: int, own: Region) -> int:
        """Where the generation prompt ends in the whole rendering.

        Where the prompt says more than the whole does (an opening of a thought, say), only what
        both have counts as prompt.
        """
        text = self._whole.text
        opened = self._prefix(index, prompt=True) if index else None
        if opened and text.startswith(opened):
            # Some templates write the beginning of the reply into the prompt.
            return len(opened)
        latest = min(own.start, self._plain_start(index, own.start))
        before = self.regions[index - 1] if index else None
        said = self._end_in_prompt(index) if before is not None else None
        if opened is None or before is None or said is None:
            earliest = max((r.end for r in self.regions[:index] if r is not None), default=0)
            return _after_prompt(text, self._renderer.habits.prompt, earliest, latest)
        shown = opened[said:]
        matching = 0
        for a, b in zip(shown, text[before.end : latest], strict=False):
            if a != b:
                break
            matching += 1
        return before.end + matching

    def _plain_start(self, index: int, otherwise: int) -> int:
        """Where a plain reply in the place of one with calls would begin to differ from it.

        What the template writes around calls may begin with the same character as the rest of
        the generation prompt.
        """
        message = self._messages[index]
        if not message.get("tool_calls"):
            return otherwise
        plain = [{"role": message["role"], "content": self._said(one)} for one in SENTINELS]
        region = self._changed_whole(index, plain)
        return otherwise if region is None else region.start

    def _end_in_prompt(self, index: int) -> int | None:
        """Where the message before ``index`` ends in the rendering of the prompt for ``index``."""
        prompt = self._messages[:index]
        text = self._prefix(index, prompt=True)
        found = None if text is None else self._region(prompt, index - 1, text, prompt=True)
        return None if found is None else found.end

    # --- parts of a message

    def _apart(
        self, index: int, start: int, ending: int, end: int
    ) -> tuple[tuple[int, int], ...] | None:
        """The stretches of a reply that are none of its calls, whichever the template writes first.

        How a template wraps a call is not known: what stands between a call and a text is left
        out, wherever it belongs.
        """
        message = self._messages[index]
        said = sorted(self._said_regions(index), key=lambda region: region.start)
        called = [
            region
            for call in range(len(message["tool_calls"]))
            if (region := self._changed_whole(index, self._with_arguments(message, call)))
        ]
        if not said or not called:
            return ()
        if any(a.start < b.end and b.start < a.end for a in said for b in called):
            return None
        first, last = min(one.start for one in called), max(one.end for one in called)
        before = max((one.end for one in said if one.end <= first), default=start)
        after = min((one.start for one in said if one.start >= last), default=ending)
        between = [(one.start, one.end) for one in said if first < one.start < last]
        return tuple(run for run in ((start, before), *between, (after, end)) if run[0] < run[1])

    def _said_regions(self, index: int) -> list[Region]:
        """The regions of a message's text and reasoning, without its calls."""
        message = self._messages[index]
        parts = [self._with_text(message)] if content_text(message) else []
        parts += [self._with_reasoning(message)] if has_reasoning(message) else []
        found = (self._changed_whole(index, variants) for variants in parts)
        return [region for region in found if region is not None]

    def _missing(self, index: int, rendered: str) -> Iterator[str]:
        message, shown = self._messages[index], _squashed(rendered)
        content = content_text(message)
        lacks = content and self._changed_whole(index, self._with_text(message)) is None
        if lacks or _squashed(content) not in shown:
            *thoughts, answer = [_squashed(piece) for piece in _TAGS.split(content)]
            if lacks or not _in_order([*thoughts, answer], shown):
                yield "reasoning" if any(thoughts) and answer in shown else "text"
        if has_reasoning(message):
            lacks = self._changed_whole(index, self._with_reasoning(message)) is None
            carried = [message[key] for key in REASONING if isinstance(message.get(key), str)]
            if lacks or any(_squashed(thought) not in shown for thought in carried):
                yield "reasoning"
        calls = message.get("tool_calls") or []
        names = [(call.get("function") or call).get("name", "") for call in calls]
        if any(str(name) not in rendered for name in names) or self.left_out_call(index):
            yield "tool calls"


def _plain(start: int, said: int, ending: int, end: int, missing: tuple[str, ...] = ()) -> Reply:
    """A reply without calls."""
    return Reply(start, said, ending, end, ((start, end),), missing)


def _in_order(pieces: Sequence[str], text: str) -> bool:
    """Whether the pieces stand in the text one after the other."""
    place = 0
    for piece in pieces:
        found = text.find(piece, place)
        if found < 0:
            return False
        place = found + len(piece)
    return True


def _squashed(text: str) -> str:
    """The text without white space, which templates trim and add as they like."""
    return "".join(text.split())


def _after_prompt(text: str, prompt: str, earliest: int, latest: int) -> int:
    """After the longest beginning of the generation prompt in ``text[earliest:latest]``.

    Between a message's own text and the one before it there is only what the template wrote, so
    its own words are found there. Less than half of the prompt is none of it.
    """
    for length in range(len(prompt), len(prompt) // 2, -1):
        place = text.rfind(prompt[:length], earliest, latest)
        if place >= 0:
            return place + length
    return latest


def _first_after(offsets: Sequence[tuple[int, int]], said: int) -> int:
    """The first token that may end after ``said``."""
    low, high = 0, len(offsets)
    while low < high:
        middle = (low + high) // 2
        if offsets[middle][1] > said:
            high = middle
        else:
            low = middle + 1
    return low
