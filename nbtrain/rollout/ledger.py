"""The ledger: one step's account of its groups and trajectories, adding up.

``started = in flight + cancelled + completed`` and
``completed = used + no-signal + filtered + too small + discarded + pending``.
``no_signal_groups`` counts every completed tied group, and ``all_success_groups`` and
``all_failed_groups`` are subsets of it; the equation uses those that did not train. Attempted
trajectories = correct + partial + incorrect (graded) + error + incomplete.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from nbtrain.rollout.admission import GroupOutcome
from nbtrain.rollout.collector import Batch, JudgedGroup
from nbtrain.rollout.types import Group, TerminationReason, Trajectory


def step_ledger(batch: Batch) -> dict[str, Any]:
    """The columns and metrics of a step's row that come from its groups and trajectories."""
    outcomes = Counter(judged.outcome for judged in batch.groups)
    trajectories = [t for judged in batch.groups for t in judged.group.trajectories]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    used = [
        a.reward
        for judged in batch.used
        for a in judged.admissions
        if a.eligible and a.reward is not None
    ]
    return {
        "avg_reward": _mean(rewards),
        "used_reward": _mean(used),
        "completed_groups": len(batch.groups),
        "used_groups": outcomes[GroupOutcome.USED],
        "no_signal_groups": sum(judged.verdict.tied for judged in batch.groups),
        "filtered_groups": outcomes[GroupOutcome.FILTERED],
        "too_small_groups": outcomes[GroupOutcome.TOO_SMALL],
        "discarded_groups": outcomes[GroupOutcome.DISCARDED],
        "pending_groups": outcomes[GroupOutcome.PENDING],
        "in_flight_groups": 0,
        "cancelled_groups": len(batch.cancelled),
        "settled": True,
        "metrics": _metrics(batch, trajectories, rewards),
    }


def _metrics(batch: Batch, trajectories: list[Trajectory], rewards: list[float]) -> dict[str, Any]:
    graded = [t for t in trajectories if t.reward is not None]
    taught_nothing = [
        t
        for judged in batch.groups
        if judged.outcome is not GroupOutcome.USED
        for t in judged.group.trajectories
    ]
    eligible = sum(a.eligible for judged in batch.groups for a in judged.admissions)
    errors = sum(t.reward is None and t.reason is TerminationReason.ERROR for t in trajectories)
    cancelled = sum(len(group.trajectories) for group in batch.cancelled)
    metrics: dict[str, Any] = {
        "no_signal_not_trained": sum(j.outcome is GroupOutcome.NO_SIGNAL for j in batch.groups),
        "all_success_groups": sum(j.verdict.tied and j.verdict.all_success for j in batch.groups),
        "all_failed_groups": sum(j.verdict.tied and j.verdict.all_failed for j in batch.groups),
        "attempted_trajectories": len(trajectories) + cancelled,
        "completed_trajectories": len(trajectories),
        "graded_trajectories": len(graded),
        "eligible_trajectories": eligible,
        "correct": sum(reward >= 1 for reward in rewards),
        "partial": sum(0 < reward < 1 for reward in rewards),
        "incorrect": sum(reward <= 0 for reward in rewards),
        "error": errors,
        "incomplete": len(trajectories) - len(graded) - errors + cancelled,
        "termination_reasons": dict(Counter(str(t.reason) for t in trajectories)),
        "reward_std": _std(rewards),
        "tokens_taught_nothing": sum(len(t.token_ids) for t in taught_nothing),
        "output_tokens": sum(len(t.token_ids) for t in trajectories),
        **_spread("tokens", [len(t.token_ids) for t in trajectories]),
        **_spread("turns", [1 for _ in trajectories]),
        "terms": _terms(trajectories),
    }
    if batch.cut_short:
        metrics["collection_ended"] = batch.cut_short
    return metrics


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


def group_row(judged: JudgedGroup, *, step: int) -> dict[str, Any]:
    """A group's row. ``step`` is the one the group completed in."""
    rewards = [t.reward for t in judged.group.trajectories if t.reward is not None]
    used = judged.outcome is GroupOutcome.USED
    return {
        "group_id": judged.group.group_id,
        "task_id": judged.group.task_id,
        "task_index": judged.group.task_index,
        "epoch": judged.group.epoch,
        "budget": None,
        "outcome": str(judged.outcome),
        "reason": judged.why,
        "size": len(judged.group.trajectories),
        "eligible": sum(a.eligible for a in judged.admissions),
        "reward_mean": _mean(rewards),
        "reward_std": _std(rewards),
        "output_tokens": sum(len(t.token_ids) for t in judged.group.trajectories),
        "consumed_step": step if used else None,
    }


def trajectory_rows(judged: JudgedGroup, *, step: int, prompt: Any) -> list[dict[str, Any]]:
    """The rows of a completed training group's trajectories, texts included."""
    used = judged.outcome is GroupOutcome.USED
    rows = []
    for trajectory, admission, advantage in zip(
        judged.group.trajectories, judged.admissions, judged.advantages, strict=True
    ):
        trained = used and admission.eligible
        row = trajectory_row(trajectory, judged.group.task_id, split="train", prompt=prompt)
        row |= {
            "used_reward": admission.reward if trained else None,
            "eligible": admission.eligible,
            "verdict": admission.why if trained or not admission.eligible else judged.why,
            "advantage": advantage if trained else None,
            "consumed_step": step if trained else None,
        }
        rows.append(row)
    return rows


def cancelled_rows(group: Group, *, prompt: Any) -> list[dict[str, Any]]:
    """The rows of a group that was cancelled before it was complete: none of it trains."""
    return [
        trajectory_row(trajectory, group.task_id, split="train", prompt=prompt)
        | {"eligible": False, "verdict": "cancelled before its group was complete"}
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
        "status": "aborted" if trajectory.reason is TerminationReason.CANCELLED else "completed",
        "reason": str(trajectory.reason),
        "reward": trajectory.reward,
        "turns": 1,
        "prompt_tokens": len(trajectory.prompt_ids),
        "output_tokens": len(trajectory.token_ids),
        "policy_version": trajectory.versions[0] if trajectory.versions else None,
        "seconds": trajectory.seconds,
        "error": error.strip().splitlines()[0][:500] if error and error.strip() else None,
        "text": {
            "prompt": prompt,
            "completion": trajectory.completion,
            "terms": trajectory.terms,
            "error": error,
        },
    }


def _terms(trajectories: Iterable[Trajectory]) -> dict[str, float | None]:
    scores: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, score in trajectory.terms.items():
            known = scores.setdefault(name, [])
            if score is not None:
                known.append(score)
    return {name: _mean(known) for name, known in scores.items()}


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
