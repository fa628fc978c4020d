"""A run on paper: thinning, text, HTML, picture."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from nbtrain.report.drawing import Line, plot_lines
from nbtrain.report.figures import png, reward_figure
from nbtrain.report.series import finite, mean, smooth, thin
from nbtrain.report.static import as_html
from nbtrain.report.summary import (
    CheckpointLine,
    HeldOut,
    RunSummary,
    as_text,
    first_and_last,
    number,
    span,
)

values = st.floats(-1e6, 1e6)


@given(st.lists(values, max_size=400), st.integers(4, 50))
def test_thinning_keeps_ends_extremes_and_order(ys: list[float], limit: int) -> None:
    points = [(float(x), y) for x, y in enumerate(ys)]
    kept = thin(points, limit)
    assert len(kept) <= max(limit, 0)
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        assert max(y for _, y in kept) == max(ys)
        assert min(y for _, y in kept) == min(ys)


@given(st.lists(values, min_size=1, max_size=60), st.integers(1, 20))
def test_smoothing_is_the_trailing_mean(ys: list[float], window: int) -> None:
    for n, got in enumerate(smooth(ys, window)):
        some = ys[max(0, n - window + 1) : n + 1]
        assert got == pytest.approx(sum(some) / len(some), abs=1e-4)


def test_only_finite_points_are_drawn() -> None:
    points = [(1, 0.5), (2, None), (3, math.nan), (4, math.inf), (None, 1.0), (5, 0)]
    assert finite(points) == [(1.0, 0.5), (5.0, 0.0)]
    assert mean([None, math.nan]) is None


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(0, None), (1, None), (2, (0.0, 1.0, 1)), (7, (1.0, 5.0, 3)), (30, (4.5, 24.5, 10))],
)
def test_first_and_last_steps_never_overlap(
    steps: int, expected: tuple[float, float, int] | None
) -> None:
    assert first_and_last([(n, float(n)) for n in range(steps)]) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "–"), (0.12345, "0.123"), (math.nan, "NaN"), (math.inf, "∞"), (-math.inf, "−∞")],
)
def test_numbers(value: float | None, expected: str) -> None:
    assert number(value) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(None, "–"), (-1, "–"), (12.4, "12 s"), (185, "3 min 05 s"), (3720, "1 h 02 min")],
)
def test_spans(seconds: float | None, expected: str) -> None:
    assert span(seconds) == expected


def summary(**more: object) -> RunSummary:
    base = RunSummary("ab" * 32, "first", "running", "TRAINING", "gspo", "sums", "nbtrain/tiny")
    base.total_steps = 60
    for name, value in more.items():
        setattr(base, name, value)
    return base


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(max_size=60))
def test_no_text_becomes_markup(text: str) -> None:
    told = summary(
        name=text, workload=text, base_model=text, failure=text, notes=[text],
        checkpoints=[CheckpointLine("cd" * 32, 1, 0.5, True, True, text)],
    )  # fmt: skip
    plain = summary(
        name="x", workload="x", base_model="x", failure="x" if text else None, notes=["x"],
        checkpoints=[CheckpointLine("cd" * 32, 1, 0.5, True, True, "x")],
    )  # fmt: skip
    got, expected = Tags(), Tags()
    got.feed(as_html(told))
    expected.feed(as_html(plain))
    assert got.tags == expected.tags
    assert got.attributes == expected.attributes


def test_what_the_descriptor_says_stands_below_the_subject() -> None:
    told = summary(config_name="r8-e2", description="triage\n  of mail")
    assert as_text(told).splitlines()[1:3] == [
        "gspo · sums · nbtrain/tiny",
        "config r8-e2 · triage of mail",
    ]
    assert ">config r8-e2 · triage of mail</div>" in as_html(told)
    long = summary(description="a" * 301)
    assert as_text(long).splitlines()[2] == "a" * 300 + " …"
    assert as_text(summary()).splitlines()[2].startswith("step 0 of 60")


def test_a_run_without_an_update_says_so_first() -> None:
    told = summary(status="succeeded", phase="COMPLETED", updates_applied=0)
    assert "no weight changed" in as_text(told).splitlines()[0]
    assert "no weight changed" in as_html(told)
    assert "no weight changed" not in as_text(summary(status="succeeded", updates_applied=3))


def test_what_was_not_graded_is_counted_with_its_most_frequent_error() -> None:
    told = summary(
        status="succeeded", phase="COMPLETED", updates_applied=3, attempted=1200, graded=6,
        ungraded_error="KeyError: 'answer'\nmore", rewards=[(1, 1.0)],
    )  # fmt: skip
    lines = as_text(told).splitlines()
    assert "most trajectories not graded · succeeded" in lines[0]
    assert "1,194 not graded, most often: KeyError: 'answer'" in lines
    assert lines.index("1,194 not graded, most often: KeyError: 'answer'") < lines.index(
        "reward 1.000"
    )
    green = as_html(summary(status="succeeded", updates_applied=3, attempted=8, graded=8))
    colour = re.search("background:(#[0-9a-f]+)", green)
    assert colour is not None
    assert colour[1] not in as_html(told)
    told.graded = 1199
    assert "most trajectories" not in as_text(told)
    assert "1 not graded" in as_text(told)
    told.graded = 1200
    assert "not graded" not in as_text(told)


def test_a_long_failure_is_cut_with_a_count() -> None:
    told = as_text(summary(status="failed", failure="x" * 5000))
    assert len(told) < 2200
    assert "3,500 characters more" in told


def test_the_best_checkpoint_leads_and_the_others_are_counted() -> None:
    lines = [CheckpointLine(f"{n:064x}", n, n / 10, True, best=n == 3) for n in range(9)]
    shown = [t for t in as_text(summary(checkpoints=lines)).splitlines() if "held-out" in t]
    assert "step 3 " in shown[0]
    assert shown[0].endswith(", best")
    assert len(shown) == 6
    assert "and 3 more checkpoints" in as_html(summary(checkpoints=lines))
    assert as_text(summary(checkpoints=lines[:7])).splitlines()[-1] == "and 1 more checkpoint"


def test_an_incomplete_round_is_marked() -> None:
    told = summary(checkpoints=[CheckpointLine("ab" * 32, 4, 0.9, complete=False)])
    assert "round not complete" in as_text(told)
    assert "not complete" in as_html(told)


def test_the_picture_stays_small_however_long_the_run() -> None:
    rewards = [(n, math.sin(n / 300) + (n * 7919 % 101) / 300) for n in range(10_000)]
    rounds = [HeldOut(n, n / 10_000, n % 30 != 0) for n in range(0, 10_000, 10)]
    picture = png(reward_figure(rewards, rounds, title="$first_{", total_steps=10_000))
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 15_000


def test_incomplete_rounds_are_drawn_hollow_and_not_joined() -> None:
    figure = reward_figure([(1, 0.1)], [HeldOut(1, 0.2, True), HeldOut(2, 0.9, False)])
    by_label = {line.get_label(): line for line in figure.axes[0].lines}
    hollow = by_label["held-out, round not complete"]
    assert (hollow.get_linestyle(), hollow.get_markerfacecolor()) == ("None", "none")
    assert list(by_label["held-out reward"].get_xdata()) == [1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("title", "drawn"),
    [
        ("run first", "run first"),
        ("$a_{", "$a_{"),
        ("_é ✓ 🎉", "_é ✓ □"),
        ("数学\t\n\ud800", "□□□□□"),
    ],
)
def test_a_title_is_text_that_the_font_has(title: str, drawn: str) -> None:
    figure = reward_figure([(1, 0.1)], title=title)
    assert figure.axes[0].get_title(loc="left") == drawn
    png(figure)


def test_one_point_and_its_interval_are_seen() -> None:
    figure = Figure()
    axes = figure.add_subplot()
    plot_lines(axes, [Line("one", [(3, 0.5)], low=[(3, 0.4)], high=[(3, 0.7)])])
    assert axes.lines[0].get_marker() == "o"
    (interval,) = axes.collections
    assert [[float(y) for _, y in each] for each in interval.get_segments()] == [[0.4, 0.7]]


def test_nothing_to_draw_is_still_a_figure() -> None:
    assert png(reward_figure([], [])).startswith(b"\x89PNG")
