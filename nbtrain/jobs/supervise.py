"""The host's work: walk the phases, run the rank, stop it when asked, say how it ended.

All of it happens in one thread that outlives the rank: Linux's parent-death signal is bound to
the thread that started a process. The kernel's main thread stays free for consoles.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nbtrain.jobs.children import Child
from nbtrain.jobs.environment import available_cores, has_gpu, rank_environment, rank_threads
from nbtrain.jobs.exits import Exit, explain, verdict
from nbtrain.jobs.family import Family
from nbtrain.plan.phases import TERMINAL, Phase
from nbtrain.processes import Identity, mark_of
from nbtrain.store import Row, Store, StoredRun
from nbtrain.training.outcome import Outcome, read_outcome
from nbtrain.training.partials import clear_partial

__all__ = ["RANK_MODULE", "Limits", "Supervisor"]

RANK_MODULE = "nbtrain.training.main"
_PREPARE_MODULE = "nbtrain.training.prepare_model"

log = logging.getLogger("nbtrain.host")


@dataclass(frozen=True, slots=True)
class Limits:
    """The host's times, in seconds."""

    poll: float = 0.25
    """Between two looks at the child."""
    commands: float = 0.5
    """Between two looks at the commands."""
    heartbeat: float = 2.0
    react: float = 10.0
    """A cancel that the rank has not answered by then is done by the host."""
    save: float = 60.0
    """A rank that has answered a cancel may save for so long."""
    term: float = 3.0
    """From SIGTERM to SIGKILL."""
    store: float = 60.0
    """How long to insist on writing a phase to a store that refuses."""


class LostRunError(Exception):
    """The run is no longer this host's: it was ended, or another attempt has begun."""


