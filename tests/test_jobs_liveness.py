"""Is a job alive? Decided by tables; ended by compare-and-set in a real store."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from nbtrain.jobs.liveness import Here, judge, liveness, reap
from nbtrain.plan.phases import Phase
from nbtrain.processes import MARK, is_alive, mark_of, process_identity
from nbtrain.store import Store, StoredRun, open_store

NOW = 1_000_000.0
BOOT = "b0/1"


def attempt(**changes: Any) -> dict[str, Any]:
    return {
        "host_pid": 10,
        "host_start_time": 5.0,
        "boot_id": BOOT,
        "hostname": "here",
        "started_at": NOW - 100,
        "heartbeat_at": NOW - 1,
        "progress_at": NOW - 1,
    } | changes


NEVER = {"host_pid": None, "host_start_time": None, "started_at": None, "heartbeat_at": None}


@pytest.mark.parametrize(
    ("phase", "changes", "runs", "state", "says"),
    [
        ("TRAINING", {}, True, "alive", None),
        ("TRAINING", {"heartbeat_at": NOW - 16}, True, "unresponsive", "unresponsive since"),
        ("TRAINING", {"progress_at": NOW - 61}, True, "unresponsive", "rank busy since"),
        # Start checks and conversions report no progress, and may take long.
        ("QUEUED", {"progress_at": NOW - 61}, True, "alive", None),
        ("QUEUED", {"progress_at": None}, True, "alive", None),
        ("TRAINING", {}, False, "gone", "its host process (pid 10) is gone"),
        ("TRAINING", {"heartbeat_at": NOW - 999}, False, "gone", "its host process (pid 10)"),
        ("TRAINING", {"boot_id": "other/1"}, False, "gone", "restarted"),
        # The same machine, other pids: a second container of the same name, or a restarted one.
        ("TRAINING", {"boot_id": "b0/2"}, False, "elsewhere", "container"),
        # A container that is only starved is not judged by another one; one replaced is, later.
        (
            "TRAINING",
            {"boot_id": "b0/2", "heartbeat_at": NOW - 16},
            False,
            "elsewhere",
            "said nothing since",
        ),
        (
            "TRAINING",
            {"boot_id": "b0/2", "heartbeat_at": NOW - 181, "started_at": NOW - 300},
            False,
            "gone",
            "pid 10",
        ),
        ("TRAINING", {"hostname": "there"}, False, "elsewhere", "runs on the machine there"),
        (
            "TRAINING",
            {"hostname": "there", "heartbeat_at": NOW - 9999},
            False,
            "elsewhere",
            "said nothing since",
        ),
        ("RESOLVING_DATASET", {**NEVER, "hostname": None}, False, "alive", None),
        ("RESOLVING_DATASET", NEVER, False, "alive", None),
    ],
)
def test_the_table_of_states(
    phase: str, changes: dict[str, Any], runs: bool, state: str, says: str | None
) -> None:
    here = Here("here", BOOT, NOW, lambda identity: runs)
    found = judge(Phase(phase), attempt(**changes), NOW - 29, here)
    assert found.state == state
    assert (found.message is None) == (says is None)
    assert (says or "") in (found.message or "")


def test_a_run_that_nobody_launched_is_gone_after_a_while() -> None:
    here = Here("here", BOOT, NOW, lambda identity: False)
    found = judge(Phase.RESOLVING_DATASET, attempt(**NEVER), NOW - 31, here)
    assert (found.state, found.message) == ("gone", "its host process was never started")


# --- in a store ---------------------------------------------------------------------------------


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with open_store() as store:
        yield store


@pytest.fixture
def run(store: Store) -> StoredRun:
    plan = {
        "settings": {"algorithm": {"value": "gspo"}},
        "workload": {"workload_id": "5" * 64},
        "base_model": {"slug": "nbtrain/tiny"},
        "config_hash": "c" * 64,
        "start_step": 0,
        "total_steps": 10,
    }
    return store.create_run("a" * 64, plan={}, resolved=plan)


def host(store: Store, run: StoredRun, process: subprocess.Popen[bytes], **changes: Any) -> None:
    """Record ``process`` as the run's host."""
    found = process_identity(process.pid)
    assert found is not None
    columns: dict[str, Any] = {
        "host_pid": found.pid,
        "host_start_time": found.start_time,
        "boot_id": found.boot_id,
        "hostname": socket.gethostname(),
    }
    assert store.start_attempt(run.key, run.attempt, **columns | changes)


def sleeper(**env: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    return subprocess.Popen(argv, env={**os.environ, **env})


def dead_host(store: Store, run: StoredRun, **changes: Any) -> None:
    process = sleeper()
    host(store, run, process, **changes)
    process.kill()
    process.wait()


def test_a_living_host_is_left_alone(store: Store, run: StoredRun) -> None:
    process = sleeper()
    host(store, run, process)
    assert liveness(store, run).state == "alive"
    assert not reap(store, run)
    process.kill()
    process.wait()
    assert liveness(store, run).state == "gone"


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        ("AWAITING_BASE_MODEL", "fetching or converting the base model's weights"),
        ("AWAITING_CAPACITY", "waiting for a free device"),
        ("STARTING_JOB", "starting the job's processes"),
        ("QUEUED", "starting the job's processes: loading torch and the trainer"),
        ("TRAINING", None),
    ],
)
def test_a_young_run_says_what_goes_on(
    store: Store, run: StoredRun, phase: str, said: str | None
) -> None:
    assert liveness(store, run).activity == "starting the process that looks after the run"
    process = sleeper()
    host(store, run, process)
    assert store.move_phase(run.key, Phase(phase), attempt=1)
    assert liveness(store, run).activity == said
    store.heartbeat(run.key, 1, "rank", activity="tokenising 4 of 9 rows")
    assert liveness(store, run).activity == "tokenising 4 of 9 rows"
    process.kill()
    process.wait()
    store.heartbeat(run.key, 1, "rank", activity="")
    assert liveness(store, run).activity is None


