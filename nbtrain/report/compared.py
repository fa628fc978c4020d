"""Several runs side by side as text, HTML, picture and page, from plain data."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nbtrain.report import palette
from nbtrain.report.drawing import Drawing, Line, draw_lines, plot_lines
from nbtrain.report.lettering import drawable
from nbtrain.report.markup import (
    Markup,
    badge,
    drawn,
    joined,
    mark,
    paragraphs,
    section,
    table,
)
from nbtrain.report.page import page
from nbtrain.report.series import Point, first_and_last, smooth
from nbtrain.report.summary import number

__all__ = [
    *("Compared", "Curve", "as_html", "as_text", "comparison_figure", "comparison_page"),
]

_BOX = "font-family:sans-serif;font-size:13px;line-height:1.45;max-width:960px"
_CELL = "padding:2px 12px 2px 0;text-align:left;border-bottom:1px solid rgba(128,128,128,0.3)"
_NUMBERS = frozenset(
    (
        *("steps", "updates", "output tokens", "trained tokens", "time", "at step", "95% interval"),
        *("reward", "loss", "final held-out", "final validation loss"),
        *("highest held-out", "lowest validation loss", "best held-out", "best validation loss"),
    )
)


@dataclass(frozen=True, slots=True)
class Curve:
    """A run's curves: its steps and its complete rounds, with their bounds where they are known."""

    label: str
    steps: Sequence[Point]
    rounds: Sequence[Point] = ()
    low: Sequence[Point] = ()
    high: Sequence[Point] = ()


@dataclass(slots=True)
class Compared:
    """What a comparison shows. ``rows`` are one mapping a run, in words; ``differing`` the plan's
    values that are not the same, by name, one for each run.

    ``measure`` is what the curves show (``reward`` or ``loss``); ``None`` where runs of both
    kinds stand side by side, which have no axis in common. ``warnings`` say what is not
    comparable.
    """

    title: str
    labels: list[str]
    rows: list[dict[str, str]]
    differing: dict[str, list[str]]
    measure: str | None
    curves: list[Curve]
    warnings: list[str] = field(default_factory=list)
    same: int = 0


def _lines(compared: Compared, *, rounds: bool) -> list[Line]:
    """One line for each run; colour and dash tell them apart, also in print."""
    found = []
    for n, curve in enumerate(compared.curves):
        colour, dash = style_of(n)
        if rounds:
            line = Line(curve.label, curve.rounds, colour, dash, marked=True,
                        low=curve.low, high=curve.high)  # fmt: skip
        else:
            line = Line(curve.label, _smoothed(curve.steps), colour, dash)
        found.append(line)
    return found


