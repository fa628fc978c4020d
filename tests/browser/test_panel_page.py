"""The live panel in a real page: it moves, it is picked from, it goes on, and it is found again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import stored

from nbtrain.client import Client

if TYPE_CHECKING:
    from conftest import NotebookPage, Open

pytestmark = pytest.mark.browser

LOAD = "%load_ext nbtrain\nimport nbtrain, time"
TRAIN = """%%train --workload sums --model nbtrain/tiny --name first --into run
num_steps: 40
batch_size: 8
group_size: 8
learning_rate: 0.0005
lr_warmup_steps: 0
val_interval_steps: 10
val_num_tasks: 32
checkpoint_interval_steps: 10"""
SELECTED = "p = run.panel()\nprint('picked', p.selected and p.selected.step_index)"


def until(condition: Callable[[], bool], seconds: float, told: str) -> None:
    """Wait until the condition holds."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, told
        time.sleep(0.05)


def panel_of(notebook: NotebookPage, index: int) -> Any:
    panel = notebook.outputs(index).locator(".nbtrain-panel")
    panel.first.locator(".nbtrain-all").wait_for(timeout=40_000)
    return panel.first


def points(panel: Any, chart: str = "curve") -> int:
    return int(panel.locator(f"[data-chart={chart}]").get_attribute("data-points") or 0)


def wait_status(panel: Any, status: str, seconds: float = 240) -> None:
    panel.locator(f".nbtrain-pill[data-status={status}]").wait_for(timeout=seconds * 1000)


def rows_of(panel: Any) -> Any:
    return panel.locator(".nbtrain-table tbody tr")


@pytest.mark.parametrize("app", ["lab", "notebook"], indirect=True)
def test_a_run_is_watched_picked_from_and_found_again(
    open_notebook: Open, tmp_path: Path, app: str
) -> None:
    notebook = open_notebook([LOAD, TRAIN, SELECTED, SELECTED], width=1300, height=2600)
    notebook.run_cell(0)
    notebook.run_cell(1)
    panel = panel_of(notebook, 1)
    static = notebook.outputs(1).first
    assert panel.bounding_box()["y"] > static.bounding_box()["y"]

    # It moves
    panel.locator("[data-chart=curve][data-points]").wait_for(timeout=180_000)
    until(lambda: points(panel) >= 3, 120, "no steps came")
    before, phase = points(panel), panel.locator(".nbtrain-headline").inner_text()
    bar = panel.get_by_role("progressbar")
    at = int(bar.get_attribute("aria-valuenow"))
    notebook.screenshot(tmp_path / f"{app}-running-light.png")
    until(lambda: points(panel) > before, 60, "the curve stands still")
    until(lambda: int(bar.get_attribute("aria-valuenow")) > at, 60, "the progress stands still")
    assert "TRAINING" in phase
    notebook.theme("dark")
    notebook.screenshot(tmp_path / f"{app}-running-dark.png")
    wait_status(panel, "succeeded")
    until(lambda: points(panel) == 40, 20, "steps are missing")
    assert panel.locator(".nbtrain-headline").inner_text() != phase

    # The checkpoints are ranked, with their intervals
    rows = rows_of(panel)
    ranks = [row.locator(".nbtrain-rank").inner_text() for row in rows.all()]
    assert ranks == [str(n + 1) for n in range(len(ranks))]
    assert len(ranks) >= 4
    scores = [float(row.locator(".nbtrain-score span").first.inner_text()) for row in rows.all()]
    assert scores[1:] == sorted(scores[1:], reverse=True)  # the best may only tie with the highest
    assert "[" in rows.first.locator(".nbtrain-score").inner_text()
    assert panel.locator(".nbtrain-best").first.is_visible()
    notebook.screenshot(tmp_path / f"{app}-finished-dark.png")
    notebook.theme("light")
    notebook.screenshot(tmp_path / f"{app}-finished-light.png")

    # Hover reads out, and what is picked is known in Python
    over = panel.locator("[data-chart=curve] .u-over")
    box = over.bounding_box()
    over.hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
    readout = panel.locator("[data-chart=curve] .nbtrain-chart-readout")
    step = readout.inner_text().split(" · ")[0]
    assert 18 <= int(step.removeprefix("step ")) <= 22, step
    rows.nth(1).click()
    picked = int(rows.nth(1).locator(".nbtrain-step").inner_text())
    notebook.run_cell(2)
    notebook.wait_text(2, f"picked {picked}")
    steps = panel.locator("[data-chart=curve]").get_attribute("data-last-step")
    assert steps == "40"
    by_keyboard(notebook, panel)
    over.click(position={"x": box["width"] * 30.5 / 41, "y": box["height"] / 3})  # its mark
    rows.locator("xpath=self::tr[@aria-selected='true']").filter(has_text="30").wait_for()
    notebook.run_cell(3)
    notebook.wait_text(3, "picked 30")
    notebook.screenshot(tmp_path / f"{app}-picked-light.png")

    # The page is loaded again: the living kernel shows it whole
    notebook.save()
    notebook.page.reload()
    notebook.wait_idle()
    panel = panel_of(notebook, 1)
    until(lambda: points(panel) == 40, 30, "the curve is not whole")
    chosen = panel.locator("tr[aria-selected=true] .nbtrain-step")
    chosen.wait_for()
    assert chosen.inner_text() == "30"
    notebook.screenshot(tmp_path / f"{app}-reloaded.png")
    area = notebook.cell(1).locator(".jp-Cell-outputArea")
    assert area.evaluate("area => area.scrollHeight - area.clientHeight") < 20  # in no small box


