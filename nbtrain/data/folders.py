"""A dataset's folder: written beside its place, made durable, then put there whole.

It holds ``rows.jsonl`` (one compact line a row), ``places`` (where every 64th row begins),
``lines-…`` where the physical lines of the source are not 1, 2, 3 …, ``images.json`` where rows
name images, and ``about.json``, written last: a folder without it is none.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from nbtrain.store import sync

__all__ = [
    "ABOUT",
    "EVERY",
    "IMAGES",
    "PLACES",
    "ROWS",
    "HalfFolder",
    "line_at",
    "lines_name",
    "read_numbers",
]

ROWS = "rows.jsonl"
PLACES = "places"
IMAGES = "images.json"
ABOUT = "about.json"
EVERY = 64
"""Rows from one remembered place to the next."""

_HALF = ".half-"
_LEFT_OVER = 60.0  # seconds after which a folder that nobody holds was left by a process that died


class HalfFolder:
    """A folder in the making; a context manager that leaves nothing behind unless it was put.

    ``digest`` is the SHA-256 over the rows written so far.
    """

    def __init__(self, parent: Path) -> None:
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_HALF, dir=parent))  # 0700
        self.rows = 0
        self.bytes = 0
        self.digest = hashlib.sha256()
        self._places = array("Q")
        self._breaks = array("Q")  # pairs: the row, and its line where that is no step of one
        self._next_line = 1
        try:
            self._file: BinaryIO = self._open(ROWS)
            # Held while this process lives, so that nobody sweeps the folder away.
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def add(self, data: bytes, line: int) -> None:
        """Write one row, which stands on ``line`` of its source. Raises ``OSError``."""
        if not self.rows % EVERY:
            self._places.append(self.bytes)
        if line != self._next_line:
            self._breaks.extend((self.rows, line))
        self._next_line = line + 1
        self._file.write(data)
        self.digest.update(data)
        self.rows += 1
        self.bytes += len(data)

    def finish(self, images: Mapping[str, Any]) -> str | None:
        """Write what stands beside the rows; the name of the file of lines, if there is one."""
        self._durable(self._file)
        self._write(PLACES, self._places.tobytes())
        if images:
            self._write(IMAGES, json.dumps(images, sort_keys=True).encode())
        if not self._breaks:
            return None
        data = self._breaks.tobytes()
        name = lines_name(data)
        self._write(name, data)
        return name

    def put(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Let the folder take its place; one that is there gets every file anew, one by one."""
        self._write(ABOUT, json.dumps(about, indent=1, allow_nan=False).encode())
        sync(self.path)
        try:
            self.path.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if not folder.is_dir():
                folder.unlink()
                folder.mkdir(mode=0o700)
            names = sorted(entry.name for entry in self.path.iterdir())
            for name in sorted(names, key=lambda name: name == ABOUT):
                (self.path / name).replace(folder / name)
            sync(folder)
        sync(folder.parent)

    def __enter__(self) -> HalfFolder:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # what could not be flushed is thrown away with the folder
            self._file.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _open(self, name: str) -> BinaryIO:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        return os.fdopen(os.open(self.path / name, flags, 0o600), "wb", buffering=2**20)

    def _write(self, name: str, data: bytes) -> None:
        with self._open(name) as file:
            file.write(data)
            self._durable(file)

    @staticmethod
    def _durable(file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())


def _sweep(parent: Path) -> None:
    """Remove what processes that died left behind."""
    for left in parent.glob(f"{_HALF}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime < _LEFT_OVER:
                continue
            with suppress(FileNotFoundError), (left / ROWS).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: somebody holds it
            shutil.rmtree(left, ignore_errors=True)


def lines_name(data: bytes) -> str:
    """Of a file of lines, by its content: a folder may hold the lines of several sources."""
    return f"lines-{hashlib.sha256(data).hexdigest()[:16]}"


def read_numbers(path: Path) -> array[int]:
    """Whole numbers as they were written. Raises ``OSError`` and ``ValueError``."""
    numbers = array("Q")
    numbers.frombytes(path.read_bytes())
    return numbers


def line_at(breaks: array[int], index: int) -> int:
    """The physical line of a row, from the pairs of rows and lines where the count breaks."""
    low, high = 0, len(breaks) // 2
    while low < high:
        middle = (low + high) // 2
        if breaks[2 * middle] <= index:
            low = middle + 1
        else:
            high = middle
    if not low:
        return index + 1
    return breaks[2 * low - 1] + index - breaks[2 * low - 2]
