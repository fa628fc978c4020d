"""What reward functions print: into the log, bounded, and never in anyone's way.

The workers' stdout and stderr are a pipe that a thread of the parent empties into the log file.
So output of C code and of programs that a reward starts is caught too, a worker that hangs holding
the GIL cannot block another, and no file grows past its limit. Python's own ``sys.stdout`` stops
at a limit per worker already in the worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import selectors
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

__all__ = ["OUTPUT_LIMIT", "Drain", "redirect"]

OUTPUT_LIMIT = 10 << 20
"""Bytes that one worker may print; what comes later is dropped."""

_CHUNK = 1 << 20
_ROOM = 1 << 16


class Drain:
    """Empties the output pipe of ``workers`` workers into ``path`` (appended, mode 0600)."""

    def __init__(self, path: Path, workers: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        # Room for what workers say after their limit.
        self._left = workers * OUTPUT_LIMIT + _ROOM
        reader, writer = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # a bigger pipe is only a comfort
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _CHUNK)
        os.set_blocking(reader, False)
        self._reader = reader
        self.writer = Connection(writer, readable=False)
        """The pipe's end for the workers."""
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="nbtrain-reward-log", daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        """Write a line of our own, whatever the limit."""
        with contextlib.suppress(OSError):
            os.write(self._file, f"[nbtrain] {line}\n".encode())

    def close(self) -> None:
        """Take what is in the pipe, then close everything. To be called once, workers gone."""
        self.writer.close()
        os.write(self._stop_writer, b"x")
        self._thread.join()
        for descriptor in (self._reader, self._stop_reader, self._stop_writer, self._file):
            os.close(descriptor)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            selector.register(self._stop_reader, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                stopping = self._stop_reader in ready
                if not self._empty() or stopping:
                    return

    def _empty(self) -> bool:
        """Read until the pipe is empty; False at its end."""
        # A surviving grandchild may write for ever: one pipe's worth at a time.
        for _ in range(16):
            try:
                data = os.read(self._reader, _CHUNK)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._keep(data)
        return True

    def _keep(self, data: bytes) -> None:
        if self._left <= 0:
            return
        with contextlib.suppress(OSError):  # a full disk must not stop the grading
            os.write(self._file, data[: self._left])
        self._left -= len(data)
        if self._left <= 0:
            self.say("the log has reached its limit; later output is dropped")


class _Limited(io.RawIOBase):
    """Writes to a file descriptor until ``budget`` is used up, then says so once and drops."""

    def __init__(self, descriptor: int, budget: list[int]) -> None:
        self._descriptor = descriptor
        self._budget = budget

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        size = len(view)
        keep = view[: max(0, self._budget[0])]
        while keep:
            keep = keep[os.write(self._descriptor, keep) :]
        if self._budget[0] >= 0 and size >= self._budget[0]:
            closing = f"\n[nbtrain] worker {os.getpid()} has printed {OUTPUT_LIMIT} bytes; "
            os.write(self._descriptor, f"{closing}what it prints from now on is dropped\n".encode())
            self._budget[0] = -1
        elif self._budget[0] > 0:
            self._budget[0] -= size
        return size


def redirect(pipe: Connection) -> None:
    """In a worker: stdin from nowhere, stdout and stderr into ``pipe``, limited for Python code."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(pipe.fileno(), 1)
    os.dup2(pipe.fileno(), 2)
    if nowhere > 2:
        os.close(nowhere)
    budget = [OUTPUT_LIMIT]  # one for both streams
    stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    streams = {"stdin": stdin, "stdout": _text(1, budget), "stderr": _text(2, budget)}
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _text(descriptor: int, budget: list[int]) -> IO[str]:
    raw = io.BufferedWriter(_Limited(descriptor, budget))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
