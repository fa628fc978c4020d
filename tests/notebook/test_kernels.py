"""Cells in real kernels with real runs: outputs stay in their cell, runs outlive their kernel."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from live_kernels import CellFailed, kernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from nbtrain.client import Client, Run
from nbtrain.errors import NbtrainError

TRAIN = """%%train --workload sums --name {name} --into run {flags}
num_steps: {steps}
batch_size: 2
group_size: 4
learning_rate: 5e-4
lr_warmup_steps: 0
val_interval_steps: {interval}
val_num_tasks: 5
"""


def cell(name: str, steps: int, flags: str = "") -> str:
    return TRAIN.format(name=name, steps=steps, interval=min(steps, 100), flags=flags)


@pytest.fixture(autouse=True)
def nothing_goes_on(home: Path) -> Iterator[None]:
    """A test that fails leaves no run behind."""
    yield
    running = [run for run in Client().training.runs.list() if not run.is_over]
    for run in running:
        run.cancel()
    for run in running:
        with contextlib.suppress(NbtrainError, TimeoutError):
            run.wait(60)


def execute(*cells: str) -> nbformat.NotebookNode:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    NotebookClient(notebook, timeout=180, kernel_name="python3").execute()
    return notebook


def until_training(name: str) -> Run:
    client = Client()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = [run for run in client.training.runs.list() if run.name == name]
        if found and found[0].progress.completed_steps:
            return found[0]
        time.sleep(0.1)
    msg = f"{name} made no step in two minutes"
    raise AssertionError(msg)


def test_outputs_stay_in_the_cell_that_started_the_run(home: Path) -> None:
    notebook = execute(
        "%load_ext nbtrain",
        cell("first", 6),
        "import time; time.sleep(1); print('two')",
        "print('three')",
        "while not run.is_over: time.sleep(0.2)\nprint('four')",
        "run.wait()\nrun.status",
    )
    outputs = [cell.outputs for cell in notebook.cells]
    assert [[o["text"] for o in out] for out in outputs[2:5]] == [
        ["two\n"],
        ["three\n"],
        ["four\n"],
    ]
    assert outputs[5][0]["data"]["text/plain"] == "'succeeded'"
    shown, _panel = outputs[1]
    assert set(shown["data"]) == {"text/plain", "text/html", "image/png"}
    assert "succeeded, COMPLETED" in shown["data"]["text/plain"]
    assert "step 6 of 6" in shown["data"]["text/html"]
    assert len(str(notebook.metadata["widgets"])) < 10_000


def test_a_refused_cell_fails_with_its_line_and_no_traceback(home: Path) -> None:
    with pytest.raises(CellExecutionError) as failed:
        execute("%load_ext nbtrain", "%%train --workload sums\nnum_stesp: 3\n")
    told = str(failed.value)
    assert failed.value.ename == "CellRefused"
    assert "    num_stesp: 3\n    ^" in told
    assert "num_steps" in told
    assert "Traceback" not in told


def test_waiting_ends_with_an_error_when_the_job_is_killed(home: Path) -> None:
    def kill() -> None:
        run = until_training("doomed")
        (attempt,) = run._store.attempts(run._key)
        os.kill(attempt["host_pid"], signal.SIGKILL)
        killed.append(time.monotonic())

    killed: list[float] = []
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(CellExecutionError) as failed:
        execute("%load_ext nbtrain", cell("doomed", 5000, "--wait"))
    killer.join(10)
    assert killed
    assert "failed: its host process" in str(failed.value)
    assert Client().training.runs.get("doomed").status == "failed"


def test_a_run_outlives_its_kernel_restarted_and_killed(home: Path) -> None:
    with kernel() as first:
        first.run(cell("long", 5000))
        until_training("long")
        first.manager.restart_kernel(now=False)
        first.client.wait_for_ready(timeout=60)
        first.run("%load_ext nbtrain\nimport nbtrain\nrun = nbtrain.attach('long')")
        assert first.run("run.status") == "'running'"
        assert int(first.run("len(run.rewards)")) >= 1
        os.kill(first.manager.provisioner.pid, signal.SIGKILL)
    with kernel() as second:
        second.run("run = nbtrain.attach('long')")
        before = int(second.run("run.progress.completed_steps"))
        second.run("%train watch long")
        whole = "steps = list(run.rewards['step'])\nsteps == list(range(1, len(steps) + 1))"
        second.run(f"while run.progress.completed_steps < {before + 3}: time.sleep(0.1)")
        assert second.run(whole) == "True"
        assert int(second.run("len(run.trajectories)")) >= 8 * before
        assert second.run("run.log != ''") == "True"
        second.run("%train cancel long")
        with pytest.raises(CellFailed) as cancelled:
            second.run("%train wait long --timeout 60")
        assert "was cancelled" in cancelled.value.shown
        assert int(second.run("len(run.checkpoints)")) >= 1
        assert second.run("run.best().step_index") == "0"
