"""The ledger: one step's account of its groups and trajectories, adding up.

Over a run, ``started = in flight + cancelled + completed``, and of the groups that completed in a
step, ``completed = used + no-signal + filtered + too small + discarded + pending``. A group
stands in the row of the step it completed in; what becomes of a pending one changes that row,
until the step is ``settled``. ``no_signal_groups`` counts every completed tied group, and
``all_success_groups`` and ``all_failed_groups`` are subsets of it; the equation uses those that
did not train. Attempted trajectories = correct + partial + incorrect (graded) + error +
incomplete.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbtrain.rollout.admission import GroupOutcome
from nbtrain.rollout.collector import Batch, Closing
from nbtrain.rollout.judging import JudgedGroup
from nbtrain.rollout.types import Group, TerminationReason, Trajectory

__all__ = [
    "Changes",
    "Ledger",
    "cancelled_rows",
    "group_row",
    "said",
    "trajectory_row",
    "trajectory_rows",
]

NEVER_COMPLETE = "cancelled before its group was complete"
RUN_ENDED = "the run ended before its group could be used"


@dataclass(slots=True)
class Changes:
    """Changes to rows of earlier steps, by step, group id and trajectory id."""

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    trajectories: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.steps or self.groups or self.trajectories)


@dataclass(slots=True)
class _Page:
    """A step whose groups may still find their place."""

    groups: list[JudgedGroup]
    cancelled: list[Group]
    in_flight: int


class Ledger:
    """The rows of steps, groups and trajectories, and what later steps change of them."""

    def __init__(self) -> None:
        self._open: dict[int, _Page] = {}
        self._last: tuple[int, _Page] | None = None

    def step(self, batch: Batch, *, started: int, in_flight: int) -> dict[str, Any]:
        """The columns and metrics of a step's row that come from groups and trajectories.

        ``started`` and ``in_flight`` are the groups of the run to date.
        """
        page = _Page(batch.groups, batch.cancelled, in_flight)
        if not _settled(page):
            self._open[batch.step] = page
        self._last = (batch.step, page)
        row = _counts(page)
        used = [
            a.reward
            for judged in batch.used
            for a in judged.admissions
            if a.eligible and a.reward is not None
        ]
        metrics = row["metrics"] | {
            "batch_groups": len(batch.used),
            "advantage_max_abs": max(
                (abs(a) for j in batch.used for a in j.advantages), default=None
            ),
        }
        if batch.cut_short:
            metrics["collection_ended"] = batch.cut_short
        return row | {
            "step": batch.step,
            "avg_reward": _mean(_graded(batch.groups)),
            "used_reward": _mean(used),
            "started_groups": started,
            "metrics": metrics,
        }

    def changes(self, changed: Sequence[JudgedGroup]) -> Changes:
        """What groups of earlier steps that have found their place change."""
        found = Changes()
        for judged in changed:
            page = self._open[judged.step]
            ids = [one.group.group_id for one in page.groups]
            page.groups[ids.index(judged.group.group_id)] = judged
            found.groups[judged.group.group_id] = _place(judged)
            for row in _verdicts(judged):
                found.trajectories[row.pop("trajectory_id")] = row
        for step in {judged.step for judged in changed}:
            found.steps[step] = _counts(self._open[step])
            if _settled(self._open[step]):
                del self._open[step]
        return found

    def closing(self, closing: Closing) -> Changes:
        """What the end of the run changes."""
        found = self.changes(closing.discarded)
        if self._last is not None and (closing.cancelled or self._last[1].in_flight):
            step, page = self._last
            page.cancelled, page.in_flight = [*page.cancelled, *closing.cancelled], 0
            found.steps[step] = _counts(page) | {"started_groups": closing.started}
        return found


def _settled(page: _Page) -> bool:
    return all(judged.outcome is not GroupOutcome.PENDING for judged in page.groups)


def _counts(page: _Page) -> dict[str, Any]:
    """What the places of a step's groups add up to."""
    outcomes = Counter(judged.outcome for judged in page.groups)
    taught_nothing = [
        t
        for judged in page.groups
        if judged.outcome not in (GroupOutcome.USED, GroupOutcome.PENDING)
        for t in judged.group.trajectories
    ]
    taught_nothing += [t for group in page.cancelled for t in group.trajectories]
    return {
        "completed_groups": len(page.groups),
        "used_groups": outcomes[GroupOutcome.USED],
        "no_signal_groups": sum(judged.verdict.tied for judged in page.groups),
        "filtered_groups": outcomes[GroupOutcome.FILTERED],
        "too_small_groups": outcomes[GroupOutcome.TOO_SMALL],
        "discarded_groups": outcomes[GroupOutcome.DISCARDED],
        "pending_groups": outcomes[GroupOutcome.PENDING],
        "in_flight_groups": page.in_flight,
        "cancelled_groups": len(page.cancelled),
        "settled": _settled(page),
        "metrics": _metrics(page)
        | {
            "no_signal_not_trained": outcomes[GroupOutcome.NO_SIGNAL],
            "eligible_trajectories": sum(
                a.eligible for judged in page.groups for a in judged.admissions
            ),
            "tokens_taught_nothing": sum(t.output_tokens for t in taught_nothing),
        },
    }


