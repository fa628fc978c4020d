"""From a dataset's rows to tokenized rows on the disk, with everything that is wrong with them.

One row is in memory at a time. A row that cannot be trained on is counted and named by its line,
and the next one is looked at: all that is wrong is said at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

from nbtrain.data.findings import Findings
from nbtrain.data.masks import LossRules, MaskedRow, cut, mask_row
from nbtrain.data.rendering import Renderer, RowRefused
from nbtrain.errors import Problem
from nbtrain.training.supervised.rows import RowWriter

__all__ = ["Rows", "Tokenized", "tokenize"]

log = logging.getLogger("nbtrain.training")

TRIED_EVERY, LEAST_TRIED, MOST_TRIED = 64, 16, 256
"""Rows whose ids are compared with what the tokenizer's template gives by itself: one in 64, but
16 where there are as many.
"""
_NOTHING = Problem("messages", "the row has no trained token", allowed="at least one")


class Rows(Protocol):
    """What tokenizing needs of a dataset."""

    @property
    def rows(self) -> int:
        """How many there are."""
        ...

    def open_rows(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """Each row."""
        ...

    def line_of(self, index: int) -> int:
        """Its physical line."""
        ...


@dataclass(slots=True)
class Tokenized:
    """What became of a dataset. Rows that are refused are in no figure but ``problems``'."""

    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    least_trained: int | None = None
    longest: int = 0
    cut: int = 0
    ended: int = 0
    """Rows whose last trained token ends a reply."""
    tried: int = 0
    differing: int = 0
    """Of the ``tried`` rows: whose ids are not those of the tokenizer's template."""
    seconds: float = 0.0
    problems: list[Problem] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds if self.seconds else 0.0


def tokenize(
    dataset: Rows,
    renderer: Renderer,
    rules: LossRules,
    folder: Path,
    *,
    max_tokens: int,
    truncation: Literal["error", "right"],
    source: str,
    most: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tokenized:
    """Write the first ``most`` rows (all by default) into ``folder``, and say what was found.

    ``progress`` is called with rows done and rows in all, after every row, and may raise to stop.
    ``source`` is what problems call the dataset. Positions of rows in ``folder`` are those in the
    dataset when nothing was refused.
    """
    found, findings = Tokenized(), Findings("line")
    total = dataset.rows if most is None else min(most, dataset.rows)
    every = max(1, min(TRIED_EVERY, total // LEAST_TRIED))
    began = time.monotonic()
    with RowWriter(folder) as writer:
        for position, row in enumerate(islice(dataset.open_rows(), total)):
            try:
                whole = mask_row(renderer, row, rules)
                kept = cut(whole, max_tokens, truncation)
                if not any(kept.trained[1:]):
                    raise RowRefused([_NOTHING])
            except RowRefused as refused:
                for problem in refused.problems:
                    _note(findings, dataset.line_of(position), problem)
            else:
                writer.append(kept.ids, kept.trained)
                _count(found, kept, renderer)
                found.cut += kept is not whole
                if (found.rows - 1) % every == 0 and found.tried < MOST_TRIED:
                    found.tried += 1
                    found.differing += _template_ids(renderer, row) != whole.ids
            progress(position + 1, total)
    found.seconds = time.monotonic() - began
    found.problems = findings.problems(source)
    log.info(
        "%s: %d rows of %d, %d tokens, %d trained; %.0f rows/s",
        *(source, found.rows, total, found.tokens, found.trained_tokens, found.rate),
    )
    return found


def _count(found: Tokenized, row: MaskedRow, renderer: Renderer) -> None:
    # Nothing predicts the first token: it is never trained
    trained = [at for at, marked in enumerate(row.trained) if marked and at]
    found.rows += 1
    found.tokens += len(row.ids)
    found.trained_tokens += len(trained)
    found.least_trained = min(len(trained), found.least_trained or len(trained))
    found.longest = max(found.longest, len(row.ids))
    found.ended += row.ids[trained[-1]] in renderer.ends


def _template_ids(renderer: Renderer, row: Mapping[str, Any]) -> list[int]:
    """What the tokenizer's own template makes of the row."""
    conversation = renderer.conversation(row)
    ids = renderer.tokenizer.apply_chat_template(
        list(conversation.messages), tools=conversation.tools, tokenize=True, return_dict=False
    )
    return list(ids)


def _note(findings: Findings, line: int, problem: Problem) -> None:
    """What is found differs from row to row, so that the message alone tells what is alike."""
    findings.add(
        problem.message, line, problem.field, problem.message, problem.allowed, hint=problem.hint
    )
