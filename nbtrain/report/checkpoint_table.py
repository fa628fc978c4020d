"""The checkpoints of a run as lines of text and as a static HTML table, the best one first."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nbtrain.plan.fields import counted
from nbtrain.plan.memory import size

__all__ = [
    *("CheckpointLine", "as_html", "as_lines", "best_meaning", "extreme", "mark"),
    *("more_told", "number", "ranked", "scored"),
]

CELL = (
    "padding:1px 10px 1px 0;text-align:left;border-bottom:1px solid rgba(128,128,128,0.3);"
    "font-variant-numeric:tabular-nums"
)
MUTED = "opacity:0.75"


@dataclass(frozen=True, slots=True)
class CheckpointLine:
    """A checkpoint with the held-out reward or validation loss of the round at its step, if any.

    ``tie`` is the step of the one with the highest reward, where it may be as good; ``highest``
    says that it is the one that the best ties with. :func:`ranked` sets both it and ``rank``.
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
    weights: bool = True
    rank: int | None = None
    highest: bool = False

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
    those without a complete round, which have no rank, the newest first.
    """
    found = sorted(lines, key=_place)
    top = next((line.tie for line in found if line.best), None)
    return [
        replace(
            line,
            rank=rank if _competes(line) else None,
            highest=_competes(line) and line.step == top,
        )
        for rank, line in enumerate(found, 1)
    ]


def _competes(line: CheckpointLine) -> bool:
    return line.complete and line.weights and line.score is not None


def _place(line: CheckpointLine) -> tuple[bool, bool, float, float, int]:
    competes = _competes(line)
    return (
        not line.best,
        not competes,
        -_or(line.held_out, -math.inf),
        _or(line.loss, math.inf),
        line.step if competes else -line.step,
    )


def _or(value: float | None, other: float) -> float:
    return value if value is not None and math.isfinite(value) else other


def as_lines(lines: Sequence[CheckpointLine], what: str, *, numbered: bool = False) -> list[str]:
    """A sentence per checkpoint, and one more where the best is not the highest.

    ``what`` names the score. ``numbered`` puts its index before each and its rank behind it.
    """
    told = []
    for at, line in enumerate(lines):
        words = [
            f"checkpoint {line.checkpoint_id[:12]} step {line.step} "
            f"{what} {scored(line.score, line.low, line.high)}",
            "" if line.complete or line.score is None else "round not complete",
            f"rank {line.rank}" if numbered and line.rank is not None else "",
            _mark_of(line),
        ]
        told.append((f"[{at}] " if numbered else "") + ", ".join(word for word in words if word))
    said = _best_told(lines)
    return [*told, said] if said else told


def as_html(
    lines: Sequence[CheckpointLine], what: str, *, sizes: bool = False, numbered: bool = False
) -> str:
    """A table of inline styles, and a sentence below where the best is not the highest.

    ``what`` names the score, ``numbered`` puts its index before each; every text is escaped.
    """
    names = [
        *([""] if numbered else []),
        *("rank", "step", what, "round", "", "checkpoint", "holds"),
        *(["size"] if sizes else []),
    ]
    head = "".join(f'<th style="{CELL}">{html.escape(name)}</th>' for name in names)
    body = []
    for at, line in enumerate(lines):
        cells = [
            *([f"[{at}]"] if numbered else []),
            "–" if line.rank is None else str(line.rank),
            str(line.step),
            scored(line.score, line.low, line.high),
            "–" if line.score is None else ("complete" if line.complete else "not complete"),
            _mark_of(line),
            f"<code>{html.escape(line.checkpoint_id[:12])}</code>",
            html.escape(line.kind),
            *([size(line.size_bytes)] if sizes else []),
        ]
        weight = ' style="font-weight:600"' if line.best else ""
        row = "".join(f'<td style="{CELL}">{cell}</td>' for cell in cells)
        body.append(f"<tr{weight}>{row}</tr>")
    said = _best_told(lines)
    return (
        '<table style="border-collapse:collapse;table-layout:auto;white-space:nowrap;'
        'margin-top:2px;font-size:inherit;color:inherit">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        + (f'<div style="{MUTED}">{html.escape(said)}</div>' if said else "")
    )


def mark(*, best: bool, tie: int | None, highest: bool, loss: bool = False) -> str:
    """``best``, ``best (ties with step 60)``, ``highest``, ``ties with step 60`` or nothing.

    ``highest`` is said of the one that the best ties with; of a ``loss`` it is the lowest.
    """
    ties = "" if tie is None else f"ties with step {tie:,}"
    if best:
        return f"best ({ties})" if ties else "best"
    return extreme(loss=loss) if highest else ties


def extreme(*, loss: bool) -> str:
    """What the top of a ranking is called."""
    return "lowest" if loss else "highest"


def _best_told(lines: Iterable[CheckpointLine]) -> str | None:
    """What best means where it is not the highest; ``None`` where it is, or is not shown."""
    best = next((line for line in lines if line.best), None)
    if best is None or best.tie is None:
        return None
    return best_meaning(loss=best.loss is not None)


def best_meaning(*, loss: bool) -> str:
    """What best means, in words."""
    top = extreme(loss=loss)
    return f"best: the earliest checkpoint whose difference to the {top} may be nothing"


def _mark_of(line: CheckpointLine) -> str:
    return mark(best=line.best, tie=line.tie, highest=line.highest, loss=line.loss is not None)


def more_told(more: int) -> str:
    """That so many checkpoints are not shown."""
    return f"and {counted(more, 'more checkpoint')}"
