"""Tokenized rows on the disk: written once, in order, then read row by row.

Three files in one folder: ids (int32), whether a token is trained (uint8), and where each row
begins (int64). Nothing of them is held in memory but the offsets.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

__all__ = ["RowWriter", "TokenizedRows"]

_IDS, _TRAINED, _OFFSETS = "ids.i32", "trained.u8", "offsets.i64"

Ids = npt.NDArray[np.int32]
Bits = npt.NDArray[np.bool_]


class RowWriter:
    """Appends rows to a new folder; :meth:`close` makes it whole."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._ids = (folder / _IDS).open("wb")
        self._trained = (folder / _TRAINED).open("wb")
        self._lengths: list[int] = []

    def append(self, ids: Sequence[int], trained: Sequence[bool]) -> None:
        """Add a row. The first token is never trained: nothing predicts it."""
        if len(ids) != len(trained):
            msg = f"{len(ids)} ids, {len(trained)} marks"
            raise ValueError(msg)
        marks = np.asarray(trained, dtype=np.uint8)
        marks[:1] = 0
        # numpy's own writing loses the number of the error: a full disk must be told as one
        self._ids.write(np.asarray(ids, dtype=np.int32).tobytes())
        self._trained.write(marks.tobytes())
        self._lengths.append(len(ids))

    def close(self) -> None:
        """Write the offsets; now the rows can be read."""
        self._ids.close()
        self._trained.close()
        offsets = np.zeros(len(self._lengths) + 1, dtype=np.int64)
        np.cumsum(self._lengths, out=offsets[1:])
        (self._folder / _OFFSETS).write_bytes(offsets.tobytes())

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        for file in (self._ids, self._trained):
            with suppress(OSError):  # what could not be written is told by ``error``
                file.close()


class TokenizedRows:
    """Rows that a :class:`RowWriter` wrote. Positions count from 0."""

    def __init__(self, folder: Path) -> None:
        offsets = np.fromfile(folder / _OFFSETS, dtype=np.int64)
        self._offsets = offsets
        self.lengths: npt.NDArray[np.int64] = np.diff(offsets)
        # Read by place, not mapped: mapped pages would count as this process's memory.
        self._ids = (folder / _IDS).open("rb")
        self._trained = (folder / _TRAINED).open("rb")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return int(self._offsets[-1])

    def row(self, position: int) -> tuple[Ids, Bits]:
        """A row's ids (T,) and which of them are trained (T,)."""
        start, stop = (int(self._offsets[position + one]) for one in (0, 1))
        count = stop - start
        ids = np.frombuffer(os.pread(self._ids.fileno(), 4 * count, 4 * start), dtype=np.int32)
        marks = np.frombuffer(os.pread(self._trained.fileno(), count, start), dtype=np.uint8)
        return ids, marks.astype(np.bool_)

    def close(self) -> None:
        """Close the files."""
        self._ids.close()
        self._trained.close()
