"""The tables of a run: which columns a frame has, and where each comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbtrain.client.frames import frame
from nbtrain.client.records import Checkpoint, HeldOutPoint, StepSummary
from nbtrain.report.turns import as_turns
from nbtrain.store import trajectory_ref

if TYPE_CHECKING:
    import pandas as pd

    from nbtrain.store import Row, Store, StoredCheckpoint

NEWEST = 20_000
"""Trajectories that a frame holds at most."""

GROUP_COUNTS = (
    "completed_groups",
    "used_groups",
    "no_signal_groups",
    "filtered_groups",
    "too_small_groups",
    "discarded_groups",
    "pending_groups",
    "started_groups",
    "in_flight_groups",
    "cancelled_groups",
)
LEDGER_FIGURES = (
    *("no_signal_not_trained", "all_success_groups", "all_failed_groups"),
    *("attempted_trajectories", "completed_trajectories", "graded_trajectories"),
    *("eligible_trajectories", "trained_trajectories", "correct", "partial", "incorrect"),
    *("error", "incomplete", "stale_trajectories", "cancelled_trajectories"),
    *("reward_std", "reward_std_within_groups", "advantage_max_abs"),
    *("output_tokens", "tokens_taught_nothing", "tokens_min", "tokens_mean", "tokens_max"),
    *("finished_tokens_min", "finished_tokens_mean", "finished_tokens_max"),
    *("turns_min", "turns_mean", "turns_max"),
)
"""What a step's ledger says of its trajectories; empty where a run has nothing of the kind."""
_STEP_COLUMNS = (
    "step",
    "created_at",
    "avg_reward",
    "used_reward",
    "loss",
    "learning_rate",
    *GROUP_COUNTS,
    "update_applied",
    "skip_reason",
    "settled",
    "attempt",
    *LEDGER_FIGURES,
)
_KEY_COLUMNS = frozenset(_STEP_COLUMNS) - frozenset(LEDGER_FIGURES)
SAMPLED_GROUP_COLUMNS = (
    "group_id",
    "step",
    "task_id",
    "task_index",
    "epoch",
    "budget",
    "outcome",
    "reason",
    "size",
    "eligible",
    "reward_mean",
    "reward_std",
    "output_tokens",
    "consumed_step",
    "attempt",
)
GROUP_COLUMNS = ("step", *GROUP_COUNTS, "update_applied", "skip_reason", "settled")
_ROUND_COLUMNS = (
    "step",
    "held_out_reward",
    "round_completed",
    "completed_samples",
    "expected_samples",
    "policy_version",
    "seconds",
    "created_at",
)
TRAJECTORY_COLUMNS = (
    "trajectory_id",
    "step",
    "split",
    "group_id",
    "sample",
    "task_id",
    "status",
    "reason",
    "reward",
    "used_reward",
    "eligible",
    "verdict",
    "advantage",
    "turns",
    "prompt_tokens",
    "output_tokens",
    "policy_version",
    "consumed_step",
    "seconds",
    "error",
    "attempt",
)
_CHECKPOINT_COLUMNS = (
    "checkpoint_id",
    "step_index",
    "held_out_reward",
    "round_completed",
    "kind",
    "reason",
    "size_bytes",
    "created_at",
    "base_model_slug",
    "run_id",
    "pinned",
)


