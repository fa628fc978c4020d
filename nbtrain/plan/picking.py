"""Picking a checkpoint by its held-out reward: intervals, ties and the best one.

A round's reward is a mean over tasks, and tasks are what another round would have drawn
otherwise: so the tasks are resampled, each with all of its samples (a cluster bootstrap). Two
rounds of a run saw the same tasks; they are compared task by task, which takes away what makes
some tasks harder than others.

**The interval** is the percentile interval of the resampled means at a level widened for few
tasks (Hesterberg, *What teachers should know about the bootstrap*, 2015, §4.3): the tails are cut
at Φ(−√(n/(n−1)) · t), t being Student's 0.975 quantile at n−1 degrees of freedom. Its coverage,
nominally 0.95, beside that of the plain percentile interval and of BCa, over 2,000 simulated
rounds each:

==================================  ==================  ==================  ==================
rewards of n tasks                  n = 8               n = 16              n = 64
==================================  ==================  ==================  ==================
(widened, percentile, BCa)
0 or 1, half of them 1              0.99  0.93  0.99    0.98  0.96  0.98    0.97  0.96  0.97
0 or 1, a fifth of them 1           0.83  0.83  0.83    0.93  0.86  0.97    0.94  0.94  0.95
means of 4 samples, tasks differ    0.96  0.91  0.94    0.96  0.94  0.95    0.96  0.96  0.96
uniform                             0.95  0.90  0.92    0.95  0.93  0.95    0.96  0.95  0.95
exponential                         0.90  0.85  0.86    0.92  0.89  0.91    0.94  0.93  0.94
difference, 3 of 10 tasks change    0.98  0.94  0.93    0.95  0.95  0.91    0.97  0.96  0.96
difference, 1 of 10 tasks changes   1.00  0.99  0.99    1.00  1.00  0.96    0.96  0.96  0.93
difference, normal                  0.94  0.89  0.89    0.95  0.93  0.92    0.94  0.93  0.93
==================================  ==================  ==================  ==================

BCa gains on a lopsided share of successes and loses where it matters here, on differences: it
would call an equal checkpoint worse up to twice as often as it should. No bootstrap helps where
all tasks agree by chance (8 tasks, a fifth right: every sixth round): the interval is a point.

``scipy.stats.bootstrap`` gives the same numbers at that level, and is the oracle of the tests;
its import costs 1.5 CPU seconds, more than a cell that launches or attaches may spend at all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "LIMITED",
    "Candidate",
    "Interval",
    "Pick",
    "Scores",
    "counted",
    "intervals",
    "pick",
    "task_means",
]

LIMITED = frozenset(("TRUNCATION", "LIMIT_REACHED", "MAX_TURNS"))
"""Endings that a limit caused."""

RESAMPLES = 2000
SEED = 0
_NORMAL = NormalDist()
_NOTHING = 1e-9
"""A difference that is none, but for rounding."""
_BLOCK = 2_000_000  # draws at a time: 48 MB at most
_COLUMNS = 256  # samples at a time

Scores = Mapping[str, float]
"""Mean counted reward by task id, of one round."""


class Interval(NamedTuple):
    """A 95 % interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint with weights whose round is complete.

    ``scores`` are those of the round's tasks; empty where they were not recorded.
    """

    step: int
    reward: float
    scores: Scores = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pick:
    """Which candidate is best, by position.

    ``top`` has the highest reward; ``ties`` are the others that may be as good as it.
    """

    best: int
    top: int
    ties: frozenset[int]


def counted(reward: float | None, reason: str | None) -> float | None:
    """What a held-out sample counts as: its reward, but nothing above 0 where a limit cut it.

    As in training, where such a reply never earns anything; its recorded reward stays. ``None``
    for what is not graded.
    """
    if reason in LIMITED:
        return min(reward or 0.0, 0.0)
    return reward


def task_means(samples: Iterable[tuple[str, float | None, str | None]]) -> dict[str, float]:
    """The mean counted reward of each task, by id; ``samples`` hold (task id, reward, reason)."""
    by_task: defaultdict[str, list[float]] = defaultdict(list)
    for task, reward, reason in samples:
        score = counted(reward, reason)
        if score is not None:
            by_task[task].append(score)
    return {task: math.fsum(found) / len(found) for task, found in sorted(by_task.items())}


def intervals(samples: Sequence[Sequence[float]]) -> list[Interval | None]:
    """The 95 % interval of the mean of each sample of tasks; ``None`` for fewer than two tasks.

    The same draws serve every sample of a size, and always the same ones: what is asked twice is
    answered alike. Values that are all equal have an interval of no width.
    """
    found: list[Interval | None] = [None] * len(samples)
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for place, values in enumerate(samples):
        if len(values) > 1 and min(values) == max(values):
            found[place] = Interval(values[0], values[0])
        elif len(values) > 1:
            by_size[len(values)].append(place)
    for places in by_size.values():
        for begun in range(0, len(places), _COLUMNS):
            some = places[begun : begun + _COLUMNS]
            ends = _bootstrap([samples[place] for place in some])
            for place, (low, high) in zip(some, ends, strict=True):
                found[place] = Interval(low, high)
    return found


def _bootstrap(samples: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Both ends for samples of one size."""
    import numpy as np

    values = np.asarray(samples, dtype=np.float64).T
    level = _tail(len(values))
    ends = np.quantile(_resampled(values), (level, 1 - level), axis=0)
    return [(float(low), float(high)) for low, high in ends.T]