def by_keyboard(notebook: NotebookPage, panel: Any) -> None:
    """The curve is read and picked from without a mouse, and its keys stay out of the notebook."""
    cells = notebook.page.locator(".jp-CodeCell").count()
    notebook.page.keyboard.press("Escape")
    notebook.page.locator(".jp-Notebook.jp-mod-commandMode").wait_for()  # whose keys are letters
    panel.locator("[data-chart=curve] [tabindex='0']").first.focus()
    press = notebook.page.keyboard.press
    press("End")
    readout = panel.locator("[data-chart=curve] .nbtrain-chart-readout")
    assert readout.get_attribute("aria-live") == "polite"
    until(lambda: readout.inner_text().startswith("step 40 "), 5, "End reads out no last step")
    press("ArrowLeft")
    until(lambda: readout.inner_text().startswith("step 39 "), 5, "ArrowLeft goes nowhere")
    press("Home")
    press("Enter")
    chosen = panel.locator("tr[aria-selected=true] .nbtrain-step")
    until(lambda: chosen.inner_text() == "0", 20, "Enter picked nothing")
    press("Tab")  # on to whatever comes next, in the panel or behind it
    assert not panel.locator("[data-chart=curve] [tabindex='0']").first.evaluate(
        "stage => stage === document.activeElement"
    )
    assert notebook.page.locator(".jp-CodeCell").count() == cells


SMALL = TRAIN.replace("num_steps: 40", "num_steps: 8").replace("steps: 10", "steps: 4")


