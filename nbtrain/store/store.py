"""The store: one database and one home folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Engine

from nbtrain.errors import StoreError
from nbtrain.store.connect import Database, database_path, file_url, parse_url
from nbtrain.store.entries import Entries
from nbtrain.store.home import home_folder, private_file, private_folder
from nbtrain.store.ids import check_id
from nbtrain.store.runs import Runs
from nbtrain.store.schema import bring_up_to_date

__all__ = ["Store", "open_store"]


class Store(Runs, Entries):
    """What nbtrain remembers; :func:`open_store` opens one.

    May be used from several threads and by several processes at once. Nothing read is held: every
    call is a transaction of its own.
    """

    def __init__(self, home: Path, database: Database, journal: str) -> None:
        self.home = home
        self.database = database
        self.journal = journal
        """SQLite's journal mode: ``wal``, or ``delete`` where WAL cannot be had."""

    @property
    def url(self) -> str:
        """The database's URL, as another process can open it."""
        return self.database.url.render_as_string(hide_password=False)

    @property
    def engine(self) -> Engine:
        """The SQLAlchemy engine, for what has no method."""
        return self.database.engine

    def run_folder(self, run_id: str) -> Path:
        """``home/runs/<run_id>``, made 0700. ``ValueError`` for anything but an id."""
        return private_folder(private_folder(self.home / "runs") / check_id(run_id))

    def close(self) -> None:
        """Close the connections. The store may be used again; it opens new ones."""
        self.database.engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[Path, str], Store], tuple[Path, str]]:
        """Copied and pickled, a store is where it lies."""
        return _opened_again, (self.home, self.url)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"


def _refuse_to_forget(home: Path, path: Path) -> None:
    """An empty store beside the files of runs would hide that theirs is lost."""
    if path.exists() or not (home / "runs").is_dir():
        return
    held = sum(run.is_dir() and any(run.iterdir()) for run in (home / "runs").iterdir())
    if held:
        msg = (
            f"the store {path} is gone, but {home / 'runs'} holds the files of {held:,} "
            f"run{'s' if held > 1 else ''}. Put it, or a copy, back; to begin anew, move runs/ away"
        )
        raise StoreError(msg)


def _opened_again(home: Path, url: str) -> Store:
    """The store that something was pickled with; none is made where it is not."""
    path = database_path(parse_url(url))
    if not path.exists():
        msg = f"the store {path} is not there: what was copied or pickled is read from it alone"
        raise StoreError(msg)
    return open_store(home, url)


def open_store(home: Path | None = None, url: str | None = None) -> Store:
    """Open the store, creating or migrating its tables when needed.

    ``home`` defaults to :func:`home_folder`; ``url`` to ``$NBTRAIN_STORE_URL``, else
    ``nbtrain.db`` in the home. Raises :class:`StoreError` when a newer version wrote it, when it
    cannot be written, when it is damaged, or when it is gone though the home holds runs.
    """
    home = home_folder() if home is None else private_folder(Path(home).absolute())
    stated = url or os.environ.get("NBTRAIN_STORE_URL")
    database = Database(parse_url(stated) if stated else file_url(home / "nbtrain.db"))
    if not stated:
        _refuse_to_forget(home, database.path)
    private_file(database.path)
    journal = database.journal()
    bring_up_to_date(database)
    return Store(home, database, journal)
