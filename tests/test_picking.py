"""Intervals over tasks, ties and the best checkpoint, as pure functions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import stdtrit

from nbtrain.plan import picking
from nbtrain.plan.picking import Candidate, Interval, counted, intervals, pick, task_means
from nbtrain.rollout.admission import LIMITS


def candidate(step: int, scores: Sequence[float], *, first: int = 0) -> Candidate:
    """A round of tasks ``first``, ``first + 1``, …"""
    named = {f"{first + n:03d}": value for n, value in enumerate(scores)}
    return Candidate(step, math.fsum(scores) / len(scores), named)


def chosen(*candidates: Candidate) -> tuple[int, int, set[int]]:
    """The steps of the best, of the top and of what ties with it."""
    found = pick(candidates)
    assert found is not None
    steps = [c.step for c in candidates]
    return steps[found.best], steps[found.top], {steps[n] for n in found.ties}


# What a sample counts as


@pytest.mark.parametrize(
    ("reward", "reason", "value"),
    [
        (1.0, "ENV_DONE", 1.0),
        (None, "ENV_DONE", None),
        (1.0, "TRUNCATION", 0.0),
        (-0.5, "MAX_TURNS", -0.5),
        (None, "LIMIT_REACHED", 0.0),
        (None, None, None),
        (0.7, "TIMEOUT", 0.7),
    ],
)
def test_nothing_above_zero_counts_where_a_limit_cut(
    reward: float | None, reason: str | None, value: float | None
) -> None:
    assert counted(reward, reason) == value


def test_the_limits_are_those_of_admission() -> None:
    assert set(LIMITS) == picking.LIMITED


def test_a_task_counts_once_whatever_its_samples() -> None:
    samples = [("b", 1.0, "ENV_DONE"), ("a", 1.0, "ENV_DONE"), ("a", 1.0, "TRUNCATION")]
    assert task_means([*samples, ("c", None, "ERROR")]) == {"a": 0.5, "b": 1.0}


# Intervals


@pytest.mark.parametrize("size", [2, 5, 16, 100])
def test_the_interval_is_that_of_scipy(size: int) -> None:
    values = np.random.default_rng(size).random(size)
    tail = stats.norm.cdf(-math.sqrt(size / (size - 1)) * stdtrit(size - 1, 0.975))
    assert picking._tail(size) == pytest.approx(tail, rel=0.04, abs=1e-6)
    oracle = stats.bootstrap(
        (values,),
        np.mean,
        method="percentile",
        n_resamples=picking.RESAMPLES,
        confidence_level=1 - 2 * picking._tail(size),
        rng=np.random.default_rng(picking.SEED),
    ).confidence_interval
    (found,) = intervals([values.tolist()])
    assert found == pytest.approx((oracle.low, oracle.high), abs=1e-12)


def test_degenerate_samples_have_no_width_and_raise_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = intervals([[], [1.0], [0.3] * 7, [0.0, 1.0]])
    assert found == [None, None, Interval(0.3, 0.3), Interval(0.0, 1.0)]


def test_many_samples_at_once_are_as_each_alone() -> None:
    random = np.random.default_rng(0)
    samples = [random.random(20).tolist() for _ in range(600)] + [random.random(9).tolist()]
    together = intervals(samples)
    for place in (0, 255, 256, 599, 600):
        assert together[place] == pytest.approx(intervals([samples[place]])[0], abs=1e-12)


DRAWS = {
    "half right": (lambda r, size: (r.random(size) < 0.5) * 1.0, 0.5, 0.93),
    "uniform": (lambda r, size: r.random(size), 0.5, 0.93),
    "normal": (lambda r, size: r.normal(size=size), 0.0, 0.92),
}


@pytest.mark.parametrize("tasks", [8, 16, 64])
@pytest.mark.parametrize("name", DRAWS)
def test_it_covers_the_mean_about_as_often_as_it_says(name: str, tasks: int) -> None:
    draw, mean, least = DRAWS[name]
    rounds = draw(np.random.default_rng(7), (600, tasks))
    found = intervals(rounds.tolist())
    covered = sum(i is not None and i.low - 1e-9 <= mean <= i.high + 1e-9 for i in found)
    assert least - 0.02 <= covered / 600 <= 0.999  # 2 standard errors of 600 rounds


# Ties and the best


def test_the_top_is_best_where_nothing_ties() -> None:
    low, high = [0.0, 0.1] * 10, [0.9, 1.0] * 10
    assert chosen(candidate(0, low), candidate(10, high)) == (10, 10, set())
    assert pick([]) is None
    assert chosen(candidate(4, [0.5])) == (4, 4, set())


def test_the_earliest_tie_is_best() -> None:
    worse = [0.0] * 20
    near = [1.0] * 17 + [0.0, 1.0, 0.0]
    top = [1.0] * 16 + [0.0, 1.0, 1.0, 1.0]
    found = chosen(candidate(0, worse), candidate(5, near), candidate(20, top), candidate(9, near))
    assert found == (5, 20, {5, 9})


def test_a_small_but_sure_difference_is_no_tie_though_the_intervals_overlap() -> None:
    before = [n / 20 for n in range(20)]
    after = [value + 0.02 + 0.005 * (n % 3) for n, value in enumerate(before)]
    ends = intervals([before, after])
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[1].low < ends[0].high
    assert chosen(candidate(1, before), candidate(2, after)) == (2, 2, set())


def test_equal_rewards_tie_whatever_is_known_of_their_tasks() -> None:
    assert chosen(Candidate(2, 0.5), Candidate(4, 0.5), Candidate(6, 0.4)) == (2, 2, {4})
    assert chosen(candidate(3, [1.0]), candidate(7, [1.0])) == (3, 3, {7})
    # the top is the earliest of equals though the later stands first
    assert chosen(Candidate(4, 0.5), Candidate(2, 0.5)) == (2, 2, {4})


def test_fewer_than_two_common_tasks_tell_nothing() -> None:
    assert chosen(candidate(1, [0.0]), candidate(2, [1.0])) == (2, 2, set())
    apart = candidate(1, [0.0, 1.0, 0.0]), candidate(2, [1.0, 0.0, 1.0], first=3)
    assert chosen(*apart) == (2, 2, set())


def test_only_common_tasks_are_compared() -> None:
    # the later one saw easier tasks besides: on those that both saw, they are alike
    early = candidate(1, [0.0, 1.0, 0.0, 1.0])
    late = candidate(2, [1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    assert chosen(early, late) == (1, 2, {1})


rewards = st.integers(0, 8).map(lambda n: n / 8)
worlds = st.integers(2, 12).flatmap(
    lambda tasks: st.lists(
        st.lists(rewards, min_size=tasks, max_size=tasks), min_size=1, max_size=6
    )
)


@settings(max_examples=60, deadline=None)
@given(worlds, st.integers(-16, 16), st.randoms(use_true_random=False))
def test_properties(world: list[list[float]], shift: int, random: object) -> None:
    rounds = [candidate(step, scores) for step, scores in enumerate(world)]
    found = pick(rounds)
    assert found is not None
    top, best = rounds[found.top], rounds[found.best]
    assert all(top.reward >= other.reward for other in rounds)
    assert best.step <= top.step
    assert found.best == found.top or found.best in found.ties
    assert found.top not in found.ties
    assert all(rounds[n].step >= best.step for n in found.ties)
    # what is equal ties
    for n, other in enumerate(rounds):
        if n != found.top and other.reward == top.reward:
            assert n in found.ties
    # a constant added to every reward, or tasks named in another order, change nothing
    moved = [candidate(step, [v + shift / 8 for v in s]) for step, s in enumerate(world)]
    assert pick(moved) == found
    turned = [Candidate(c.step, c.reward, dict(reversed(c.scores.items()))) for c in rounds]
    assert pick(turned) == found
    assert pick(rounds) == found
    # the order in which the candidates stand changes no step
    order = list(range(len(rounds)))
    random.shuffle(order)  # type: ignore[attr-defined]
    other_order = pick([rounds[n] for n in order])
    assert other_order is not None
    assert order[other_order.best] == found.best
    assert {order[n] for n in other_order.ties} == set(found.ties)


@given(st.lists(rewards, min_size=2, max_size=30))
def test_the_mean_lies_in_its_interval(scores: list[float]) -> None:
    (found,) = intervals([scores])
    assert found is not None
    mean = math.fsum(scores) / len(scores)
    assert min(scores) <= found.low <= mean + 1e-12
    assert mean - 1e-12 <= found.high <= max(scores)
