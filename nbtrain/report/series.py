"""Pure preparation of curves: drop what is no number, thin long series, smooth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

Point = tuple[float, float]


def finite(points: Iterable[tuple[float | None, float | None]]) -> list[Point]:
    """The points whose both coordinates are finite numbers, in their order."""
    return list(_finite(points))


def _finite(points: Iterable[tuple[float | None, float | None]]) -> Iterator[Point]:
    for x, y in points:
        if x is not None and y is not None and math.isfinite(x) and math.isfinite(y):
            yield float(x), float(y)


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` of the points, keeping both ends and the extremes of every stretch.

    ``limit`` is at least 4. Peaks survive: each of the equally long stretches between the ends
    contributes its lowest and its highest point, in their order.
    """
    if limit < 4:
        msg = f"limit must be at least 4, got {limit}"
        raise ValueError(msg)
    if len(points) <= limit:
        return list(points)
    stretches = (limit - 2) // 2
    inner = len(points) - 2
    kept = [points[0]]
    for n in range(stretches):
        first = 1 + n * inner // stretches
        last = 1 + (n + 1) * inner // stretches
        low = min(range(first, last), key=lambda i: points[i][1])
        high = max(range(first, last), key=lambda i: points[i][1])
        kept += [points[i] for i in sorted({low, high})]
    kept.append(points[-1])
    return kept


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Trailing mean over up to ``window`` values; shorter at the start."""
    means: list[float] = []
    total = 0.0
    for n, value in enumerate(values):
        total += value
        if n >= window:
            total -= values[n - window]
        means.append(total / min(n + 1, window))
    return means


def first_and_last(
    points: Sequence[tuple[float | None, float | None]], width: int = 10
) -> tuple[float, float, int] | None:
    """Mean of the first and of the last values, and of how many each; ``None`` below two.

    The one window in which a curve's ends are told and judged. What is no finite number is left
    out; the two stretches never overlap: below ``2 * width`` values each is half of them.
    """
    # Whoever watches a long run asks again with each step: only the ends are looked at
    head = [value for _, value in islice(_finite(points), 2 * width)]
    each = min(width, len(head) // 2)
    if each == 0:
        return None
    last = [value for _, value in islice(_finite(reversed(points)), each)]
    return sum(head[:each]) / each, sum(reversed(last)) / each, each


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the finite values, ``None`` when there is none."""
    kept = [v for v in values if v is not None and math.isfinite(v)]
    return sum(kept) / len(kept) if kept else None