def test_the_first_reader_ends_a_run_whose_host_is_gone(store: Store, run: StoredRun) -> None:
    dead_host(store, run)
    logs = store.run_folder(run.run_id) / "logs"
    logs.mkdir(parents=True)
    (logs / "host.log").write_text("Traceback (most recent call last):\n x\nOSError: disk full\n")
    (logs / "rank0.log").write_text("step 7\n")
    store.move_phase(run.key, Phase.TRAINING, attempt=1)
    assert [reap(store, run), reap(store, run)] == [True, False]
    ended = store.run(run.key)
    assert ended.phase is Phase.FAILED
    assert "is gone" in (ended.failure or "")
    assert "OSError: disk full" in (ended.failure or "")
    assert "step 7" in (ended.failure or "")


def test_a_hosts_own_exit_code_is_told_by_who_started_it(store: Store, run: StoredRun) -> None:
    dead_host(store, run)
    assert reap(store, run, host_exit=3)
    assert "the host process exited with code 3" in (store.run(run.key).failure or "")


@pytest.mark.parametrize(
    ("outcome", "phase"),
    [
        ({"result": "completed", "ended": "early"}, Phase.COMPLETED),
        ({"result": "cancelled"}, Phase.CANCELLED),
        ({"result": "failed", "failure": "the loss is not finite"}, Phase.FAILED),
    ],
)
def test_the_ranks_last_word_counts(
    outcome: dict[str, str], phase: Phase, store: Store, run: StoredRun
) -> None:
    dead_host(store, run)
    store.move_phase(run.key, Phase.TRAINING, attempt=1)
    path = store.run_folder(run.run_id) / "attempts" / "1" / "outcome.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(outcome))
    assert reap(store, run)
    ended = store.run(run.key)
    assert ended.phase is phase
    assert (ended.failure, ended.ended) == (outcome.get("failure"), outcome.get("ended"))


def test_reaping_kills_what_the_run_left_behind(store: Store, run: StoredRun) -> None:
    dead_host(store, run)
    rank, worker = sleeper(), sleeper(**{MARK: mark_of(run.run_id, 1)})
    found = process_identity(rank.pid)
    assert found is not None
    store.update_attempt(run.key, 1, rank_pids=[[found.pid, found.start_time]])
    assert reap(store, run)
    assert {rank.wait(10), worker.wait(10)} <= {-9, -15}


def test_a_recorded_pid_that_belongs_to_someone_else_now_is_spared(
    store: Store, run: StoredRun
) -> None:
    dead_host(store, run)
    stranger = sleeper()
    found = process_identity(stranger.pid)
    assert found is not None
    store.update_attempt(run.key, 1, rank_pids=[[found.pid, found.start_time - 60]])
    assert reap(store, run)
    assert is_alive(found)
    stranger.kill()
    stranger.wait()


def test_a_host_that_comes_late_but_in_time_is_judged_anew(
    store: Store, run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader finds nobody, and before it can say so the host takes the run up."""
    with store.engine.begin() as connection:
        connection.execute(text("update runs set created_at = created_at - 60"))
    late = sleeper()

    def meanwhile(*_: object, **__: object) -> None:
        if store.run(run.key).phase is Phase.RESOLVING_DATASET:
            host(store, run, late)
            assert store.move_phase(run.key, Phase.QUEUED, attempt=1)

    assert liveness(store, run).state == "gone"
    monkeypatch.setattr("nbtrain.jobs.liveness.stop_tree", meanwhile)
    assert not reap(store, run)
    assert store.run(run.key).phase is Phase.QUEUED
    late.kill()
    late.wait()
    assert reap(store, run)
    assert store.run(run.key).phase is Phase.FAILED


def test_another_machines_run_is_never_ended_here(store: Store, run: StoredRun) -> None:
    dead_host(store, run, hostname="there", heartbeat_at=time.time() - 9999)
    assert liveness(store, run).state == "elsewhere"
    assert not reap(store, run)
    assert store.run(run.key).phase is Phase.RESOLVING_DATASET


def test_reaping_clears_half_written_checkpoints(store: Store, run: StoredRun) -> None:
    half = store.run_folder(run.run_id) / "checkpoints" / ".step-000003.partial"
    half.mkdir(parents=True)
    (half / "adapter_model.safetensors").write_bytes(b"half")
    dead_host(store, run)
    assert reap(store, run)
    assert not half.exists()


def test_an_ended_or_paused_run_needs_no_host(store: Store, run: StoredRun) -> None:
    dead_host(store, run)
    for phase in (Phase.TRAINING, Phase.PAUSING, Phase.PAUSED):
        assert store.move_phase(run.key, phase, attempt=1)
    assert liveness(store, run).message == "the run is PAUSED"
    assert not reap(store, run)
    assert store.move_phase(run.key, Phase.CANCELLED, attempt=1)
    assert not reap(store, run)
    assert store.run(run.key).phase is Phase.CANCELLED
