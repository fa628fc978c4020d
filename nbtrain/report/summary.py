"""A run at a glance: plain data, and its text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from nbtrain.plan.fields import counted
from nbtrain.report import checkpoint_table, supervised
from nbtrain.report.checkpoint_table import CheckpointLine, number
from nbtrain.report.series import first_and_last
from nbtrain.report.supervised import Supervised
from nbtrain.report.verdict import checks_told
from nbtrain.report.verdict import headline as smoke
from nbtrain.report.verdict import sentences as smoke_told

__all__ = [
    "CheckpointLine",
    "HeldOut",
    "RunSummary",
    "as_text",
    "clock",
    "counts",
    "headline",
    "message",
    "movement",
    "number",
    "progress_line",
    "ranked",
    "score_of",
    "span",
    "ungraded",
]

_SHOWN_CHECKPOINTS = 6
_LONGEST_ERROR = 200  # characters of the most frequent error
_LONGEST_DESCRIPTION = 300  # characters
_LONGEST_MESSAGE = 1500  # characters of a failure that a notebook keeps


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One validation round: its step, its mean reward, and whether all of it was graded.

    ``low`` and ``high`` are the reward's 95 % interval, where it was read.
    """

    step: int
    reward: float | None
    complete: bool
    low: float | None = None
    high: float | None = None


@dataclass(slots=True)
class RunSummary:
    """Everything the text, the HTML and the figure of a run are made from.

    ``supervised`` are the figures of a supervised run, ``None`` of another; ``checks`` are its
    start checks and ``verdict`` what a smoke check found, as the store has them; ``model`` is
    what it registered, in words.
    """

    run_id: str
    name: str | None
    status: str
    phase: str
    method: str = ""
    workload: str = ""
    base_model: str = ""
    config_name: str | None = None
    description: str | None = None
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
    admission: str = ""
    supervised: Supervised | None = None
    checks: list[dict[str, Any]] = field(default_factory=list)
    verdict: Mapping[str, Any] | None = None
    model: str | None = None

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
    def doubtful(self) -> bool:
        """Whether it succeeded, and yet is no success to rely on."""
        failed = self.verdict is not None and not self.verdict.get("passed")
        return self.status == "succeeded" and (self.mostly_ungraded or self.unchanged or failed)

    @property
    def subject(self) -> str:
        """Method, workload and base model in one line."""
        parts = (self.method, self.admission, self.workload, self.base_model)
        return " · ".join(part for part in parts if part)

    @property
    def annotation(self) -> str:
        """What its descriptor calls it and says of it, in one line."""
        said = " ".join((self.description or "").split())
        if len(said) > _LONGEST_DESCRIPTION:
            said = f"{said[:_LONGEST_DESCRIPTION]} …"
        called = f"config {self.config_name}" if self.config_name else ""
        return " · ".join(part for part in (called, said) if part)

    @property
    def unchanged(self) -> bool:
        """Whether the run succeeded without a single update."""
        return self.status == "succeeded" and self.updates_applied == 0


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


def headline(summary: RunSummary) -> str:
    """What state the run is in, in one line.

    A run that changed no weight, or that could grade few of its trajectories, says so first.
    """
    state = f"{summary.status}, {summary.phase}"
    if summary.unchanged:
        state = f"no weight changed · {state}"
    if summary.mostly_ungraded:
        state = f"most trajectories not graded · {state}"
    if summary.verdict is not None:
        state = f"{smoke(summary.verdict).partition(':')[0]} · {state}"
    if summary.liveness:
        state += f" · {summary.liveness}"
    return state


def message(summary: RunSummary) -> str | None:
    """The failure, or why the run ended early; cut to a length a notebook can hold."""
    # A smoke check ends with its verdict, which is told in lines of its own
    ended = summary.ended if summary.verdict is None else None
    text = summary.failure or ended
    if text and len(text) > _LONGEST_MESSAGE:
        return f"{text[:_LONGEST_MESSAGE]} … ({len(text) - _LONGEST_MESSAGE:,} characters more)"
    return text


def counts(summary: RunSummary) -> str:
    """Steps, trajectories, tokens and time in one line."""
    step = f"step {summary.completed_steps:,} of {summary.total_steps:,}"
    if summary.start_step:
        step += f" (from step {summary.start_step:,})"
    parts = [step, amounts(summary)]
    begun = summary.started_at or summary.created_at
    if begun is not None and summary.ended_at is not None:
        parts.append(span(summary.ended_at - begun))
    return " · ".join(parts)


def amounts(summary: RunSummary) -> str:
    """Updates, trajectories and tokens in one line."""
    parts = [counted(summary.updates_applied, "update")]
    if summary.supervised is None:
        many = "trajectory" if summary.attempted == 1 else "trajectories"
        told = f"{summary.attempted:,} {many}, {summary.graded:,} graded"
        parts.append(told + (f", {summary.cut:,} cut off" if summary.cut else ""))
    if summary.output_tokens:
        parts.append(counted(summary.output_tokens, "token"))
    return " · ".join(parts)


def progress_line(summary: RunSummary) -> str:
    """``step 40 of 120, loss 1.204, validation loss 1.310 (perplexity 3.71)``."""
    parts = []
    if summary.activity and summary.completed_steps == summary.start_step:
        parts.append(summary.activity)
    else:
        parts.append(f"step {summary.completed_steps:,} of {summary.total_steps:,}")
    if summary.supervised is not None:
        parts.append(supervised.loss_told(summary.supervised))
    elif summary.rewards:
        parts.append(f"reward {number(summary.rewards[-1][1])}")
        whole = [r for r in summary.held_out if r.complete]
        parts.append(f"held-out {number(whole[-1].reward)}" if whole else "")
    return ", ".join(part for part in parts if part)


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
    """How rewards or losses moved, one line each, where there is something to say.

    What the start checks measured and what a smoke check found stands before and after.
    """
    lines = checks_told(summary.checks)
    moved = _rewards if summary.supervised is None else _losses
    lines += moved(summary)
    if summary.verdict is not None:
        lines += smoke_told(summary.verdict)
    if summary.model:
        lines.append(f"registered as model {summary.model}")
    if summary.problem:
        lines.append(f"problem: {summary.problem} (run.diagnose() says more)")
    return lines


def _losses(summary: RunSummary) -> list[str]:
    return [] if summary.supervised is None else supervised.movement(summary.supervised)


def _rewards(summary: RunSummary) -> list[str]:
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
    return lines


def ranked(summary: RunSummary) -> tuple[list[CheckpointLine], int]:
    """The checkpoints to show, best first, and how many are left out."""
    lines = checkpoint_table.ranked(summary.checkpoints)
    return lines[:_SHOWN_CHECKPOINTS], max(0, len(lines) - _SHOWN_CHECKPOINTS)


def score_of(summary: RunSummary) -> tuple[str, str]:
    """What ranks checkpoints: in words, and the field of their lines."""
    return ("held-out", "held_out") if summary.supervised is None else ("validation loss", "loss")


def as_text(summary: RunSummary) -> str:
    """The summary as plain text."""
    lines = [f"run {summary.title} · {headline(summary)}"]
    if summary.activity:
        lines.append(f"now: {summary.activity}")
    if summary.subject:
        lines.append(summary.subject)
    if summary.annotation:
        lines.append(summary.annotation)
    lines.append(counts(summary))
    lines += movement(summary)
    told = message(summary)
    if told:
        lines.append(told)
    shown, more = ranked(summary)
    lines += checkpoint_table.as_lines(shown, score_of(summary)[0])
    if more:
        lines.append(checkpoint_table.more_told(more))
    return "\n".join(lines + summary.notes)
