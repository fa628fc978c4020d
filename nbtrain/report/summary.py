"""A run at a glance: plain data, and its text and static HTML.

The HTML uses inline styles and neutral colours only, so it reads in light and dark themes, in a
saved notebook and on pages that strip style sheets and scripts. Every text is escaped.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from nbtrain.report.series import mean

_SHOWN_CHECKPOINTS = 6
_LONGEST_ERROR = 200  # characters of the most frequent error
_LONGEST_MESSAGE = 1500  # characters of a failure that a notebook keeps


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One validation round: its step, its mean reward, and whether all of it was graded."""

    step: int
    reward: float | None
    complete: bool


@dataclass(frozen=True, slots=True)
class CheckpointLine:
    """A checkpoint with the held-out reward of the round at its step, if there was one."""

    checkpoint_id: str
    step: int
    held_out: float | None = None
    complete: bool = False
    best: bool = False
    kind: str = ""


@dataclass(slots=True)
class RunSummary:
    """Everything the text, the HTML and the figure of a run are made from."""

    run_id: str
    name: str | None
    status: str
    phase: str
    method: str = ""
    workload: str = ""
    base_model: str = ""
    start_step: int = 0
    completed_steps: int = 0
    total_steps: int = 0
    updates_applied: int = 0
    attempted: int = 0
    graded: int = 0
    cut: int = 0
    ungraded_error: str | None = None
    output_tokens: int = 0
    created_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    failure: str | None = None
    ended: str | None = None
    liveness: str | None = None
    activity: str | None = None
    rewards: list[tuple[int, float | None]] = field(default_factory=list)
    held_out: list[HeldOut] = field(default_factory=list)
    checkpoints: list[CheckpointLine] = field(default_factory=list)
    last_groups: dict[str, int] = field(default_factory=dict)
    problem: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Name and short id, or the short id alone."""
        short = self.run_id[:12]
        return f"{self.name} ({short})" if self.name else short

    @property
    def ungraded(self) -> int:
        """Trajectories that ended and have no grade; ``cut`` are those stopped before their end."""
        return max(0, self.attempted - self.graded - self.cut)

    @property
    def mostly_ungraded(self) -> bool:
        """Whether the rewards shown are those of a minority."""
        return self.ungraded * 2 > self.attempted - self.cut

    @property
    def unchanged(self) -> bool:
        """Whether the run succeeded without a single update."""
        return self.status == "succeeded" and self.updates_applied == 0


def number(value: float | None, digits: int = 3) -> str:
    """A short decimal, ``–`` for nothing, ``NaN`` for what is no number."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    return f"{value:.{digits}f}"


