"""Whatever is killed, at whatever moment: the run's state says so, and nothing is left running.

The rank is a stand-in (``rank_stub.py``); everything else is real: the notebook's kernel, the
host, its guardian, the store.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from stub_runs import (
    CHECKOUT,
    STUB,
    create,
    host_of,
    nothing_left,
    processes_of,
    until,
    wait_phase,
)

from nbtrain.jobs.connection import send_code
from nbtrain.jobs.control import request_cancel
from nbtrain.jobs.launch import launch
from nbtrain.jobs.liveness import liveness, reap
from nbtrain.plan.phases import Phase
from nbtrain.processes import descendants, is_alive, marked
from nbtrain.store import Store, StoredRun, open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc of Linux")

BAD = ["hangs with the GIL", "ignores SIGTERM", "own session"]
HOST_MB = 80


@pytest.fixture
def store(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
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
    """Starts a run whose stub rank has the given orders; returns once it is training."""

    def start(**stub: Any) -> StoredRun:
        run = create(store, stub)
        launch(store, run, host_options=STUB)
        return wait_phase(store, run, Phase.TRAINING)

    return start


def host_memory(store: Store, run: StoredRun) -> float:
    return float(psutil.Process(host_of(store, run).pid).memory_info().rss / 2**20)


def polled_end(store: Store, run: StoredRun) -> StoredRun:
    """The run once a reader that looks now and then finds it ended; 15 s are promised."""
    until(lambda: reap(store, run) or store.run(run.key).ended_for_good, 15.0)
    return store.run(run.key)


# --- the notebook -------------------------------------------------------------------------------

IN_THE_KERNEL = """
import json, sys, types
# A kernel in which the user has used the GPU already: nothing of it may reach the job.
torch = types.ModuleType("torch"); torch.cuda_was_used = True; sys.modules["torch"] = torch
sys.path.insert(0, {folder!r})
from stub_runs import STUB, create
from nbtrain.jobs.launch import launch
from nbtrain.store import open_store
store = open_store()
runs = []
for _ in range(2):
    run = create(store)
    launch(store, run, host_options=STUB)
    runs.append(run.run_id)
