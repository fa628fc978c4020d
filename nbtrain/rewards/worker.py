"""The worker process: what runs beside the user's reward functions.

Imported by every spawned worker, so it imports nothing heavy. Functions run in the worker's main
thread, where signals, ``asyncio.run`` and SQLite work.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess

from nbtrain.processes import die_with_parent
from nbtrain.rewards.bundle_code import BundleFunction
from nbtrain.rewards.contract import GradeRequest, Outcome, RewardTerm
from nbtrain.rewards.forms import read_signature
from nbtrain.rewards.output import redirect
from nbtrain.rewards.packing import read_packed
from nbtrain.rewards.scoring import Unit, describe, score_units
from nbtrain.rewards.travel import open_parcel, restore

__all__ = ["EXITED_WITH_ZERO", "Answer", "Context", "grade", "hello", "initialize"]

EXITED_WITH_ZERO = 256
"""Exit code reported for a worker that ended itself with status 0, which is no success here."""

Answer = tuple[list[tuple[Unit, list[Outcome]]], list[Unit], float]
"""Outcomes by unit, units left undone, seconds spent."""

_terms: list[RewardTerm] = []
_failure: str | None = "the worker was not initialized"


class _Worker(SpawnProcess):
    """A worker process that leads a process group and is killed together with it."""

    def run(self) -> None:
        """In the child, before anything else."""
        die_with_parent(self._parent_pid)  # type: ignore[attr-defined]
        os.setpgid(0, 0)
        super().run()

    def terminate(self) -> None:
        """Kill the worker and the programs it started.

        At once, not by SIGTERM first: a hang in C code would not see it, and the pool stands
        still while it waits.
        """
        kill_group(self.pid)
        self.kill()

    @property
    def exitcode(self) -> int | None:
        """The exit code; pebble takes 0 for a wanted end and would wait for the task for ever."""
        code = super().exitcode
        return EXITED_WITH_ZERO if code == 0 else code


class Context(SpawnContext):
    """Spawned processes, with our own class for them."""

    Process = _Worker


def kill_group(pid: int | None) -> None:
    """Kill what is left of the process group that worker ``pid`` led."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def initialize(path: str, pipe: Connection) -> None:
    """Prepare this worker: output into the log, the rewards loaded once.

    Never raises: a failure to load is the answer to every call.
    """
    global _failure
    redirect(pipe)
    faulthandler.enable(file=2)
    try:
        packed = read_packed(path)
        restore(packed.parcel)
        functions = open_parcel(packed.parcel)
        for info, packed_function in zip(packed.terms, functions, strict=True):
            bundled = isinstance(packed_function, BundleFunction)
            function = packed_function.load() if bundled else packed_function
            signature = read_signature(function)
            if isinstance(signature, str):
                msg = f"reward {info.name!r} {signature}"
                raise TypeError(msg)
            _terms.append(RewardTerm(info.name, info.weight, function, signature))
        _failure = None
    except BaseException as error:
        _failure = f"the rewards could not be loaded: {describe(error)}"
        print(_failure, file=sys.stderr)


def hello() -> str | None:
    """None when the rewards are loaded, else why not."""
    return _failure


def grade(request: bytes, units: Sequence[Unit], budget: float) -> Answer:
    """Score units of a pickled :class:`GradeRequest`; begins none after ``budget`` seconds."""
    start = time.monotonic()
    loaded: GradeRequest = pickle.loads(request)
    if _failure is not None:
        count = len(loaded.completions)
        failed = Outcome("exception", error=_failure)
        done = [(u, [failed] * (count if u.sample is None else 1)) for u in units]
        return done, [], 0.0
    done, left = score_units(_terms, loaded, units, budget)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # user code may have replaced or closed it
            stream.flush()
    return done, left, time.monotonic() - start
