"""The committed notebook, executed as it stands; the command line's quickstart, shortened."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
import stored
from nbclient import NotebookClient
from rich.console import Console
from typer.testing import CliRunner

import nbtrain
from nbtrain.cli import quickstart
from nbtrain.cli.main import app
from nbtrain.client import Client
from nbtrain.client.workloads import Workloads
from nbtrain.errors import RunEnded

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"


def test_the_notebook_learns_and_resumes(home: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()

    training = Client().training
    first, more = training.runs.get("first"), training.runs.list().items[1]
    assert first.status == more.status == "succeeded"
    rewards = first.rewards["avg_reward"]
    assert rewards[-10:].mean() >= rewards[:10].mean() + 0.3
    rounds = first.validation["held_out_reward"]
    assert rounds.iloc[-1] > rounds.iloc[0]
    best = first.best()
    assert (more.plan.start_step, more.plan.total_steps) == (best.step_index, best.step_index + 20)
    assert len(more.rewards) == 20
    shown = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.source.startswith("%%train")
        for output in cell.outputs
        if "image/png" in output["data"]
    ]
    assert len(shown) == 3
    assert all("succeeded, COMPLETED" in text for text in shown)
    assert "inherited" in shown[1]


def test_the_committed_outputs_are_those_of_a_whole_execution() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert NOTEBOOK.stat().st_size < 250_000
    text = NOTEBOOK.read_text()
    assert "/root" not in text
    assert "/home/" not in text


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where its report goes
    few = {"num_steps": 4, "batch_size": 2, "group_size": 4, "val_interval_steps": 2}
    monkeypatch.setattr(quickstart, "OPTIONS", {**quickstart.OPTIONS, **few, "val_num_tasks": 5})
    monkeypatch.setattr(quickstart, "FURTHER_STEPS", 2)


def test_the_command_trains_picks_and_resumes(home: Path, short: None) -> None:
    done = CliRunner().invoke(app, ["quickstart"])
    assert done.exit_code == 0, done.output
    told = re.sub(r"\s+", " ", done.output)
    assert "Mean reward of the first 2 steps" in told
    assert "Held-out reward" in told
    assert "Checkpoints of quickstart" in told
    assert "best" in told
    assert "Its report, to be opened in a browser" in told
    assert "Run quickstart" in Path("nbtrain-quickstart.html").read_text("utf-8")
    assert 'nbtrain.attach("quickstart")' in told
    runs = Client().training.runs.list()
    assert [run.name for run in runs] == ["quickstart-resumed", "quickstart"]
    assert {run.status for run in runs} == {"succeeded"}
    assert runs[0].plan.parent is not None
    assert runs[0].plan.parent.checkpoint_id == runs[1].best().checkpoint_id


def test_the_command_fails_when_the_run_fails(
    home: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client()

    def fails(completion: str, task: dict[str, object]) -> float:
        msg = "no reward today"
        raise ValueError(msg)

    tasks = [{"prompt": f"{n}?"} for n in range(40)]
    own = client.workloads.create("own", tasks=tasks, rewards=fails)
    going = stored.create(client, "quickstart")
    monkeypatch.setattr(Workloads, "sample", lambda _: own)
    done = CliRunner().invoke(app, ["quickstart"])
    assert done.exit_code == 1
    assert "no reward today" in done.output
    assert f"Another {going.title} is still running." in done.output
    assert "Traceback" not in done.output.split("no reward today")[0]


def test_a_run_that_stopped_early_says_why(home: Path) -> None:
    run = stored.create(Client())
    stored.finish(run, ended="no more signal: every group tied for 8 steps")
    console = Console(record=True, width=200)
    quickstart.tell(run, console)
    assert "no more signal: every group tied for 8 steps" in console.export_text()


def test_an_interrupt_detaches(home: Path) -> None:
    command = [sys.executable, "-c", "from nbtrain.cli.main import app; app()", "quickstart"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    runs = Client().training.runs
    deadline = time.monotonic() + 60
    while not len(runs.list()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    started.send_signal(signal.SIGINT)
    _, told = started.communicate(timeout=30)
    (run,) = runs.list()
    try:
        assert started.returncode == 130
        assert "goes on in the background" in told
        assert "nbtrain.attach('quickstart').cancel()" in told
        assert run.status in ("pending", "running")
    finally:
        run.cancel()
        with pytest.raises(RunEnded):
            run.wait(60)


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"nbtrain {nbtrain.__version__}\n")
