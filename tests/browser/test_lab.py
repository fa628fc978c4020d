"""A run in a real JupyterLab in a real browser: the cell's output follows it and stays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Open

CELLS = [
    "%load_ext nbtrain",
    "%%train --workload sums --model nbtrain/tiny --name lab --into run\n"
    "num_steps: 4\nbatch_size: 2\ngroup_size: 4\nlr_warmup_steps: 0\n"
    "val_interval_steps: 2\nval_num_tasks: 4",
    "6 * 7",
    "%%train --workload sums\nstesp: 5\nbatch_size: 1000",
]

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("app", ["lab", "notebook"], indirect=True)
def test_a_cell_returns_at_once_and_its_output_follows_the_run(
    open_notebook: Open, tmp_path: Path
) -> None:
    notebook = open_notebook(CELLS)
    notebook.run_all()
    outputs, after = notebook.outputs(1), notebook.outputs(2)
    after.first.wait_for(timeout=60_000)
    assert after.first.inner_text().strip() == "42"
    # the kernel was free before the run was done
    assert "COMPLETED" not in outputs.first.inner_text()

    notebook.outputs(3).first.wait_for()
    refusal = notebook.outputs(3).first.inner_text()
    assert "stesp" in refusal
    assert "num_steps" in refusal
    assert "batch_size" in refusal
    assert "^" in refusal
    assert "Traceback" not in refusal

    notebook.wait_text(1, "COMPLETED", seconds=120)
    # The panel below says so first; the summary follows with its picture
    outputs.first.get_by_text("COMPLETED").wait_for(timeout=60_000)
    text = outputs.first.inner_text()
    assert "step 4 of 4" in text
    assert "held-out" in text
    picture = outputs.first.locator("img")
    assert picture.count() == 1
    assert picture.first.evaluate("image => image.naturalWidth") > 300
    notebook.screenshot(tmp_path / "lab.png")
    assert notebook.cell(2).inner_text().count("COMPLETED") == 0
