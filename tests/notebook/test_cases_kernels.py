"""Field trouble with notebooks, in real kernels: text in the wrong cell, buttons that wait, lines
that are lost, files that grow, runners that hang, figures that are none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import nbformat
import psutil
import pytest
import stored
from live_kernels import Kernel, kernel
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from pages import KernelPage
from saved import Markup, panel_states, stripped
from sqlalchemy import insert

from nbtrain.client import Client, Run
from nbtrain.errors import NbtrainError
from nbtrain.store import tables

T = TypeVar("T")
WIDGET = "application/vnd.jupyter.widget-view+json"
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


@pytest.fixture
def free(home: Path) -> Iterator[None]:
    """A test that fails leaves no run behind."""
    yield
    running = [run for run in Client().training.runs.list() if not run.is_over]
    for run in running:
        run.cancel()
    for run in running:
        with contextlib.suppress(NbtrainError, TimeoutError):
            run.wait(60)


def until(found: Callable[[], T | None], seconds: float = 240.0) -> T:
    deadline = time.monotonic() + seconds
    while (value := found()) is None:
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.1)
    return value


def training(name: str) -> Run:
    """The run of this name, once it made a step."""

    def found() -> Run | None:
        for run in Client().training.runs.list():
            if run.name == name and run.progress.completed_steps:
                return run
        return None

    return until(found)


# A notebook executed as a whole, and again


@dataclass
class Executed:
    """One notebook after each of three executions, and what its run shows in the end."""

    first: nbformat.NotebookNode
    fresh: nbformat.NotebookNode
    same: nbformat.NotebookNode
    runs: int
    run_id: str
    picture: str
    """The run's curve as base64, drawn anew."""


CELLS = (
    "%load_ext nbtrain",
    cell("first", 4),
    "import time; time.sleep(2); print('two')",
    "print('three')",
    "time.sleep(5); print('four')",
    "run.wait()\nrun.status",
)


def executions(times: int) -> Iterator[nbformat.NotebookNode]:
    """The notebook after each execution from top to bottom in one kernel, as it is saved."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    client = NotebookClient(notebook, timeout=180, kernel_name="python3")
    with client.setup_kernel():
        for _ in range(times):
            for index, each in enumerate(notebook.cells):
                client.execute_cell(each, index)
            client.set_widgets_metadata()
            yield nbformat.reads(nbformat.writes(notebook), 4)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBTRAIN_HOME", str(tmp_path_factory.mktemp("home")))
        (first,) = executions(1)
        run = Client().training.runs.get("first")
        picture = run._repr_mimebundle_()["image/png"]
        fresh, same = executions(2)
        runs = len(Client().training.runs.list())
        yield Executed(first, fresh, same, runs, run.id, picture)


def printed(notebook: nbformat.NotebookNode) -> list[list[str]]:
    return [[output.get("text", "") for output in each.outputs] for each in notebook.cells[2:5]]


def test_nb_01_what_a_run_shows_stays_in_the_cell_that_started_it(executed: Executed) -> None:
    for notebook in (executed.first, executed.fresh, executed.same):
        assert printed(notebook) == [["two\n"], ["three\n"], ["four\n"]]
        static, panel = notebook.cells[1].outputs
        assert set(static["data"]) == {"text/plain", "text/html", "image/png"}
        assert WIDGET in panel["data"]
        assert notebook.cells[5].outputs[0]["data"]["text/plain"] == "'succeeded'"


def test_the_saved_cell_has_the_final_curve_without_a_widget(executed: Executed) -> None:
    data = executed.first.cells[1].outputs[0]["data"]
    assert data["image/png"].strip() == executed.picture
    markup = Markup(data["text/html"])
    assert [image.partition(",")[2] for image in markup.images] == [executed.picture]
    for text in (data["text/plain"], markup.words):
        assert executed.run_id[:12] in text
        assert "succeeded, COMPLETED" in text
        assert "step 4 of 4" in text


def test_run_all_twice_trains_nothing_again_and_shows_everything(executed: Executed) -> None:
    assert executed.runs == 1
    assert "attached to" not in executed.first.cells[1].outputs[0]["data"]["text/plain"]
    for again in (executed.fresh, executed.same):
        data = again.cells[1].outputs[0]["data"]
        assert data["image/png"].strip() == executed.picture
        for text in (data["text/plain"], Markup(data["text/html"]).words):
            assert "attached to run first" in text
            assert "succeeded, COMPLETED" in text
            assert "step 4 of 4" in text


def test_nb_06_a_page_without_widgets_says_which_run_it_was_and_how_it_ended(
    executed: Executed,
) -> None:
    bare = stripped(executed.first)
    assert "widgets" not in bare.metadata
    assert WIDGET not in nbformat.writes(bare)
    page = Markup(HTMLExporter().from_notebook_node(bare)[0])
    assert executed.run_id[:12] in page.words
    assert "succeeded, COMPLETED" in page.words
    assert f"data:image/png;base64,{executed.picture}" in page.images
    # nothing beside it still speaks of a run that has yet to begin
    assert "PENDING" not in page.words
    assert "pending" not in page.words


def test_nb_06_a_page_that_prefers_widgets_shows_the_same_offline(executed: Executed) -> None:
    """``jupyter nbconvert --to html`` as it is: only the panel's place needs a network."""
    page = Markup(HTMLExporter().from_notebook_node(executed.first)[0])
    assert "application/vnd.jupyter.widget-view+json" in page.scripts
    assert executed.run_id[:12] in page.words
    assert "succeeded, COMPLETED" in page.words
    assert f"data:image/png;base64,{executed.picture}" in page.images


