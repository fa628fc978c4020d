"""The learning rate by step: shape, ends, and agreement with transformers' own schedule."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbtrain.plan.schedule import Kind, Schedule, learning_rate, schedule_of, trace

CASES = Path(__file__).parent / "cases"
calm = settings(deadline=None)


def shape(warmup: int, hold: int, total: int, ratio: float = 0.1, rate: float = 1e-4) -> Schedule:
    return {
        "learning_rate": rate,
        "warmup": warmup,
        "hold": hold,
        "total_steps": total,
        "min_ratio": ratio,
    }


shapes = st.builds(
    shape,
    warmup=st.integers(0, 60),
    hold=st.integers(0, 60),
    total=st.integers(1, 200),
    ratio=st.just(0.0) | st.floats(1e-6, 1),
    rate=st.floats(1e-8, 1e-2),
)


def test_the_first_step_of_a_warm_up_has_its_share_of_the_rate() -> None:
    options = json.loads((CASES / "warmup.json").read_text()) | {"lr_min_ratio": 0.1}
    rates = trace(schedule_of(options, options["num_steps"]))
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 3e-4, 3e-4, 3e-4], rel=1e-12)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (1, 1e-4 / 15),
        (14, 1e-4 * 14 / 15),
        (15, 1e-4),
        (150, 1e-4),
        (275, 1e-4 * 0.55),
        (400, 1e-5),
        (401, 1e-5),
    ],
)
def test_the_default_shape_over_400_steps(step: int, rate: float) -> None:
    assert learning_rate(step, **shape(15, 135, 400)) == pytest.approx(rate, rel=1e-12)


def test_a_default_run_of_100_steps_ends_at_the_base_rate() -> None:
    assert trace(shape(15, 135, 100))[14:] == [1e-4] * 86


def test_without_warm_up_and_hold_the_decay_begins_at_once() -> None:
    rates = trace(shape(0, 0, 4, ratio=0.5))
    expected = [(0.75 + 0.25 * math.cos(math.pi * s / 4)) * 1e-4 for s in (1, 2, 3, 4)]
    assert rates == pytest.approx(expected, abs=1e-18)


@pytest.mark.parametrize(
    ("kind", "ratio", "expected"),
    [
        # a floor of 0 would be reached at step 5 of 4
        ("cosine", 0.0, [0.5 * (1 + math.cos(math.pi * s / 5)) for s in (1, 2, 3, 4)]),
        ("linear", 0.0, [0.8, 0.6, 0.4, 0.2]),
        ("cosine", 0.1, [0.1 + 0.45 * (1 + math.cos(math.pi * s / 4)) for s in (1, 2, 3, 4)]),
        ("constant", 0.0, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_the_kinds_of_schedule(kind: Kind, ratio: float, expected: list[float]) -> None:
    s = shape(0, 0, 4, ratio, rate=1.0)
    assert trace(s | {"kind": kind}) == pytest.approx(expected, abs=1e-15)
    warm = trace(s | {"kind": kind, "warmup": 2, "total_steps": 4})
    assert warm[:2] == [0.5, 1.0]


def supervised(kind: str, ratio: float, floor: float, rate: float = 1e-3) -> dict[str, object]:
    return {
        "learning_rate": rate,
        "scheduler_kind": kind,
        "warmup_ratio": ratio,
        "min_learning_rate_ratio": floor,
    }


@pytest.mark.parametrize(
    ("ratio", "total", "warmup"), [(0, 9, 1), (0.1, 10, 1), (0.07, 100, 7), (0.01, 3, 1)]
)
def test_warm_up_is_a_share_of_all_updates_rounded_up_and_at_least_one(
    ratio: float, total: int, warmup: int
) -> None:
    assert schedule_of(supervised("linear", ratio, 0.0), total)["warmup"] == warmup


@calm
@given(
    kind=st.sampled_from(["linear", "cosine", "constant"]),
    ratio=st.floats(0, 0.999),
    floor=st.just(0.0) | st.floats(1e-6, 1),
    total=st.integers(1, 300),
)
def test_no_supervised_update_runs_at_zero(
    kind: str, ratio: float, floor: float, total: int
) -> None:
    floor = floor if kind == "cosine" else 0.0
    schedule = schedule_of(supervised(kind, ratio, floor), total)
    rates, top = trace(schedule), schedule["warmup"]
    assert len(rates) == total
    assert all(0 < rate <= 1e-3 for rate in rates)
    assert rates[:top] == sorted(rates[:top])
    assert rates[max(top - 1, 0) :] == sorted(rates[max(top - 1, 0) :], reverse=True)
    if kind == "constant":
        assert set(rates[top:]) <= {1e-3}
    elif floor > 0 and total > top:
        assert rates[-1] == pytest.approx(1e-3 * floor)


@pytest.mark.parametrize("step", [0, -1])
def test_steps_count_from_one(step: int) -> None:
    with pytest.raises(ValueError, match=f"found {step}"):
        learning_rate(step, **shape(1, 1, 10))


def test_a_trace_of_a_resumed_run_is_the_end_of_the_whole_trace() -> None:
    whole = shape(3, 4, 20)
    assert trace(whole, start_step=12) == trace(whole)[12:]


@calm
@given(shapes)
def test_the_rate_stays_between_floor_and_base_and_is_never_zero(s: Schedule) -> None:
    rates = trace(s)
    base = s["learning_rate"]
    assert len(rates) == s["total_steps"]
    assert all(0 <= r <= base for r in rates)
    assert rates[0] > 0
    assert rates[-1] > 0
    decay_from = s["warmup"] + s["hold"]
    if s["total_steps"] > decay_from:
        if s["min_ratio"] > 0:
            assert rates[-1] == pytest.approx(base * s["min_ratio"], abs=base * 1e-12)
    elif s["total_steps"] >= s["warmup"]:
        assert rates[-1] == base


@calm
@given(shapes)
def test_the_rate_rises_holds_and_falls(s: Schedule) -> None:
    rates = trace(s)
    top = max(s["warmup"] - 1, 0)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    hold = rates[top : s["warmup"] + s["hold"]]
    assert all(r == s["learning_rate"] for r in hold)


@calm
@given(
    warmup=st.integers(0, 20),
    hold=st.integers(0, 20),
    decay=st.integers(1, 40),
    ratio=st.floats(0, 1),
)
def test_transformers_own_schedule_agrees(warmup: int, hold: int, decay: int, ratio: float) -> None:
    """Its step 0 comes before the first update, so our step s is its step s.

    It warms up from ``min_lr_ratio``, we from zero, so the warm-up agrees only for ratio 0; there
    it ends at zero, and we end one step before that.
    """
    import torch
    from transformers import get_wsd_schedule

    def theirs(floor: float) -> Callable[[int], float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = get_wsd_schedule(
            optimizer, warmup, decay, num_stable_steps=hold, decay_type="cosine", min_lr_ratio=floor
        )
        return scheduler.lr_lambdas[0]

    total = warmup + hold + decay
    for floor, first in ((0.0, 1), (ratio, max(warmup, 1))):
        expected = theirs(floor)
        ours = shape(warmup, hold, total, floor, rate=1.0)
        ours["total_steps"] -= floor == 0
        for step in range(first, ours["total_steps"] + 1):
            assert learning_rate(step, **ours) == pytest.approx(expected(step), abs=1e-12)


def test_without_warm_up_a_supervised_run_has_transformers_own_linear_rates() -> None:
    found = trace(schedule_of(supervised("linear", 0, 0.0), 6))
    assert found == pytest.approx([1e-3 * (6 - k) / 6 for k in range(6)], rel=1e-12)


def test_a_single_update_trains_at_the_full_rate() -> None:
    for kind in ("linear", "cosine", "constant"):
        assert trace(schedule_of(supervised(kind, 0, 0.0), 1)) == [1e-3]
