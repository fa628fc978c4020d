"""The tables of a run: which columns a frame has, and where each comes from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbtrain.client.frames import frame
from nbtrain.client.held_out import NOT_READ, RoundRead, rounds_read
from nbtrain.client.records import Checkpoint, HeldOutPoint, StepSummary, verdict_told
from nbtrain.plan.picking import Candidate, pick
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
    "low",
    "high",
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
    "low",
    "high",
    "tie",
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


def validation(rows: Sequence[Mapping[str, Any]], store: Store) -> pd.DataFrame:
    """One row per validation round, with the interval of its reward."""
    points = held_out_points(rows, store)
    told = [{**row, "low": p.low, "high": p.high} for row, p in zip(rows, points, strict=True)]
    return frame(told, _ROUND_COLUMNS)


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
                "verdict": verdict_told(row),
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
    """One row per committed checkpoint, by step; ``score`` is the column that ranks them.

    A loss has no interval, and so no ``low``, ``high`` and ``tie``.
    """
    names = list(_CHECKPOINT_COLUMNS)
    if score != "held_out_reward":
        names = [name for name in names if name not in ("low", "high", "tie")]
        names[names.index("held_out_reward")] = score
    told = [
        {**c.to_row(), "low": c.held_out_low, "high": c.held_out_high, "tie": c.ties_with}
        for c in found
    ]
    return frame(told, names)


def events(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per phase the run entered."""
    return frame(list(rows), ("at", "attempt", "phase", "message"))


def held_out_points(
    rows: Iterable[Mapping[str, Any]],
    store: Store | None = None,
    steps: Collection[int] | None = None,
) -> list[HeldOutPoint]:
    """The rounds as records; with a ``store`` the complete ones, or those of them at ``steps``,
    get their interval and their tasks' rewards.
    """
    rows = list(rows)
    read = {} if store is None else rounds_read(store, rows, steps)
    return [_held_out_point(row, read.get(row["id"], NOT_READ)) for row in rows]


def _held_out_point(row: Mapping[str, Any], read: RoundRead) -> HeldOutPoint:
    return HeldOutPoint(
        step=row["step"],
        held_out_reward=row["held_out_reward"],
        round_completed=bool(row["round_completed"]),
        completed_samples=row["completed_samples"] or 0,
        expected_samples=row["expected_samples"] or 0,
        policy_version=row.get("policy_version"),
        validation_loss=row.get("loss"),
        perplexity=row.get("perplexity"),
        low=read.interval.low if read.interval else None,
        high=read.interval.high if read.interval else None,
        tasks=read.tasks,
    )


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
    """Checkpoints by step, each with the round at its step; ``store`` is what they act through.

    ``rounds`` need their tasks' rewards for ties to be found.
    """
    by_step = {point.step: point for point in rounds}
    in_order = sorted(rows, key=lambda row: (row.step, row.key))
    found = [_checkpoint(row, by_step.get(row.step), store) for row in in_order]
    competing = [n for n, c in enumerate(found) if cost(c) is not None]
    picked = pick([_candidate(found[n], by_step[found[n].step_index]) for n in competing])
    if picked is not None:
        top = found[competing[picked.top]]
        for place in picked.ties:
            at = competing[place]
            found[at] = replace(found[at], ties_with=top.step_index, _tied_reward=score_of(top))
    return found


def _candidate(checkpoint: Checkpoint, point: HeldOutPoint) -> Candidate:
    return Candidate(checkpoint.step_index, -(cost(checkpoint) or 0.0), point.tasks)


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
        held_out_low=point.low if point else None,
        held_out_high=point.high if point else None,
        _store=store,
    )


def best(found: Iterable[Checkpoint]) -> Checkpoint | None:
    """The earliest of the checkpoints that tie with the top, itself included; ``None`` if none.

    The top has the highest held-out reward of a complete round, or the lowest validation loss;
    checkpoints without weights cannot be picked. ``found`` are all checkpoints of a run.
    """
    competing = [(at, c.step_index, c) for c in found if (at := cost(c)) is not None]
    if not competing:
        return None
    _, _, top = min(competing, key=lambda each: each[:2])
    alike = [c for _, _, c in competing if c.ties_with is not None]
    return min((top, *alike), key=lambda c: c.step_index)


def score_of(checkpoint: Checkpoint) -> float | None:
    """What ranks it: its held-out reward, of a supervised run its validation loss."""
    reward = checkpoint.held_out_reward
    return checkpoint.validation_loss if reward is None else reward


def cost(checkpoint: Checkpoint) -> float | None:
    """What is to be as low as possible; ``None`` where nothing comparable was measured."""
    if not checkpoint.round_completed or not checkpoint.has_weights:
        return None
    reward = checkpoint.held_out_reward
    return checkpoint.validation_loss if reward is None else -reward