class Supervisor:
    """Runs one attempt of one run to its end; see :meth:`run`.

    ``rank_module`` is the module that is run as the rank.
    """

    def __init__(
        self,
        store: Store,
        run: StoredRun,
        *,
        rank_module: str = RANK_MODULE,
        limits: Limits | None = None,
    ) -> None:
        self._store = store
        self._run = run
        self._rank_module = rank_module
        self._limits = limits or Limits()
        self._folder = store.run_folder(run.run_id)
        self._mark = mark_of(run.run_id, run.attempt)
        self._family = Family(self._mark)
        self._began = time.time()
        self._wake = threading.Event()
        self._signalled = False
        self._cancelled_at: float | None = None
        self._answered = False
        self._stopped = False
        self._due: dict[str, float] = {}

    # --- from other threads -------------------------------------------------------------------

    def wake(self) -> None:
        """Look at the commands now instead of a little later."""
        self._due["commands"] = 0.0
        self._wake.set()

    def cancel(self) -> None:
        """Cancel the run, as a command in the store would. Safe in a signal handler."""
        self._signalled = True
        self.wake()

    # --- the attempt ----------------------------------------------------------------------------

    def run(self) -> Phase | None:
        """Take the attempt through its phases; its terminal phase, None if the run was lost.

        Never raises for what happens to the job: that becomes the run's failure.
        """
        try:
            self._family.watch_over()
            outcome = self._work()
        except LostRunError as lost:
            log.warning("%s", lost)
            self._sweep()
            return None
        except Exception as error:
            log.exception("the host failed")
            outcome = Outcome("failed", None, f"the host failed: {type(error).__name__}: {error}")
        self._insist(lambda: self._move(Phase.CLEANING_UP))
        self._sweep()
        self._quietly(self._answer_cancels)
        phase = Phase[outcome.result.upper()]
        moved = self._insist(
            lambda: self._move(phase, ended=outcome.ended, failure=outcome.failure)
        )
        log.info("%s%s", phase, "" if moved else " could not be recorded")
        return phase if moved else None

    def _work(self) -> Outcome:
        resolved = self._run.resolved
        tasks = self._store.home / "workloads" / self._run.workload_id / "workload.json"
        if not tasks.is_file():
            return Outcome("failed", None, f"the workload's folder is gone ({tasks.parent})")
        self._enter(Phase.AWAITING_BASE_MODEL)
        if _weights_missing(resolved["base_model"], self._store.home):
            failed = self._prepare_model()
            if failed is not None:
                return failed
        self._enter(Phase.AWAITING_CAPACITY)
        self._enter(Phase.STARTING_JOB)
        threads = rank_threads(
            resolved, stated=os.environ.get("OMP_NUM_THREADS"), cores=available_cores()
        )
        env = self._environment(threads)
        # Said before it is true, so that the rank never finds itself in an earlier phase.
        self._enter(Phase.QUEUED)
        self._beat()
        if self._cancelled_at is not None:
            return Outcome("cancelled", "cancelled before its processes were started")
        number = ["--attempt", str(self._run.attempt)]
        rank = self._start(self._rank_module, "rank0.log", env, *number)
        one = rank.identity
        pids = [[one.pid, one.start_time]] if one is not None else []
        self._insist(lambda: self._attempt(rank_pids=pids, threads=threads))
        ended = self._until_exit(rank)
        self._insist(lambda: self._attempt(exit_code=ended.code))
        return verdict(
            ended,
            read_outcome(self._folder, self._run.attempt),
            what="the rank",
            log=rank.log,
            stopped=self._stopped,
            cancelled=self._cancelled_at is not None,
        )

    def _prepare_model(self) -> Outcome | None:
        """Fetch or convert the weights in a process of their own; None when they are there."""
        env = self._environment(available_cores())
        child = self._start(_PREPARE_MODULE, "prepare.log", env)
        ended = self._until_exit(child)
        if self._cancelled_at is not None:
            return Outcome("cancelled", "cancelled while its base model was prepared")
        if ended.code != 0:
            what = "preparing the base model"
            return Outcome("failed", None, explain(ended, what=what, log=child.log))
        return None

    def _environment(self, threads: int) -> dict[str, str]:
        env = dict(os.environ) | {"NBTRAIN_HOME": str(self._store.home)}
        return rank_environment(env, mark=self._mark, threads=threads, gpu=has_gpu())

    def _start(self, module: str, log_name: str, env: Mapping[str, str], *more: str) -> Child:
        logs = self._folder / "logs"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        arguments = ["--run", self._run.run_id, *more]
        child = self._family.start(
            module, arguments, env=env, cwd=self._folder, log=logs / log_name
        )
        log.info("started %s as pid %d", module, child.pid)
        return child

    # --- watching -------------------------------------------------------------------------------

    def _until_exit(self, child: Child) -> Exit:
        while (ended := child.poll()) is None:
            self._wake.wait(self._limits.poll)
            self._wake.clear()
            self._beat()
            if self._must_stop(child):
                log.warning("stopping pid %d", child.pid)
                self._stopped = True
                self._stop(self._limits.term)
        log.info("pid %d ended with %d", child.pid, ended.code)
        return ended

    def _must_stop(self, child: Child) -> bool:
        if self._cancelled_at is None:
            return False
        limit = self._limits.save if self._answered else self._limits.react
        if child.log.name == "prepare.log":
            limit = 0.0  # it looks at no commands and has nothing to save
        return time.monotonic() - self._cancelled_at >= limit

    def _beat(self) -> None:
        """Everything that happens now and then; a store that refuses must not end the watch."""
        if self._signalled:
            self._note_cancel()
        try:
            if self._is_due("heartbeat", self._limits.heartbeat):
                self._store.heartbeat(self._run.key, self._run.attempt, "host")
                self._check_ours()
                self._family.watch_over()
            if self._is_due("commands", self._limits.commands):
                self._look_at_commands()
        except LostRunError:
            raise
        except Exception as error:
            log.warning("the store cannot be used: %s: %s", type(error).__name__, error)

    def _look_at_commands(self) -> None:
        cancels = self._cancels()
        if self._signalled and not cancels:
            self._store.request(self._run.key, "cancel", by="signal")
        if cancels:
            self._answered = any(row["handled_at"] is not None for row in cancels)
            self._note_cancel()

    def _note_cancel(self) -> None:
        if self._cancelled_at is None:
            log.info("cancelled")
            self._cancelled_at = time.monotonic()

    def _cancels(self) -> list[Row]:
        """Requests to cancel this attempt, answered ones too; not those an earlier one answered."""
        rows = self._store.commands(self._run.key, unhandled=False)
        mine = [row for row in rows if (row["handled_at"] or self._began) >= self._began]
        return [row for row in mine if row["command"] == "cancel"]

    def _answer_cancels(self) -> None:
        for row in self._cancels():
            self._store.handled(row["id"])

    def _check_ours(self) -> None:
        run = self._store.run(self._run.key)
        if run.attempt != self._run.attempt or run.phase in TERMINAL:
            msg = f"the run is {run.phase} in attempt {run.attempt}: no longer this host's"
            raise LostRunError(msg)

    def _is_due(self, what: str, every: float) -> bool:
        now = time.monotonic()
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + every
        return True

    # --- stopping -------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Stop whatever is left of the job; at its normal end nothing is."""
        left = self._family.left()
        if left:
            log.info("stopping %d left-over processes", len(left))
        survivors = self._stop(1.0 if self._stopped else self._limits.term)
        if survivors:
            log.error("could not be stopped: %s", [one.pid for one in survivors])
        else:
            clear_partial(self._folder / "checkpoints")

    def _stop(self, grace: float) -> list[Identity]:
        def beat() -> None:
            if self._is_due("heartbeat", self._limits.heartbeat):
                self._quietly(lambda: self._store.heartbeat(self._run.key, self._run.attempt))

        return self._family.stop(grace, beat)

    # --- the store ------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        self._insist(lambda: self._move(phase))
        self._check_ours()

    def _move(self, phase: Phase, *, ended: str | None = None, failure: str | None = None) -> bool:
        return self._store.move_phase(
            self._run.key, phase, attempt=self._run.attempt, ended=ended, failure=failure
        )

    def _attempt(self, **columns: object) -> bool:
        return self._store.update_attempt(self._run.key, self._run.attempt, **columns)

    def _quietly(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            log.warning("the store cannot be used: %s: %s", type(error).__name__, error)

    def _insist(self, action: Callable[[], bool]) -> bool:
        """Do ``action`` though the store may be locked or its disk full for a while."""
        end = time.monotonic() + self._limits.store
        while True:
            try:
                return action()
            except Exception as error:
                log.warning("the store cannot be used: %s: %s", type(error).__name__, error)
                if time.monotonic() >= end:
                    return False
                time.sleep(1.0)


def _weights_missing(model: Mapping[str, object], home: Path) -> bool:
    """Whether weights must be fetched or converted first.

    For a repository the answer needs the hub's library, which the preparing process asks.
    """
    if model["kind"] == "gguf":
        return not (home / "base_models" / str(model["fingerprint"]) / "config.json").is_file()
    return model["kind"] == "repository"
