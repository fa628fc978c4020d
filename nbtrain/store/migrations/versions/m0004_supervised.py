"""Datasets, bundles and models; validation losses; what a run's start checks and verdict were."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def _content(name: str, key: str) -> None:
    """A table of things that are known by their content."""
    op.create_table(
        name,
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column(key, sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("path", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint(key),
        sqlite_autoincrement=True,
    )


def upgrade() -> None:
    """Add three tables and the columns."""
    _content("datasets", "dataset_id")
    _content("bundles", "bundle_id")
    op.create_table(
        "models",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("checkpoint_id", sa.Text(), nullable=False),
        sa.Column("base_model_slug", sa.Text(), nullable=False),
        sa.Column("base_fingerprint", sa.Text(), nullable=False),
        sa.Column("config_hash", sa.Text(), nullable=False),
        sa.Column("workload_id", sa.Text(), nullable=True),
        sa.Column("weights_digest", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("model_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_models_run", "models", ["run"], unique=False)
    op.create_index("ix_runs_config", "runs", ["config_hash", "id"], unique=False)
    for name in ("checks", "verdict"):
        op.add_column("runs", sa.Column(name, sa.JSON(none_as_null=True), nullable=True))
    for name in ("loss", "perplexity"):
        op.add_column("validation_rounds", sa.Column(name, sa.Float(), nullable=True))
    op.add_column("validation_rounds", sa.Column("trained_tokens", sa.Integer(), nullable=True))
