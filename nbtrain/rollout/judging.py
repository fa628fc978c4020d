"""A completed group with its verdict, fresh or stale."""

from __future__ import annotations

from dataclasses import dataclass

from nbtrain.rollout.admission import (
    Admission,
    AdmissionRules,
    GroupOutcome,
    GroupVerdict,
    admit,
    advantages,
    judge,
)
from nbtrain.rollout.types import Group, TerminationReason, Trajectory

__all__ = ["JudgedGroup", "is_stale", "judged_group", "rejudged"]


@dataclass(slots=True)
class JudgedGroup:
    """A group with its verdict. The lists run parallel to ``group.trajectories``.

    ``advantages`` is 0 for trajectories that are not eligible; they are not in the batch.
    ``step`` is the one the group completed in, ``consumed_step`` the one that trained on it.
    ``owner`` is the rank that sampled it, and trains on it.
    """

    group: Group
    admissions: list[Admission]
    verdict: GroupVerdict
    advantages: list[float]
    outcome: GroupOutcome
    why: str
    step: int = 0
    consumed_step: int | None = None
    owner: int = 0

    @property
    def started_version(self) -> int:
        """The oldest policy version that any of its eligible trajectories began under."""
        versions = [
            trajectory.started_version
            for trajectory, admission in zip(self.group.trajectories, self.admissions, strict=True)
            if admission.eligible and trajectory.started_version is not None
        ]
        return min(versions, default=0)


def judged_group(
    group: Group, rules: AdmissionRules, *, oldest: int = 0, step: int = 0, owner: int = 0
) -> JudgedGroup:
    """Admit a completed group's trajectories, judge the group, and give its advantages.

    Trajectories that began under a policy before version ``oldest`` are STALE: they never train.
    A group that would have trained but for that is DISCARDED; one that is left with enough others
    is not.
    """
    judged = _judged(group, rules, step, owner)
    stale = [t for t in group.trajectories if is_stale(t, oldest)]
    if not stale:
        return judged
    for trajectory in stale:
        trajectory.reason = TerminationReason.STALE
    again = _judged(group, rules, step, owner)
    if judged.outcome is GroupOutcome.PENDING and again.outcome is not GroupOutcome.PENDING:
        again.outcome = GroupOutcome.DISCARDED
        again.why = f"stale: {len(stale)} of {len(group.trajectories)} began too many updates ago"
    elif judged.outcome is not GroupOutcome.PENDING:
        again.outcome, again.why = judged.outcome, judged.why
    return again


def rejudged(judged: JudgedGroup, rules: AdmissionRules, *, oldest: int) -> JudgedGroup:
    """A pending group after an update; itself when nothing of it became stale."""
    if not any(is_stale(trajectory, oldest) for trajectory in judged.group.trajectories):
        return judged
    return judged_group(judged.group, rules, oldest=oldest, step=judged.step, owner=judged.owner)


def is_stale(trajectory: Trajectory, oldest: int) -> bool:
    """Whether it began before version ``oldest`` and has not been called stale yet."""
    version = trajectory.started_version
    ended = trajectory.reason in (TerminationReason.STALE, TerminationReason.CANCELLED)
    return version is not None and version < oldest and not ended


def _judged(group: Group, rules: AdmissionRules, step: int, owner: int) -> JudgedGroup:
    admissions = [admit(trajectory, rules) for trajectory in group.trajectories]
    rewards = [a.reward for a in admissions if a.eligible and a.reward is not None]
    verdict = judge(rewards, rules)
    relative = iter(advantages(rewards))
    spread = [next(relative) if a.eligible else 0.0 for a in admissions]
    outcome = GroupOutcome.PENDING if verdict.outcome is None else verdict.outcome
    return JudgedGroup(
        group, admissions, verdict, spread, outcome, verdict.why, step=step, owner=owner
    )
