"""Two ranks under one host: whichever is killed, whatever happens, all end and the cause is named.

The ranks are stand-ins (``rank_stub.py``); the host and all else is real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from stub_runs import (
    CHECKOUT,
    STUB,
    create,
    host_of,
    nothing_left,
    processes_of,
    ranks_of,
    until,
    wait_phase,
)

import nbtrain.jobs.launch
from nbtrain.jobs.control import request_cancel
from nbtrain.jobs.environment import host_environment
from nbtrain.jobs.launch import launch
from nbtrain.jobs.liveness import reap
from nbtrain.plan.phases import Phase
from nbtrain.processes import descendants, is_alive, marked
from nbtrain.store import Store, StoredRun, open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc of Linux")


@pytest.fixture
def store(home: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    store = open_store()
    yield store
    for run in store.runs():
        host = store.attempts(run.key)[-1]["host_pid"]
        for one in [*marked(f"{run.run_id}/"), *(descendants(host) if host else [])]:
            os.kill(one.pid, signal.SIGKILL)
        if host and is_alive(host_of(store, run)):
            os.kill(host, signal.SIGKILL)
    store.close()


Start = Callable[..., StoredRun]


@pytest.fixture
def training(store: Store) -> Start:
    """Starts a run of two stub ranks with these orders; returns once both run."""

    def start(**stub: Any) -> StoredRun:
        run = create(store, stub, ranks=2)
        launch(store, run, host_options=STUB)
        wait_phase(store, run, Phase.TRAINING)
        assert until(lambda: store.attempts(run.key)[-1]["rank_pids"])
        return run

    return start


def test_two_ranks_share_a_group_and_are_all_recorded(store: Store, training: Start) -> None:
    run = training()
    ranks = ranks_of(store, run)
    assert len({one.pid for one in ranks}) == 2
    assert {os.getpgid(one.pid) for one in ranks} == {ranks[0].pid}
    assert {os.getsid(one.pid) for one in ranks} == {host_of(store, run).pid}
    assert all(is_alive(one) for one in ranks)
    logs = store.run_folder(run.run_id) / "logs"
    assert {log.name for log in logs.iterdir()} >= {"rank0.log", "rank1.log"}
    said = {row["phase"]: row["message"] for row in store.phases(run.key)}
    assert said["QUEUED"] == "2 CPU ranks: this machine has no GPU"
    request_cancel(store, run)
    ended = wait_phase(store, run, Phase.CANCELLED)
    # Rank 0 answered; the other, which looks at nothing, was ended behind it.
    assert ended.ended == "cancelled on request"
    nothing_left(store, run)


@pytest.mark.parametrize(
    ("rank", "number", "helpers"),
    [
        (0, signal.SIGKILL, []),
        (1, signal.SIGKILL, ["own session"]),
        (0, signal.SIGTERM, []),
        (1, signal.SIGTERM, []),
    ],
)
def test_a_rank_ended_from_outside_ends_the_run_and_is_named(
    rank: int, number: signal.Signals, helpers: list[str], store: Store, training: Start
) -> None:
    run = training(helpers=helpers, follower={"helpers": helpers})
    # host and guardian, two ranks, their helpers
    assert until(lambda: len(processes_of(run)) == 2 + 2 + 2 * len(helpers)), processes_of(run)
    os.kill(ranks_of(store, run)[rank].pid, number)
    ended = wait_phase(store, run, Phase.FAILED, seconds=15)
    assert (ended.failure or "").startswith(f"rank {rank} of 2")
    assert number.name in (ended.failure or "")
    nothing_left(store, run)


def test_a_killed_host_takes_all_ranks_with_it(store: Store, training: Start) -> None:
    run = training(helpers=["hangs with the GIL"], follower={"helpers": ["own session"]})
    os.kill(host_of(store, run).pid, signal.SIGKILL)
    assert until(lambda: not processes_of(run), 5.0), processes_of(run)
    until(lambda: reap(store, run) or store.run(run.key).ended_for_good, 15.0)
    assert store.run(run.key).phase is Phase.FAILED
    nothing_left(store, run)


def test_the_cause_is_named_and_not_who_suffers_from_it(store: Store) -> None:
    # Rank 0 notices at once that the other is gone; the other takes a while to end.
    run = create(store, {"then": "lost", "follower": {"wait": 1.0, "then": "raise"}}, ranks=2)
    launch(store, run, host_options=STUB)
    failure = wait_phase(store, run, Phase.FAILED).failure or ""
    assert failure.startswith(
        "rank 1 of 2 exited with code 1: ValueError: the stub was told to fail"
    )
    assert store.attempts(run.key)[-1]["exit_code"] == 1
    nothing_left(store, run)


def test_two_ranks_complete(store: Store) -> None:
    run = create(store, {"then": "complete", "follower": {"then": "complete"}}, ranks=2)
    launch(store, run, host_options=STUB)
    assert wait_phase(store, run, Phase.COMPLETED).failure is None
    assert store.attempts(run.key)[-1]["exit_code"] == 0
    nothing_left(store, run)


PATIENT = """
import functools, sys
from nbtrain.jobs import host, supervise
limits = supervise.Limits(react=3600.0)
host.Supervisor = functools.partial(supervise.Supervisor, limits=limits)
sys.exit(host.main(sys.argv[1:]))
"""


def start_a_patient_host(
    store: Store, run: StoredRun, connection: Path, log: Path, options: Sequence[str]
) -> subprocess.Popen[bytes]:
    """A host that gives ranks in training an hour to answer a cancel."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", PATIENT, "--run", run.run_id, "-f", connection, *options],
            env=host_environment(os.environ, home=store.home, url=None),
            cwd=store.run_folder(run.run_id),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def test_a_cancel_while_ranks_start_up_waits_for_no_answer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nbtrain.jobs.launch, "_start", start_a_patient_host)
    run = create(store, {"then": "start", "follower": {"then": "start"}}, ranks=2)
    launch(store, run, host_options=STUB)
    wait_phase(store, run, Phase.QUEUED)
    assert until(lambda: store.attempts(run.key)[-1]["rank_pids"])
    request_cancel(store, run)
    ended = wait_phase(store, run, Phase.CANCELLED)
    assert ended.ended == "cancelled before training began"
    nothing_left(store, run)


def test_a_deaf_rank_beside_a_cancelled_one_is_killed(store: Store, training: Start) -> None:
    run = training(follower={"deaf": True})
    request_cancel(store, run)
    assert wait_phase(store, run, Phase.CANCELLED).ended == "cancelled on request"
    nothing_left(store, run)
