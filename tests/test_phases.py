from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.plan.phases import (
    RESUME_AT,
    TERMINAL,
    Phase,
    Status,
    is_paused,
    may_follow,
    status_of,
)

STATUS = {
    "pending": "RESOLVING_DATASET AWAITING_BASE_MODEL DEPLOYING_GRADER AWAITING_GRADER "
    "AWAITING_CAPACITY STARTING_JOB QUEUED PREPARING PAUSED",
    "running": "TRAINING PAUSING RECORDING CLEANING_UP",
    "succeeded": "COMPLETED",
    "failed": "FAILED",
    "cancelled": "CANCELLED",
}
ALLOWED = """
RESOLVING_DATASET AWAITING_BASE_MODEL AWAITING_CAPACITY STARTING_JOB QUEUED TRAINING
TRAINING RECORDING CLEANING_UP COMPLETED
RESOLVING_DATASET DEPLOYING_GRADER AWAITING_GRADER QUEUED PREPARING TRAINING PAUSING PAUSED
TRAINING CLEANING_UP CANCELLED
PAUSING CLEANING_UP FAILED
PAUSED CANCELLED
QUEUED FAILED
"""
REFUSED = [
    ("QUEUED", "STARTING_JOB"),  # a host that reports late does not take the run back
    ("TRAINING", "TRAINING"),
    ("TRAINING", "QUEUED"),
    ("TRAINING", "PAUSED"),
    ("RECORDING", "PAUSING"),
    ("QUEUED", "COMPLETED"),
    ("PREPARING", "COMPLETED"),
    ("PAUSING", "COMPLETED"),
    ("PAUSING", "RECORDING"),
    ("QUEUED", "RECORDING"),
    ("PAUSED", "TRAINING"),  # a resume is a new attempt
    ("PAUSED", "FAILED"),
    ("COMPLETED", "FAILED"),
    ("FAILED", "CLEANING_UP"),
    ("CANCELLED", "COMPLETED"),
]


def test_there_are_sixteen_phases_and_each_has_the_status_of_the_table() -> None:
    assert len(Phase) == 16
    found = {phase: status_of(phase) for phase in Phase}
    assert found == {Phase(p): Status(s) for s, ps in STATUS.items() for p in ps.split()}


def test_only_paused_is_paused() -> None:
    assert [phase for phase in Phase if is_paused(phase)] == [Phase.PAUSED]


def test_a_word_that_is_no_phase_has_no_status() -> None:
    with pytest.raises(ValueError, match="LEARNING"):
        status_of("LEARNING")


@pytest.mark.parametrize("path", ALLOWED.strip().splitlines())
def test_a_run_may_take_these_paths(path: str) -> None:
    phases = path.split()
    for before, after in itertools.pairwise(phases):
        assert may_follow(before, after), (before, after)


@pytest.mark.parametrize(("before", "after"), REFUSED)
def test_a_run_may_not_move(before: str, after: str) -> None:
    assert not may_follow(before, after)


@given(st.sampled_from(Phase), st.sampled_from(Phase))
def test_no_two_phases_may_follow_each_other(one: Phase, other: Phase) -> None:
    assert not (may_follow(one, other) and may_follow(other, one))


@given(st.sampled_from(sorted(set(Phase) - TERMINAL)))
def test_every_open_phase_can_be_cancelled_and_leads_to_an_end(phase: Phase) -> None:
    assert may_follow(phase, Phase.CANCELLED)
    assert RESUME_AT.isdisjoint(TERMINAL)
