"""Processes beside this one that answer questions: started when first needed, kept warm.

What they speak is told in :mod:`nbtrain.data.serving`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from nbtrain.errors import NbtrainError, NotFound, Problem, Refused, Where
from nbtrain.store.home import private_file, private_folder

__all__ = ["WarmProcess", "kept"]

_MOST_LOG = 1 << 20
_TRIES = 2
_STOP_SECONDS = 3.0
"""How long an answer may take to stop once it is not wanted any more, before it is killed."""

T = TypeVar("T", bound="WarmProcess")
_kept: dict[tuple[object, ...], Any] = {}
_keeping = threading.Lock()


def kept(make: Callable[..., T], *where: Any) -> T:
    """The one process that ``make(*where)`` made in this Python process."""
    with _keeping:
        # A fork has its parent's objects but may not speak over its pipes.
        key = (os.getpid(), make, *where)
        if key not in _kept:
            _kept[key] = make(*where)
        found: T = _kept[key]
        return found


class WarmProcess:
    """A process of its own that lives as long as this one.

    ``home`` is where it writes its log. It is started by the first question and anew when it
    ended, or gave no sign of life for ``patience`` seconds (``first`` for the first answer,
    before which it loads libraries). Questions of several threads wait for one another. An
    interrupt stops the answer and leaves the process as it is, unless it does not stop: then it
    is killed.
    """

    module: ClassVar[str]
    """What ``python -m`` starts."""
    called: ClassVar[str]
    """Who it is, for sentences."""
    log_name: ClassVar[str]

    def __init__(
        self,
        home: Path,
        *,
        patience: float,
        first: float,
        arguments: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._patience, self._first = patience, first
        self._arguments, self._environment = arguments, environment
        self._answered = False
        self._hung: float | None = None
        self._home = home
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._asked = 0
        self._owner = os.getpid()

    @property
    def pid(self) -> int | None:
        """The process's id while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def log(self) -> Path:
        """What the process and the libraries in it wrote."""
        return self._home / self.log_name

    def request(
        self,
        request: Mapping[str, Any],
        progress: Callable[[Any], None] | None = None,
        *,
        starting: Callable[[str], None] | None = None,
    ) -> Any:
        """The result of a request.

        ``progress`` gets what the answer tells while it is made; ``starting`` (by default
        stderr) the sentence that the process has to be started first. Raises what the process
        raised, and ``NbtrainError`` when it died, or hung, twice.
        """
        with self._lock:
            for _ in range(_TRIES):
                self._asked += 1
                reply = self._tried({"id": self._asked, **request}, progress, starting)
                if reply is not None:
                    break
                ended = self._how_it_ended()
                self.close()
            else:
                msg = f"{self.called} {ended}, twice; its log is {self.log}"
                raise NbtrainError(msg)
        if "error" in reply:
            raise _error(reply["error"], self.log)
        return reply["result"]

    def close(self) -> None:
        """End the process; the next question starts another one."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return  # a fork ends with its own exit handlers, but not its parent's process
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait()
        self._ended.set()
        atexit.unregister(self.close)

    # --- asking

    def _tried(
        self,
        request: Mapping[str, Any],
        progress: Callable[[Any], None] | None,
        starting: Callable[[str], None] | None,
    ) -> dict[str, Any] | None:
        """The reply, or ``None`` where the process ended first."""
        try:
            process = self._running(starting)
            return self._exchange(process, request, progress)
        except OSError:  # it ended before or while it was asked
            return None
        except BaseException:
            # What it would still answer is no answer to the next question.
            if not self._stopped(request["id"]):
                self.close()
            raise

    def _exchange(
        self,
        process: subprocess.Popen[bytes],
        request: Mapping[str, Any],
        progress: Callable[[Any], None] | None,
    ) -> dict[str, Any] | None:
        assert process.stdin is not None
        with _Watch(process, self._patience if self._answered else self._first) as watch:
            try:
                process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
                process.stdin.flush()
                return self._reply(process, request["id"], watch, progress)
            finally:
                self._hung = watch.limit if watch.expired else None

    def _reply(
        self,
        process: subprocess.Popen[bytes],
        number: int,
        watch: _Watch | None = None,
        progress: Callable[[Any], None] | None = None,
    ) -> dict[str, Any] | None:
        assert process.stdout is not None
        for line in process.stdout:
            if watch is not None:
                watch.seen()
            try:
                reply = json.loads(line)
            except ValueError:  # not a reply: something wrote to its stdout
                continue
            if not isinstance(reply, dict) or reply.get("id") != number:
                continue
            if "progress" not in reply:
                self._answered = True
                return reply
            if progress is not None:
                progress(reply["progress"])
        return None

    def _stopped(self, number: int) -> bool:
        """Whether the process could be told to stop its answer, and has."""
        process = self._process
        if process is None or not self._answered:
            return False
        with contextlib.suppress(OSError, ValueError), _Watch(process, _STOP_SECONDS):
            process.send_signal(signal.SIGINT)
            return self._reply(process, number) is not None
        return False

    def _how_it_ended(self) -> str:
        if self._hung:
            return f"gave no sign of life for {self._hung:g} s"
        code: int | None = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1)
        if code == -signal.SIGKILL:
            return "was killed (as a system does that has no memory left)"
        return "died"

    # --- starting

    def _running(self, starting: Callable[[str], None] | None = None) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._answered = False
        said = f"starting {self.called}; this takes some seconds"
        if starting is None:
            sys.stderr.write(f"{said}\n")
        else:
            starting(said)
        private_folder(self._home)
        log = private_file(self.log)
        if log.stat().st_size > _MOST_LOG:
            log.write_bytes(b"")
        return self._started(log)

    def _started(self, log: Path) -> subprocess.Popen[bytes]:
        """A new process, started by a thread that outlives it.

        On Linux a process dies with the very thread that started it, and the one that asks may
        end with its question.
        """
        ended = self._ended = threading.Event()
        handed: queue.SimpleQueue[subprocess.Popen[bytes] | BaseException] = queue.SimpleQueue()

        def hold() -> None:
            try:
                with log.open("ab") as errors:
                    self._process = subprocess.Popen(
                        [sys.executable, "-X", "utf8", "-P", "-m", self.module, *self._arguments],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env=None if self._environment is None else dict(self._environment),
                        start_new_session=True,  # an interrupt in the notebook is not meant for it
                    )
            except BaseException as error:
                handed.put(error)
                return
            handed.put(self._process)
            ended.wait()

        threading.Thread(target=hold, daemon=True, name=f"{self.module}-holder").start()
        process = handed.get()
        if isinstance(process, BaseException):
            msg = f"{self.called} cannot be started: {process}"
            raise NbtrainError(msg) from process
        atexit.register(self.close)
        return process


class _Watch:
    """Kills a process that has not been ``seen`` for ``limit`` seconds; a context manager.

    That also ends a wait for its pipes, which knows no time limit.
    """

    def __init__(self, process: subprocess.Popen[bytes], limit: float) -> None:
        self._process, self.limit = process, limit
        self._seen = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="nbtrain-side-watch")
        self.expired = False

    def seen(self) -> None:
        """The process gave a sign of life."""
        self._seen = time.monotonic()

    def _run(self) -> None:
        while not self._done.wait(max(0.0, self._seen + self.limit - time.monotonic())):
            if time.monotonic() >= self._seen + self.limit:
                self.expired = True
                self._process.kill()
                return

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def _error(told: Mapping[str, Any], log: Path) -> Exception:
    message = str(told["message"])
    kind = told["kind"]
    if kind == "refused":
        return Refused([_problem(problem) for problem in told["problems"]])
    if kind == "not_found":
        return NotFound(message)
    if kind == "index":
        return IndexError(message)
    return NbtrainError(f"{message} (the side process's log is {log})")


def _problem(told: Mapping[str, Any]) -> Problem:
    where = told["where"]
    return Problem(**{**told, "where": None if where is None else Where(**where)})
