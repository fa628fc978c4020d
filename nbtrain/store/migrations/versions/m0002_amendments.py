"""Rows of earlier steps change: found by their own ids, and what they were is kept for a while."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table and three indices."""
    op.create_table(
        "amendments",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("before", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_amendments_run", "amendments", ["run", "step"], unique=False)
    op.create_index("ix_groups_group", "groups", ["run", "group_id"], unique=False)
    op.create_index(
        "ix_trajectories_trajectory",
        "trajectories",
        ["run", "trajectory_id"],
        unique=False,
        sqlite_where=sa.text("split = 'train'"),
    )
    op.create_index(
        "ix_steps_unsettled",
        "steps",
        ["run", "id"],
        unique=False,
        sqlite_where=sa.text("settled = 0"),
    )