def test_nb_12_the_panel_s_saved_state_is_small_and_knows_the_end(executed: Executed) -> None:
    state = executed.first.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]
    assert len(json.dumps(state)) < 10_000
    (kept,) = panel_states(executed.first)
    assert "succeeded, COMPLETED" in kept["told"]
    outputs = [len(json.dumps(output)) for output in executed.first.cells[1].outputs]
    assert sum(outputs) < 60_000


# A run that a kernel follows


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel with a home of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBTRAIN_HOME", str(tmp_path_factory.mktemp("home")))
        with kernel() as started:
            yield started


def made(name: str, **options: Any) -> Run:
    run = stored.create(Client(), name, **options)
    stored.train(run)
    return run


def test_nb_03_no_line_of_a_log_is_lost_or_doubled(seen: Kernel) -> None:
    run = made("logged")
    written = run.folder / "logs" / "rank-0.log"
    written.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        with written.open("w", buffering=1) as log:
            for number in range(1, 10_001):
                log.write(f"line {number:05}\n")
                if number % 100 == 0:
                    time.sleep(0.1)

    seen.run("%train watch logged")
    page = KernelPage(seen)
    page.send({"kind": "hello"})
    writer = threading.Thread(target=write)
    writer.start()
    shown = []
    while not shown or shown[-1][-1] < 10_000:
        told = page.listen(lambda c: "log" in c.get("state", {}))["state"]["log"]
        numbers = [int(found) for found in re.findall(r"^line (\d+)$", told, re.M)]
        if numbers:
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            shown.append(numbers)
    writer.join()
    assert len(shown) > 1, "it came while the log was written"
    whole, whole_words = written.read_text().splitlines(), written.read_text().split()
    told = told.splitlines()
    assert told[-100:] == whole[-100:]
    assert [line for line in told if line not in set(whole)] in ([], [told[0]])
    assert seen.run("print(nbtrain.attach('logged').log)").split()[-200:] == whole_words[-200:]
    stored.finish(run)


