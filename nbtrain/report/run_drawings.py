"""Which drawings a run's report has, and what is seen in each, from rows of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nbtrain.report.drawing import Drawing, Line, draw_lines, draw_stack, smoothed
from nbtrain.report.series import Point, finite, first_and_last, mean
from nbtrain.report.summary import number

__all__ = ["Round", "reward_drawings", "supervised_drawings"]

Step = Mapping[str, Any]
Round = Mapping[str, Any]
"""A validation round: ``step, score, low, high, complete``."""

_GROUPS = (
    ("used", 2, "used_groups"),
    ("no signal", 6, "no_signal_not_trained"),
    ("filtered", 4, "filtered_groups"),
    ("too small", 3, "too_small_groups"),
    ("discarded", 1, "discarded_groups"),
    ("pending", 5, "pending_groups"),
)
_PARTS = (
    ("sampling", 0), ("grading", 2), ("environment", 3), ("loss", 1), ("update", 4),
    ("validation", 5), ("saving", 6), ("waiting", 4),
)  # fmt: skip
_MOST_TERMS = 7  # as many as there are colours


def reward_drawings(steps: Sequence[Step], rounds: Sequence[Round], until: int) -> list[Drawing]:
    """Of a run that samples; drawings without a single point are left out."""
    if not steps and not any(each["score"] is not None for each in rounds):
        return []
    makers: tuple[Callable[[], Drawing | None], ...] = (
        lambda: _rewards(steps, rounds, until),
        lambda: _groups(steps),
        lambda: _terms(steps),
        lambda: _lengths(steps),
        lambda: _seconds(steps),
        lambda: _of(steps, "entropy", "Entropy", "nats", 0),
        lambda: _of(steps, "clipped_share", "Clipped share of ratios", "share", 1),
        lambda: _of(steps, "learning_rate", "Learning rate", "rate", 6),
    )
    return [drawing for make in makers if (drawing := make()) is not None]


def supervised_drawings(
    steps: Sequence[Step], rounds: Sequence[Round], until: int
) -> list[Drawing]:
    """Of a supervised run."""
    if not steps:
        return []
    makers: tuple[Callable[[], Drawing | None], ...] = (
        lambda: _losses(steps, rounds, until),
        lambda: _of(steps, "learning_rate", "Learning rate", "rate", 6),
        lambda: _of(steps, "grad_norm", "Gradient norm", "norm", 3),
        lambda: _of(steps, "trained_tokens", "Trained tokens", "tokens", 2),
        lambda: _seconds(steps),
    )
    return [drawing for make in makers if (drawing := make()) is not None]


def _points(steps: Sequence[Step], name: str) -> list[Point]:
    return finite((step["step"], step.get(name)) for step in steps)


def _moved(what: str, points: Sequence[Point]) -> str:
    """``Mean reward goes from 0.105 to 0.543 (means of the first and last 10 steps)``."""
    moved = first_and_last(points)
    if moved is None:
        return f"{what}: {number(points[0][1])} at step {points[0][0]:.0f}" if points else ""
    first, last, each = moved
    stretch = "steps" if each == 1 else f"{each} steps"
    how = "first and last step" if each == 1 else f"means of the first and last {stretch}"
    if _short(first) == _short(last):
        return f"{what} begins and ends at {_short(first)} ({how})"
    return f"{what} goes from {_short(first)} to {_short(last)} ({how})"


def _short(value: float) -> str:
    if value and (abs(value) < 0.01 or abs(value) >= 10):
        return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return number(value)


def round_lines(rounds: Sequence[Round], label: str, colour: int) -> list[Line]:
    """Complete rounds joined, with their intervals; others hollow."""
    whole = [each for each in rounds if each["complete"] and each["score"] is not None]
    bounded = [each for each in whole if each["low"] is not None and each["high"] is not None]
    partial = finite((each["step"], each["score"]) for each in rounds if not each["complete"])
    return [
        Line(
            label + (" with 95% interval" if bounded else ""),
            finite((each["step"], each["score"]) for each in whole),
            colour,
            marked=True,
            low=finite((each["step"], each["low"]) for each in bounded),
            high=finite((each["step"], each["high"]) for each in bounded),
        ),
        Line(f"{label}, round not complete", partial, colour, hollow=True),
    ]


def _rounds_told(rounds: Sequence[Round], what: str) -> str:
    whole = [each for each in rounds if each["complete"] and each["score"] is not None]
    if not whole:
        return ""
    first, last = whole[0], whole[-1]
    told = f"{what} reads {number(first['score'])} at step {first['step']:,}"
    if last is not first:
        told += f" and {number(last['score'])} at step {last['step']:,}"
    return told


def _sentences(*parts: str) -> str:
    return " ".join(f"{part}." for part in parts if part)


def _rewards(steps: Sequence[Step], rounds: Sequence[Round], until: int) -> Drawing:
    points = _points(steps, "avg_reward")
    lines = [*smoothed("mean reward", points), *round_lines(rounds, "held-out reward", 1)]
    told = _sentences(_moved("Mean reward", points), _rounds_told(rounds, "Held-out reward"))
    return draw_lines("Reward", lines, told=told, unit="reward", until=until, wide=True)


def _losses(steps: Sequence[Step], rounds: Sequence[Round], until: int) -> Drawing:
    points = _points(steps, "loss")
    lines = [*smoothed("loss", points), *round_lines(rounds, "validation loss", 1)]
    told = _sentences(_moved("Loss", points), _rounds_told(rounds, "Validation loss"))
    return draw_lines(
        "Loss", lines, told=told, unit="nats per trained token", until=until, wide=True
    )


def _groups(steps: Sequence[Step]) -> Drawing | None:
    parts = [(label, colour, _counts(steps, name)) for label, colour, name in _GROUPS]
    total = sum(sum(values) for *_, values in parts)
    if not total:
        return None
    told = ", ".join(
        f"{_share(sum(values) / total)} {label}" for label, _, values in parts if any(values)
    )
    return draw_stack(
        "Groups by outcome", [step["step"] for step in steps], parts,
        told=f"Of {total:,.0f} completed groups: {told}.", unit="groups",
    )  # fmt: skip


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.01 else "under 1%"


def _counts(steps: Sequence[Step], name: str) -> list[float]:
    """Of a value that may be missing, nothing; without its own figure every tied group is idle."""
    other = "no_signal_groups" if name == "no_signal_not_trained" else name
    return [float(step.get(name, step.get(other)) or 0) for step in steps]


def _terms(steps: Sequence[Step]) -> Drawing | None:
    found = dict.fromkeys(name for step in steps for name in step.get("terms") or {})
    if len(found) < 2:
        return None
    names = list(found)[:_MOST_TERMS]
    lines, told = [], []
    for n, name in enumerate(names):
        points = finite((step["step"], (step.get("terms") or {}).get(name)) for step in steps)
        if not points:
            continue
        lines.append(smoothed(name, points, n, _dash(n))[-1])
        told.append(_moved(name, points))
    if len(found) > len(names):
        told.append(f"{len(found) - len(names)} more terms are not drawn")
    return draw_lines("Reward terms, unweighted means", lines, told=_sentences(*told), unit="score")


def _dash(n: int) -> str:
    return ("solid", "dashed", "dashdot", "dotted")[n % 4]


def _lengths(steps: Sequence[Step]) -> Drawing | None:
    means = _points(steps, "tokens_mean")
    if not means:
        return None
    known = [
        s for s in steps if s.get("tokens_min") is not None and s.get("tokens_max") is not None
    ]
    line = replace(
        smoothed("mean", means)[-1],
        label="mean, between shortest and longest",
        low=[(step["step"], step["tokens_min"]) for step in known],
        high=[(step["step"], step["tokens_max"]) for step in known],
    )
    return draw_lines(
        "Length of trajectories", [line], told=_sentences(_moved("Mean length in tokens", means)),
        unit="output tokens", from_zero=True,
    )  # fmt: skip


def _seconds(steps: Sequence[Step]) -> Drawing | None:
    parts = [(label, colour, _counts(steps, f"seconds_{label}")) for label, colour in _PARTS]
    total = sum(sum(values) for *_, values in parts)
    if not total:
        return None
    shares = sorted(((sum(values) / total, label) for label, _, values in parts), reverse=True)
    told = ", ".join(f"{label} {share:.0%}" for share, label in shares if share >= 0.01)
    return draw_stack(
        "Seconds by part", [step["step"] for step in steps], parts,
        told=f"Of {total:,.0f} s: {told}.", unit="seconds a step",
    )  # fmt: skip


def _of(steps: Sequence[Step], name: str, title: str, unit: str, colour: int) -> Drawing | None:
    points = _points(steps, name)
    if not points or mean(y for _, y in points) is None:
        return None
    smooth = name in ("entropy", "clipped_share", "grad_norm", "trained_tokens")
    lines = smoothed(title.lower(), points, colour) if smooth else [
        Line(title.lower(), points, colour, marked=len(points) < 3)
    ]  # fmt: skip
    return draw_lines(title, lines, told=_sentences(_moved(title, points)), unit=unit,
                      from_zero=True)  # fmt: skip