def test_a_picked_checkpoint_is_tried_exported_and_gone_on_from(
    open_notebook: Open, tmp_path: Path
) -> None:
    asked = [
        "print('selected', run.panel().selected.step_index)",
        "print('resumed', run.panel().resumed and run.panel().resumed.name)",
        "print('followed by', nbtrain.attach('second').panel() is panel)",
    ]
    cells = [LOAD, SMALL, "panel = run.panel()", *asked]
    notebook = open_notebook(cells, width=1300, height=2600)
    notebook.run_cell(0)
    notebook.run_cell(1)
    panel = panel_of(notebook, 1)
    wait_status(panel, "succeeded")
    notebook.run_cell(2)
    panel.get_by_role("radio", name="step 8,").check()

    panel.get_by_role("tab", name="Try").click()
    panel.get_by_role("textbox", name="Prompt").fill("What is 2 + 2?")
    panel.get_by_role("spinbutton", name="Replies").fill("2")
    panel.get_by_role("button", name="Generate", exact=True).click()
    panel.locator(".nbtrain-reply").nth(1).wait_for(timeout=120_000)
    assert "step 8" in panel.locator(".nbtrain-replies").inner_text()
    notebook.screenshot(tmp_path / "tried.png")

    panel.get_by_role("tab", name="Export").click()
    panel.get_by_role("textbox", name="Folder").fill(str(tmp_path / "adapter"))
    panel.get_by_role("button", name="Export", exact=True).click()
    panel.get_by_text("the adapter is in").wait_for(timeout=60_000)
    notebook.screenshot(tmp_path / "exported.png")
    exported = {path.name for path in (tmp_path / "adapter").rglob("*")}
    assert exported >= {"adapter_config.json", "adapter_model.safetensors"}

    panel.get_by_role("tab", name="Resume").click()
    panel.get_by_role("spinbutton", name="Further steps").fill("4")
    panel.get_by_role("textbox", name="Name").fill("second")
    panel.get_by_role("button", name="Resume", exact=True).click()
    follow = panel.get_by_role("button", name="Follow it here")
    follow.wait_for(timeout=60_000)
    notebook.screenshot(tmp_path / "resumed.png")
    second = Client().training.runs.get("second")
    first = Client().training.runs.get("first")
    known = {c.checkpoint_id: c for c in first.checkpoint_list()}
    parent = known[stored.row_of(second).parent_checkpoint_id]
    assert parent.step_index == 8
    notebook.run_cell(3)
    notebook.wait_text(3, "selected 8")
    notebook.run_cell(4)
    notebook.wait_text(4, "resumed second")

    follow.click()
    panel.get_by_role("heading", name="run second").wait_for(timeout=20_000)
    wait_status(panel, "succeeded")
    until(lambda: points(panel) == 4, 20, "the steps of the run that is followed are missing")
    assert panel.locator("[data-chart=curve]").get_attribute("data-last-step") == "12"
    notebook.run_cell(5)
    notebook.wait_text(5, "followed by True")
    notebook.screenshot(tmp_path / "followed.png")


def made(name: str, steps: int = 40) -> Any:
    """A run that seems to be trained by this very process."""
    run = stored.create(Client(), name, num_steps=100)
    stored.train(run)
    for number in range(1, steps + 1):
        stored.step(run, number, reward=number / 100)
        if number % 20 == 0:
            scores = [k % 3 / 2 * number / 40 for k in range(12)]
            stored.scored(run, number, scores)
    return run


def test_clicks_arrive_while_a_cell_runs_and_a_restarted_kernel_shows_it_whole(
    open_notebook: Open, home: Path, tmp_path: Path
) -> None:
    made("first")
    seen = tmp_path / "seen"
    busy = (
        f"open({str(tmp_path / 'running')!r}, 'w').close()\n"
        "def note(change):\n"
        f"    with open({str(seen)!r}, 'w') as out: out.write(change['new'])\n"
        "run.panel().observe(note, 'selected_id')\ntime.sleep(15)"
    )
    again = "%load_ext nbtrain\nimport nbtrain\nnbtrain.attach('first').panel()"
    cells = [LOAD, "run = nbtrain.attach('first')\nrun.panel()", busy, again]
    notebook = open_notebook(cells, width=1300, height=2600)
    notebook.run_cell(0)
    notebook.run_cell(1)
    panel = panel_of(notebook, 1)
    notebook.run_cell(2)
    until((tmp_path / "running").exists, 20, "the cell does not run")
    rows = rows_of(panel)
    rows.last.click()
    until(lambda: seen.exists() and bool(seen.read_text()), 10, "no click arrived")
    assert "[*]" in notebook.cell(2).inner_text()
    assert seen.read_text() == rows.last.get_attribute("title")
    notebook.wait_idle()

    notebook.page.evaluate(
        "window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.restart()"
    )
    alert = panel.get_by_role("alert")
    alert.filter(has_text="nbtrain.attach('first').panel()").wait_for(timeout=30_000)
    notebook.wait_idle()
    assert panel.locator("xpath=self::*[contains(@class, 'nbtrain-gone')]").count() == 1
    assert panel.get_by_role("radio").first.is_disabled()
    assert points(panel) == 40
    notebook.screenshot(tmp_path / "gone-light.png")
    notebook.theme("dark")
    notebook.screenshot(tmp_path / "gone-dark.png")
    notebook.run_cell(3)
    fresh = panel_of(notebook, 3)
    until(lambda: points(fresh) == 40, 20, "the curve is not whole")
    assert rows_of(fresh).count() == 2


