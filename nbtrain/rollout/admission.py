"""Admission: which trajectories and groups train. Pure functions of plain data.

Trajectories are decided first (eligible, eligible with reward 0, or excluded), then the
group filters look at the eligible rewards alone. A group is excluded if any of its filters
excludes it. Reward 0 is for training only; the recorded reward never changes.

As graded, nothing is filtered: whatever ended a trajectory, its own grade is what it trains with,
and a group is left out only when none of it was graded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nbtrain.rollout.types import TerminationReason, Trajectory

ADVANTAGE_EPSILON = 1e-4
"""Added to the group's standard deviation, as in the GRPO paper's public implementations."""

ROUNDING = 1e-12
"""Rewards that differ by less, relative to the largest of them or to 1, are equal: 0.3 and
0.1 + 0.2 are the same score."""


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """The six filters and the smallest number of eligible trajectories in a group.

    With ``as_graded`` (see :data:`AS_GRADED`) a batch is what was rolled out, not what passed.
    """

    min_trajectories: int
    train_on_truncation: bool = False
    train_on_timeout: bool = False
    train_on_error: bool = False
    train_on_all_fail: bool = False
    train_on_all_pass: bool = False
    train_on_zero_advantage: bool = False
    as_graded: bool = False


AS_GRADED = AdmissionRules(1, True, True, True, True, True, True, as_graded=True)
"""Every grade trains, and every group that has one."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a trajectory may train, the reward it trains with, and why."""

    eligible: bool
    reward: float | None
    why: str


class GroupOutcome(StrEnum):
    """A completed group's place in the ledger; disjoint, first match from the top."""

    USED = "used"
    """Trained on."""
    NO_SIGNAL = "no_signal"
    """Its eligible rewards are all identical, and it did not train."""
    FILTERED = "filtered"
    """All failed or all passed, with differing rewards."""
    TOO_SMALL = "too_small"
    """Fewer eligible trajectories than ``min_trajectories_per_group``."""
    DISCARDED = "discarded"
    """Eligible, but stale or beyond the batch."""
    PENDING = "pending"
    """Eligible, waiting for a later step."""


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """Whether a group may train, and what its eligible rewards look like.

    ``outcome`` is the ledger place of a group that may not train, ``None`` for one that may.
    """

    admitted: bool
    outcome: GroupOutcome | None
    why: str
    tied: bool
    all_failed: bool
    all_success: bool


LIMITS = (
    TerminationReason.TRUNCATION,
    TerminationReason.LIMIT_REACHED,
    TerminationReason.MAX_TURNS,
)
"""Endings that a limit caused."""


def admit(trajectory: Trajectory, rules: AdmissionRules) -> Admission:
    """Decide whether one trajectory is eligible, and the reward it trains with."""
    reason = trajectory.reason
    if rules.as_graded:
        return _as_graded(trajectory)
    if reason is TerminationReason.ENV_DONE and trajectory.reward is not None:
        return Admission(True, trajectory.reward, "finished and graded")
    if reason in LIMITS:
        return _zeroed(rules.train_on_truncation, "train_on_truncation", reason)
    if reason is TerminationReason.TIMEOUT:
        return _zeroed(rules.train_on_timeout, "train_on_timeout", reason)
    if reason is TerminationReason.ERROR:
        return _zeroed(rules.train_on_error, "train_on_error", reason)
    if reason is TerminationReason.ENV_DONE:
        return _zeroed(rules.train_on_error, "train_on_error", "no grade")
    return Admission(False, None, f"{reason} never trains")


def _as_graded(trajectory: Trajectory) -> Admission:
    if trajectory.reason in (TerminationReason.STALE, TerminationReason.CANCELLED):
        return Admission(False, None, f"{trajectory.reason} never trains")
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        return Admission(False, None, "no grade: left out")
    return Admission(True, trajectory.reward, "as graded")


def _zeroed(admitted: bool, option: str, cause: str) -> Admission:
    if admitted:
        return Admission(True, 0.0, f"{cause}: trains with reward 0 ({option})")
    return Admission(False, None, f"{cause}: left out ({option} is false)")


def judge(rewards: Sequence[float], rules: AdmissionRules) -> GroupVerdict:
    """Decide a completed group from its eligible rewards, one per eligible trajectory.

    A group is tied when at least two eligible rewards are all identical, up to rounding; a single
    one counts as tied where the minimum admits it. Zero advantage follows in both cases.
    """
    enough = len(rewards) >= max(rules.min_trajectories, 1)
    tied = bool(rewards) and _identical(rewards) and (len(rewards) >= 2 or enough)
    failed = bool(rewards) and all(reward <= 0 for reward in rewards)
    passed = bool(rewards) and all(reward >= 1 for reward in rewards)
    filtered = []
    if failed and not rules.train_on_all_fail:
        filtered.append("all fail (train_on_all_fail is false)")
    if passed and not rules.train_on_all_pass:
        filtered.append("all pass (train_on_all_pass is false)")
    reasons = list(filtered)
    if not enough:
        few = f"{len(rewards)} eligible of at least {rules.min_trajectories}"
        reasons.append("no completion was graded" if rules.as_graded else few)
    if tied and not rules.train_on_zero_advantage:
        reasons.append("identical rewards (train_on_zero_advantage is false)")
    if not reasons:
        return GroupVerdict(True, None, "admitted", tied, failed, passed)
    if tied:
        outcome = GroupOutcome.NO_SIGNAL
    elif filtered:
        outcome = GroupOutcome.FILTERED
    else:
        outcome = GroupOutcome.TOO_SMALL
    return GroupVerdict(False, outcome, "; ".join(reasons), tied, failed, passed)


def advantages(rewards: Sequence[float]) -> list[float]:
    """Group-relative advantages: (r - mean) / (std + 1e-4), std with n - 1 (Shao et al. 2024).

    Exactly 0 for rewards that are equal up to rounding, and for a single one.
    """
    if _identical(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    scale = variance**0.5 + ADVANTAGE_EPSILON
    return [(reward - mean) / scale for reward in rewards]


def _identical(rewards: Sequence[float]) -> bool:
    """Whether all are the same number, up to what rounding makes of one."""
    if len(rewards) < 2:
        return True
    return max(rewards) - min(rewards) <= ROUNDING * max(1.0, *map(abs, rewards))
