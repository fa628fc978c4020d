"""A child process of the host: started in the background, watched, its end explained."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nbtrain.jobs.exits import Exit
from nbtrain.jobs.memory import available_bytes
from nbtrain.processes import Identity, process_identity

__all__ = ["Child"]

# Linux counts kilobytes, macOS bytes.
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class Child:
    """One process with its output in a file, in process group ``group`` (default: its own).

    Its output goes to a file and never through a pipe: a job may print more than a pipe holds,
    and the host keeps none of it in memory.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        group: int = 0,
    ) -> None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                list(argv),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                process_group=group,
            )
        finally:
            os.close(descriptor)
        self.log = log
        self.pid = self._process.pid
        self.identity: Identity | None = process_identity(self.pid)
        self._exit: Exit | None = None
        self._free: int | None = None

    def poll(self) -> Exit | None:
        """How it ended, once it has; None while it runs."""
        if self._exit is None:
            # wait4 instead of Popen.poll: it tells this very child's peak memory.
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid == self.pid:
                code = os.waitstatus_to_exitcode(status)
                self._process.returncode = code
                self._exit = Exit(code, usage.ru_maxrss * _RSS_UNIT, self._free)
            else:
                self._free = available_bytes()  # once it is gone, its own memory is free again
        return self._exit
