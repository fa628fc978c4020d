"""The committed notebooks on workloads, picking and flat curves: executed, with less to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from nbtrain.client import Client

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def executed(name: str, *instead: tuple[str, str]) -> Any:
    """The notebook after all its cells, in each of which one text stands instead of another."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
            for old, new in instead:
                cell.source = cell.source.replace(old, new)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    return notebook


def shown(notebook: Any, begins: str) -> str:
    """What the last output of the cell that begins so says as text."""
    (cell,) = (c for c in notebook.cells if c.source.startswith(begins))
    (*_, last) = cell.outputs
    return str(last["data"]["text/plain"] if "data" in last else last["text"])


def test_own_tasks_and_rewards(home: Path) -> None:
    few = (("num_steps: 40", "num_steps: 6"), ("val_num_tasks: 40", "val_num_tasks: 6"))
    notebook = executed("workload", *few, ("step=40", "step=6"))
    runs = Client().training.runs
    run, fragile = runs.get("additions"), runs.get("fragile")
    assert run.status == "succeeded"
    terms = run.texts(step=6)["terms"].iloc[0]
    assert set(terms) == {"right", "close", "brief"}
    assert fragile.status == "failed"
    assert "object is not subscriptable" in shown(notebook, "from nbtrain.errors")


def test_picking_and_comparing(home: Path) -> None:
    few = (("num_steps: 60", "num_steps: 6"), ("val_interval_steps: 10", "val_interval_steps: 3"))
    fewer = (("num_steps: 10", "num_steps: 2"), ("batch_size: 8", "batch_size: 2"))
    notebook = executed("checkpoints", *few, *fewer)
    runs = Client().training.runs
    run, further = runs.get("candidates"), runs.get("further")
    assert further.plan.parent is not None
    assert further.plan.parent.checkpoint_id == run.best().checkpoint_id
    assert shown(notebook, "best.generate").count("reply ") == 6
    assert "95 % interval" in shown(notebook, "first = run")
    assert "adapter_model.safetensors" in shown(notebook, "import tempfile")
    assert "manifest.json" in shown(notebook, "[file.name")


def test_a_flat_curve_is_explained(home: Path) -> None:
    few = (("range(14)", "range(6)"), ("num_steps: 30", "num_steps: 6"))
    notebook = executed("flat_curve", *few, ("val_num_tasks: 40", "val_num_tasks: 4"))
    runs = Client().training.runs
    assert [runs.get(name).status for name in ("flat", "moves", "cut")] == [
        *("failed", "succeeded", "failed")
    ]
    assert "Not one of the last" in shown(notebook, "flat.diagnose")
    assert "max_output_tokens_per_turn is 3" in shown(notebook, "try:\n    cut")
    assert "3 runs side by side" in shown(notebook, "client = nbtrain")


@pytest.mark.parametrize("name", ["workload", "checkpoints", "flat_curve"])
def test_the_committed_outputs_are_those_of_a_whole_execution(name: str) -> None:
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = nbformat.read(path, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert path.stat().st_size < 250_000
    assert "/root" not in path.read_text()
    assert "/home/" not in path.read_text()
