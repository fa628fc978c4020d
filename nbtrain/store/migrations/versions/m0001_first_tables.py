"""The first tables: runs and all they write, workloads, base models, aliases.

A migration says everything itself: it must still do what it did when the tables have moved on.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "aliases",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("moved_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("kind", "name", name="uq_aliases"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "base_models",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("slug", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("location", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("slug"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("workload_id", sa.Text(), nullable=False),
        sa.Column("workload_name", sa.Text(), nullable=True),
        sa.Column("base_model_slug", sa.Text(), nullable=False),
        sa.Column("config_hash", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("ended", sa.Text(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("parent_run_id", sa.Text(), nullable=True),
        sa.Column("parent_checkpoint_id", sa.Text(), nullable=True),
        sa.Column("start_step", sa.Integer(), nullable=False),
        sa.Column("total_steps", sa.Integer(), nullable=False),
        sa.Column("completed_steps", sa.Integer(), nullable=False),
        sa.Column("saved_step", sa.Integer(), nullable=True),
        sa.Column("updates_applied", sa.Integer(), nullable=False),
        sa.Column("attempted_trajectories", sa.Integer(), nullable=False),
        sa.Column("graded_trajectories", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("config_name", sa.Text(), nullable=True),
        sa.Column("plan", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("resolved", sa.JSON(none_as_null=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_runs_name", "runs", ["name", "id"], unique=False)
    op.create_index("ix_runs_phase", "runs", ["phase"], unique=False)
    op.create_table(
        "workloads",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("workload_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("path", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("workload_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "attempts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("host_pid", sa.Integer(), nullable=True),
        sa.Column("host_start_time", sa.Float(), nullable=True),
        sa.Column("boot_id", sa.Text(), nullable=True),
        sa.Column("hostname", sa.Text(), nullable=True),
        sa.Column("connection_file", sa.Text(), nullable=True),
        sa.Column("rank_pids", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("heartbeat_at", sa.Float(), nullable=True),
        sa.Column("progress_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("threads", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run", "number", name="uq_attempts"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("checkpoint_id", sa.Text(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("superseded", sa.Boolean(), server_default=sa.text("0"), nullable=False),
        sa.Column("weights", sa.Boolean(), nullable=False),
        sa.Column("training_state", sa.Boolean(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=True),
        sa.Column("manifest_digest", sa.Text(), nullable=True),
        sa.Column("base_model_slug", sa.Text(), nullable=True),
        sa.Column("base_fingerprint", sa.Text(), nullable=True),
        sa.Column("workload_id", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("pinned", sa.Boolean(), server_default=sa.text("0"), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("checkpoint_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_checkpoints_run", "checkpoints", ["run", "id"], unique=False)
    op.create_table(
        "commands",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("args", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("handled_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_commands_run", "commands", ["run", "id"], unique=False)
    op.create_table(
        "groups",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("superseded", sa.Boolean(), server_default=sa.text("0"), nullable=False),
        sa.Column("group_id", sa.Integer(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=True),
        sa.Column("task_index", sa.Integer(), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=True),
        sa.Column("budget", sa.Integer(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("size", sa.Integer(), nullable=True),
        sa.Column("eligible", sa.Integer(), nullable=True),
        sa.Column("reward_mean", sa.Float(), nullable=True),
        sa.Column("reward_std", sa.Float(), nullable=True),
        sa.Column("output_tokens", sa.Integer(), nullable=True),
        sa.Column("consumed_step", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_groups_run", "groups", ["run", "id"], unique=False)
    op.create_index("ix_groups_step", "groups", ["run", "step"], unique=False)
    op.create_table(
        "phases",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_phases_run", "phases", ["run", "id"], unique=False)
    op.create_table(
        "steps",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("superseded", sa.Boolean(), server_default=sa.text("0"), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("avg_reward", sa.Float(), nullable=True),
        sa.Column("used_reward", sa.Float(), nullable=True),
        sa.Column("loss", sa.Float(), nullable=True),
        sa.Column("learning_rate", sa.Float(), nullable=True),
        sa.Column("completed_groups", sa.Integer(), nullable=True),
        sa.Column("used_groups", sa.Integer(), nullable=True),
        sa.Column("no_signal_groups", sa.Integer(), nullable=True),
        sa.Column("filtered_groups", sa.Integer(), nullable=True),
        sa.Column("too_small_groups", sa.Integer(), nullable=True),
        sa.Column("discarded_groups", sa.Integer(), nullable=True),
        sa.Column("pending_groups", sa.Integer(), nullable=True),
        sa.Column("started_groups", sa.Integer(), nullable=True),
        sa.Column("in_flight_groups", sa.Integer(), nullable=True),
        sa.Column("cancelled_groups", sa.Integer(), nullable=True),
        sa.Column("update_applied", sa.Boolean(), nullable=True),
        sa.Column("skip_reason", sa.Text(), nullable=True),
        sa.Column("settled", sa.Boolean(), nullable=False),
        sa.Column("metrics", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run", "attempt", "step", name="uq_steps"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_steps_reward",
        "steps",
        ["run", "step", "superseded", "attempt", "avg_reward", "used_reward"],
        unique=False,
    )
    op.create_index("ix_steps_run", "steps", ["run", "id"], unique=False)
    op.create_table(
        "trajectories",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("superseded", sa.Boolean(), server_default=sa.text("0"), nullable=False),
        sa.Column("split", sa.Text(), nullable=False),
        sa.Column("trajectory_id", sa.Integer(), nullable=True),
        sa.Column("group_id", sa.Integer(), nullable=True),
        sa.Column("sample", sa.Integer(), nullable=True),
        sa.Column("task_id", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("used_reward", sa.Float(), nullable=True),
        sa.Column("eligible", sa.Boolean(), nullable=True),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.Column("advantage", sa.Float(), nullable=True),
        sa.Column("turns", sa.Integer(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("output_tokens", sa.Integer(), nullable=True),
        sa.Column("policy_version", sa.Integer(), nullable=True),
        sa.Column("consumed_step", sa.Integer(), nullable=True),
        sa.Column("seconds", sa.Float(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_trajectories_held_out",
        "trajectories",
        ["run", "split", "id"],
        unique=False,
        sqlite_where=sa.text("split = 'held_out'"),
    )
    op.create_index("ix_trajectories_run", "trajectories", ["run", "id"], unique=False)
    op.create_index("ix_trajectories_step", "trajectories", ["run", "step"], unique=False)
    op.create_table(
        "validation_rounds",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("superseded", sa.Boolean(), server_default=sa.text("0"), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=True),
        sa.Column("held_out_reward", sa.Float(), nullable=True),
        sa.Column("round_completed", sa.Boolean(), nullable=False),
        sa.Column("completed_samples", sa.Integer(), nullable=True),
        sa.Column("expected_samples", sa.Integer(), nullable=True),
        sa.Column("seconds", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run", "attempt", "step", name="uq_validation_rounds"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_validation_rounds_run", "validation_rounds", ["run", "id"], unique=False)
    op.create_table(
        "trajectory_texts",
        sa.Column("first", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["first"],
            ["trajectories.id"],
        ),
        sa.PrimaryKeyConstraint("first"),
    )
