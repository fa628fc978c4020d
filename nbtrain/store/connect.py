"""Connections to the database: how they are set up, and what its errors mean to a person."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sqlite3
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError

from nbtrain.errors import StoreError
from nbtrain.store.presence import Presence

__all__ = ["BUSY_SECONDS", "Database", "database_path", "file_url", "parse_url"]

BUSY_SECONDS = 20.0
"""How long a writer waits for another process's transaction before it gives up."""

_WRITE = "nbtrain_write"
_CURSORS = "nbtrain_cursors"

_dumps = functools.partial(json.dumps, allow_nan=False, separators=(",", ":"))


def parse_url(url: str) -> URL:
    """The parsed URL of a store. Raises :class:`StoreError` for what is not built yet."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        msg = f"{url!r} is no store URL; one looks like sqlite:////folder/nbtrain.db"
        raise StoreError(msg) from error
    backend = parsed.get_backend_name()
    if backend != "sqlite":
        msg = f"the store URL names {backend}, which is not built yet; only sqlite:///… is"
        raise StoreError(msg)
    if not parsed.database or parsed.database == ":memory:":
        msg = f"the store URL {url!r} names no file, so no other process could see the store"
        raise StoreError(msg)
    # Host and rank open the same URL from folders of their own
    prefix = "file:" if parsed.database.startswith("file:") else ""
    path = Path(parsed.database.removeprefix("file:")).absolute()
    return parsed.set(database=f"{prefix}{path}")


def file_url(path: Path) -> URL:
    """The URL of a store in a file, whatever characters its path has."""
    if "?" not in str(path):
        return URL.create("sqlite", database=str(path))
    return URL.create("sqlite", database=f"file:{quote(str(path))}", query={"uri": "true"})


def database_path(url: URL) -> Path:
    """The database file that a store URL names (also in its ``file:…?uri=true`` form)."""
    name = url.database or ""
    return Path(unquote(name.removeprefix("file:")) if name.startswith("file:") else name)


class Database:
    """An engine on one SQLite file.

    Reading takes a deferred transaction, writing an immediate one: a writer waits up to
    :data:`BUSY_SECONDS` for the other writer instead of failing halfway. Whatever the database
    complains about leaves as :class:`StoreError` with a sentence; the transaction is rolled back
    whole and may be tried again.
    """

    def __init__(self, url: URL) -> None:
        self.path = database_path(url)
        self.url = url
        self.engine: Engine = create_engine(
            url,
            connect_args={"timeout": BUSY_SECONDS},
            json_serializer=_dumps,
            hide_parameters=True,  # a message about a failed insert would hold whole texts
        )
        self.presence = Presence(self.engine, self.path)
        event.listen(self.engine, "connect", self._set_up)
        event.listen(self.engine, "begin", _begin)
        event.listen(self.engine, "after_cursor_execute", _remember)
        self._writer = self.engine.execution_options(**{_WRITE: True})
        _dispose_after_fork(self.engine)

    def _set_up(self, dbapi_connection: Any, _record: object) -> None:
        dbapi_connection.isolation_level = None  # BEGIN is ours: see _begin
        dbapi_connection.execute("PRAGMA foreign_keys=ON")
        (mode,) = dbapi_connection.execute("PRAGMA journal_mode").fetchone()
        # In WAL a commit survives the death of any process without an fsync of its own; a
        # rollback journal without one can be torn by a power cut
        dbapi_connection.execute(f"PRAGMA synchronous={'NORMAL' if mode == 'wal' else 'FULL'}")

    def journal(self) -> str:
        """Switch to WAL where the file system can do it; the mode that holds: wal, delete, ….

        Warns when WAL cannot be had. Two processes may do this at once on a new file: SQLite
        answers "locked" there without waiting, so the waiting is done here.
        """
        with self.translated():
            mode = _patiently(self._switch_to_wal)
        if mode != "wal":
            msg = (
                f"the file system of {self.path} has no shared memory for SQLite's WAL; "
                "a rollback journal is used: readers and the job wait for each other. "
                "NBTRAIN_HOME on a local disk is faster"
            )
            warnings.warn(msg, RuntimeWarning, stacklevel=3)
        return mode

    def _switch_to_wal(self) -> str:
        raw = self.engine.raw_connection()
        try:
            cursor = raw.cursor()
            (mode,) = cursor.execute("PRAGMA journal_mode").fetchone()
            if mode != "wal":
                (mode,) = cursor.execute("PRAGMA journal_mode=WAL").fetchone()
                cursor.execute(f"PRAGMA synchronous={'NORMAL' if mode == 'wal' else 'FULL'}")
            cursor.close()
        finally:
            raw.close()
        return str(mode)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A short transaction that sees one state of the database.

        What was not read to its end is dropped with it: a cursor that lives on, in the traceback
        of an error say, would hold its connection at that state for as long.
        """
        with self.translated(), self.engine.connect() as connection:
            try:
                yield connection
            finally:
                _close_cursors(connection)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that holds the write lock from its begin; committed whole or not at all."""
        with self.translated(), self._writer.begin() as connection:
            try:
                yield connection
            finally:
                _close_cursors(connection)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turn the database's errors into :class:`StoreError`; a broken rule passes as it is."""
        try:
            yield
        except IntegrityError:
            raise
        except DBAPIError as error:
            raise StoreError(self._sentence(str(error.orig))) from error
        except sqlite3.Error as error:  # while a connection was being set up
            raise StoreError(self._sentence(str(error))) from error

    def _sentence(self, complaint: str) -> str:
        for sign, sentence in _SENTENCES.items():
            if sign in complaint:
                return sentence.format(path=self.path, free=_free(self.path), found=complaint)
        return f"the store {self.path} answers: {complaint}"


