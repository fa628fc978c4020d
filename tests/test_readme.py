"""README's snippets as they are written: what they define is built, what they launch is checked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from shells import Shell

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(?:python)?\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def block(words: str) -> str:
    """The one block that holds these words."""
    (found,) = (text for text in BLOCKS if words in text)
    return found


@pytest.fixture
def shell(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path / "ipython")
    shell.do("import nbtrain")
    return shell


def checked(shell: Shell, cell: str) -> str:
    """A launch cell with ``--dry-run``; what it tells."""
    head, body = cell.split("\n", 1)
    shell.do(f"{head.replace(' --into run', '')} --dry-run\n{body}")
    return "\n".join(bundle["text/plain"] for bundle in shell.bundles)


def test_tasks_and_rewards_of_your_own(shell: Shell) -> None:
    shell.do(block("def digits_only"))
    assert shell.ns["w"].name == "mine"
    told = checked(shell, "%%train --workload mine --method gspo --name own\nnum_steps: 2\n")
    assert "nbtrain/tiny" in told


def test_an_agent_of_your_own(shell: Shell) -> None:
    shell.do(block("def digits_only"))
    shell.do(block("class SecondChance"))
    assert shell.ns["w"].name == "mine-agent"
    cell = "%%train --workload mine-agent --method gspo --name agent\nnum_steps: 2\n"
    assert "workload mine-agent" in checked(shell, cell)


def test_the_first_cell(shell: Shell) -> None:
    told = checked(shell, block("--name first"))
    assert "plan first" in told
    assert "step 0 to 60" in told or "60 steps" in told


def test_supervised_runs(shell: Shell, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    shell.do(block('register("mine-train"'))
    flat = checked(shell, block("validation_dataset: support"))
    assert "support-triage-validation" in flat
    described = checked(shell, block("kind: run\n"))
    assert "support-triage-validation" in described


def test_a_script(shell: Shell) -> None:
    lines = block("client.training.estimate").split("run = ", 1)[0]
    shell.do(f"client = nbtrain.Client()\n{lines}")
    assert shell.ns["plan"]["options"] == {"num_steps": 20, "batch_size": 8}
