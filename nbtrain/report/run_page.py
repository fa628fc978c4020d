"""The report of one run as a page, from plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbtrain.report.checkpoint_table import best_meaning
from nbtrain.report.drawing import Drawing
from nbtrain.report.findings import Diagnosis, Finding
from nbtrain.report.markup import (
    Markup,
    badge,
    code,
    details,
    drawn,
    facts,
    grouped_table,
    joined,
    mark,
    paragraphs,
    section,
    table,
)
from nbtrain.report.page import page
from nbtrain.report.summary import (
    RunSummary,
    headline,
    message,
    movement,
    number,
    score_of,
)
from nbtrain.report.turns import as_turns
from nbtrain.report.verdict import check_told

__all__ = ["CheckpointRow", "PlanRow", "Progressed", "RunPage", "SampleShown", "run_page"]

_LONGEST = 4000  # characters of a text that a sample shows
_SEVERITY = {"problem": "bad", "hint": "doubtful", "fine": "good"}
_STATE = {
    "succeeded": "good", "failed": "bad", "cancelled": "doubtful", "running": "busy",
}  # fmt: skip
_MOVED = ("reward ", "held-out ", "loss ", "validation ", "smoke check ")
_ALL_CHECKPOINTS = 12  # shown at once; the rest is folded


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint in the order of its rank: what its round read, and between what bounds."""

    checkpoint_id: str
    step: int
    score: float | None
    low: float | None
    high: float | None
    complete: bool
    said: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class SampleShown:
    """One trajectory with its texts; ``terms`` are each reward term's unweighted score."""

    title: str
    prompt: Any
    completion: Any
    reward: float | None
    terms: Sequence[tuple[str, float | None]] = ()
    verdict: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Progressed:
    """What checkpoints answered to the same held-out task: (when, answer, reward)."""

    prompt: Any
    answers: Sequence[tuple[str, Any, float | None]]


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A value of the resolved plan; ``usual`` values are folded away."""

    group: str
    name: str
    value: str
    origin: str
    note: str = ""
    usual: bool = False


@dataclass(slots=True)
class RunPage:
    """Everything that a run's report shows."""

    summary: RunSummary
    as_of: str
    head: list[tuple[str, str]]
    drawings: list[Drawing]
    diagnosis: Diagnosis
    checkpoints: list[CheckpointRow]
    samples: list[SampleShown]
    progress: list[Progressed]
    checks: list[dict[str, Any]]
    plan: list[PlanRow]
    data: list[tuple[str, str]]
    environment: list[tuple[str, str]]
    environment_said: str
    hashes: list[tuple[str, str]]
    cell: str
    python: str
    restated_said: str
    events: list[tuple[str, str, str, str]]
    events_left_off: int = 0
    samples_said: str = ""
    made_by: str = ""
    notes: list[str] = field(default_factory=list)


def run_page(given: RunPage) -> str:
    """The whole document."""
    summary = given.summary
    sections = [
        ("curves", "Curves", _curves(given)),
        ("diagnosis", "Diagnosis", _diagnosis(given.diagnosis)),
        ("checkpoints", "Checkpoints", _checkpoints(given)),
        ("samples", "Samples", _samples(given)),
        ("checks", "Start checks", _checks(given.checks)),
        ("data", "Data", section("data", "What it trained on", facts(given.data))),
        ("plan", "Plan", _plan(given.plan)),
        ("environment", "Environment", _environment(given)),
        ("again", "Train it again", _again(given)),
        ("events", "Events", _events(given)),
    ]
    return page(f"Run {summary.title}", _header(given), sections, given.made_by)


def _header(given: RunPage) -> Markup:
    summary = given.summary
    state = _STATE.get(summary.status, "plain")
    if summary.doubtful:
        state = "doubtful"
    called = summary.name or summary.run_id[:12]
    told = message(summary)
    failed = summary.status == "failed"
    # What is wrong is said below, in full
    lines = [line for line in movement(summary) if not line.startswith("problem: ")]
    moved = [line for line in lines if line.startswith(_MOVED)]
    return joined((
        mark("h1", joined(("Run ", called, " ", badge(headline(summary), state)))),
        paragraphs([summary.annotation], "muted"),
        paragraphs(moved, "lead"),
        paragraphs(line for line in lines if line not in moved),
        code(told, "Why it failed", "message") if told and failed else paragraphs([told]),
        facts(given.head),
        paragraphs(given.notes, "muted"),
        paragraphs([given.as_of], "muted"),
    ))  # fmt: skip


def _curves(given: RunPage) -> Markup:
    if not given.drawings:
        said = "No step was recorded, so there is nothing to draw."
        return section("curves", "Curves", paragraphs([said], "muted"))
    figures = [drawn(one, wide=one.narrow is not None) for one in given.drawings]
    return section("curves", "Curves", mark("div", joined(figures), class_="figures"))


def _diagnosis(found: Diagnosis) -> Markup:
    shown = [_finding(finding) for finding in found] or [paragraphs(["Nothing to report."])]
    return section("diagnosis", "Diagnosis", *shown)


def _finding(finding: Finding) -> Markup:
    samples = f"For example {finding.samples}." if finding.samples else ""
    return mark("div", joined((
        mark("p", joined((mark("b", f"{finding.severity.capitalize()}: "), finding.sentence))),
        paragraphs([finding.suggestion]), paragraphs([samples], "muted"),
    )), class_=f"finding {_SEVERITY[finding.severity]}")  # fmt: skip


