"""What a smoke check's model has to write itself, and how the rows' training marks cover it.

The answers are found here in each row's rendering, apart from the marks that were trained on: a
fault in those shows as tokens of an answer that are not trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from nbtrain.data.masks import LossRules
from nbtrain.data.rendering import Conversation, Renderer, Rendering
from nbtrain.data.spans import Finder, Reply
from nbtrain.training.supervised.rows import TokenizedRows
from nbtrain.training.supervised.tokenizing import Rows

__all__ = ["Answer", "Stretch", "read_answers"]

_SHOWN = 40
"""Characters of a difference that are shown."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens to be written in one go: ``expected`` after ``prompt``."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a row's model has to write, its end token included.

    ``row`` counts from 0, ``line`` is the physical line. ``untrained`` are tokens of the answer
    that are not trained (``end_untrained``: an end token is one of them), ``beside`` trained ones
    that belong to no answer. ``passed_over`` tells that the row's own mask leaves its last
    assistant message out. ``prompt_differs`` says how the generation prompt is not what stands
    before the trained text, ``None`` where it is.
    """

    row: int
    line: int
    stretches: tuple[Stretch, ...]
    untrained: int = 0
    end_untrained: bool = False
    beside: int = 0
    passed_over: bool = False
    prompt_differs: str | None = None

    @property
    def tokens(self) -> int:
        """How many there are to write."""
        return sum(len(stretch.expected) for stretch in self.stretches)


def read_answers(
    dataset: Rows, renderer: Renderer, rules: LossRules, trained: TokenizedRows
) -> list[Answer]:
    """The answers of the dataset's first rows, those that ``trained`` holds.

    A mask column may leave turns out. Where it leaves the last assistant message out of more than
    half of the rows it is taken for a mistake, and that message is asked for in these rows too.
    """
    found = []
    for position, row in enumerate(islice(dataset.open_rows(), len(trained))):
        found.append(
            _Reader(renderer, row, rules, trained, position).read(dataset.line_of(position))
        )
    passed_over = sum(plain.passed_over for plain, _ in found)
    whole = 2 * passed_over > len(found)
    return [with_last if whole else plain for plain, with_last in found]


class _Reader:
    """Reads one row."""

    def __init__(
        self,
        renderer: Renderer,
        row: Mapping[str, Any],
        rules: LossRules,
        trained: TokenizedRows,
        position: int,
    ) -> None:
        self._renderer, self._row, self._rules = renderer, row, rules
        self._position = position
        self._talk: Conversation = renderer.conversation(row)
        self._whole: Rendering = renderer.render_conversation(self._talk)
        self._finder = Finder(renderer, self._talk, self._whole)
        ids, marks = trained.row(position)
        self._other_ids = self._whole.ids[: len(ids)] != ids.tolist()
        self._marked = {place for place, mark in enumerate(marks.tolist()) if mark}
        mask = None if rules.mask_column is None else row.get(rules.mask_column)
        self._mask: Sequence[Any] | None = mask

    def read(self, line: int) -> tuple[Answer, Answer]:
        """The row's answer as it is stated, and with the last assistant message in any case."""
        roles = [message.get("role") for message in self._talk.messages]
        assistants = [index for index, role in enumerate(roles) if role == "assistant"]
        last = assistants[-1:]
        if self._mask is not None:
            stated = [index for index in assistants if self._mask[index]]
        else:
            stated = assistants if self._rules.assistant_turns == "all" else last
        plain = self._answer(line, stated)
        if self._mask is None or not last or last[0] in stated:
            return plain, plain
        plain = replace(plain, passed_over=True)
        return plain, replace(self._answer(line, [*stated, *last]), passed_over=True)

    def _answer(self, line: int, messages: Sequence[int]) -> Answer:
        stretches: list[Stretch] = []
        places: set[int] = set()
        differs = "other ids than the template gives" if self._other_ids else None
        for index in messages:
            reply = self._finder.reply(index)
            if not isinstance(reply, Reply):
                continue  # the row would not have been taken
            first = True
            for start, end in self._runs(reply):
                run = self._tokens(start, end)
                if not run:
                    continue
                before = tuple(self._whole.ids[: run[0]])
                begins = first and start == reply.start
                prompt = self._prompt(index) or before if begins else before
                if prompt != before and differs is None:
                    differs = self._difference(prompt, before)
                stretches.append(Stretch(prompt, tuple(self._whole.ids[at] for at in run)))
                places.update(run)
                first = False
        untrained = sorted(places - self._marked)
        return Answer(
            self._position,
            line,
            tuple(stretches),
            untrained=len(untrained),
            end_untrained=any(self._whole.ids[at] in self._renderer.ends for at in untrained),
            beside=len(self._marked - places - self._results()),
            prompt_differs=differs,
        )

    def _runs(self, reply: Reply) -> list[tuple[int, int]]:
        """Characters of a reply that are trained: all, or what stands around its calls."""
        if self._rules.tool_calls or self._mask is not None:
            return [(reply.start, reply.end)]
        return list(reply.apart or ())

    def _tokens(self, start: int, end: int) -> list[int]:
        """Places of the tokens within these characters, without the first of the row."""
        return [
            place
            for place, (first, after) in enumerate(self._whole.offsets)
            if place and start <= first < end and after <= end
        ]

    def _results(self) -> set[int]:
        """Places of the tool results that are trained by the rules."""
        chosen: Iterator[int] = (
            index
            for index, message in enumerate(self._talk.messages)
            if message.get("role") == "tool"
            and (self._rules.tool_results if self._mask is None else self._mask[index])
        )
        regions = (self._finder.region(index) for index in chosen)
        return {at for one in regions if one for at in self._tokens(one.start, one.end)}

    def _prompt(self, index: int) -> tuple[int, ...]:
        """Ids of the generation prompt for a message; none where the template gives none."""
        if index == 0:
            return ()
        try:
            text = self._renderer.text(self._talk.messages[:index], self._talk.tools, prompt=True)
        except Exception:  # a template raises whatever it likes
            return ()
        return tuple(self._renderer.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _difference(self, prompt: tuple[int, ...], before: tuple[int, ...]) -> str:
        pairs = zip(prompt, before, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(before)))
        one, other = (self._said(ids[same:]) for ids in (prompt, before))
        return f"the generation prompt has {one} where the trained text has {other}"

    def _said(self, ids: Sequence[int]) -> str:
        if not ids:
            return "nothing"
        text: str = self._renderer.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")
