"""Alembic's entry: migrates over the connection, and inside the transaction, that it is given."""

from __future__ import annotations

from alembic import context

from nbtrain.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite changes a table by copying it
)
context.run_migrations()
