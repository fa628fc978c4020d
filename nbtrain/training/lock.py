"""One writer per run folder, for as long as it writes."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nbtrain.errors import NbtrainError

_PATIENCE_SECONDS = 5.0  # a killed predecessor's processes may take a moment to go


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises :class:`NbtrainError` when another process keeps it."""
    end = time.monotonic() + _PATIENCE_SECONDS
    with (folder / "writer.lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    msg = f"another process is writing to {folder.name}"
                    raise NbtrainError(msg) from error
                time.sleep(0.1)
        yield
