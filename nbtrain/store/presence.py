"""Whether the database's file is still the one that was opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import InvalidatePoolError

from nbtrain.errors import StoreError

__all__ = ["Presence"]

_FILE = "nbtrain_file"


class Presence:
    """Watches the file behind an engine's connections, which SQLite itself never looks at again.

    A connection to a file that was removed or replaced meanwhile is dropped as it is taken from
    the pool, with all others. Where the file is gone, :class:`~nbtrain.errors.StoreError` says so
    instead of SQLite making an empty one. ``replaced`` tells that another file was opened since.
    """

    def __init__(self, engine: Engine, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self.replaced = False
        event.listen(engine, "do_connect", self._about_to_connect)
        event.listen(engine, "connect", self._connected)
        event.listen(engine, "checkout", self._taken)

    def _found(self) -> tuple[int, int] | None:
        """Device and number of the file; those known where it may not be looked at."""
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return self._file
        return found.st_dev, found.st_ino

    def _about_to_connect(self, *_: object) -> None:
        if self._file is not None and self._found() is None:
            msg = (
                f"the store {self._path} is gone: its file was there when it was opened. Put it, "
                "or a copy, back; what lies under runs/ is not touched by this"
            )
            raise StoreError(msg)

    def _connected(self, _connection: object, record: Any) -> None:
        found = self._found()
        self.replaced = self.replaced or self._file not in (None, found)
        self._file = record.info[_FILE] = found

    def _taken(self, _connection: object, record: Any, _proxy: object) -> None:
        if record.info.get(_FILE) != self._found():
            msg = "the file is another one"
            raise InvalidatePoolError(msg)