def test_me_01_a_panel_names_figures_that_are_no_numbers_and_goes_on(seen: Kernel) -> None:
    run = made("nan")
    seen.run("%train watch nan")
    page = KernelPage(seen)
    page.send({"kind": "hello"})
    page.update()
    nan, inf = float("nan"), float("inf")
    for number, bad in enumerate((0.1, nan, inf, -inf, 0.2), 1):
        stored.step(run, number, bad, rewards=(0.0, bad), loss=bad, metrics={"kl": bad})
    stored.finish(run)
    page.listen(lambda c: c.get("state", {}).get("head", {}).get("over", False))
    page.send({"kind": "hello"})
    whole, figures = page.update()
    assert [row[1:3] for row in figures["steps"]] == [
        [1, 0.1], [2, None], [3, None], [4, None], [5, 0.2],
    ]  # fmt: skip
    broken = whole["state"]["not_finite"]
    assert {one["step"] for one in broken} == {2, 3, 4}
    assert {"avg_reward"} <= {one["name"] for one in broken}
    for content, _ in page.heard:
        json.dumps(content, allow_nan=False)
    told, end = "", time.monotonic() + 60
    while "step 5 of 8" not in told and time.monotonic() < end:
        seen.run("time.sleep(0.5)")
        shown = [
            message["content"]["data"]["text/plain"]
            for message in seen.messages
            if message["msg_type"] == "update_display_data"
        ]
        told = next((text for text in reversed(shown) if text.startswith("run nan ")), "")
    assert "step 5 of 8" in told
    frame = "nbtrain.attach('nan').rewards['avg_reward'].isna().tolist()"
    assert seen.run(frame) == "[False, True, True, True, False]"


LONG = 10_000


def steps(run: Run, first: int, last: int) -> None:
    """A hundred fast steps: all but the last written at once."""
    rows = [
        {
            "run": run._key, "attempt": 1, "step": number, "created_at": time.time(),
            "avg_reward": (number * 7919 % 101) / 202 + number / (2 * LONG), "used_reward": 0.5,
            "completed_groups": 3, "used_groups": 2, "no_signal_groups": 1,
            "update_applied": True, "settled": True, "metrics": {},
        }
        for number in range(first, last)
    ]  # fmt: skip
    with run._store.database.writing() as connection:
        connection.execute(insert(tables.steps), rows)
    stored.step(run, last, 0.7, text=False)


def most_in_a_second(moments: list[datetime]) -> int:
    return max(
        sum(0 <= (other - one).total_seconds() < 1.0 for other in moments) for one in moments
    )


def test_nb_12_ten_thousand_steps_add_little_and_seldom(seen: Kernel) -> None:
    run = made("fast", num_steps=LONG, val_interval_steps=100)

    def train() -> None:
        for last in range(100, LONG + 1, 100):
            steps(run, last - 99, last)
            if last % 500 == 0:
                stored.validate(run, last, last / LONG)
                stored.save(run, last)
            time.sleep(0.1)
        stored.finish(run)

    trainer = threading.Thread(target=train)
    seen.messages.clear()
    seen.run("%train watch fast")
    trainer.start()
    # first with nothing but the static output; from the middle on with a page, too
    seen.run("while nbtrain.attach('fast').progress.completed_steps < 5_000: time.sleep(0.2)")
    page = KernelPage(seen)
    page.send({"kind": "hello"})
    page.listen(lambda c: c.get("state", {}).get("head", {}).get("over", False), 120)
    trainer.join()
    seen.run("time.sleep(3)")

    shown = [m for m in seen.messages if "display_data" in m["msg_type"]]
    moments: dict[str, list[datetime]] = {}
    for message in shown:
        place = message["content"].get("transient", {}).get("display_id")
        if place is not None:
            moments.setdefault(place, []).append(message["header"]["date"])
    sent = [m for m in seen.messages if m["msg_type"] == "comm_msg"]
    moments["panel"] = [
        m["header"]["date"] for m in sent if m["content"]["comm_id"] == page.comm_id
    ]
    static = next(iter(moments))  # outputs of other tests may follow
    assert len(moments[static]) > 2, "it followed"
    assert len(moments["panel"]) > 2
    assert {
        place: most for place in moments if (most := most_in_a_second(moments[place])) > 4
    } == {}

    mine = (m["content"] for m in shown if m["content"].get("transient", {}))
    last = [content for content in mine if content["transient"]["display_id"] == static][-1]
    (panel,) = (m["content"] for m in shown if WIDGET in m["content"]["data"])
    assert f"step {LONG:,} of {LONG:,}" in last["data"]["text/plain"]
    opened = [m["content"] for m in seen.messages if m["msg_type"] == "comm_open"]
    beside = [c["data"]["state"] for c in opened if c["comm_id"] != page.comm_id]
    added = [json.dumps(thing) for thing in (last["data"], panel["data"], page.state, *beside)]
    assert sum(map(len, added)) < 50_000, [len(text) for text in added]


