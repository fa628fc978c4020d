"""The committed notebook on agents: executed, with fewer steps."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

from nbtrain.client import Client

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "agent.ipynb"


def test_the_notebook_trains_two_agents(home: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
            cell.source = cell.source.replace("num_steps: 40", "num_steps: 8")
            cell.source = cell.source.replace("num_steps: 10", "num_steps: 2")
            cell.source = cell.source.replace("(step=40)", "(step=8)")
            cell.source = cell.source.replace("(step=10)", "(step=2)")
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    runs = Client().training.runs
    agent, chances = runs.get("agent"), runs.get("chances")
    assert agent.status == chances.status == "succeeded"
    rounds = agent.validation["held_out_reward"]
    assert rounds.iloc[-1] > rounds.iloc[0]
    trained = agent.trajectories.query("split == 'train'")
    called = trained[trained["turns"] == 3]
    assert len(called), "a call, the environment's answer, the reply"
    told = agent.texts(step=8)["completion"]
    assert any("tool: " in text for text in told)
    assert set(chances.trajectories["turns"]) <= {1, 3}


def test_the_committed_outputs_are_those_of_a_whole_execution() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert NOTEBOOK.stat().st_size < 100_000
    assert "/root" not in NOTEBOOK.read_text()