def _metrics(page: _Page) -> dict[str, Any]:
    """What a step's trajectories were."""
    trajectories = [t for judged in page.groups for t in judged.group.trajectories]
    terms = _terms(trajectories)
    rewards = _graded(page.groups)
    errors = sum(t.reward is None and t.reason is TerminationReason.ERROR for t in trajectories)
    cancelled = [t for group in page.cancelled for t in group.trajectories]
    reasons = Counter(str(t.reason) for t in [*trajectories, *cancelled])
    return {
        "all_success_groups": sum(j.verdict.tied and j.verdict.all_success for j in page.groups),
        "all_failed_groups": sum(j.verdict.tied and j.verdict.all_failed for j in page.groups),
        "attempted_trajectories": len(trajectories) + len(cancelled),
        "completed_trajectories": len(trajectories),
        "cancelled_trajectories": len(cancelled),
        "stale_trajectories": reasons[str(TerminationReason.STALE)],
        "graded_trajectories": len(rewards),
        "correct": sum(reward >= 1 for reward in rewards),
        "partial": sum(0 < reward < 1 for reward in rewards),
        "incorrect": sum(reward <= 0 for reward in rewards),
        "error": errors,
        "incomplete": len(trajectories) - len(rewards) - errors + len(cancelled),
        "termination_reasons": dict(reasons),
        "reward_std": _std(rewards),
        "reward_std_within_groups": _within(page.groups),
        "output_tokens": sum(t.output_tokens for t in [*trajectories, *cancelled]),
        **_spread("tokens", [t.output_tokens for t in trajectories]),
        **_spread("finished_tokens", [t.output_tokens for t in trajectories if _finished(t)]),
        **_spread("turns", [t.turns for t in trajectories]),
        "terms": {name: _mean(known) for name, known in terms.items()},
        "terms_std": {name: _std(known) for name, known in terms.items()},
    }


def _within(groups: Iterable[JudgedGroup]) -> float | None:
    """Mean over groups of the spread of their eligible rewards: what there is to learn from.

    ``reward_std`` beside it spans all groups, so that tasks of unequal difficulty widen it too.
    """
    each = [
        _std([a.reward for a in judged.admissions if a.eligible and a.reward is not None])
        for judged in groups
    ]
    return _mean([spread for spread in each if spread is not None])


def _finished(trajectory: Trajectory) -> bool:
    """Whether it ended by itself: no limit, failure or time-out cut it."""
    return trajectory.reason is TerminationReason.ENV_DONE


def _graded(groups: Iterable[JudgedGroup]) -> list[float]:
    return [t.reward for j in groups for t in j.group.trajectories if t.reward is not None]


def said(row: dict[str, Any]) -> str:
    """A step's ledger as a sentence, for runs that taught nothing."""
    metrics = row["metrics"]
    parts = [
        f"{row['no_signal_groups']} with identical rewards" if row["no_signal_groups"] else "",
        f"{row['filtered_groups']} all failed or all passed" if row["filtered_groups"] else "",
        f"{row['too_small_groups']} with too few eligible trajectories"
        if row["too_small_groups"]
        else "",
    ]
    told = ", ".join(part for part in parts if part)
    text = f"In step {row['step']}, of {row['completed_groups']} groups: {told or 'none left out'}"
    ungraded = metrics["completed_trajectories"] - metrics["graded_trajectories"]
    if ungraded:
        text += f"; {ungraded} of {metrics['completed_trajectories']} trajectories were not graded"
    if row["avg_reward"] is not None:
        text += f"; mean reward {row['avg_reward']:.3g}"
    return text


