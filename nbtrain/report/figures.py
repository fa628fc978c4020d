"""The curve of a run as a matplotlib figure and as a small PNG.

Only matplotlib's object interface is used (an Agg canvas of our own), so drawing in a background
thread never touches pyplot's state or the user's backend.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nbtrain.report.lettering import drawable
from nbtrain.report.palette import LINES
from nbtrain.report.series import Point, finite, smooth, thin

if TYPE_CHECKING:
    from nbtrain.report.summary import HeldOut
    from nbtrain.report.supervised import Supervised, Validated

REWARD, HELD_OUT = LINES[:2]
RATE = "#6e7781"
_GRID = "#d9d9d9"
_BARS = 40  # error bars at most: of more intervals, a band
_POINTS = 240  # more cannot be told apart on 640 pixels
_COLOURS = 16  # of the palette the PNG is reduced to, for each axes: a sixth of the bytes


def reward_figure(
    rewards: Iterable[tuple[float | None, float | None]],
    held_out: Iterable[HeldOut] = (),
    *,
    title: str | None = None,
    total_steps: int | None = None,
    size: tuple[float, float] = (6.4, 2.5),
) -> Any:
    """A figure of the mean reward by step and of the held-out rounds with their intervals.

    ``rewards`` holds (step, mean reward); what is no finite number is left out. Rounds that did
    not complete are drawn hollow and are not joined. ``size`` is in inches at 100 dpi.
    """
    figure = _blank(size)
    axes = figure.add_subplot()
    _draw_line(axes, finite(rewards), "mean reward")
    _draw_held_out(axes, list(held_out))
    axes.set_ylabel("reward", fontsize=8)
    _dress(axes, title, total_steps)
    return figure


def loss_figure(
    run: Supervised,
    *,
    title: str | None = None,
    total_steps: int | None = None,
    size: tuple[float, float] = (6.4, 3.0),
) -> Any:
    """A figure of training and validation loss by step, the learning rate in a strip below.

    As in :func:`reward_figure`, what is no finite number is left out and rounds that did not
    complete are drawn hollow.
    """
    figure = _blank(size)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    _draw_line(axes, finite(run.losses), "loss")
    _draw_validation(axes, run.rounds)
    axes.set_ylabel("loss", fontsize=8)
    rates = thin(finite(run.rates), _POINTS)
    if rates:
        marker = "o" if len(rates) < 3 else None
        below.plot(
            *zip(*rates, strict=True), color=RATE, linewidth=1.0, marker=marker, markersize=3
        )
        top = max(value for _, value in rates)
        below.set_yticks([0, top], ["0", f"{top:.2g}"])
    below.set_ylabel("rate", fontsize=8)
    below.set_ylim(bottom=0)
    _dress(axes, title, total_steps, named=False)
    _dress(below, None, total_steps)
    return figure


def _blank(size: tuple[float, float]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _dress(axes: Any, title: str | None, total_steps: int | None, *, named: bool = True) -> None:
    """Axes, grid, title and legend; the steps are ``named`` on the lowest axes only."""
    from matplotlib.ticker import MaxNLocator

    if named:
        axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8, length=2)
    axes.grid(color=_GRID, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if total_steps:
        axes.set_xlim(right=max(total_steps, axes.get_xlim()[1]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if title:
        # "$" would start a formula: a run's name is text, never TeX
        axes.set_title(drawable(title), fontsize=9, loc="left", parse_math=False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False, loc="best")


def _draw_line(axes: Any, points: list[Point], what: str) -> None:
    if not points:
        return
    steps, values = zip(*thin(points, _POINTS), strict=True)
    few = len(points) < 3
    marker = "o" if few else None
    window = max(5, len(points) // 20)
    long = len(points) > 12
    axes.plot(
        steps,
        values,
        color=REWARD,
        linewidth=1.0,
        alpha=0.35 if long else 1.0,
        marker=marker,
        markersize=3,
        label=None if long else what,
    )
    if long:
        means = smooth([value for _, value in points], window)
        line = thin([(step, m) for (step, _), m in zip(points, means, strict=True)], _POINTS)
        label = f"{what} (over {window} steps)"
        axes.plot(*zip(*line, strict=True), color=REWARD, linewidth=1.6, label=label)


def _draw_held_out(axes: Any, rounds: list[HeldOut]) -> None:
    whole = finite((r.step, r.reward) for r in rounds if r.complete)
    partial = finite((r.step, r.reward) for r in rounds if not r.complete)
    bounded = [r for r in rounds if r.complete and r.low is not None and r.high is not None]
    name = "held-out reward with 95 % interval" if bounded else "held-out reward"
    _draw_intervals(axes, bounded)
    _draw_rounds(axes, whole, partial, (name, "held-out, round not complete"))


def _draw_intervals(axes: Any, rounds: list[HeldOut]) -> None:
    if not rounds:
        return
    steps = [r.step for r in rounds]
    low, high = [r.low for r in rounds], [r.high for r in rounds]
    if len(rounds) <= _BARS:
        axes.vlines(steps, low, high, color=HELD_OUT, linewidth=1.2, alpha=0.7)
    else:
        axes.fill_between(steps, low, high, color=HELD_OUT, alpha=0.18, linewidth=0)


def _draw_validation(axes: Any, rounds: list[Validated]) -> None:
    whole = finite((r.step, r.loss) for r in rounds if r.complete)
    partial = finite((r.step, r.loss) for r in rounds if not r.complete)
    _draw_rounds(axes, whole, partial, ("validation loss", "validation, round not complete"))


def _draw_rounds(
    axes: Any, whole: list[Point], partial: list[Point], names: tuple[str, str]
) -> None:
    if whole:
        line = thin(whole, _POINTS)
        size = 5 if len(line) <= _BARS else 0
        axes.plot(
            *zip(*line, strict=True),
            color=HELD_OUT,
            linewidth=1.2,
            # Another shape than the dots of the line above, and another dash where it has none
            linestyle="solid" if size else (0, (5, 1)),
            marker="D",
            markersize=size * 0.9,
            label=names[0],
        )
    if partial:
        axes.plot(
            *zip(*thin(partial, _POINTS), strict=True),
            color=HELD_OUT,
            linestyle="",
            marker="D",
            markersize=4.5,
            markerfacecolor="none",
            label=names[1],
        )


def png(figure: Any) -> bytes:
    """The figure as a PNG reduced to a small palette: about 10 kB, never much above 20."""
    from PIL import Image

    figure.canvas.draw()
    image = Image.frombuffer(
        "RGBA", figure.canvas.get_width_height(), bytes(figure.canvas.buffer_rgba())
    )
    colours = _COLOURS * max(1, len(figure.axes))
    # Median cut would merge the thin lines' colours with their neighbours: orange turns brown
    small = image.convert("RGB").quantize(
        colours, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE
    )
    buffer = io.BytesIO()
    small.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
