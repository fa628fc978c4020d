"""Which trajectories and groups train: tables of the rules, and their properties."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.rollout.admission import (
    AdmissionRules,
    GroupOutcome,
    admit,
    advantages,
    judge,
)
from nbtrain.rollout.types import TerminationReason as R
from nbtrain.rollout.types import Trajectory

RULES = AdmissionRules(min_trajectories=2)
EVERYTHING = AdmissionRules(2, True, True, True, True, True, True)


def ended(reason: R, reward: float | None) -> Trajectory:
    return Trajectory(1, 1, 0, (1,), [2], [-1.0], [0], reason, reward=reward)


@pytest.mark.parametrize(
    ("reason", "reward", "option", "zeroed"),
    [
        (R.TRUNCATION, 0.7, "train_on_truncation", True),
        (R.LIMIT_REACHED, 0.7, "train_on_truncation", True),
        (R.MAX_TURNS, None, "train_on_truncation", True),
        (R.TIMEOUT, None, "train_on_timeout", True),
        (R.ERROR, None, "train_on_error", True),
        (R.ENV_DONE, None, "train_on_error", True),
    ],
)
def test_endings_train_only_with_their_option_and_then_with_reward_zero(
    reason: R, reward: float | None, option: str, zeroed: bool
) -> None:
    trajectory = ended(reason, reward)
    left_out = admit(trajectory, RULES)
    assert (left_out.eligible, left_out.reward) == (False, None)
    assert option in left_out.why
    others = replace(EVERYTHING, **{option: False})
    assert not admit(trajectory, others).eligible
    admitted = admit(trajectory, replace(RULES, **{option: True}))
    assert (admitted.eligible, admitted.reward) == (True, 0.0)
    assert trajectory.reward == reward  # the recorded reward stays as logged


@pytest.mark.parametrize("reason", [R.STALE, R.CANCELLED])
def test_stale_and_cancelled_never_train(reason: R) -> None:
    assert not admit(ended(reason, 1.0), EVERYTHING).eligible


def test_a_graded_ending_trains_with_its_reward() -> None:
    verdict = admit(ended(R.ENV_DONE, 0.25), RULES)
    assert (verdict.eligible, verdict.reward) == (True, 0.25)


@pytest.mark.parametrize(
    ("rewards", "outcome"),
    [
        ([0.0, 1.0], None),
        ([0.0, 0.0], GroupOutcome.NO_SIGNAL),
        ([1.0, 1.0], GroupOutcome.NO_SIGNAL),
        ([0.5, 0.5, 0.5], GroupOutcome.NO_SIGNAL),
        ([-1.0, 0.0], GroupOutcome.FILTERED),  # all fail, rewards differ
        ([1.0, 2.0], GroupOutcome.FILTERED),  # all pass, rewards differ
        ([-1.0], GroupOutcome.FILTERED),  # too small as well: the first match counts
        ([0.3], GroupOutcome.TOO_SMALL),
        ([], GroupOutcome.TOO_SMALL),
    ],
)
def test_groups(rewards: list[float], outcome: GroupOutcome | None) -> None:
    verdict = judge(rewards, RULES)
    assert verdict.outcome is outcome
    assert verdict.admitted is (outcome is None)


def test_any_filter_excludes() -> None:
    """All zeros is both all-fail and tied: admitting one kind does not admit the other."""
    zeros = [0.0, 0.0]
    assert not judge(zeros, replace(RULES, train_on_all_fail=True)).admitted
    assert not judge(zeros, replace(RULES, train_on_zero_advantage=True)).admitted
    both = replace(RULES, train_on_all_fail=True, train_on_zero_advantage=True)
    assert judge(zeros, both).admitted
    assert judge([-1.0, 0.0], replace(RULES, train_on_all_fail=True)).admitted
    assert judge([1.0, 2.0], replace(RULES, train_on_all_pass=True)).admitted


def test_a_single_eligible_reward_is_tied_where_the_minimum_admits_it() -> None:
    one = AdmissionRules(min_trajectories=1)
    assert judge([0.5], one).outcome is GroupOutcome.NO_SIGNAL
    assert judge([0.5], replace(one, train_on_zero_advantage=True)).admitted


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], [-0.5 / (math.sqrt(0.5) + 1e-4), 0.5 / (math.sqrt(0.5) + 1e-4)]),
        ([0.0, 0.0, 3.0], [-1 / (math.sqrt(3) + 1e-4)] * 2 + [2 / (math.sqrt(3) + 1e-4)]),
        ([0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
        ([0.7], [0.0]),
        ([], []),
    ],
)
def test_advantages(rewards: list[float], expected: list[float]) -> None:
    assert advantages(rewards) == pytest.approx(expected, abs=1e-12)


finite = st.floats(-5, 5, allow_nan=False)


@given(st.lists(finite, min_size=2, max_size=12))
def test_advantages_add_up_to_zero_and_ties_are_exactly_zero(rewards: list[float]) -> None:
    values = advantages(rewards)
    assert sum(values) == pytest.approx(0.0, abs=1e-6)
    assert all(v == 0.0 for v in advantages([rewards[0]] * len(rewards)))


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.3, 1.0, 2.0]), max_size=6), st.data())
def test_every_group_has_one_place(rewards: list[float], data: st.DataObject) -> None:
    flags = [data.draw(st.booleans()) for _ in range(6)]
    rules = AdmissionRules(data.draw(st.integers(1, 4)), *flags)
    verdict = judge(rewards, rules)
    assert verdict.admitted == (verdict.outcome is None)
    if verdict.admitted:
        assert len(rewards) >= rules.min_trajectories
        assert rules.train_on_zero_advantage or len(set(rewards)) > 1
