"""The side process that a notebook asks about tokens: started when first needed, kept warm."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.errors import NbtrainError, NotFound, Problem, Refused, Where
from nbtrain.store.home import private_file, private_folder

if TYPE_CHECKING:
    from nbtrain.catalog.base_models import BaseModel
    from nbtrain.data.analysis import Analysis
    from nbtrain.data.dataset import Dataset
    from nbtrain.data.masks import LossRules

__all__ = ["SideProcess", "side_process"]

_LOG = "side.log"
_MOST_LOG = 1 << 20
_TRIES = 2

_kept: dict[tuple[int, Path], SideProcess] = {}
_keeping = threading.Lock()


def side_process(home: Path) -> SideProcess:
    """The one side process that this Python process has for a home."""
    with _keeping:
        # A fork has its parent's objects but may not speak over its pipes.
        key = (os.getpid(), home)
        if key not in _kept:
            _kept[key] = SideProcess(home)
        return _kept[key]


class SideProcess:
    """Answers what needs a tokenizer, from a process of its own that lives as long as this one.

    ``home`` is where it writes its log, ``side.log``. It is started by the first question and
    anew when it died, or gave no sign of life for ``patience`` seconds (``first`` for the first
    answer, before which it loads libraries); questions of several threads wait for one another.
    """

    def __init__(self, home: Path, *, patience: float = 60.0, first: float = 300.0) -> None:
        self._patience, self._first = patience, first
        self._answered = False
        self._hung: float | None = None
        self._home = home
        self._process: subprocess.Popen[bytes] | None = None
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
        return self._home / _LOG

    def analyze(
        self,
        dataset: Dataset,
        model: BaseModel,
        rules: LossRules | None = None,
        max_length: int = 2048,
        progress: Callable[[int], None] | None = None,
    ) -> Analysis:
        """Lengths and findings of a dataset under a model's tokenizer; takes minutes for 100,000
        rows. ``progress`` is called with rows done. Raises ``Refused`` and ``NbtrainError``.
        """
        from nbtrain.data.analysis import Analysis

        found = self._ask(
            "analyze", dataset, model, rules, progress=progress, max_length=max_length
        )
        return Analysis.from_json(found)

    def rows(
        self,
        dataset: Dataset,
        model: BaseModel,
        rules: LossRules | None = None,
        offset: int = 0,
        limit: int = 25,
    ) -> list[dict[str, Any]]:
        """A page of rows with token counts and marked text, as
        :func:`nbtrain.data.analysis.rows_page` gives them.
        """
        page: list[dict[str, Any]] = self._ask(
            "rows", dataset, model, rules, offset=offset, limit=limit
        )
        return page

    def preview(
        self, dataset: Dataset, model: BaseModel, rules: LossRules | None = None, row: int = 0
    ) -> dict[str, Any]:
        """One row, counted from 0: ``text`` and ``html`` with the trained parts marked, ``line``,
        ``tokens`` and ``trained``. Raises ``Refused`` naming the line of a row that cannot be
        trained on, and for one that there is not.
        """
        shown: dict[str, Any] = self._ask("preview", dataset, model, rules, row=row)
        return shown

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
        atexit.unregister(self.close)

    # --- asking

    def _ask(
        self,
        op: str,
        dataset: Dataset,
        model: BaseModel,
        rules: LossRules | None,
        progress: Callable[[int], None] | None = None,
        **more: object,
    ) -> Any:
        request: dict[str, Any] = {
            "op": op,
            "dataset": {"folder": str(dataset.folder), "name": dataset.name},
            "model": {"kind": model.kind, "location": str(model.location)},
            "rules": {} if rules is None else asdict(rules),
            **more,
        }
        return self._request(request, progress)

    def _request(
        self, request: Mapping[str, Any], progress: Callable[[int], None] | None = None
    ) -> Any:
        with self._lock:
            for _ in range(_TRIES):
                self._asked += 1
                try:
                    reply = self._exchange({"id": self._asked, **request}, progress)
                except OSError:  # it died before or while it was asked
                    reply = None
                except BaseException:
                    # What it would still answer is no answer to the next question.
                    self.close()
                    raise
                if reply is not None:
                    break
                self.close()
            else:
                ended = f"gave no sign of life for {self._hung:g} s" if self._hung else "died"
                msg = f"the process that knows tokenizers {ended}, twice; its log is {self.log}"
                raise NbtrainError(msg)
        if "error" in reply:
            raise _error(reply["error"], self.log)
        return reply["result"]

    def _exchange(
        self, request: Mapping[str, Any], progress: Callable[[int], None] | None
    ) -> dict[str, Any] | None:
        """The reply, or ``None`` where the process ended first."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        with _Watch(process, self._patience if self._answered else self._first) as watch:
            try:
                process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
                process.stdin.flush()
                for line in process.stdout:
                    watch.seen()
                    try:
                        reply = json.loads(line)
                    except ValueError:  # not a reply: something wrote to its stdout
                        continue
                    if not isinstance(reply, dict) or reply.get("id") != request["id"]:
                        continue
                    if "progress" not in reply:
                        self._answered = True
                        return reply
                    if progress is not None:
                        progress(int(reply["progress"]))
            finally:
                self._hung = watch.limit if watch.expired else None
        return None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._answered = False
        sys.stderr.write("starting the process that knows tokenizers; this takes some seconds\n")
        private_folder(self._home)
        log = private_file(self.log)
        if log.stat().st_size > _MOST_LOG:
            log.write_bytes(b"")
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "utf8", "-P", "-m", "nbtrain.data.side"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # an interrupt in the notebook is not meant for it
            )
        atexit.register(self.close)
        return self._process


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
    if kind in ("row", "refused"):
        return Refused([_problem(problem) for problem in told["problems"]])
    if kind == "not_found":
        return NotFound(message)
    if kind == "index":
        return IndexError(message)
    return NbtrainError(f"{message} (the side process's log is {log})")


def _problem(told: Mapping[str, Any]) -> Problem:
    where = told["where"]
    return Problem(**{**told, "where": None if where is None else Where(**where)})