def metrics(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per step, every recorded figure a column; nested figures are joined by a dot."""
    flat = [{name: row.get(name) for name in _STEP_COLUMNS} | _flat(row) for row in rows]
    names = dict.fromkeys(_STEP_COLUMNS)
    for row in flat:
        names.update(dict.fromkeys(row))
    table = frame(flat, names)
    for name in LEDGER_FIGURES:
        if table[name].dtype == object:
            table[name] = table[name].astype("float64")
    return table


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in (row.get("metrics") or {}).items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{inner}": v for inner, v in value.items()})
        elif name not in _KEY_COLUMNS:
            flat[name] = value
    return flat


def rewards(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """``step, avg_reward, used_reward``."""
    return frame(list(rows), ("step", "avg_reward", "used_reward"))


def groups(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per step: where its groups went."""
    return frame(list(rows), GROUP_COLUMNS)


def sampled_groups(rows: Sequence[Mapping[str, Any]], *, left_off: int = 0) -> pd.DataFrame:
    """One row per group."""
    return frame(rows, SAMPLED_GROUP_COLUMNS, left_off=left_off)


def validation(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per validation round."""
    return frame(list(rows), _ROUND_COLUMNS)


def trajectories(rows: list[Row], run_id: str, *, left_off: int = 0) -> pd.DataFrame:
    """One row per trajectory, oldest first, without texts; ``rows`` are the store's, used up."""
    for row in rows:
        row["trajectory_id"] = trajectory_ref(run_id, row)
    return frame(rows, TRAJECTORY_COLUMNS, left_off=left_off)


TEXT_COLUMNS = ("trajectory_id", "step", "prompt", "completion", "reward", "terms", "verdict")


def texts(
    rows: list[Row], found: Mapping[int, Mapping[str, Any]], run_id: str, *, left_off: int = 0
) -> pd.DataFrame:
    """One row per trajectory with its texts; ``found`` holds these by the rows' keys."""
    told = []
    for row in rows:
        text = found.get(row["id"], {})
        told.append(
            {
                **row,
                "trajectory_id": trajectory_ref(run_id, row),
                "prompt": last_message(text.get("prompt")),
                "completion": as_turns(text.get("completion")),
                "terms": text.get("terms"),
            }
        )
    return frame(told, TEXT_COLUMNS, left_off=left_off)


def last_message(text: Any) -> Any:
    """The content of the last chat message; what is no list of messages stays as it is."""
    if isinstance(text, list) and text and isinstance(text[-1], Mapping):
        return text[-1].get("content")
    return text


def trajectory_row(row: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    """The public columns of a trajectory's row; ``trajectory_id`` becomes its public id."""
    named = {name: row[name] for name in TRAJECTORY_COLUMNS}
    named["trajectory_id"] = trajectory_ref(run_id, dict(row))
    return named


def checkpoints(found: Iterable[Checkpoint], score: str = "held_out_reward") -> pd.DataFrame:
    """One row per committed checkpoint, by step; ``score`` is the column that ranks them."""
    names = [score if name == "held_out_reward" else name for name in _CHECKPOINT_COLUMNS]
    return frame([c.to_row() for c in found], names)


def events(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per phase the run entered."""
    return frame(list(rows), ("at", "attempt", "phase", "message"))


def held_out_points(rows: Iterable[Mapping[str, Any]]) -> list[HeldOutPoint]:
    """The rounds as records."""
    return [
        HeldOutPoint(
            step=row["step"],
            held_out_reward=row["held_out_reward"],
            round_completed=bool(row["round_completed"]),
            completed_samples=row["completed_samples"] or 0,
            expected_samples=row["expected_samples"] or 0,
            policy_version=row.get("policy_version"),
            validation_loss=row.get("loss"),
            perplexity=row.get("perplexity"),
        )
        for row in rows
    ]


def step_summaries(rows: Iterable[Mapping[str, Any]]) -> list[StepSummary]:
    """The steps' ledgers as records."""
    return [
        StepSummary(
            step=row["step"],
            avg_reward=row["avg_reward"],
            used_reward=row["used_reward"],
            **{name: row[name] or 0 for name in GROUP_COUNTS},
            update_applied=bool(row["update_applied"]),
            skip_reason=row["skip_reason"],
            settled=bool(row["settled"]),
        )
        for row in rows
    ]


def checkpoint_kind(*, weights: bool, training_state: bool) -> str:
    """What a checkpoint holds, in words."""
    held = (("weights", weights), ("training state", training_state))
    return " + ".join(name for name, there in held if there) or "empty"


def checkpoint_records(
    rows: Iterable[StoredCheckpoint], rounds: Iterable[HeldOutPoint], store: Store | None = None
) -> list[Checkpoint]:
    """Checkpoints by step, each with the round at its step; ``store`` is what they act through."""
    by_step = {point.step: point for point in rounds}
    in_order = sorted(rows, key=lambda row: (row.step, row.key))
    return [_checkpoint(row, by_step.get(row.step), store) for row in in_order]


def _checkpoint(
    row: StoredCheckpoint, point: HeldOutPoint | None, store: Store | None
) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=row.checkpoint_id,
        step_index=row.step,
        base_model_slug=row.base_model_slug or "",
        held_out_reward=point.held_out_reward if point else None,
        round_completed=bool(point and point.round_completed),
        kind=checkpoint_kind(weights=row.weights, training_state=row.training_state),
        reason=row.reason or "",
        size_bytes=row.size_bytes or 0,
        created_at=row.created_at,
        run_id=row.run_id,
        path=row.path,
        has_weights=row.weights,
        has_training_state=row.training_state,
        pinned=row.pinned,
        validation_loss=point.validation_loss if point else None,
        _store=store,
    )


def best(found: Iterable[Checkpoint]) -> Checkpoint | None:
    """Highest held-out reward of complete rounds, or lowest validation loss, the earliest on ties.

    ``None`` if there is none. Checkpoints without weights cannot be picked.
    """
    ranked = [(cost, c.step_index, c) for c in found if (cost := _cost(c)) is not None]
    return min(ranked, key=lambda each: each[:2])[2] if ranked else None


def _cost(checkpoint: Checkpoint) -> float | None:
    """What is to be as low as possible; ``None`` where nothing comparable was measured."""
    if not checkpoint.round_completed or not checkpoint.has_weights:
        return None
    reward = checkpoint.held_out_reward
    return checkpoint.validation_loss if reward is None else -reward