def test_nb_04_stop_is_heard_while_a_cell_runs(free: None) -> None:
    with kernel() as busy:
        begun = time.monotonic()
        busy.run(cell("long", 5000))
        returned = time.monotonic() - begun
        page = KernelPage(busy)
        run = training("long")
        assert returned < time.monotonic() - begun, "the cell returned before a step was made"
        request = busy.client.session.msg("create_subshell_request")
        busy.client.control_channel.send(request)
        over = str(busy.client.get_control_msg(timeout=10)["content"]["subshell_id"])
        asleep = busy.client.execute("time.sleep(60)")
        time.sleep(1)
        page.send({"kind": "do", "id": 1, "action": "cancel", "args": {}}, subshell=over)
        told = page.listen(lambda c: c["kind"] == "done")
        assert told["ok"]
        assert "was asked to stop" in told["said"]
        until(lambda: run.is_over or None, 40)
        assert run.status == "cancelled"
        replies = [m for m in busy.messages if m["parent_header"].get("msg_id") == asleep]
        assert not [m for m in replies if m["content"].get("execution_state") == "idle"]


# Without anybody watching


Started = tuple[subprocess.Popen[str], Path]


@pytest.fixture
def papermill(free: None, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts papermill on a notebook of some cells; gives the process and where the result goes."""
    started: list[subprocess.Popen[str]] = []

    def start(*cells: str) -> Started:
        texts = [nbformat.v4.new_code_cell(text) for text in cells]
        given, done = tmp_path / "in.ipynb", tmp_path / "out.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=texts), given)
        command = [sys.executable, "-m", "papermill", str(given), str(done)]
        process = subprocess.Popen(
            [*command, "--kernel", "python3", "--no-progress-bar"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process, done

    yield start
    for process in started:
        process.terminate()
        process.wait(30)


def running(root: int, words: str) -> int:
    """The process below ``root`` that was started with ``words``."""
    family = psutil.Process(root).children(recursive=True)
    (found,) = {each.pid for each in family if words in " ".join(each.cmdline())}
    return found


def test_nb_13_a_cell_that_waits_fails_when_its_worker_is_killed(
    papermill: Callable[..., Started],
) -> None:
    started, done = papermill("%load_ext nbtrain", cell("doomed", 5000, "--wait"))
    run = training("doomed")
    (attempt,) = run._store.attempts(run._key)
    os.kill(running(attempt["host_pid"], "nbtrain.training.main"), signal.SIGKILL)
    killed = time.time()
    _, told = started.communicate(timeout=90)
    assert started.returncode != 0
    assert "doomed" in told
    assert "failed: " in told
    failed = nbformat.read(done, 4).cells[-1]
    assert failed.metadata["papermill"]["status"] == "failed"
    ended = datetime.fromisoformat(failed.metadata["papermill"]["end_time"])
    assert ended.timestamp() - killed < 10
    (error,) = (output for output in failed.outputs if output["output_type"] == "error")
    assert "failed: " in error["evalue"]
    assert "killed" in error["evalue"] or "SIGKILL" in error["evalue"]
    shown = next(output for output in failed.outputs if "data" in output)
    assert "failed, FAILED" in shown["data"]["text/plain"]
    assert run.status == "failed"


def test_nb_13_a_killed_kernel_leaves_its_run_alone(papermill: Callable[..., Started]) -> None:
    started, _ = papermill("%load_ext nbtrain", cell("orphan", 5000, "--wait"))
    training("orphan")
    os.kill(running(started.pid, "ipykernel_launcher"), signal.SIGKILL)
    _, told = started.communicate(timeout=90)
    assert started.returncode != 0
    assert "DeadKernelError" in told
    found = Client().training.runs.get("orphan")
    before = found.progress.completed_steps
    until(lambda: found.progress.completed_steps > before or None, 60)
    assert found.status == "running"
