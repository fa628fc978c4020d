"""The form's texts as HTML. Whatever a plan, a run or a model says is escaped here."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from nbtrain.notebook.form.entries import Entry
from nbtrain.notebook.form.outcome import Outcome, told_value
from nbtrain.plan.fields import show
from nbtrain.plan.schedule import Schedule, learning_rate, schedule_of

if TYPE_CHECKING:
    from nbtrain.client import Run
    from nbtrain.errors import Problem
    from nbtrain.plan.registry import BaseModelInfo
    from nbtrain.plan.resolved import ResolvedPlan

__all__ = ["STYLE", "cell_box", "expected", "lines", "note", "refusals", "state"]

STYLE = """<style>
.nbtrain-form {max-width: 1100px; font-size: var(--jp-ui-font-size1, 13px)}
.nbtrain-form .widget-label {text-align: left; color: inherit}
.nbtrain-form .widget-html-content {line-height: 1.35; color: var(--jp-ui-font-color1, inherit)}
.nbtrain-form .nbtrain-muted {color: var(--jp-ui-font-color2, gray); font-size: 12px}
.nbtrain-form .nbtrain-refused {color: var(--jp-error-color0, #b3261e); font-weight: 600}
.nbtrain-form .nbtrain-bad input, .nbtrain-form .nbtrain-bad select
  {box-shadow: inset 0 0 0 1px var(--jp-error-color1, #b3261e)}
.nbtrain-form .nbtrain-value {font-variant-numeric: tabular-nums}
.nbtrain-form .widget-dropdown > select {background-repeat: no-repeat; background-size: 5px 5px;
  background-position: right 11px center, right 6px center;
  background-image: linear-gradient(45deg, transparent 50%, currentColor 50%),
    linear-gradient(-45deg, transparent 50%, currentColor 50%)}
.nbtrain-form button:disabled {cursor: default; color: var(--jp-ui-font-color1);
  background: var(--jp-layout-color2)}
.nbtrain-form button.nbtrain-group {text-align: left; font-weight: 600}
.nbtrain-form button.nbtrain-group.mod-active {box-shadow: none; margin-bottom: 8px}
.nbtrain-form ul {margin: 2px 0; padding-left: 18px}
.nbtrain-form textarea {width: 100%; box-sizing: border-box; background: var(--jp-layout-color1);
  color: inherit; border: 1px solid var(--jp-border-color1, gray);
  font-family: var(--jp-code-font-family, monospace); font-size: 12px}
</style>"""

_CHOOSE = {
    "workload": "a workload", "model": "a base model", "dataset": "a dataset",
    "method": "a method", "parent": "a checkpoint", "name": "a name",
}  # fmt: skip
_WIDE, _HIGH, _LEFT, _TOP, _BOTTOM = 340, 96, 4, 16, 18
_POINTS = 160
_SENTENCE = re.compile(r"(.+?\.)(\s|$)")


def note(
    entry: Entry,
    outcome: Outcome,
    model: BaseModelInfo | None,
    *,
    stated: bool,
) -> str:
    """What stands beside a field: its value and origin, bounds, help, and what is refused."""
    problems = outcome.beside.get(entry.name, ())
    value = None if problems else told_value(outcome.nearest, entry.name)
    if value is None:
        value = "stated" if stated else entry.unstated()
    elif stated and entry.option.compute is None and "stated" in value:
        value += f" (default {show(entry.option.default)})"
    found = _SENTENCE.match(entry.option.help)
    first = found[1] if found else entry.option.help
    return (
        refusals(problems) + f'<div><span class="nbtrain-value">{html.escape(value)}</span> '
        f'<span class="nbtrain-muted">· {html.escape(entry.option.allowed(model))}</span></div>'
        f'<div class="nbtrain-muted" title="{html.escape(entry.option.help)}">'
        f"{html.escape(first)}</div>"
    )


def refusals(problems: Iterable[Problem]) -> str:
    """Problems as alerts, which a screen reader tells when they appear."""
    return "".join(
        f'<div class="nbtrain-refused" role="alert">{html.escape(str(problem))}</div>'
        for problem in problems
    )


def lines(told: Iterable[str], css: str = "nbtrain-muted") -> str:
    """Sentences, one to a line."""
    return "".join(f'<div class="{css}">{html.escape(line)}</div>' for line in told)


def state(outcome: Outcome) -> str:
    """Whether it can be launched: the count of refusals and those without a field, or the hash."""
    count = len(outcome.refused)
    choose = " and ".join(_CHOOSE[name] for name in outcome.missing)
    missing = lines([f"choose {choose}"], "") if choose else ""
    if count:
        head = f"refused: {count} problem{'s' if count > 1 else ''}"
        mended = "all are" if count > 1 else "it is"
        head += f"; nothing starts before {mended} mended, and a cell copied now is refused too"
        return lines([head], "nbtrain-refused") + refusals(outcome.general) + missing
    if missing:
        return missing
    if outcome.view is None:
        return lines(["…"])
    told = [f"config {outcome.view.config_hash[:12]}: nothing is refused"]
    same = [f"same recipe as {_called(run)}" for run in outcome.earlier[:3]]
    if len(outcome.earlier) > len(same):
        same.append(f"and {len(outcome.earlier) - len(same)} earlier runs of it")
    return lines(told, "") + lines(same)


def _called(run: Run) -> str:
    return f"run {run.name} {run.id[:12]}" if run.name else f"run {run.id[:12]}"


def expected(outcome: Outcome) -> str:
    """The learning rate by step and what the run takes; empty where the plan is refused."""
    if outcome.view is None:
        return ""
    told = "".join(f"<li>{html.escape(line)}</li>" for line in outcome.expected)
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:4px 24px">'
        f"<div>{_rates(outcome.view.plan)}</div>"
        f'<ul style="flex:1 1 360px">{told}</ul></div>'
    )


def _rates(plan: ResolvedPlan) -> str:
    """The learning rate by step as a picture that follows the theme."""
    schedule = schedule_of(plan.options, plan.total_steps)
    steps = _steps(plan.start_step + 1, schedule)
    rates = [learning_rate(step, **schedule) for step in steps]
    top = max(rates)
    span = max(1, steps[-1] - steps[0])

    def x(step: int) -> float:
        return _LEFT + (step - steps[0]) / span * (_WIDE - 2 * _LEFT)

    def y(rate: float) -> float:
        return _HIGH - _BOTTOM - rate / top * (_HIGH - _TOP - _BOTTOM)

    points = " ".join(f"{x(s):.1f},{y(r):.1f}" for s, r in zip(steps, rates, strict=True))
    ends = f"{_rate(rates[0])} at step {show(steps[0])}, {_rate(rates[-1])} at {show(steps[-1])}"
    base = _HIGH - _BOTTOM
    text = 'font-size="11" fill="currentColor"'
    return (
        f'<svg width="{_WIDE}" height="{_HIGH}" viewBox="0 0 {_WIDE} {_HIGH}" role="img" '
        f'aria-label="learning rate: {ends}">'
        f'<text x="{_LEFT}" y="11" {text}>learning rate, at most {_rate(top)}</text>'
        f'<line x1="{_LEFT}" x2="{_WIDE - _LEFT}" y1="{base}" y2="{base}" stroke="currentColor" '
        'stroke-opacity="0.35"/>'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.6"/>'
        f'<text x="{_LEFT}" y="{_HIGH - 4}" {text}>{_rate(rates[0])}</text>'
        f'<text x="{_WIDE / 2}" y="{_HIGH - 4}" text-anchor="middle" {text}>steps '
        f"{show(steps[0])} to {show(steps[-1])}</text>"
        f'<text x="{_WIDE - _LEFT}" y="{_HIGH - 4}" text-anchor="end" {text}>{_rate(rates[-1])}'
        "</text></svg>"
    )


def _steps(first: int, schedule: Schedule) -> Sequence[int]:
    """Steps to draw: evenly spread, and the corners of the schedule."""
    last = max(first, schedule["total_steps"])
    stride = max(1, math.ceil((last - first) / _POINTS))
    corners = (schedule["warmup"], schedule["warmup"] + schedule["hold"], last)
    return sorted({*range(first, last + 1, stride), *(c for c in corners if first <= c <= last)})


def _rate(rate: float) -> str:
    return show(float(f"{rate:.3g}"))


def cell_box(text: str, *, refused: bool = False) -> str:
    """A button that copies the text of a cell and says so, and that the cell is ``refused``.

    Where the page may not write to the clipboard, the text is shown, selected.
    """
    rows = text.count("\n") + 1
    more = "; it is refused as it stands" if refused else ""
    return (
        '<button class="jupyter-button widget-button" style="width:auto" '
        f'title="the same plan as a %%train cell{more}" onclick="'
        "const said = this.nextElementSibling, box = said.nextElementSibling; "
        "const shown = () => {box.hidden = false; box.focus(); box.select(); "
        "return document.execCommand('copy');}; "
        "(navigator.clipboard ? navigator.clipboard.writeText(box.value) : Promise.reject())"
        ".then(() => true, shown).then(done => {"
        f"said.textContent = (done ? 'copied' : 'selected: copy it from here') + '{more}';}})"
        '">copy as cell</button> <span class="nbtrain-muted" role="status"></span>'
        f'<textarea readonly hidden rows="{rows}" cols="80" aria-label="the same as a cell" '
        f'onfocus="this.select()">{html.escape(text)}</textarea>'
    )
