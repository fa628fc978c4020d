"""The tables, as the newest migration leaves them.

Integer keys inside (``run`` is ``runs.id``); hex ids stand only in the tables that carry them.
Times are float seconds since 1970, UTC. Ids are never given out twice (``AUTOINCREMENT``), so
that "rows after id N" misses nothing. A test holds this module against the migrations.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

metadata = MetaData()


def _json(name: str) -> Column[Any]:
    return Column(name, JSON(none_as_null=True))


def _run() -> Column[int]:
    return Column("run", Integer, ForeignKey("runs.id"), nullable=False)


def _placed() -> list[Column[Any]]:
    """Columns of everything that a step of an attempt wrote."""
    return [
        _run(),
        Column("attempt", Integer, nullable=False),
        Column("step", Integer, nullable=False),
        Column("superseded", Boolean, nullable=False, server_default=false()),
    ]


def _table(name: str, *items: Any) -> Table:
    key: Column[int] = Column("id", Integer, primary_key=True)
    return Table(name, metadata, key, *items, sqlite_autoincrement=True)


runs = _table(
    "runs",
    Column("run_id", Text, nullable=False, unique=True),
    Column("name", Text),
    Column("kind", Text, nullable=False),
    Column("method", Text, nullable=False),
    Column("workload_id", Text, nullable=False),
    Column("workload_name", Text),
    Column("base_model_slug", Text, nullable=False),
    Column("config_hash", Text, nullable=False),
    Column("phase", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("ended", Text),
    Column("failure", Text),
    Column("parent_run_id", Text),
    Column("parent_checkpoint_id", Text),
    Column("start_step", Integer, nullable=False),
    Column("total_steps", Integer, nullable=False),
    Column("completed_steps", Integer, nullable=False),
    Column("saved_step", Integer),
    Column("updates_applied", Integer, nullable=False),
    Column("attempted_trajectories", Integer, nullable=False),
    Column("graded_trajectories", Integer, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("description", Text),
    Column("config_name", Text),
    _json("plan"),
    _json("resolved"),
    # What its start checks measured, and what a smoke check found
    _json("checks"),
    _json("verdict"),
    Index("ix_runs_name", "name", "id"),
    Index("ix_runs_phase", "phase"),
    Index("ix_runs_config", "config_hash", "id"),
)

attempts = _table(
    "attempts",
    _run(),
    Column("number", Integer, nullable=False),
    Column("host_pid", Integer),
    Column("host_start_time", Float),
    Column("boot_id", Text),
    Column("hostname", Text),
    Column("connection_file", Text),
    _json("rank_pids"),
    Column("started_at", Float),
    Column("heartbeat_at", Float),
    Column("progress_at", Float),
    Column("ended_at", Float),
    Column("exit_code", Integer),
    Column("threads", Integer),
    Column("activity", Text),
    UniqueConstraint("run", "number", name="uq_attempts"),
)

phases = _table(
    "phases",
    _run(),
    Column("attempt", Integer, nullable=False),
    Column("phase", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("message", Text),
    Index("ix_phases_run", "run", "id"),
)

steps = _table(
    "steps",
    *_placed(),
    Column("created_at", Float, nullable=False),
    Column("avg_reward", Float),
    Column("used_reward", Float),
    Column("loss", Float),
    Column("learning_rate", Float),
    Column("completed_groups", Integer),
    Column("used_groups", Integer),
    Column("no_signal_groups", Integer),
    Column("filtered_groups", Integer),
    Column("too_small_groups", Integer),
    Column("discarded_groups", Integer),
    Column("pending_groups", Integer),
    Column("started_groups", Integer),
    Column("in_flight_groups", Integer),
    Column("cancelled_groups", Integer),
    Column("update_applied", Boolean),
    Column("skip_reason", Text),
    Column("settled", Boolean, nullable=False),
    _json("metrics"),
    UniqueConstraint("run", "attempt", "step", name="uq_steps"),
    Index("ix_steps_run", "run", "id"),
    # The few that a poller has to read again
    Index("ix_steps_unsettled", "run", "id", sqlite_where=text("settled = 0")),
    # Covers the reward history: 9 ms instead of 322 for 10,000 steps read cold, since the
    # pages with the metrics stay unread
    Index(
        "ix_steps_reward",
        *("run", "step", "superseded", "attempt", "avg_reward", "used_reward"),
    ),
)

groups = _table(
    "groups",
    *_placed(),
    Column("group_id", Integer, nullable=False),
    Column("task_id", Text),
    Column("task_index", Integer),
    Column("epoch", Integer),
    Column("budget", Integer),
    Column("outcome", Text),
    Column("reason", Text),
    Column("size", Integer),
    Column("eligible", Integer),
    Column("reward_mean", Float),
    Column("reward_std", Float),
    Column("output_tokens", Integer),
    Column("consumed_step", Integer),
    Index("ix_groups_run", "run", "id"),
    Index("ix_groups_step", "run", "step"),
    Index("ix_groups_group", "run", "group_id"),
)

trajectories = _table(
    "trajectories",
    *_placed(),
    Column("split", Text, nullable=False),
    Column("trajectory_id", Integer),
    Column("group_id", Integer),
    Column("sample", Integer),
    Column("task_id", Text),
    Column("status", Text),
    Column("reason", Text),
    Column("reward", Float),
    Column("used_reward", Float),
    Column("eligible", Boolean),
    Column("verdict", Text),
    Column("advantage", Float),
    Column("turns", Integer),
    Column("prompt_tokens", Integer),
    Column("output_tokens", Integer),
    Column("policy_version", Integer),
    Column("consumed_step", Integer),
    Column("seconds", Float),
    Column("error", Text),
    Index("ix_trajectories_run", "run", "id"),
    Index("ix_trajectories_step", "run", "step"),
    # To amend them by their own id; held-out ones have ids of their own kind
    Index(
        "ix_trajectories_trajectory",
        *("run", "trajectory_id"),
        sqlite_where=text("split = 'train'"),
    ),
    # Held-out ones are few: without this, finding them reads a run's every trajectory
    # ("split" leads SQLite to choose it over the first index; it is the same in every entry)
    Index(
        "ix_trajectories_held_out",
        *("run", "split", "id"),
        sqlite_where=text("split = 'held_out'"),
    ),
)

trajectory_texts = Table(
    "trajectory_texts",
    metadata,
    # A block of texts of consecutive trajectories, by the key of the first
    Column("first", Integer, ForeignKey("trajectories.id"), primary_key=True),
    Column("data", LargeBinary, nullable=False),
)

validation_rounds = _table(
    "validation_rounds",
    *_placed(),
    Column("policy_version", Integer),
    Column("held_out_reward", Float),
    Column("round_completed", Boolean, nullable=False),
    Column("completed_samples", Integer),
    Column("expected_samples", Integer),
    Column("seconds", Float),
    Column("created_at", Float, nullable=False),
    # Of supervised runs: weighted by trained tokens, of which there are so many
    Column("loss", Float),
    Column("perplexity", Float),
    Column("trained_tokens", Integer),
    UniqueConstraint("run", "attempt", "step", name="uq_validation_rounds"),
    Index("ix_validation_rounds_run", "run", "id"),
)

checkpoints = _table(
    "checkpoints",
    Column("checkpoint_id", Text, nullable=False, unique=True),
    *_placed(),
    Column("weights", Boolean, nullable=False),
    Column("training_state", Boolean, nullable=False),
    Column("path", Text, nullable=False),
    Column("size_bytes", Integer),
    Column("manifest_digest", Text),
    Column("base_model_slug", Text),
    Column("base_fingerprint", Text),
    Column("workload_id", Text),
    Column("reason", Text),
    Column("pinned", Boolean, nullable=False, server_default=false()),
    Column("created_at", Float, nullable=False),
    Index("ix_checkpoints_run", "run", "id"),
)

amendments = _table(
    "amendments",
    _run(),
    # The step that changed earlier ones, and what these were before
    Column("step", Integer, nullable=False),
    _json("before"),
    Index("ix_amendments_run", "run", "step"),
)

commands = _table(
    "commands",
    _run(),
    Column("command", Text, nullable=False),
    _json("args"),
    Column("created_at", Float, nullable=False),
    Column("handled_at", Float),
    Index("ix_commands_run", "run", "id"),
)

workloads = _table(
    "workloads",
    Column("workload_id", Text, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
    _json("spec"),
    Column("path", Text),
)

aliases = _table(
    "aliases",
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("moved_at", Float, nullable=False),
    UniqueConstraint("kind", "name", name="uq_aliases"),
)

base_models = _table(
    "base_models",
    Column("slug", Text, nullable=False, unique=True),
    Column("kind", Text, nullable=False),
    Column("location", Text, nullable=False),
    Column("fingerprint", Text, nullable=False),
    _json("spec"),
    Column("created_at", Float, nullable=False),
)

datasets = _table(
    "datasets",
    Column("dataset_id", Text, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
    _json("spec"),
    Column("path", Text),
)

bundles = _table(
    "bundles",
    Column("bundle_id", Text, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
    _json("spec"),
    Column("path", Text),
)

models = _table(
    "models",
    Column("model_id", Text, nullable=False, unique=True),
    _run(),
    Column("checkpoint_id", Text, nullable=False),
    Column("base_model_slug", Text, nullable=False),
    Column("base_fingerprint", Text, nullable=False),
    Column("config_hash", Text, nullable=False),
    Column("workload_id", Text),
    # SHA-256 of the adapter's weights
    Column("weights_digest", Text, nullable=False),
    Column("path", Text, nullable=False),
    _json("spec"),
    Column("created_at", Float, nullable=False),
    Index("ix_models_run", "run"),
)
