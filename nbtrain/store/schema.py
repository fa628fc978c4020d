"""The schema's version: a cheap look at every opening, Alembic only when there is work to do."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, text

from nbtrain.errors import StoreError
from nbtrain.store.connect import Database

__all__ = ["MIGRATIONS", "REVISIONS", "bring_up_to_date", "version"]

REVISIONS = ("0001", "0002", "0003", "0004")
"""Every revision this version knows, oldest first (a test holds it against the migrations)."""

MIGRATIONS = Path(__file__).parent / "migrations"


def bring_up_to_date(database: Database) -> bool:
    """Create or migrate the tables if they are not current; whether anything was done.

    Safe when several processes open at once: the migration runs in one transaction that holds
    the write lock, and whoever comes second finds the work done. Raises :class:`StoreError` for
    a store that a newer version wrote and for a database that is not a store.
    """
    with database.reading() as connection:
        if _current(connection, database.path):
            return False
    with database.writing() as connection:
        if _current(connection, database.path):
            return False
        _migrate(connection)
    return True


def version(connection: Connection) -> str | None:
    """The store's revision, or ``None`` for an empty database."""
    rows = connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'"))
    names = set(rows.scalars())
    if "alembic_version" in names:
        found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
        if found is not None:
            return str(found)
    elif not names:
        return None
    return "foreign"


def _current(connection: Connection, path: Path) -> bool:
    found = version(connection)
    if found == "foreign":
        msg = f"the database {path} holds other tables; it is not an nbtrain store"
        raise StoreError(msg)
    if found is not None and found not in REVISIONS:
        msg = (
            f"the store {path} was written by a newer nbtrain (schema {found}; this version knows "
            f"up to {REVISIONS[-1]}). Update nbtrain, or name another folder with NBTRAIN_HOME"
        )
        raise StoreError(msg)
    return found == REVISIONS[-1]


def _migrate(connection: Connection) -> None:
    # Imported here: a store that is current, the usual case, never pays for Alembic
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