print(json.dumps(runs))
"""


def test_a_run_survives_its_notebook_kernel(store: Store) -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", cwd=str(CHECKOUT))
    try:
        said: list[str] = []
        code = IN_THE_KERNEL.format(folder=str(Path(__file__).parent))
        reply = client.execute_interactive(
            code,
            timeout=60,
            output_hook=lambda message: said.append(message["content"].get("text", "")),
        )
        assert reply["content"]["status"] == "ok", reply
        started = json.loads("".join(said))
        runs = [store.find_run(run_id) for run_id in started]
        for run in runs:
            wait_phase(store, run, Phase.TRAINING)
        manager.interrupt_kernel()
        manager.restart_kernel(now=True)
        assert [liveness(store, run).state for run in runs] == ["alive", "alive"]
        pid = manager.provisioner.pid  # type: ignore[union-attr]
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    time.sleep(1.0)
    for run in runs:
        assert liveness(store, run).state == "alive"
        assert store.run(run.key).phase is Phase.TRAINING
        assert host_memory(store, run) < HOST_MB
        assert request_cancel(store, run)
    for run in runs:
        assert wait_phase(store, run, Phase.CANCELLED).failure is None
        nothing_left(store, run)


def test_the_host_is_a_session_of_its_own_and_deaf_to_hangups(
    store: Store, training: Start
) -> None:
    run = training()
    host = host_of(store, run)
    assert os.getsid(host.pid) == host.pid
    os.kill(host.pid, signal.SIGHUP)
    os.kill(host.pid, signal.SIGINT)
    time.sleep(0.5)
    assert is_alive(host)
    os.kill(host.pid, signal.SIGTERM)
    wait_phase(store, run, Phase.CANCELLED)
    nothing_left(store, run)


# --- kill -9 ------------------------------------------------------------------------------------


def scratch(store: Store, run: StoredRun) -> list[Path]:
    """What a job keeps on the disk while it lives; a killed one cannot remove it."""
    folder = store.run_folder(run.run_id)
    made = [folder / "attempts" / "1" / name for name in ("rows", "trainer")]
    made += [folder / "policies", folder / "checkpoints" / ".step-000003.partial"]
    for one in made:
        one.mkdir(parents=True)
        (one / "file").write_bytes(b"much")
    return made


def test_a_killed_host_leaves_a_failed_run_and_no_process(store: Store, training: Start) -> None:
    run = training(helpers=BAD)
    made = scratch(store, run)
    assert len(processes_of(run)) == 3 + len(BAD)  # host, guardian, rank, helpers
    os.kill(host_of(store, run).pid, signal.SIGKILL)
    # Nobody looks yet: the rank, the hanging worker and what that started end by themselves.
    assert until(lambda: not processes_of(run), 5.0), processes_of(run)
    ended = polled_end(store, run)
    assert ended.phase is Phase.FAILED
    assert "host process" in (ended.failure or "")
    assert "gone" in (ended.failure or "") or "SIGKILL" in (ended.failure or "")
    nothing_left(store, run)
    assert [one for one in made if one.exists()] == []


def test_with_host_and_guardian_killed_a_reader_cleans_up(store: Store, training: Start) -> None:
    run = training(helpers=["own session"])
    guardian = next(
        one for one in descendants(host_of(store, run).pid) if "guardian" in command(one.pid)
    )
    os.kill(guardian.pid, signal.SIGKILL)
    os.kill(host_of(store, run).pid, signal.SIGKILL)
    assert polled_end(store, run).phase is Phase.FAILED
    nothing_left(store, run)


def command(pid: int) -> str:
    return " ".join(psutil.Process(pid).cmdline())


def test_a_killed_guardian_is_replaced(store: Store, training: Start) -> None:
    run = training()

    def guardian() -> list[int]:
        below = descendants(host_of(store, run).pid)
        return [one.pid for one in below if "guardian" in command(one.pid)]

    (first,) = guardian()
    os.kill(first, signal.SIGKILL)
    assert until(lambda: guardian() not in ([], [first]))
    request_cancel(store, run)
    wait_phase(store, run, Phase.CANCELLED)
    nothing_left(store, run)


def test_a_killed_rank_is_reported_with_signal_and_peak_memory(store: Store) -> None:
    run = create(store, {"helpers": BAD, "then": "oom"})
    made = scratch(store, run)
    launch(store, run, host_options=STUB)
    failure = wait_phase(store, run, Phase.FAILED).failure or ""
    told = re.search(r"nobody did it, the system ran out of memory: peak (\d+) MiB, \d+", failure)
    assert told is not None, failure
    assert 64 < int(told[1]) < 1000
    assert [one for one in made if one.exists()] == []
    assert store.attempts(run.key)[-1]["exit_code"] == -9
    nothing_left(store, run)


# --- cancel -------------------------------------------------------------------------------------


def test_cancel_stops_helpers_that_ignore_sigterm(store: Store, training: Start) -> None:
    run = training(helpers=["ignores SIGTERM", "ignores SIGTERM", "own session"])
    asked = time.monotonic()
    assert request_cancel(store, run)
    ended = wait_phase(store, run, Phase.CANCELLED, seconds=15.0)
    nothing_left(store, run, max(0.1, 15.0 - (time.monotonic() - asked)))
    assert ended.ended == "cancelled on request"
    assert not request_cancel(store, run)


def test_cancel_stops_a_rank_that_does_not_react(store: Store, training: Start) -> None:
    run = training(helpers=BAD, deaf=True)
    asked = time.monotonic()
    request_cancel(store, run)
    request_cancel(store, run)
    assert len(store.commands(run.key, unhandled=False)) == 1
    ended = wait_phase(store, run, Phase.CANCELLED, seconds=15.0)
    nothing_left(store, run, max(0.1, 15.0 - (time.monotonic() - asked)))
    assert "did not stop by itself" in (ended.ended or "")
    assert store.commands(run.key) == []
    assert store.attempts(run.key)[-1]["exit_code"] == -9


def test_a_run_cancelled_before_its_rank_never_starts_one(store: Store) -> None:
    run = create(store)
    store.request(run.key, "cancel")
    launch(store, run, host_options=STUB)
    wait_phase(store, run, Phase.CANCELLED)
    nothing_left(store, run)
    assert not (store.run_folder(run.run_id) / "logs" / "rank0.log").exists()


def test_a_kernel_shutdown_from_a_console_cancels(store: Store, training: Start) -> None:
    from jupyter_client.blocking.client import BlockingKernelClient

    run = training()
    client = BlockingKernelClient()
    client.load_connection_file(store.attempts(run.key)[-1]["connection_file"])
    client.start_channels()
    try:
        # The main shell is free: a console can look around while the run trains.
        client.wait_for_ready(timeout=20)
        reply = client.execute_interactive("type(host).__name__", timeout=20)
        assert reply["content"]["status"] == "ok"
        client.shutdown()
        wait_phase(store, run, Phase.CANCELLED)
    finally:
        client.stop_channels()
    nothing_left(store, run)


# --- ends by itself -----------------------------------------------------------------------------


def test_a_rank_that_prints_100_mb_neither_blocks_nor_swells_its_host(
    store: Store, training: Start
) -> None:
    run = training(print_mb=100)
    log = store.run_folder(run.run_id) / "logs" / "rank0.log"
    assert until(lambda: log.stat().st_size >= 100 * 2**20, 60.0)
    assert until(lambda: store.attempts(run.key)[-1]["progress_at"] is not None)
    assert host_memory(store, run) < HOST_MB
    request_cancel(store, run)
    wait_phase(store, run, Phase.CANCELLED)
    nothing_left(store, run)
    log.unlink()


@pytest.mark.parametrize(
    ("then", "says"),
    [
        ("raise", "the rank exited with code 1: ValueError: the stub was told to fail"),
        ("exit", "the rank exited with code 7; its log is empty"),
    ],
)
def test_a_failing_rank_fails_its_run(then: str, says: str, store: Store) -> None:
    run = create(store, {"then": then})
    launch(store, run, host_options=STUB)
    assert says in (wait_phase(store, run, Phase.FAILED).failure or "")
    nothing_left(store, run)


def test_a_run_completes_in_a_folder_with_spaces_and_letters(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBTRAIN_HOME", str(tmp_path / "größe 测试 'x' $y"))
    with open_store() as odd:
        run = create(odd, {"then": "complete"})
        launch(odd, run, host_options=STUB)
        ended = wait_phase(odd, run, Phase.COMPLETED)
        nothing_left(odd, run)
    assert (ended.failure, ended.ended) == (None, None)
    phases = [row["phase"] for row in odd.phases(run.key)]
    assert phases == [
        *("RESOLVING_DATASET", "AWAITING_BASE_MODEL", "AWAITING_CAPACITY", "STARTING_JOB"),
        *("QUEUED", "TRAINING", "CLEANING_UP", "COMPLETED"),
    ]


def test_what_a_job_leaves_is_private(store: Store, training: Start) -> None:
    run = training()
    connection = Path(store.attempts(run.key)[-1]["connection_file"])
    logs = store.run_folder(run.run_id) / "logs"
    assert mode(connection) == 0o600
    assert mode(connection.parent) == mode(connection.parent.parent) == mode(logs) == 0o700
    assert {mode(log) for log in logs.iterdir()} == {0o600}
    assert send_code(connection, "assert host", timeout=20)
    assert not send_code(connection, "assert not host", timeout=20)
    forged = store.home / "forged.json"
    forged.write_text(json.dumps(json.loads(connection.read_text()) | {"key": "0" * 64}))
    assert not send_code(forged, "1", timeout=1)
    request_cancel(store, run)
    wait_phase(store, run, Phase.CANCELLED)
    nothing_left(store, run)
    assert not send_code(connection, "1", timeout=0.3)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode) & 0o777


# --- false starts -------------------------------------------------------------------------------


def test_a_host_that_cannot_be_imported_fails_its_run(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sqlalchemy.py").write_text("raise ImportError('broken on purpose')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{CHECKOUT}")
    run = create(store)
    launch(store, run, host_options=STUB)
    # Nobody polls: whoever launched it waits in the background.
    failure = wait_phase(store, run, Phase.FAILED).failure or ""
    assert "the host process exited with code 1: ImportError: broken on purpose" in failure
    nothing_left(store, run)


def test_an_interpreter_that_is_gone_fails_the_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(store)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        launch(store, run, host_options=STUB)
    ended = store.run(run.key)
    assert ended.phase is Phase.FAILED
    assert "/nowhere/python" in (ended.failure or "")
    assert not Path(store.attempts(run.key)[-1]["connection_file"]).exists()


def test_a_missing_workload_fails_the_run_before_a_rank_starts(store: Store) -> None:
    run = create(store)
    (store.home / "workloads" / run.workload_id / "workload.json").unlink()
    launch(store, run, host_options=STUB)
    assert "workload's folder is gone" in (wait_phase(store, run, Phase.FAILED).failure or "")
    nothing_left(store, run)


def test_a_second_host_of_an_attempt_refuses(store: Store, training: Start) -> None:
    run = training()
    first = host_of(store, run)
    with pytest.raises(ValueError, match="launched already"):
        launch(store, run, host_options=STUB)
    argv = [sys.executable, "-m", "nbtrain.jobs.host", "--run", run.run_id, "-f", "nowhere.json"]
    second = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert "has a host or has ended" in second.stderr
    assert store.run(run.key).phase is Phase.TRAINING
    assert host_of(store, run) == first
    assert is_alive(first)
    request_cancel(store, run)
    wait_phase(store, run, Phase.CANCELLED)
    nothing_left(store, run)
