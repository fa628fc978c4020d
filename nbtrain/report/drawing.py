"""Drawings for pages: lines, bands and stacks as inline SVG, from plain series.

Matplotlib's object interface only. Texts stay texts (they can be read out, found and copied) and
colours become variables of the page, so one drawing serves light, dark and paper.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from nbtrain.report import palette
from nbtrain.report.series import Point, smooth, thin

__all__ = ["Drawing", "Key", "Line", "draw_lines", "draw_stack", "plot_lines", "smoothed"]

_POINTS = 400  # of a line; more cannot be told apart on 1,000 pixels
_BINS = 150  # of a stack
_FONT = 9.5
WIDE, NARROW = (9.2, 3.1), (4.7, 2.75)
"""Inches of 72 points: a page's whole width, and half of it or a phone's."""
_FEW = 40  # points whose markers do not run together


@dataclass(frozen=True, slots=True)
class Line:
    """One line: (x, y) points in order, what it is called, its colour's place in the palette.

    ``low`` and ``high`` bound it where an interval is known, as (x, y) points. ``faint`` lines
    stand behind another and have no place in the legend; ``hollow`` points are not joined.
    """

    label: str
    points: Sequence[Point]
    colour: int = 0
    dash: str = "solid"
    faint: bool = False
    hollow: bool = False
    marked: bool = False
    low: Sequence[Point] = ()
    high: Sequence[Point] = ()


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a legend: label, place in the palette, and how its sign is drawn."""

    label: str
    colour: int
    sign: str = "solid"


@dataclass(frozen=True, slots=True)
class Drawing:
    """An SVG with what stands around it: title, legend, and what is seen in words."""

    title: str
    svg: str
    told: str
    keys: Sequence[Key] = field(default=())
    narrow: str | None = None