_WHOLE = "Nothing was half-written"
_SENTENCES = {
    "disk is full": "the disk of the store {path} is full ({free} free). "
    f"{_WHOLE}; free some space and try again",
    "disk I/O error": "the disk of the store {path} fails ({found}, {free} free). " + _WHOLE,
    "readonly": "the store {path} cannot be written: the file or its folder is read-only",
    "malformed": "the store {path} is damaged ({found}). Move it away together with its -wal "
    "file and restore a copy; checkpoints under runs/ are not touched by this",
    "not a database": "the file {path} is not an nbtrain store ({found})",
    "locked": f"the store {{path}} was locked by another process for {BUSY_SECONDS:.0f} s. "
    f"{_WHOLE}; try again",
    "no such table": "the store {path} has no tables of nbtrain ({found}): its file was "
    "emptied, or another one was put in its place. Put it, or a copy, back",
    "unable to open": "the store {path} cannot be opened: its folder is missing, or not "
    "readable and writable for this user",
}


def _free(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path.parent).free / 2**20:.0f} MiB"
    except OSError:
        return "an unknown amount"


def _begin(connection: Connection) -> None:
    write = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _remember(connection: Connection, cursor: Any, *_: object) -> None:
    connection.info.setdefault(_CURSORS, []).append(cursor)


def _close_cursors(connection: Connection) -> None:
    if not connection.closed and not connection.invalidated:
        for cursor in connection.info.pop(_CURSORS, ()):
            with suppress(sqlite3.Error):
                cursor.close()


def _patiently(action: Callable[[], str]) -> str:
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return action()
        except (sqlite3.OperationalError, DBAPIError) as error:
            if "locked" not in str(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.02)


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _dispose_after_fork(engine: Engine) -> None:
    """A forked child opens its own connections: SQLite's must not be carried across a fork."""
    if not _engines:
        os.register_at_fork(after_in_child=_forget_connections)
    _engines.add(engine)


def _forget_connections() -> None:
    for engine in list(_engines):
        engine.dispose(close=False)
