"""Why a model does not reproduce rows it has seen many times: the layer that is suspected.

Pure: from what was measured of each row to one layer and one sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from nbtrain.training.supervised.answers import Answer, Stretch

__all__ = ["Layer", "Scored", "attainable", "contradictions", "matching", "suspect"]

Layer = Literal["mask", "template", "data", "training"]

_LINES_NAMED = 10


@dataclass(frozen=True, slots=True)
class Scored:
    """A row's answer with the share of it that was reproduced.

    ``forced`` is the share of the row's trained tokens that the model puts first when it is given
    the true text before each.
    """

    answer: Answer
    score: float
    forced: float


def matching(expected: Sequence[int], written: Sequence[int]) -> int:
    """How many tokens of ``expected`` were written before the first other one."""
    pairs = zip(expected, written, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(written)))


def contradictions(answers: Sequence[Answer]) -> list[list[int]]:
    """Groups of rows (positions in ``answers``) that ask the same and answer differently."""
    return [
        sorted({position for position, _ in asked})
        for asked in _by_prompt(answers)
        if len({stretch.expected for _, stretch in asked}) > 1
    ]


def attainable(answers: Sequence[Answer]) -> float:
    """The best mean score that rows can reach: after one prompt a model writes one text."""
    best = 0.0
    for asked in _by_prompt(answers):
        texts = {stretch.expected for _, stretch in asked}
        best += max(
            sum(matching(s.expected, text) / answers[position].tokens for position, s in asked)
            for text in texts
        )
    return best / len(answers) if answers else 0.0


def _by_prompt(answers: Sequence[Answer]) -> Iterable[list[tuple[int, Stretch]]]:
    """Stretches that start from the same prompt, each with its position in ``answers``."""
    found: dict[tuple[int, ...], list[tuple[int, Stretch]]] = {}
    for position, answer in enumerate(answers):
        for stretch in answer.stretches:
            found.setdefault(stretch.prompt, []).append((position, stretch))
    return found.values()


def suspect(
    rows: Sequence[Scored],
    *,
    threshold: float,
    loss: float,
    updates: int,
    mask_column: str | None = None,
) -> tuple[Layer, str]:
    """The suspected layer of a failed check and a sentence about it.

    The layer is the one that explains most of the rows that fall short, and at least half of
    them; where nothing about the rows does, it is how long or how fast they were trained.
    ``loss`` is that of the last update's model over the trained tokens.
    """
    groups = contradictions([row.answer for row in rows])
    torn = {position for group in groups for position in group}
    short = [n for n, row in enumerate(rows) if row.score < threshold] or list(range(len(rows)))
    masked = [n for n in short if _mangled(rows[n].answer)]
    turned = [n for n in short if rows[n].answer.prompt_differs]
    contrary = [n for n in short if n in torn]
    most = max(len(masked), len(turned), len(contrary))
    if 2 * most >= len(short):
        if len(masked) == most:
            return "mask", _mask([rows[n].answer for n in masked], rows, mask_column)
        if len(turned) == most:
            return "template", _template([rows[n].answer for n in turned], rows)
        return "data", _data(groups, rows)
    forced = sum(rows[n].forced for n in short) / len(short)
    if all(rows[n].forced == 1 for n in short):
        return "template", (
            "given the true text the model predicts every token, left to itself it does not, "
            "though the generation prompt is what it was trained after: it does not decode as it "
            "was trained"
        )
    return "training", (
        f"after {updates:,} updates the loss is still {loss:.3g} and {forced:.0%} of the trained "
        "tokens of the rows that fall short are predicted from the true text: raise "
        "smoke.maxSteps or the learning rate, or take fewer rows (smoke.sliceSize)"
    )


def _mangled(answer: Answer) -> bool:
    return bool(answer.untrained or answer.beside or not answer.stretches)


def _mask(masked: Sequence[Answer], rows: Sequence[Scored], column: str | None) -> str:
    told = []
    untrained = sum(answer.untrained for answer in masked)
    if untrained:
        tokens = sum(answer.tokens for answer in masked)
        of = [answer.line for answer in masked if answer.untrained]
        told.append(f"{untrained:,} of {tokens:,} tokens of the answers are not trained")
        told[-1] += f" ({_lines(of)})"
        ends = sum(answer.end_untrained for answer in masked)
        if ends:
            told.append(f"the end token is not trained in {ends:,} rows")
    beside = sum(answer.beside for answer in masked)
    if beside:
        of = [answer.line for answer in masked if answer.beside]
        told.append(f"{beside:,} trained tokens belong to no answer ({_lines(of)})")
    empty = [answer.line for answer in masked if not answer.stretches]
    if empty:
        told.append(f"no assistant message is trained ({_lines(empty)})")
    over = sum(row.answer.passed_over for row in rows)
    if over and column is not None:
        told.append(
            f"the mask column {column} leaves the last assistant message out of {over:,} of "
            f"{len(rows):,} rows"
        )
    return "; ".join(told)


def _template(turned: Sequence[Answer], rows: Sequence[Scored]) -> str:
    lines = _lines([answer.line for answer in turned])
    forced = sum(row.forced for row in rows) / len(rows)
    return (
        f"{turned[0].prompt_differs} ({lines}): {forced:.0%} of the trained tokens are predicted "
        "from the true text, but a reply starts from another one"
    )


def _data(groups: Sequence[Sequence[int]], rows: Sequence[Scored]) -> str:
    named = [_lines([rows[n].answer.line for n in group]) for group in groups]
    shown = "; ".join(named[:_LINES_NAMED])
    more = f"; and {len(named) - _LINES_NAMED:,} more" if len(named) > _LINES_NAMED else ""
    return f"rows with the same prompt have different answers: {shown}{more}"


def _lines(lines: Sequence[int]) -> str:
    shown = ", ".join(str(line) for line in lines[:_LINES_NAMED])
    more = f" and {len(lines) - _LINES_NAMED:,} more" if len(lines) > _LINES_NAMED else ""
    return f"{'line' if len(lines) == 1 else 'lines'} {shown}{more}"