def smoothed(
    label: str, points: Sequence[Point], colour: int = 0, dash: str = "solid"
) -> list[Line]:
    """A noisy series as a faint line and its trailing mean; a short one as it is."""
    if len(points) <= 12:
        return [Line(label, points, colour, dash, marked=len(points) < 3)]
    window = max(5, len(points) // 20)
    means = smooth([y for _, y in points], window)
    mean = [(x, y) for (x, _), y in zip(points, means, strict=True)]
    return [
        Line(label, points, colour, faint=True),
        Line(f"{label} (mean of {window} steps)", mean, colour, dash),
    ]


def draw_lines(
    title: str,
    lines: Sequence[Line],
    *,
    told: str,
    unit: str,
    until: int | None = None,
    from_zero: bool = False,
    wide: bool = False,
) -> Drawing:
    """Lines over steps. ``unit`` names the vertical axis, ``until`` is the last planned step."""
    how: dict[str, Any] = {"unit": unit, "until": until, "from_zero": from_zero}
    size = WIDE if wide else NARROW
    keys = [
        Key(line.label, line.colour, "hollow" if line.hollow else line.dash)
        for line in lines
        if not line.faint and line.points
    ]
    return Drawing(
        title,
        _svg(_lined(lines, size, **how), title),
        told,
        keys,
        _svg(_lined(lines, NARROW, **how), f"{title} narrow") if wide else None,
    )


def draw_stack(
    title: str,
    steps: Sequence[int],
    parts: Sequence[tuple[str, int, Sequence[float]]],
    *,
    told: str,
    unit: str,
) -> Drawing:
    """Parts of a whole by step, one on the other: (label, colour, value at each step).

    Many steps are drawn as the means of stretches. Parts that are nothing anywhere are left out.
    """
    shown = [part for part in parts if any(part[2])]
    figure, axes = _blank(NARROW)
    places, stacks = _binned(steps, [values for *_, values in shown])
    if shown:
        axes.stackplot(
            places,
            *stacks,
            colors=[palette.LINES[colour] for _, colour, _ in shown],
            step="mid",
            linewidth=0,
        )
    _dress(axes, unit, None)
    axes.margins(x=0.02, y=0.06)
    axes.set_ylim(bottom=0)
    keys = [Key(label, colour, "area") for label, colour, _ in shown]
    return Drawing(title, _svg(figure, title), told, keys)


def _binned(
    steps: Sequence[int], values: Sequence[Sequence[float]]
) -> tuple[list[float], list[list[float]]]:
    """The steps and values, or the means of at most :data:`_BINS` stretches of them.

    The ends are held half a step further, so that the first and the last step have their width.
    """
    count = len(steps)
    bins = min(count, _BINS)
    cuts = [n * count // bins for n in range(bins + 1)]
    stretches = [slice(a, b) for a, b in pairwise(cuts)]
    places = [sum(steps[s]) / (s.stop - s.start) for s in stretches]
    means = [[sum(part[s]) / (s.stop - s.start) for s in stretches] for part in values]
    if places:
        half = (places[-1] - places[0]) / max(1, len(places) - 1) / 2 or 0.5
        places = [places[0] - half, *places, places[-1] + half]
        means = [[part[0], *part, part[-1]] for part in means]
    return places, means


def plot_lines(axes: Any, lines: Sequence[Line]) -> None:
    """Draw the lines with their bands into matplotlib axes."""
    for line in lines:
        if not line.points:
            continue
        colour = palette.LINES[line.colour]
        if line.low and line.high:
            _draw_band(axes, line, colour)
        # One point is no line: without a marker it would not be seen
        dotted = line.hollow or len(line.points) == 1
        dotted = dotted or (line.marked and len(line.points) < _FEW)
        xs, ys = zip(*thin(line.points, _POINTS), strict=True)
        axes.plot(
            xs,
            ys,
            color=colour,
            label=None if line.faint else line.label,
            linestyle="" if line.hollow else line.dash,
            linewidth=0.8 if line.faint else 1.7,
            alpha=0.35 if line.faint else 1.0,
            marker="o" if dotted else None,
            markersize=4,
            markerfacecolor="none" if line.hollow else colour,
        )


def _draw_band(axes: Any, line: Line, colour: str) -> None:
    """What lies between ``low`` and ``high``; of one point, which has no width, a stroke."""
    xs, lows, highs = _band(line)
    if len(xs) == 1:
        axes.vlines(xs, lows, highs, color=colour, alpha=0.35, linewidth=4)
    else:
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.18, linewidth=0)


def _band(line: Line) -> tuple[list[float], list[float], list[float]]:
    """Where, lowest, highest; of many points the extremes of stretches."""
    count = len(line.low)
    bins = min(count, _BINS)
    cuts = [n * count // bins for n in range(bins + 1)]
    stretches = [slice(a, b) for a, b in pairwise(cuts)]
    xs = [sum(x for x, _ in line.low[s]) / (s.stop - s.start) for s in stretches]
    lows = [min(y for _, y in line.low[s]) for s in stretches]
    return xs, lows, [max(y for _, y in line.high[s]) for s in stretches]


def _lined(
    lines: Sequence[Line],
    size: tuple[float, float],
    *,
    unit: str,
    until: int | None,
    from_zero: bool,
) -> Any:
    figure, axes = _blank(size)
    plot_lines(axes, lines)
    _dress(axes, unit, until)
    if from_zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    return figure


def _blank(size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    # Fixed: a layout engine draws everything twice to find what these few labels need
    width, height = size
    figure.subplots_adjust(0.68 / width, 0.47 / height, 1 - 0.1 / width, 1 - 0.12 / height)
    axes.patch.set_visible(False)
    return figure, axes


def _dress(axes: Any, unit: str, until: int | None) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step", fontsize=_FONT, color=palette.MUTED)
    axes.set_ylabel(unit, fontsize=_FONT, color=palette.MUTED, parse_math=False)
    axes.tick_params(labelsize=_FONT, length=0, labelcolor=palette.MUTED)
    axes.grid(axis="y", color=palette.GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(palette.MUTED)
    if until:
        axes.set_xlim(right=max(until, axes.get_xlim()[1]))
    wide = axes.figure.get_figwidth() > NARROW[0]
    round_ones = [1, 2, 5, 10]
    axes.xaxis.set_major_locator(
        MaxNLocator(integer=True, nbins=10 if wide else 6, steps=round_ones)
    )
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=round_ones))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: _tick(value))


def _tick(value: float) -> str:
    """A tick's label: round numbers as they are, tiny ones with an exponent."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.6g}"
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


_LOCK = threading.Lock()
_OURS = re.compile(r' id="(?:figure|axes|patch|line2d|text|matplotlib|xtick|ytick|Fill)[^"]*"')
_FONTS = re.compile(r"font: ([\d.]+)px [^;\"]*")
_PLACES = re.compile(r' (?:d|x|y)="[^"]*"')
_LONG = re.compile(r"(\d\.\d{2})\d+")
_SIZE = re.compile(r' width="[\d.]+pt" height="[\d.]+pt"|height="[\d.]+pt" | version="1.1"')


@contextmanager
def _as_text(salt: str) -> Iterator[None]:
    """While an SVG is written: texts as texts, and names of its parts that are its own."""
    import matplotlib as mpl

    ours = {"svg.fonttype": "none", "svg.hashsalt": salt}
    with _LOCK:
        before = {name: mpl.rcParams[name] for name in ours}
        mpl.rcParams.update(ours)
        try:
            yield
        finally:
            mpl.rcParams.update(before)


def _svg(figure: Any, salt: str) -> str:
    buffer = io.StringIO()
    with _as_text(salt):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return _inline(buffer.getvalue())


def _inline(text: str) -> str:
    """The drawing as a part of a page: what belongs to a file of its own is taken out."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)
    text = text.replace("xlink:href", "href")
    head, _, rest = text.partition(">")
    text = _SIZE.sub(" ", head) + ' aria-hidden="true" focusable="false">' + rest
    text = _FONTS.sub(r"font-size: \1px", _OURS.sub("", text))
    text = re.sub(r"\s*\n\s*", " ", text)
    text = _PLACES.sub(lambda found: _LONG.sub(r"\1", found[0]), text)
    return palette.in_variables(text).strip()
