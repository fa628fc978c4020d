"""Field trouble with notebooks: magics that rewrote what was typed."""

from __future__ import annotations

from pathlib import Path

import descriptors
import pytest
from shells import Shell

from nbtrain.client import Run, default_client
from nbtrain.notebook.line import split

CASES = Path(__file__).parent / "cases"


def told_name(launched: list[Run], shell: Shell, line: str) -> str | None:
    """The name that arrives from a line with ``--name``."""
    shell.do(f"%%train --workload sums {line}\nnum_steps: 1\n")
    return launched[-1].name


def test_nb_07_braces_and_dollars_arrive_unchanged(shell: Shell, launched: list[Run]) -> None:
    line = "--set 'config.reward={\"a\": {1}}' --note 'cost $HOME {x}'"
    shown = []
    for defined in (False, True):
        if defined:
            shell.ns["x"] = 5
        shown.append(shell.refuse(f"%%train {line}\nnum_steps: 1\n"))
        assert f"    %%train {line}\n" in shown[-1], "the line is shown as it was typed"
        assert """'config.reward={"a": {1}}' belongs to no flag""" in shown[-1]
        assert "'cost $HOME {x}' belongs to no flag" in shown[-1]
        assert told_name(launched, shell, "--name 'cost $HOME {x} 50%'") == "cost $HOME {x} 50%"
    assert shown[0] == shown[1]
    shell.ns["HOME"] = "elsewhere"
    assert told_name(launched, shell, "--name $HOME") == "elsewhere", "a whole value is a name"
    assert told_name(launched, shell, "--name $$HOME") == "$HOME"
    assert "the name $hme is not defined" in shell.refuse("%%train --workload sums --name $hme\n")
    found = shell.do("%train show 'cost $HOME {x} 50%'")
    assert found.name == "cost $HOME {x} 50%"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('--name "a b"', "a b"),
        ("--name='a b'", "a b"),
        ('--name="a b"', "a b"),
        ('--name="C:\\new dir\\t"', "C:\\new dir\\t"),
        (r"--name C:\temp\new", r"C:\temp\new"),
        ("--name 'it''s'", "it's"),
        ('--name="my data/tr ain.jsonl"', "my data/tr ain.jsonl"),
    ],
)
def test_nb_09_quoted_values_stay_whole(
    shell: Shell, launched: list[Run], written: str, value: str
) -> None:
    assert told_name(launched, shell, written) == value
    assert shell.do(f"%train show {written.removeprefix('--name').lstrip(' =')}").name == value


def test_nb_09_all_on_one_line() -> None:
    words, problems = split("--data=\"my data/tr ain.jsonl\" --name 'it''s' --out C:\\temp\\new")
    assert not problems
    assert [(word.flag, word.text) for word in words] == [
        ("--data", "my data/tr ain.jsonl"),
        ("--name", "--name"), (None, "it's"),
        ("--out", "--out"), (None, "C:\\temp\\new"),
    ]  # fmt: skip


def test_nb_10_comments_end_a_line_and_stand_above_the_body(
    shell: Shell, launched: list[Run]
) -> None:
    client = default_client()
    client.workloads.create("t")
    client.datasets.register("d", descriptors.TICKETS)
    client.base_models.select(client.base_models.get("nbtrain/tiny").location, "tiny")
    cell = (CASES / "NB-10.cell.txt").read_text()
    shell.do(cell)
    plan = shell.ns["_"].plan
    assert (plan.display_name, plan.method, plan.base_model.slug) == ("run #7", "sft", "tiny")
    assert not launched, "the comment holds a flag, the line --dry-run"
    shell.do("%%train --workload sums --name some#thing # --new --bogus 'unclosed\n"
             "# smoke\n\nnum_steps: 20 # of 100\n")  # fmt: skip
    assert launched[0].name == "some#thing"
    assert launched[0].plan["num_steps"] == 20