def group_row(judged: JudgedGroup) -> dict[str, Any]:
    """A completed group's row."""
    rewards = [t.reward for t in judged.group.trajectories if t.reward is not None]
    return {
        "group_id": judged.group.group_id,
        "task_id": judged.group.task_id,
        "task_index": judged.group.task_index,
        "epoch": judged.group.epoch,
        "budget": judged.group.budget,
        "size": len(judged.group.trajectories),
        "reward_mean": _mean(rewards),
        "reward_std": _std(rewards),
        "output_tokens": sum(t.output_tokens for t in judged.group.trajectories),
        **_place(judged),
    }


def _place(judged: JudgedGroup) -> dict[str, Any]:
    """The columns of a group that a later step may change."""
    return {
        "outcome": str(judged.outcome),
        "reason": judged.why,
        "eligible": sum(a.eligible for a in judged.admissions),
        "consumed_step": judged.consumed_step,
    }


def trajectory_rows(judged: JudgedGroup, *, prompt: Any) -> list[dict[str, Any]]:
    """The rows of a completed training group's trajectories, texts included."""
    return [
        trajectory_row(trajectory, judged.group.task_id, split="train", prompt=prompt) | verdict
        for trajectory, verdict in zip(judged.group.trajectories, _verdicts(judged), strict=True)
    ]


def _verdicts(judged: JudgedGroup) -> list[dict[str, Any]]:
    """The columns of a group's trajectories that a later step may change, and their ids."""
    used = judged.outcome is GroupOutcome.USED
    rows = []
    for trajectory, admission, advantage in zip(
        judged.group.trajectories, judged.admissions, judged.advantages, strict=True
    ):
        trained = used and admission.eligible
        rows.append(
            {
                "trajectory_id": trajectory.trajectory_id,
                "reason": str(trajectory.reason),
                "used_reward": admission.reward if trained else None,
                "eligible": admission.eligible,
                "verdict": admission.why if trained or not admission.eligible else judged.why,
                "advantage": advantage if trained else None,
                "consumed_step": judged.consumed_step if trained else None,
            }
        )
    return rows


def cancelled_rows(group: Group, *, prompt: Any, why: str = NEVER_COMPLETE) -> list[dict[str, Any]]:
    """The rows of a group that was cancelled before it was complete: none of it trains."""
    return [
        trajectory_row(trajectory, group.task_id, split="train", prompt=prompt)
        | {"eligible": False, "verdict": why}
        for trajectory in group.trajectories
    ]


def trajectory_row(
    trajectory: Trajectory, task_id: str, *, split: str, prompt: Any
) -> dict[str, Any]:
    """The columns that training and validation trajectories share."""
    error = trajectory.error
    return {
        "split": split,
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "sample": trajectory.sample,
        "task_id": task_id,
        "status": "aborted" if _was_aborted(trajectory) else "completed",
        "reason": str(trajectory.reason),
        "reward": trajectory.reward,
        "turns": trajectory.turns,
        "prompt_tokens": len(trajectory.prompt_ids),
        "output_tokens": trajectory.output_tokens,
        "policy_version": trajectory.started_version,
        "seconds": trajectory.seconds,
        "error": error.strip().splitlines()[0][:500] if error and error.strip() else None,
        "text": {
            "prompt": prompt,
            "completion": trajectory.completion
            if trajectory.messages is None
            else trajectory.messages,
            "terms": trajectory.terms,
            "error": error,
        },
    }


def _was_aborted(trajectory: Trajectory) -> bool:
    """Whether it was cancelled in flight; what is called stale later had finished."""
    if trajectory.reason is TerminationReason.STALE:
        return trajectory.reward is None
    return trajectory.reason is TerminationReason.CANCELLED


def _terms(trajectories: Iterable[Trajectory]) -> dict[str, list[float]]:
    """The scores of each reward term."""
    scores: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, score in trajectory.terms.items():
            known = scores.setdefault(name, [])
            if score is not None:
                known.append(score)
    return scores


def _spread(name: str, values: list[int]) -> dict[str, float | None]:
    return {
        f"{name}_min": min(values, default=None),
        f"{name}_mean": _mean(values),
        f"{name}_max": max(values, default=None),
    }


def _mean(values: list[float] | list[int]) -> float | None:
    return sum(values) / len(values) if values else None


def _std(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