def style_of(n: int) -> tuple[int, str]:
    """Colour and dash of the nth run; no two of 28 are alike."""
    count = len(palette.LINES)
    return n % count, palette.DASHES[(n % count + n // count) % len(palette.DASHES)]


def _smoothed(points: Sequence[Point]) -> list[Point]:
    if len(points) <= 12:
        return list(points)
    means = smooth([y for _, y in points], max(5, len(points) // 20))
    return [(x, y) for (x, _), y in zip(points, means, strict=True)]


def _words(compared: Compared) -> tuple[str, str, str]:
    if compared.measure == "loss":
        return "Loss", "Validation loss", "nats per trained token"
    return "Mean reward", "Held-out reward", "reward"


def comparison_figure(compared: Compared) -> Any:
    """A matplotlib figure: the steps' curves, and beside them the validation rounds'."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8.6, 3.1), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    first, second, unit = _words(compared)
    axes = figure.subplots(1, 2, sharey=True)
    for one, title, rounds in zip(axes, (first, second), (False, True), strict=True):
        plot_lines(one, _lines(compared, rounds=rounds))
        one.set_title(title, fontsize=9, loc="left")
        one.set_xlabel("step", fontsize=8)
        one.tick_params(labelsize=8, length=2)
        one.grid(color=palette.GRID, linewidth=0.5)
        one.spines[["top", "right"]].set_visible(False)
        one.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
    axes[0].set_ylabel(unit, fontsize=8)
    pairs = zip(_lines(compared, rounds=False), compared.curves, strict=True)
    _legend(figure, [line for line, curve in pairs if curve.steps or curve.rounds])
    return figure


def _legend(figure: Any, lines: Sequence[Line]) -> None:
    """Names below the figure, whatever they are: matplotlib itself leaves out ``_this``."""
    from matplotlib.lines import Line2D

    if not lines:
        return
    signs = [
        Line2D([], [], color=palette.LINES[line.colour], linestyle=line.dash, linewidth=1.7)
        for line in lines
    ]
    legend = figure.legend(
        signs, [str(n) for n, _ in enumerate(lines)], loc="outside lower center", ncols=3,
        fontsize=7, frameon=False, handlelength=3,
    )  # fmt: skip
    for told, line in zip(legend.get_texts(), lines, strict=True):
        told.set_parse_math(False)
        told.set_text(drawable(line.label))


def drawings(compared: Compared) -> list[Drawing]:
    """The same for a page."""
    if compared.measure is None:
        return []
    first, second, unit = _words(compared)
    found = []
    for title, rounds in ((first, False), (second, True)):
        lines = _lines(compared, rounds=rounds)
        if not any(line.points for line in lines):
            continue
        told = "; ".join(_told(line, rounds=rounds) for line in lines if line.points)
        found.append(draw_lines(title, lines, told=f"{told}.", unit=unit, wide=True))
    return found


def _told(line: Line, *, rounds: bool) -> str:
    """From where to where: rounds by their ends, steps by the means of several."""
    moved = first_and_last(line.points, 1 if rounds else 10)
    if moved is None:
        return f"{line.label} {number(line.points[0][1])}"
    return f"{line.label} {number(moved[0])} → {number(moved[1])}"


def as_text(compared: Compared) -> str:
    """The comparison as plain text."""
    lines = [compared.title, *compared.warnings]
    columns = list(compared.rows[0])
    lines += _columns([columns, *([row[name] for name in columns] for row in compared.rows)])
    if compared.differing:
        lines += ["", "what differs in the plans"]
        body = [[name, *values] for name, values in compared.differing.items()]
        lines += _columns([["", *compared.labels], *body])
    else:
        lines += ["", "the plans are the same"]
    return "\n".join(lines)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def as_html(compared: Compared, picture: str | None = None) -> str:
    """The comparison as static HTML with inline styles; ``picture`` is a PNG in base64."""
    esc = html.escape
    parts = [f"<div><b>{esc(compared.title)}</b></div>"]
    parts += [f'<div style="color:#9a6700">{esc(line)}</div>' for line in compared.warnings]
    columns = list(compared.rows[0])
    parts.append(_plain(columns, [[row[name] for name in columns] for row in compared.rows]))
    if picture:
        what = " and ".join(_words(compared)[:2]).lower()
        parts.append(
            f'<img alt="{what} by step of {esc(", ".join(compared.labels))}" '
            f'src="data:image/png;base64,{picture}" '
            'style="max-width:100%;background:#ffffff;margin:6px 0;border-radius:4px">'
        )
    if compared.differing:
        parts.append(
            _plain(
                ["differs", *compared.labels],
                [[name, *values] for name, values in compared.differing.items()],
            )
        )
    said = f"{compared.same} values of the plans are the same"
    parts.append(f'<div style="opacity:0.75">{said}</div>')
    return f'<div class="nbtrain-comparison" style="{_BOX}">{"".join(parts)}</div>'


def _plain(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col" style="{_CELL}">{html.escape(n)}</th>' for n in names)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{html.escape(c)}</td>' for c in row) + "</tr>"
        for row in rows
    )
    return (
        '<table style="border-collapse:collapse;margin:4px 0;font-size:inherit;color:inherit">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def comparison_page(compared: Compared, runs: list[tuple[str, str, Markup]], made_by: str) -> str:
    """The document: the comparison, then a section (anchor, title, content) for each run."""
    columns = list(compared.rows[0])
    right = [n for n, name in enumerate(columns) if name in _NUMBERS]
    rows = [[row[name] for name in columns] for row in compared.rows]
    figures = mark("div", joined(drawn(each, wide=True) for each in drawings(compared)),
                   class_="figures")  # fmt: skip
    differ = table(
        ("value of the plan", *compared.labels),
        [(name, *(mark("code", value) for value in values))
         for name, values in compared.differing.items()],
        caption="Only what is not the same in all of them",
    )  # fmt: skip
    same = f"{compared.same} values are the same."
    header = joined((
        mark("h1", joined((f"{len(compared.labels)} runs side by side ",
                           badge(compared.measure or "tables only", "plain")))),
        paragraphs(compared.labels and [", ".join(compared.labels)]),
        paragraphs(compared.warnings, "doubtful"),
    ))  # fmt: skip
    sections = [
        ("results", "Results", section("results", "Results", table(
            columns, rows, caption="Where each run stands", numbers=right))),
        ("curves", "Curves",
         section("curves", "Curves", figures) if compared.measure else Markup("")),
        ("plans", "Plans", section("plans", "What differs in the plans", differ,
                                   paragraphs([same], "muted"))),
        *runs,
    ]  # fmt: skip
    return page(compared.title, header, sections, made_by)
