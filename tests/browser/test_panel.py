"""The live panel in a real page: it moves, it is picked from, it goes on, and it is found again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import NotebookPage, Open

pytestmark = pytest.mark.browser

LOAD = "%load_ext nbtrain\nimport nbtrain, time"
TRAIN = """%%train --workload sums --model nbtrain/tiny --name first --into run
num_steps: 60
batch_size: 8
group_size: 8
learning_rate: 0.0005
lr_warmup_steps: 0
val_interval_steps: 10
val_num_tasks: 32
checkpoint_interval_steps: 10"""
SELECTED = "p = run.panel()\nprint('picked', p.selected and p.selected.step)"


def until(condition: Callable[[], bool], seconds: float, told: str) -> float:
    """Wait until the condition holds; returns how many seconds that took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, told
        time.sleep(0.05)
    return time.monotonic() - begun


def panel_of(notebook: NotebookPage, index: int) -> Any:
    panel = notebook.outputs(index).locator(".nbtrain-panel")
    panel.first.locator(".nbtrain-all").wait_for(timeout=40_000)
    return panel.first


def points(panel: Any, chart: str = "curve") -> int:
    return int(panel.locator(f"[data-chart={chart}]").get_attribute("data-points") or 0)


def wait_status(panel: Any, status: str, seconds: float = 180) -> None:
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
    panel.locator("[data-chart=curve][data-points]").wait_for(timeout=60_000)
    until(lambda: points(panel) >= 3, 60, "no steps came")
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
    until(lambda: points(panel) == 60, 20, "steps are missing")
    assert panel.locator(".nbtrain-headline").inner_text() != phase

    # The checkpoints are ranked, with their intervals
    rows = rows_of(panel)
    ranks = [row.locator(".nbtrain-rank").inner_text() for row in rows.all()]
    assert ranks == [str(n + 1) for n in range(len(ranks))]
    assert len(ranks) >= 6
    scores = [float(row.locator(".nbtrain-score span").first.inner_text()) for row in rows.all()]
    assert scores == sorted(scores, reverse=True)
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
    assert 25 <= int(step.removeprefix("step ")) <= 36, step
    rows.nth(1).click()
    picked = int(rows.nth(1).locator(".nbtrain-step").inner_text())
    notebook.run_cell(2)
    notebook.wait_text(2, f"picked {picked}")
    steps = panel.locator("[data-chart=curve]").get_attribute("data-last-step")
    assert steps == "60"
    over.click(position={"x": box["width"] * 29.5 / 60, "y": box["height"] / 3})  # its mark
    rows.locator("xpath=self::tr[@aria-selected='true']").filter(has_text="30").wait_for()
    notebook.run_cell(3)
    notebook.wait_text(3, "picked 30")
    notebook.screenshot(tmp_path / f"{app}-picked-light.png")

    # The page is loaded again: the living kernel shows it whole
    notebook.save()
    notebook.page.reload()
    notebook.wait_idle()
    panel = panel_of(notebook, 1)
    until(lambda: points(panel) == 60, 30, "the curve is not whole")
    chosen = panel.locator("tr[aria-selected=true] .nbtrain-step")
    chosen.wait_for()
    assert chosen.inner_text() == "30"
    notebook.screenshot(tmp_path / f"{app}-reloaded.png")