def _resampled(values: NDArray[Any]) -> NDArray[Any]:
    """Means of :data:`RESAMPLES` draws of rows with replacement: (draw, column)."""
    import numpy as np

    size = len(values)
    random = np.random.default_rng(SEED)
    at_once = max(1, _BLOCK // size)
    means = []
    for begun in range(0, RESAMPLES, at_once):
        some = min(at_once, RESAMPLES - begun)
        drawn = random.integers(0, size, (some, size)) + size * np.arange(some)[:, None]
        # How often each task was drawn: one product then serves all columns
        often = np.bincount(drawn.ravel(), minlength=some * size).reshape(some, size)
        means.append(often.astype(np.float64) @ values / size)
    return np.concatenate(means)


def _tail(size: int) -> float:
    """The share cut off at either end of the resampled means of so many tasks."""
    z, free = _NORMAL.inv_cdf(0.975), size - 1
    # Student's quantile by its expansion in 1/free: 1 % off at 3, 3 % at 2, where all is kept
    # anyway; scipy.special's own would cost 0.3 CPU seconds of import
    student = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    student += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    return _NORMAL.cdf(-math.sqrt(size / free) * student)


def pick(candidates: Sequence[Candidate]) -> Pick | None:
    """The best candidate: the earliest step that ties with the top; ``None`` without candidates.

    The top has the highest reward, the earliest of equals. Another ties with it when the interval
    of the paired difference over their common tasks reaches down to 0. Where fewer than two tasks
    are common, only an equal reward is a tie.
    """
    if not candidates:
        return None
    places = range(len(candidates))
    top = max(places, key=lambda n: (candidates[n].reward, -candidates[n].step))
    first = candidates[top]
    others = [n for n in places if n != top]
    differences = intervals([_paired(first.scores, candidates[n].scores) for n in others])
    ties = frozenset(
        n
        for n, gap in zip(others, differences, strict=True)
        if candidates[n].reward == first.reward or (gap is not None and gap.low <= _NOTHING)
    )
    return Pick(min((top, *ties), key=lambda n: candidates[n].step), top, ties)


def _paired(one: Scores, other: Scores) -> list[float]:
    """By how much ``one`` is better, for each task that both have, in the order of their ids."""
    return [one[task] - other[task] for task in sorted(one.keys() & other.keys())]
