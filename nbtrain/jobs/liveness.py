"""Is the job still there? What every reader of a run asks, and what it does when it is not."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nbtrain.jobs.connection import remove_connection
from nbtrain.jobs.exits import Exit, explain, last_exception, last_lines
from nbtrain.plan.phases import Phase
from nbtrain.processes import Identity, boot_id, is_alive, mark_of, stop_tree
from nbtrain.store import Row, Store, StoredRun
from nbtrain.training.outcome import Outcome, read_outcome
from nbtrain.training.partials import clear_left_overs

__all__ = ["Here", "Liveness", "judge", "liveness", "reap", "seen_of"]

CONTAINER_SECONDS = 180.0
"""Silence after which a host in another process namespace counts as gone."""

STALE_SECONDS = 15.0
"""A host whose heartbeat is older is unresponsive."""
BUSY_SECONDS = 60.0
"""A training rank that got on with nothing for so long is shown as busy since then."""
LAUNCH_SECONDS = 30.0
"""A run that has no host after so long was never launched."""

_BEGINS = {
    Phase.RESOLVING_DATASET: "starting the process that looks after the run",
    Phase.AWAITING_BASE_MODEL: "fetching or converting the base model's weights",
    Phase.AWAITING_CAPACITY: "waiting for a free device",
    Phase.STARTING_JOB: "starting the job's processes",
    Phase.QUEUED: "starting the job's processes: loading torch and the trainer",
}
"""What goes on while no process of the job can say it yet."""

State = Literal["alive", "unresponsive", "gone", "elsewhere"]


@dataclass(frozen=True, slots=True)
class Liveness:
    """Whether a run's job lives.

    ``alive``; ``unresponsive`` (it lives, but says nothing); ``gone`` (its host process does not
    exist on this machine, where it ran); ``elsewhere`` (on another machine: nobody here can
    tell). ``since`` is when it was last heard of, seconds since 1970; ``message`` says the same
    in words and is None for ``alive``. ``activity`` is what the job says it does.
    """

    state: State
    since: float | None = None
    message: str | None = None
    activity: str | None = None


@dataclass(frozen=True, slots=True)
class Here:
    """What is known on this machine now."""

    hostname: str
    boot_id: str
    now: float
    is_alive: Callable[[Identity], bool] = is_alive


def here() -> Here:
    """The machine this runs on, now."""
    return Here(socket.gethostname(), boot_id(), time.time())


def judge(phase: Phase, attempt: Mapping[str, Any], created_at: float, here: Here) -> Liveness:
    """Judge an attempt's row; ``created_at`` is the run's. Pure but for ``here.is_alive``.

    Another machine's host and one that merely says nothing are never judged gone.
    """
    heard = max(filter(None, (attempt["heartbeat_at"], attempt["started_at"])), default=created_at)
    stale = here.now - heard > STALE_SECONDS
    if attempt["hostname"] not in (None, here.hostname):
        silence = f", which has said nothing since {_clock(heard)}" if stale else ""
        return Liveness("elsewhere", heard, f"runs on the machine {attempt['hostname']}{silence}")
    if attempt["host_pid"] is None:
        if here.now - heard <= LAUNCH_SECONDS:
            return Liveness("alive", heard)
        return Liveness("gone", heard, "its host process was never started")
    host = Identity(attempt["host_pid"], attempt["host_start_time"], attempt["boot_id"])
    if here.is_alive(host):
        return _of_a_living_host(phase, attempt, heard, stale, here.now)
    if _boot(host.boot_id) != _boot(here.boot_id):
        return Liveness("gone", heard, f"the machine was restarted after {_clock(heard)}")
    if host.boot_id != here.boot_id and here.now - heard <= CONTAINER_SECONDS:
        # Another container of the same name: its pids are not ours to look at. When it has been
        # silent for long, it is the one that this container replaced.
        silence = f", which has said nothing since {_clock(heard)}" if stale else ""
        return Liveness("elsewhere", heard, f"runs in another container{silence}")
    message = f"its host process (pid {host.pid}) is gone; last heard of {_clock(heard)}"
    return Liveness("gone", heard, message)


def _of_a_living_host(
    phase: Phase, attempt: Mapping[str, Any], heard: float, stale: bool, now: float
) -> Liveness:
    if stale:
        return Liveness("unresponsive", heard, f"unresponsive since {_clock(heard)}")
    progress = attempt["progress_at"]
    working = phase in (Phase.TRAINING, Phase.RECORDING) and progress is not None
    if working and now - progress > BUSY_SECONDS:
        return Liveness("unresponsive", progress, f"rank busy since {_clock(progress)}")
    return Liveness("alive", heard)


def _boot(full: str) -> str:
    return full.partition("/")[0]


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def liveness(store: Store, run: StoredRun) -> Liveness:
    """Whether ``run``'s job lives now. An ended or paused run has no job: ``gone``."""
    run = store.run(run.key)
    if run.ended_for_good or run.paused:
        return seen_of(run, {})
    return seen_of(run, store.attempt(run.key, run.attempt))


