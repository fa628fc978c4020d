"""An attempt says what its job does now."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("attempts", sa.Column("activity", sa.Text(), nullable=True))
