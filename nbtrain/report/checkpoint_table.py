"""The checkpoints of a run as lines of text and as a static HTML table, the best one first."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nbtrain.plan.memory import size

__all__ = ["CheckpointLine", "as_html", "as_lines", "number", "ranked", "scored"]

CELL = (
    "padding:1px 10px 1px 0;text-align:left;border-bottom:1px solid rgba(128,128,128,0.3);"
    "font-variant-numeric:tabular-nums"
)
MUTED = "opacity:0.75"


@dataclass(frozen=True, slots=True)
class CheckpointLine:
    """A checkpoint with the held-out reward or validation loss of the round at its step, if any.

    ``tie`` is the step of the one with the highest reward, where it may be as good.
    """

    checkpoint_id: str
    step: int
    held_out: float | None = None
    complete: bool = False
    best: bool = False
    kind: str = ""
    loss: float | None = None
    low: float | None = None
    high: float | None = None
    tie: int | None = None
    size_bytes: int = 0

    @property
    def score(self) -> float | None:
        """What ranks it."""
        return self.loss if self.held_out is None else self.held_out


def number(value: float | None, digits: int = 3) -> str:
    """A short decimal, ``–`` for nothing, ``NaN`` for what is no number."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    return f"{value:.{digits}f}"


def scored(value: float | None, low: float | None, high: float | None) -> str:
    """``0.940 [0.880, 0.980]``: a score with its interval, where it has one."""
    told = number(value)
    return told if low is None or high is None else f"{told} [{number(low)}, {number(high)}]"


def ranked(lines: Iterable[CheckpointLine]) -> list[CheckpointLine]:
    """The best first, then by the score of complete rounds, the earliest of equals first; then
    those without a complete round, the newest first.
    """
    return sorted(lines, key=_place)


def _place(line: CheckpointLine) -> tuple[bool, bool, float, float, int]:
    whole = line.complete and line.score is not None
    return (
        not line.best,
        not whole,
        -_or(line.held_out, -math.inf),
        _or(line.loss, math.inf),
        line.step if whole else -line.step,
    )


def _or(value: float | None, other: float) -> float:
    return value if value is not None and math.isfinite(value) else other


def as_lines(lines: Sequence[CheckpointLine], what: str) -> list[str]:
    """A sentence per checkpoint; ``what`` names the score."""
    return [
        f"checkpoint {line.checkpoint_id[:12]} step {line.step} "
        f"{what} {scored(line.score, line.low, line.high)}"
        f"{'' if line.complete or line.score is None else ', round not complete'}"
        f"{'' if line.tie is None else f', ties with step {line.tie}'}"
        f"{' (best)' if line.best else ''}"
        for line in lines
    ]


def as_html(lines: Sequence[CheckpointLine], what: str, *, sizes: bool = False) -> str:
    """A table of inline styles; ``what`` names the score, and every text is escaped."""
    names = ["", "step", what, "round", "", "checkpoint", "holds", *(["size"] if sizes else [])]
    head = "".join(f'<th style="{CELL}">{html.escape(name)}</th>' for name in names)
    body = []
    for rank, line in enumerate(lines, 1):
        whole = line.complete and line.score is not None
        cells = [
            str(rank) if whole else "–",
            str(line.step),
            scored(line.score, line.low, line.high),
            "–" if line.score is None else ("complete" if line.complete else "not complete"),
            verdict(line),
            f"<code>{html.escape(line.checkpoint_id[:12])}</code>",
            html.escape(line.kind),
            *([size(line.size_bytes)] if sizes else []),
        ]
        weight = ' style="font-weight:600"' if line.best else ""
        row = "".join(f'<td style="{CELL}">{cell}</td>' for cell in cells)
        body.append(f"<tr{weight}>{row}</tr>")
    return (
        '<table style="border-collapse:collapse;margin-top:2px;font-size:inherit;color:inherit">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def verdict(line: CheckpointLine) -> str:
    """``best``, ``tie with step 20``, or both."""
    told = ["best"] if line.best else []
    return ", ".join(told + ([] if line.tie is None else [f"tie with step {line.tie}"]))