def _checkpoints(given: RunPage) -> Markup:
    what, _ = score_of(given.summary)
    ties = any(row.said.startswith("best (") for row in given.checkpoints)
    bounded = any(row.low is not None for row in given.checkpoints)
    rows = [
        (
            *(f"{row.step:,}", number(row.score)),
            *((_interval(row),) if bounded else ()),
            *(row.said, _round(row), mark("code", row.checkpoint_id[:12]), row.kind, row.reason),
        )
        for row in given.checkpoints
    ]
    names = (
        *("step", what),
        *(("95% interval",) if bounded else ()),
        *("rank", "round", "checkpoint", "holds", "saved for"),
    )
    first, rest = rows[:_ALL_CHECKPOINTS], rows[_ALL_CHECKPOINTS:]
    caption = f"Committed checkpoints, the best {what} of a complete round first"
    return section(
        "checkpoints", "Checkpoints",
        table(names, first, caption=caption, numbers=(0, 1)),
        details(f"{len(rest)} more", table(names, rest, caption="The other checkpoints",
                                                       numbers=(0, 1))),
        paragraphs([f"{best_meaning(loss=what != 'held-out')}."] if ties else [], "muted"),
        "" if rows else paragraphs(["No checkpoint was committed."], "muted"),
    )  # fmt: skip


def _interval(row: CheckpointRow) -> str:
    if row.low is None or row.high is None:
        return "–"
    return f"{number(row.low)} to {number(row.high)}"


def _round(row: CheckpointRow) -> str:
    if row.score is None:
        return "–"
    return "complete" if row.complete else "not complete"


def _samples(given: RunPage) -> Markup:
    if not given.samples and not given.progress:
        return Markup("")
    shown = joined(_progressed(each) for each in given.progress)
    told = "The same held-out task, answered at several steps."
    return section(
        "samples", "What the model wrote",
        joined((mark("h3", "On the way"), paragraphs([told], "muted"), shown)) if shown else "",
        mark("h3", "Best and worst") if given.samples else "",
        paragraphs([given.samples_said], "muted"),
        *(_sample(each) for each in given.samples),
    )  # fmt: skip


def _progressed(task: Progressed) -> Markup:
    rows = [
        (when, mark("div", _cut(answer), class_="said"), number(reward))
        for when, answer, reward in task.answers
    ]
    asked = table(
        ("at", "answer", "reward"), rows, caption="Answers by step", numbers=(2,), hidden=True
    )
    return mark("div", joined((mark("div", _cut(task.prompt), class_="said"), asked)),
                class_="sample")  # fmt: skip


def _sample(sample: SampleShown) -> Markup:
    terms = ", ".join(f"{name} {number(value)}" for name, value in sample.terms)
    graded = "not graded" if sample.reward is None else f"reward {number(sample.reward)}"
    head = joined((mark("b", sample.title), " · ", graded, f" ({terms})" if terms else ""))
    return mark("div", joined((
        mark("p", head),
        mark("div", _cut(sample.prompt), class_="said"),
        mark("div", _cut(sample.completion), class_="said"),
        paragraphs([sample.verdict], "muted"),
        code(_cut(sample.error), "Error") if sample.error else "",
    )), class_="sample")  # fmt: skip


def _cut(value: Any) -> str:
    told = as_turns(value)
    words = "" if told is None else str(told)
    if len(words) <= _LONGEST:
        return words
    return f"{words[:_LONGEST]} … ({len(words) - _LONGEST:,} more characters)"


def _checks(checks: Sequence[dict[str, Any]]) -> Markup:
    rows = [
        (check["name"], check["verdict"], check_told(check).removeprefix(f"{check['name']} "))
        for check in checks
    ]
    caption = "What was measured before the first update"
    return section("checks", "Start checks",
                   table(("check", "verdict", "measured"), rows, caption=caption))  # fmt: skip


def _plan(rows: Sequence[PlanRow]) -> Markup:
    told = [row for row in rows if not row.usual]
    usual = [row for row in rows if row.usual]
    caption = "Values that were stated, computed or inherited"
    folded = f"{len(usual)} values at their defaults"
    return section(
        "plan", "Resolved plan",
        _values(told, caption),
        details(folded, _values(usual, folded)) if usual else "",
    )  # fmt: skip


def _values(rows: Iterable[PlanRow], caption: str) -> Markup:
    groups: dict[str, list[tuple[object, ...]]] = {}
    for row in rows:
        cells = (row.name, mark("code", row.value), row.origin, row.note)
        groups.setdefault(row.group, []).append(cells)
    names = ("value of", "value", "origin", "note")
    return grouped_table(names, groups.items(), caption=caption)


def _environment(given: RunPage) -> Markup:
    return section(
        "environment", "Environment and hashes",
        facts(given.environment), paragraphs([given.environment_said], "muted"),
        mark("div", facts(given.hashes), class_="long"),
    )  # fmt: skip


def _again(given: RunPage) -> Markup:
    return section(
        "again", "Train it again",
        paragraphs([given.restated_said], "muted"),
        mark("h3", "In a notebook"), code(given.cell, "Cell that trains it again"),
        mark("h3", "In Python"), code(given.python, "Python that trains it again"),
    )  # fmt: skip


def _events(given: RunPage) -> Markup:
    left = f"The first {given.events_left_off:,} are left off." if given.events_left_off else ""
    shown = table(("at", "attempt", "phase", "message"), given.events,
                  caption="Phases that the run entered", numbers=(1,))  # fmt: skip
    return section("events", "Events", paragraphs([left], "muted"), shown)