def seen_of(run: StoredRun, attempt: Row) -> Liveness:
    """The same of a run and its attempt as they were read together."""
    if run.ended_for_good or run.paused:
        return Liveness("gone", run.ended_at, f"the run is {run.phase}")
    found = judge(run.phase, attempt, run.created_at, here())
    begins = _BEGINS.get(run.phase) if found.state == "alive" else None
    return replace(found, activity=attempt["activity"] or begins)


def reap(store: Store, run: StoredRun, *, host_exit: int | None = None) -> bool:
    """End a run whose host is gone; whether this call did it.

    Its left-over processes are killed first. The run becomes FAILED with what the logs say, by
    compare-and-set on attempt and phase, so the host's own last word and any other reader's win
    over a late one; a run that moved on meanwhile is judged anew. What the rank itself had said
    before (completed, cancelled, why it failed) counts. ``host_exit`` is the host's exit code,
    for the process that started it.
    """
    judged = None
    while True:
        run = store.run(run.key)
        if run.ended_for_good or run.paused or (run.attempt, run.phase) == judged:
            return False
        judged = (run.attempt, run.phase)
        attempt = store.attempt(run.key, run.attempt)
        found = judge(run.phase, attempt, run.created_at, here())
        if found.state != "gone":
            return False
        _kill_leftovers(run, attempt)
        folder = store.run_folder(run.run_id)
        clear_left_overs(folder, run.attempt)
        outcome = _last_word(store, run, found, host_exit)
        ended = store.move_phase(
            run.key,
            Phase[outcome.result.upper()],
            attempt=run.attempt,
            expect=run.phase,
            ended=outcome.ended,
            failure=outcome.failure,
        )
        if ended:
            if attempt["connection_file"]:
                remove_connection(Path(attempt["connection_file"]))
            return True


def _kill_leftovers(run: StoredRun, attempt: Row) -> None:
    """Ranks die with their host by themselves; this is for systems where they cannot."""
    boot = attempt["boot_id"] or ""
    ranks = [Identity(pid, start, boot) for pid, start in attempt["rank_pids"] or []]
    stop_tree(ranks, grace=0.0, mark=mark_of(run.run_id, run.attempt))


def _last_word(store: Store, run: StoredRun, found: Liveness, host_exit: int | None) -> Outcome:
    folder = store.run_folder(run.run_id)
    outcome = read_outcome(folder, run.attempt)
    if outcome is not None and (outcome.result != "failed" or outcome.failure):
        return outcome
    log = folder / "logs" / "host.log"
    if host_exit is not None and host_exit != -9:
        return Outcome("failed", None, explain(Exit(host_exit), what="the host process", log=log))
    failure = f"{found.message}: killed, or the machine ran out of memory"
    if found.message is not None and "(pid" not in found.message:
        failure = found.message
    exception = last_exception(log)
    if exception is not None:
        failure += f"; the last exception in its log: {exception}"
    lines = last_lines(folder / "logs" / "rank0.log", 5)
    if lines:
        failure += "\nlast lines of the rank's log:\n" + "\n".join(f"  {line}" for line in lines)
    return Outcome("failed", None, re.sub(r"\s+$", "", failure))
