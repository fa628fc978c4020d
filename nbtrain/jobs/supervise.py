"""The host's work: walk the phases, run the ranks, stop them when asked, say how they ended.

Rank 0 decides: it alone looks at commands, and when it has ended, cancelled or otherwise, the
host ends the other ranks. When any rank fails, the host stops all.

All of it happens in one thread that outlives the ranks: Linux's parent-death signal is bound to
the thread that started a process. The kernel's main thread stays free for consoles.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbtrain.jobs.children import Child
from nbtrain.jobs.environment import (
    available_cores,
    has_gpu,
    rank_count,
    rank_environment,
    rank_threads,
)
from nbtrain.jobs.exits import Exit, RankEnd, explain, first_cause, leader, verdict
from nbtrain.jobs.family import Family
from nbtrain.jobs.rank_watch import RankWatch
from nbtrain.plan.phases import TERMINAL, Phase, Status, status_of
from nbtrain.processes import Identity, mark_of
from nbtrain.store import Row, Store, StoredRun
from nbtrain.training.outcome import Outcome, meeting_path, read_outcome
from nbtrain.training.partials import clear_attempt, clear_left_overs

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

    ``rank_module`` is the module that is run as each rank.
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
        self._stopped: str | None = None
        self._trains = False
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
            self._sweep(ours=False)
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
        ranks, gpu = rank_count(resolved), has_gpu()
        # Said before it is true, so that no rank ever finds itself in an earlier phase.
        self._enter(Phase.QUEUED, _on_what(ranks, gpu=gpu))
        self._beat()
        if self._cancelled_at is None:
            # Insisted on: a store that was locked just now must not hide a cancel.
            self._insist(self._look_at_commands)
        if self._cancelled_at is not None:
            return Outcome("cancelled", "cancelled before its processes were started")
        started = self._start_ranks(ranks, gpu=gpu)
        ends = self._until_all_exit(started)
        ended = leader(ends) if not leader(ends).failed else first_cause(ends)
        self._insist(lambda: self._attempt(exit_code=ended.exit.code))
        self._quietly(self._look_at_commands)
        cancelled = self._cancelled_at is not None
        return verdict(ends, stopped=self._stopped, cancelled=cancelled)

    def _start_ranks(self, ranks: int, *, gpu: bool) -> list[Child]:
        """Start every rank, all in one process group."""
        threads = rank_threads(
            self._run.resolved,
            stated=os.environ.get("OMP_NUM_THREADS"),
            cores=available_cores(),
            ranks=ranks,
        )
        meeting_path(self._folder, self._run.attempt).unlink(missing_ok=True)
        number = ["--attempt", str(self._run.attempt)]
        started: list[Child] = []
        for rank in range(ranks):
            env = self._environment(threads, gpu=gpu, rank=rank, ranks=ranks)
            first = started[0] if started else None
            log = f"rank{rank}.log"
            started.append(self._start(self._rank_module, log, env, *number, beside=first))
        pids = [[one.pid, one.start_time] for one in (child.identity for child in started) if one]
        self._insist(lambda: self._attempt(rank_pids=pids, threads=threads))
        return started

    def _prepare_model(self) -> Outcome | None:
        """Fetch or convert the weights in a process of their own; None when they are there."""
        env = self._environment(available_cores(), gpu=has_gpu())
        child = self._start(_PREPARE_MODULE, "prepare.log", env)
        ended = self._until_exit(child)
        if self._cancelled_at is not None:
            return Outcome("cancelled", "cancelled while its base model was prepared")
        if ended.code != 0:
            what = "preparing the base model"
            return Outcome("failed", None, explain(ended, what=what, log=child.log))
        return None

    def _environment(
        self, threads: int, *, gpu: bool, rank: int = 0, ranks: int = 1
    ) -> dict[str, str]:
        env = dict(os.environ) | {"NBTRAIN_HOME": str(self._store.home)}
        return rank_environment(
            env, mark=self._mark, threads=threads, gpu=gpu, rank=rank, ranks=ranks
        )

    def _start(
        self,
        module: str,
        log_name: str,
        env: Mapping[str, str],
        *more: str,
        beside: Child | None = None,
    ) -> Child:
        logs = self._folder / "logs"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        arguments = ["--run", self._run.run_id, *more]
        child = self._family.start(
            module, arguments, env=env, cwd=self._folder, log=logs / log_name, beside=beside
        )
        log.info("started %s as pid %d", module, child.pid)
        return child

    # --- watching -------------------------------------------------------------------------------

    def _until_exit(self, child: Child) -> Exit:
        """The end of a child that looks at no commands and has nothing to save."""
        while (ended := child.poll()) is None:
            self._pause()
            if self._cancelled_at is not None:
                self._stop_for_cancel()
        log.info("pid %d ended with %d", child.pid, ended.code)
        return ended

    def _until_all_exit(self, ranks: Sequence[Child]) -> list[RankEnd]:
        """How each rank ended, in the order of their ends."""
        watch = RankWatch(ranks, lambda rank: read_outcome(self._folder, self._run.attempt, rank))
        while watch.look(time.monotonic()):
            if watch.to_stop(time.monotonic()):
                log.warning("stopping ranks %s", watch.living)
                watch.by_host = True
                self._stop(self._limits.term)
                continue
            self._pause()
            if self._must_stop():
                watch.by_host = True
                self._stop_for_cancel()
        return watch.ends

    def _pause(self) -> None:
        self._wake.wait(self._limits.poll)
        self._wake.clear()
        self._beat()

    def _stop_for_cancel(self) -> None:
        log.warning("stopping the job, as it is cancelled")
        self._stopped = "cancelled before training began"
        if self._in_training():
            self._stopped = "cancelled; the job did not stop by itself and was stopped"
        self._stop(self._limits.term)

    def _must_stop(self) -> bool:
        if self._cancelled_at is None:
            return False
        if not self._in_training():
            return True  # nothing to save yet, and loading a model looks at no commands
        limit = self._limits.save if self._answered else self._limits.react
        return time.monotonic() - self._cancelled_at >= limit

    def _in_training(self) -> bool:
        """Whether training has begun; a store that cannot be read does not say that it has not."""
        if not self._trains:
            try:
                phase = self._store.run(self._run.key).phase
                self._trains = status_of(phase) is not Status.PENDING
            except Exception as error:
                log.warning("the store cannot be used: %s: %s", type(error).__name__, error)
                return True
        return self._trains

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

    def _look_at_commands(self) -> bool:
        cancels = self._cancels()
        if self._signalled and not cancels:
            self._store.request(self._run.key, "cancel", by="signal")
        if cancels:
            self._answered = any(row["handled_at"] is not None for row in cancels)
            self._note_cancel()
        return True

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

    def _sweep(self, *, ours: bool = True) -> None:
        """Stop whatever is left of the job; at its normal end nothing is.

        A run that is not ``ours`` any more may have another attempt at work.
        """
        left = self._family.left()
        if left:
            log.info("stopping %d left-over processes", len(left))
        survivors = self._stop(1.0 if self._stopped else self._limits.term)
        if survivors:
            log.error("could not be stopped: %s", [one.pid for one in survivors])
        else:
            clear = clear_left_overs if ours else clear_attempt
            clear(self._folder, self._run.attempt)

    def _stop(self, grace: float) -> list[Identity]:
        def beat() -> None:
            if self._is_due("heartbeat", self._limits.heartbeat):
                self._quietly(lambda: self._store.heartbeat(self._run.key, self._run.attempt))

        return self._family.stop(grace, beat)

    # --- the store ------------------------------------------------------------------------------

    def _enter(self, phase: Phase, message: str | None = None) -> None:
        self._insist(lambda: self._move(phase, message=message))
        self._check_ours()

    def _move(self, phase: Phase, **more: str | None) -> bool:
        return self._store.move_phase(self._run.key, phase, attempt=self._run.attempt, **more)

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


def _on_what(ranks: int, *, gpu: bool) -> str | None:
    """What the ranks run on, where that needs saying."""
    if ranks == 1:
        return None
    return f"{ranks} ranks, one per GPU" if gpu else f"{ranks} CPU ranks: this machine has no GPU"
