"""The process that loads an environment's code once and forks a process for each environment.

It is started with exec, never forked from a rank, which has threads of torch; it has no thread of
its own while it forks. It watches its children: tells the pool who died, kills on request, and
when the pool's end of its socket is gone, or its parent is, it kills everything below it and ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import selectors
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from nbtrain.environments.channel import frame, receive
from nbtrain.environments.episode import Episode, EpisodeError, log
from nbtrain.environments.packing import Packed, read_packed
from nbtrain.processes import (
    become_subreaper,
    descendants,
    die_with_parent,
    reap_orphans,
    stop_tree,
)
from nbtrain.rewards.output import redirect
from nbtrain.rewards.scoring import describe
from nbtrain.rewards.travel import open_parcel, restore

__all__ = ["FORK", "KILL", "REQUEST_BYTES", "main"]

FORK, KILL = b"F", b"K"
REQUEST_BYTES = 9
"""A request: one letter and a token of 8 bytes; with FORK comes the new process's socket."""


def main() -> None:
    """Load, say so, then fork and watch until the pool is gone. Arguments: see ``pool``."""
    control, pipe, parent, path = sys.argv[1:]
    # SIGTERM, not SIGKILL: the children's children have to be ended too, once there are any.
    die_with_parent(int(parent), signum=signal.SIGTERM, watch=False)
    become_subreaper()
    connection = socket.socket(fileno=int(control))
    redirect(Connection(int(pipe), readable=False))
    faulthandler.enable(file=2)
    packed, factory, failure = _load(path)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or every child would print it again
    gc.collect()
    gc.freeze()  # so that collections in the children do not copy every page
    connection.sendall(frame({"loaded": True, "error": failure}))
    _Keeper(connection, packed, factory).run()


def _load(path: str) -> tuple[Packed | None, Any, str | None]:
    try:
        packed = read_packed(path)
        restore(packed.parcel)
        (factory,) = open_parcel(packed.parcel)
    except BaseException as error:
        failure = f"the environment could not be loaded: {describe(error)}"
        print(failure, file=sys.stderr)
        return None, None, failure
    return packed, factory, None


class _Keeper:
    """Forks, watches and kills."""

    def __init__(self, control: socket.socket, packed: Packed | None, factory: Any) -> None:
        self._control = control
        self._packed = packed
        self._factory = factory
        self._pids: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: None)
        parent = os.getppid()
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        going = True
        while going:
            ready = {key.fileobj for key, _ in self._selector.select(timeout=1.0)}
            signals = self._signals() if self._wake_reader in ready else b""
            going = signal.SIGTERM not in signals and os.getppid() == parent
            if going and self._control in ready:
                going = self._serve()
            if signal.SIGCHLD in signals:
                self._reap()
        stop_tree(descendants(), grace=0.0, on_poll=reap_orphans)

    def _signals(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return self._wake_reader.recv(4096)
        return b""

    def _serve(self) -> bool:
        """Handle one request; False when the pool is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, REQUEST_BYTES, 1)
        except OSError:
            return False
        if len(data) < REQUEST_BYTES:
            return False
        token = int.from_bytes(data[1:], "big")
        if data[:1] == FORK:
            self._fork(token, descriptors[0])
        else:
            self._kill(token)
        return True

    def _fork(self, token: int, descriptor: int) -> None:
        keeper = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(descriptor)
            self._tell({"died": token, "error": f"no process could be started: {error}"})
            return
        if pid == 0:
            self._become(descriptor, keeper)
        os.close(descriptor)
        with contextlib.suppress(OSError):  # the child does it too, whoever comes first
            os.setpgid(pid, pid)
        self._pids[token] = pid

    def _become(self, descriptor: int, keeper: int) -> NoReturn:
        """In the child: be one environment after another until the pool is gone."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            die_with_parent(keeper, watch=False)
            self._selector.close()
            for end in (self._control, self._wake_reader, self._wake_writer):
                end.close()
            random.seed()
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed()
            assert self._packed is not None
            _Life(self._packed, self._factory).run(socket.socket(fileno=descriptor))
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(0)

    def _kill(self, token: int) -> None:
        pid = self._pids.get(token)
        if pid is None:
            return
        # Those that left the group have their parent still.
        victims = [one.pid for one in descendants(pid)]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        for victim in (pid, *victims):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(victim, signal.SIGKILL)

    def _reap(self) -> None:
        for token, pid in list(self._pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found == 0:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # what it left behind
            del self._pids[token]
            self._tell({"died": token, "code": os.waitstatus_to_exitcode(status)})
        reap_orphans(spare=set(self._pids.values()))

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(frame(message))


# --- in a forked process ---------------------------------------------------------------------


class _Life:
    """One environment after another, as the pool asks for them."""

    def __init__(self, packed: Packed, factory: Any) -> None:
        self._packed = packed
        self._factory = factory
        self._episode: Episode | None = None

    def run(self, connection: socket.socket) -> None:
        pid = os.getpid()
        while (received := receive(connection)) is not None:
            call, message = received
            began = time.monotonic()
            answer = self._answer(message)
            if os.getpid() != pid:  # user code forked and came back twice: one answers
                os._exit(0)
            answer["seconds"] = time.monotonic() - began
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # user code may have replaced or closed it
                    stream.flush()
            connection.sendall(frame(answer, call))

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._handle(message)
        except EpisodeError as error:
            text = str(error)
        except BaseException as error:  # a hostile value raises wherever it is looked at
            text = f"environment {self._packed.name!r} raised {describe(error)}"
        log(text)
        return {"error": text}

    def _handle(self, message: dict[str, Any]) -> dict[str, Any]:
        match message["call"]:
            case "open":
                return {"text": self._begin().reset(message["columns"])}
            case "probe":
                return {"contract": self._begin().contract.to_json()}
            case "drop":
                if self._episode is not None:
                    self._episode.close()
                self._episode = None
                return {}
        assert self._episode is not None
        if message["call"] == "act":
            messages, done = self._episode.act(message["reply"])
            return {"messages": messages, "done": done}
        return {"state": self._episode.finish()}

    def _begin(self) -> Episode:
        self._episode = Episode(self._packed.name, self._factory, self._packed.contract)
        return self._episode
