"""The pool's hold on its zygote: starting it, asking for processes, hearing of deaths."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nbtrain.environments.channel import Channel
from nbtrain.environments.zygote import FORK, KILL
from nbtrain.rewards.crew import how_it_died

__all__ = ["Nursery"]

_PROGRAM = "from nbtrain.environments.zygote import main; main()"
_STOP_SECONDS = 5.0


class Nursery:
    """A zygote that has the environment at ``path`` loaded; its output goes to ``pipe``."""

    def __init__(self, path: Path, pipe: Connection) -> None:
        self._path = path
        self._pipe = pipe
        self._process: subprocess.Popen[bytes] | None = None
        self.channel: Channel
        self.loaded = False
        self.failure: str | None = None
        """Why nothing can be started any more."""

    def start(self) -> None:
        """Start the zygote, by exec: whoever calls has threads that must not be forked."""
        self.loaded = False
        ours, theirs = socket.socketpair()
        descriptors = (theirs.fileno(), self._pipe.fileno())
        arguments = [*map(str, descriptors), str(os.getpid()), str(self._path)]
        self._process = subprocess.Popen(
            [sys.executable, "-X", "utf8", "-P", "-c", _PROGRAM, *arguments],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        theirs.close()
        self.channel = Channel(ours)

    def fork(self, token: int) -> Channel:
        """Ask for a process; its channel can be used at once."""
        ours, theirs = socket.socketpair()
        control = self.channel.socket
        with contextlib.suppress(OSError), theirs:  # a dead zygote shows at its channel's end
            control.settimeout(_STOP_SECONDS)
            socket.send_fds(control, [_request(FORK, token)], [theirs.fileno()])
        control.setblocking(False)
        return Channel(ours)

    def kill(self, token: int) -> None:
        """Have a process killed, and all it started."""
        self.channel.send(_request(KILL, token))

    def hear(self) -> list[dict[str, Any]]:
        """Who died since the last call."""
        died = []
        for _, told in self.channel.received():
            if "loaded" in told:
                self.loaded, self.failure = True, told["error"]
            else:
                died.append(told)
        return died

    def how_it_ended(self) -> str:
        """A clause on how the zygote ended."""
        assert self._process is not None
        try:
            return how_it_died(self._process.wait(_STOP_SECONDS))
        except subprocess.TimeoutExpired:
            return "it closed its channel"

    def stop(self) -> None:
        """End the zygote and everything below it."""
        if self._process is None:
            return
        process, self._process = self._process, None
        self.channel.close()  # it ends what is below it and goes
        try:
            # One that hangs while it loads has forked nothing, and does not look.
            process.wait(_STOP_SECONDS if self.loaded else 0.5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _request(what: bytes, token: int) -> bytes:
    return what + token.to_bytes(8, "big")