COUNTED = """from nbtrain.notebook import live
from nbtrain.notebook.panel import messages
real, sent = messages.code, []
def counted(program, have):
    message = real(program, have)
    sent.append(bool(message[1]))
    return message
messages.code = counted
a, b = nbtrain.attach('first'), nbtrain.attach('second')"""


def test_many_panels_of_two_runs_all_move_and_fetch_the_program_once(
    open_notebook: Open, home: Path, tmp_path: Path
) -> None:
    first, second = made("first", 5), made("second", 7)
    shown = ["a.panel()", "b.panel()", "a.panel()", "live.new_panel(b)", "live.new_panel(a)"]
    cells = [f"{LOAD}\n{COUNTED}", *shown, "print('sent', sum(sent), 'asked', len(sent))"]
    notebook = open_notebook(cells, width=1300, height=7000)
    for index in range(6):
        notebook.run_cell(index)
    panels = [panel_of(notebook, index) for index in range(1, 6)]
    before = [5, 7, 5, 7, 5]
    until(lambda: [points(one) for one in panels] == before, 30, "a panel has not everything")
    for run, after in ((first, 5), (second, 7)):
        for number in range(after + 1, after + 4):
            stored.step(run, number)
    until(lambda: [points(one) for one in panels] == [8, 10, 8, 10, 8], 15, "a panel stands still")
    notebook.run_cell(6)
    notebook.wait_text(6, "sent 1 asked 5")


HOSTILE = (
    "<script>window.hostile = 1</script><img src=x onerror='window.hostile = 2'>"
    "<a href='javascript:window.hostile = 3'>link</a> **bold** [x](javascript:1) $x^2$ "
    "\u202eright to left\u2066 </pre></div>&amp;"
)


def test_what_models_and_tasks_say_is_shown_as_text(
    open_notebook: Open, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text(number: int, sample: int) -> dict[str, Any]:
        return {
            "prompt": [{"role": "user", "content": f"task {HOSTILE}"}],
            "completion": f"reply {HOSTILE}",
            "terms": {f"term {HOSTILE}": float(sample)},
            "error": f"error {HOSTILE}",
        }

    monkeypatch.setattr(stored, "_text", text)
    run = stored.create(Client(), "named <img src=x onerror=window.hostile=4>")
    stored.train(run)
    stored.step(run, 1, rewards=[0.0, 1.0, None], errors=[None, None, f"broke {HOSTILE}"])
    stored.scored(run, 1, [0.5, 1.0])
    logs = run.folder / "logs"
    logs.mkdir(parents=True)
    (logs / "rank0.log").write_text(f"log {HOSTILE}\n")
    stored.finish(run, stored.Phase.FAILED, failure=f"failed {HOSTILE}")
    shown = f"run = nbtrain.attach({run.id!r})\ndisplay(run)\nrun.panel()"
    notebook = open_notebook([LOAD, shown], width=1300, height=2600)
    dialogs: list[str] = []

    def dismiss(dialog: Any) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    notebook.page.on("dialog", dismiss)
    notebook.run_cell(0)
    notebook.run_cell(1)
    panel = panel_of(notebook, 1)
    panel.locator("summary", has_text="Log").click()
    panel.get_by_role("radio").first.check()
    told = panel.evaluate("panel => panel.textContent")
    for words in ("task", "reply", "term", "log", "failed"):
        assert f"{words} {HOSTILE}" in told, words
    assert "named <img src=x" in panel.get_by_role("heading").first.inner_text()
    assert panel.locator("img, script, a, iframe, strong + em").count() == 0
    assert notebook.outputs(1).locator("script, iframe, a[href^=javascript]").count() == 0
    notebook.screenshot(tmp_path / "hostile.png")
    assert notebook.page.evaluate("window.hostile") is None
    assert dialogs == []
