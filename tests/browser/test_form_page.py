"""The configuration form in a real page: a refusal beside its field, mended, launched, curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Open

CELLS = [
    "%load_ext nbtrain\nimport nbtrain, time",
    "form = nbtrain.panel('sums', 'nbtrain/tiny', options={'num_steps': 4, 'group_size': 4,\n"
    "    'lr_warmup_steps': 0, 'val_num_tasks': 4}, name='formed')\nform",
]

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("app", ["lab", "notebook"], indirect=True)
def test_a_refusal_stands_beside_its_field_and_a_mended_form_launches(
    open_notebook: Open, tmp_path: Path
) -> None:
    notebook = open_notebook(CELLS, width=1200, height=1700)
    notebook.run_all()
    form = notebook.cell(1).locator(".nbtrain-form")
    form.wait_for(timeout=60_000)
    notebook.wait_text(1, "nothing is refused")
    notebook.screenshot(tmp_path / "form-light.png")

    batch = form.get_by_label("batch_size", exact=True)
    batch.fill("4000")
    alert = form.get_by_role("alert").filter(has_text="batch_size")
    alert.wait_for(timeout=10_000)
    assert "1 to 256" in alert.inner_text()
    beside, field = alert.bounding_box(), batch.bounding_box()
    assert beside is not None
    assert field is not None
    assert abs(beside["y"] - field["y"]) < 30
    assert beside["x"] > field["x"] + field["width"]
    assert form.get_by_role("button", name="launch").is_disabled()
    heading = form.get_by_role("button", name="optimization").bounding_box()
    first = form.get_by_label("num_steps", exact=True).bounding_box()
    assert first["y"] - heading["y"] - heading["height"] >= 6
    notebook.theme("dark")
    notebook.screenshot(tmp_path / "form-dark.png")
    look = (
        "one => { const { color, backgroundColor } = getComputedStyle(one);"
        " return [color, backgroundColor]; }"
    )
    launch, dry_run = (form.get_by_role("button", name=name) for name in ("launch", "dry run"))
    assert launch.evaluate(look) == dry_run.evaluate(look)
    arrow = (
        "one => { const { color, backgroundImage } = getComputedStyle(one);"
        " return backgroundImage.includes(color); }"
    )
    assert form.locator("select").first.evaluate(arrow), "an arrow in the colour of the text"

    batch.fill("2")
    notebook.wait_text(1, "nothing is refused")
    form.get_by_role("button", name="launch").click()
    notebook.wait_text(1, "COMPLETED", seconds=120)
    assert "step 4 of 4" in notebook.cell(1).inner_text()
    summary = notebook.outputs(1).nth(1)
    summary.locator("img").wait_for(timeout=60_000)  # the static output, which is saved
    notebook.page.wait_for_timeout(3000)
    form.get_by_role("button", name="launch").scroll_into_view_if_needed()
    notebook.screenshot(tmp_path / "form-run.png")
    notebook.save()
    saved = json.loads(notebook.path.read_text())
    outputs = json.dumps(saved["cells"][1]["outputs"])
    assert "COMPLETED" in outputs
    assert "image/png" in outputs


def test_a_form_answers_while_a_cell_runs(open_notebook: Open) -> None:
    notebook = open_notebook([*CELLS, "time.sleep(20)"], width=1200, height=1700)
    notebook.run_all()
    form = notebook.cell(1).locator(".nbtrain-form")
    form.wait_for(timeout=60_000)
    notebook.page.wait_for_timeout(1000)
    form.get_by_label("batch_size", exact=True).fill("4000")
    form.get_by_role("alert").filter(has_text="batch_size").wait_for(timeout=8_000)
    assert "[*]" in notebook.cell(2).inner_text()