def clock(at: float | None) -> str:
    """A time (unix seconds) as ``2026-01-31 12:00:00 UTC``."""
    if at is None:
        return "–"
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def span(seconds: float | None) -> str:
    """A duration as ``1 h 02 min``, ``3 min 05 s`` or ``12 s``."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return "–"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole} s"


def first_and_last(
    rewards: Sequence[tuple[int, float | None]], width: int = 10
) -> tuple[float, float, int] | None:
    """Mean reward of the first and of the last steps and how many of each; ``None`` below two.

    The two stretches never overlap: with fewer than ``2 * width`` steps each is half of them.
    """
    values = [value for _, value in rewards]
    each = min(width, len(values) // 2)
    if each == 0:
        return None
    first, last = mean(values[:each]), mean(values[-each:])
    if first is None or last is None:
        return None
    return first, last, each


def headline(summary: RunSummary) -> str:
    """What state the run is in, in one line.

    A run that changed no weight, or that could grade few of its trajectories, says so first.
    """
    state = f"{summary.status}, {summary.phase}"
    if summary.unchanged:
        state = f"no weight changed · {state}"
    if summary.mostly_ungraded:
        state = f"most trajectories not graded · {state}"
    if summary.liveness:
        state += f" · {summary.liveness}"
    return state


def message(summary: RunSummary) -> str | None:
    """The failure, or why the run ended early; cut to a length a notebook can hold."""
    text = summary.failure or summary.ended
    if text and len(text) > _LONGEST_MESSAGE:
        return f"{text[:_LONGEST_MESSAGE]} … ({len(text) - _LONGEST_MESSAGE:,} characters more)"
    return text


def counts(summary: RunSummary) -> str:
    """Steps, trajectories, tokens and time in one line."""
    parts = [f"step {summary.completed_steps:,} of {summary.total_steps:,}"]
    if summary.start_step:
        parts[0] += f" (from step {summary.start_step:,})"
    parts.append(f"{summary.updates_applied:,} updates")
    told = f"{summary.attempted:,} trajectories, {summary.graded:,} graded"
    parts.append(told + (f", {summary.cut:,} cut off" if summary.cut else ""))
    if summary.output_tokens:
        parts.append(f"{summary.output_tokens:,} tokens")
    begun = summary.started_at or summary.created_at
    if begun is not None and summary.ended_at is not None:
        parts.append(span(summary.ended_at - begun))
    return " · ".join(parts)


def ungraded(summary: RunSummary) -> str | None:
    """How many trajectories have no grade and the most frequent reason; ``None`` without any."""
    if not summary.ungraded:
        return None
    text = f"{summary.ungraded:,} not graded"
    error = summary.ungraded_error
    if error:
        lines = error.strip().splitlines() or [""]
        text += f", most often: {lines[0][:_LONGEST_ERROR]}"
    return text


def movement(summary: RunSummary) -> list[str]:
    """How training and held-out reward moved, one line each, where there is something to say."""
    lines = []
    missing = ungraded(summary)
    if missing:
        lines.append(missing)
    moved = first_and_last(summary.rewards)
    if moved is not None:
        first, last, each = moved
        steps = "step" if each == 1 else f"{each} steps"
        lines.append(f"reward {number(first)} → {number(last)} (first and last {steps})")
    elif summary.rewards:
        lines.append(f"reward {number(summary.rewards[-1][1])}")
    whole = [r for r in summary.held_out if r.complete and r.reward is not None]
    if len(whole) > 1:
        first_round, last_round = whole[0], whole[-1]
        lines.append(
            f"held-out {number(first_round.reward)} at step {first_round.step} → "
            f"{number(last_round.reward)} at step {last_round.step}"
        )
    elif whole:
        lines.append(f"held-out {number(whole[0].reward)} at step {whole[0].step}")
    if summary.last_groups:
        told = ", ".join(f"{n} {what}" for what, n in summary.last_groups.items())
        lines.append(f"groups of the last step: {told}")
    if summary.problem:
        lines.append(f"problem: {summary.problem} (run.diagnose() says more)")
    return lines


def ranked(summary: RunSummary) -> tuple[list[CheckpointLine], int]:
    """The checkpoints to show, best first, and how many are left out."""
    lines = sorted(
        summary.checkpoints,
        key=lambda c: (not c.best, not c.complete, -_or(c.held_out, -math.inf), -c.step),
    )
    return lines[:_SHOWN_CHECKPOINTS], max(0, len(lines) - _SHOWN_CHECKPOINTS)


def _or(value: float | None, other: float) -> float:
    return value if value is not None and math.isfinite(value) else other


def as_text(summary: RunSummary) -> str:
    """The summary as plain text."""
    lines = [f"run {summary.title} · {headline(summary)}"]
    if summary.activity:
        lines.append(f"now: {summary.activity}")
    subject = " · ".join(s for s in (summary.method, summary.workload, summary.base_model) if s)
    if subject:
        lines.append(subject)
    lines.append(counts(summary))
    lines += movement(summary)
    told = message(summary)
    if told:
        lines.append(told)
    shown, more = ranked(summary)
    for line in shown:
        mark = " (best)" if line.best else ""
        partial = "" if line.complete or line.held_out is None else ", round not complete"
        lines.append(
            f"checkpoint {line.checkpoint_id[:12]} step {line.step} "
            f"held-out {number(line.held_out)}{partial}{mark}"
        )
    if more:
        lines.append(f"and {more} more checkpoints")
    return "\n".join(lines + summary.notes)


_BOX = "font-family:sans-serif;font-size:13px;line-height:1.45;max-width:720px"
_MUTED = "opacity:0.75"
_CELL = (
    "padding:1px 10px 1px 0;text-align:left;border-bottom:1px solid rgba(128,128,128,0.3);"
    "font-variant-numeric:tabular-nums"
)
_DOUBTFUL = "#9a6700"
_STATE = {"succeeded": "#1a7f37", "failed": "#c0392b", "cancelled": "#9a6700", "running": "#1f77b4"}


def as_html(summary: RunSummary, picture: bytes | None = None) -> str:
    """The summary as static HTML; ``picture`` is the curve's PNG, placed inline."""
    esc = html.escape
    colour = _STATE.get(summary.status, "#6e7781")
    if summary.status == "succeeded" and (summary.mostly_ungraded or summary.unchanged):
        colour = _DOUBTFUL
    state = headline(summary)
    rows = [
        f'<div><b>{esc(summary.title)}</b> <span style="background:{colour};color:#ffffff;'
        f'border-radius:8px;padding:1px 8px;margin-left:6px">{esc(state)}</span></div>'
    ]
    if summary.activity:
        rows.append(f"<div>now: {esc(summary.activity)}</div>")
    subject = " · ".join(s for s in (summary.method, summary.workload, summary.base_model) if s)
    if subject:
        rows.append(f'<div style="{_MUTED}">{esc(subject)}</div>')
    rows.append(f"<div>{_bar(summary)}{esc(counts(summary))}</div>")
    rows += [f"<div>{esc(line)}</div>" for line in movement(summary)]
    told = message(summary)
    if told:
        rows.append(
            f'<pre style="white-space:pre-wrap;border-left:3px solid {colour};padding-left:8px;'
            f'margin:4px 0">{esc(told)}</pre>'
        )
    if picture:
        data = base64.b64encode(picture).decode("ascii")
        rows.append(
            f'<img alt="reward by step of {esc(summary.title)}" '
            f'src="data:image/png;base64,{data}" style="max-width:100%;background:#ffffff;'
            'margin:6px 0;border-radius:4px">'
        )
    rows.append(_checkpoint_table(summary))
    rows += [f'<div style="{_MUTED}">{esc(note)}</div>' for note in summary.notes]
    inner = "\n".join(row for row in rows if row)
    return f'<div class="nbtrain-run" style="{_BOX}">\n{inner}\n</div>'


def _bar(summary: RunSummary) -> str:
    planned = summary.total_steps - summary.start_step
    if planned <= 0:
        return ""
    share = min(1.0, max(0.0, (summary.completed_steps - summary.start_step) / planned))
    return (
        '<span style="display:inline-block;width:120px;height:8px;margin-right:8px;'
        'background:rgba(128,128,128,0.25);border-radius:4px">'
        f'<span style="display:block;width:{share:.0%};height:8px;background:#1f77b4;'
        'border-radius:4px"></span></span>'
    )


def _checkpoint_table(summary: RunSummary) -> str:
    shown, more = ranked(summary)
    if not shown:
        return ""
    names = ("checkpoint", "step", "held-out", "round", "kind", "")
    head = "".join(f'<th style="{_CELL}">{name}</th>' for name in names)
    body = []
    for line in shown:
        told = "complete" if line.complete else "not complete"
        if line.held_out is None:
            told = "–"
        cells = (
            f"<code>{html.escape(line.checkpoint_id[:12])}</code>",
            str(line.step),
            number(line.held_out),
            told,
            html.escape(line.kind),
            "best" if line.best else "",
        )
        body.append("<tr>" + "".join(f'<td style="{_CELL}">{c}</td>' for c in cells) + "</tr>")
    rest = f'<div style="{_MUTED}">and {more} more checkpoints</div>' if more else ""
    return (
        '<table style="border-collapse:collapse;margin-top:2px;font-size:inherit;color:inherit">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>{rest}"
    )
