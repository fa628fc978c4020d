"""Descriptors, supervised options, checks and the small listings, in a real shell."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import descriptors
import pandas as pd
import pytest
import stored
from shells import Shell

from nbtrain.client import Run, checking, default_client
from nbtrain.client.checking import CheckReport
from nbtrain.client.resolved import ResolvedView
from nbtrain.notebook.refusals import CellError

DESCRIPTOR = """%%train --into run
kind: run
workload: support-triage
baseModel: nbtrain/tiny
config:
  dataset: support-triage-train
  maxSeqLength: 512
  hyperparams:
    training: {epochs: 2}
"""
FLAT = """%%train --method sft --workload support-triage --model nbtrain/tiny --name first
dataset: support-triage-train
max_seq_length: 512
epochs: 2
"""


@pytest.fixture(autouse=True)
def registered(shell: Shell) -> None:
    client = default_client()
    client.workloads.create("support-triage")
    client.datasets.register("support-triage-train", descriptors.TICKETS)


def test_a_descriptor_cell_starts_a_run(shell: Shell, launched: list[Run]) -> None:
    shell.do(DESCRIPTOR)
    (run,) = launched
    assert shell.ns["run"] == run
    assert (run.plan.method, run.plan["epochs"], run.plan.total_steps) == ("sft", 2, 10)
    assert stored.row_of(run).plan["text"].startswith("%%train --into run\nkind: run")
    assert "10 updates" in shell.bundles[0]["text/plain"]


@pytest.mark.parametrize("document", [descriptors.SUPERVISED, descriptors.REINFORCEMENT])
def test_documents_run_as_a_body(
    shell: Shell, launched: list[Run], tmp_path: Path, document: str
) -> None:
    descriptors.register(default_client(), tmp_path)
    shell.do(f"%%train\n{document}")
    (run,) = launched
    assert stored.row_of(run).config_name in ("r8-e2", "grpo-100-steps")


def test_a_flat_cell_is_the_same_recipe_and_attaches(shell: Shell, launched: list[Run]) -> None:
    shell.do(DESCRIPTOR)
    shell.do(FLAT)
    one, two = launched
    assert one.config_hash == two.config_hash
    shell.do(FLAT)
    assert len(launched) == 2
    assert "attached to run first" in shell.bundles[0]["text/plain"]
    named = DESCRIPTOR.replace("--into run", "--name first")
    shell.do(named)
    assert len(launched) == 2, "the same plan, however it was written"
    shell.do(named.replace("epochs: 2", "epochs: 3"))
    assert len(launched) == 3


def test_what_the_line_states_beside_a_descriptor(shell: Shell, launched: list[Run]) -> None:
    line = "%%train --workload support-triage --model nbtrain/tiny --method sft --name first"
    shell.do(DESCRIPTOR.replace("%%train --into run", line))
    shell.do(line + "\nkind: run\nconfig: {dataset: support-triage-train, maxSeqLength: 512}\n")
    assert [run.name for run in launched] == ["first", "first"]
    told = shell.refuse(
        DESCRIPTOR.replace("%%train --into run", "%%train --method grpo --workload sums")
        .replace("config:\n", "config:\n  method: sft\n")
    )  # fmt: skip
    assert "workload is stated twice, differently" in told
    assert "method is stated twice, differently" in told
    assert len(launched) == 2


def test_places_in_the_cell_and_on_the_line(shell: Shell) -> None:
    cell = DESCRIPTOR.replace("--into run", "--from abcdef").replace("{epochs: 2}", "{epochs: two}")
    told = shell.refuse(cell)
    assert "training.epochs needs a whole number" in told
    assert "    training: {epochs: two}\n" + " " * (4 + 23) + "^" in told
    assert "--from: no checkpoint 'abcdef'" in told
    assert "(line 1, column 16)" in told
    told = shell.refuse(
        FLAT.replace("nbtrain/tiny", "nbtrain/tny").replace("epochs: 2", "epohs: 2")
    )
    assert "did you mean 'nbtrain/tiny'" in told.lower()
    assert "epohs: 2\n    ^" in told
    assert f"(line 1, column {FLAT.index('nbtrain/tiny') + 1})" in told


def test_objects_in_a_descriptor(shell: Shell, launched: list[Run]) -> None:
    client = default_client()
    shell.ns["ds"] = client.datasets.get("support-triage-train")
    shell.ns["w"] = client.workloads.get("support-triage")
    shell.ns["df"] = pd.DataFrame(descriptors.TICKETS)
    body = DESCRIPTOR.replace("support-triage-train", "$ds").replace(": support-triage\n", ": $w\n")
    shell.do(body)
    assert launched[0].plan.dataset is not None
    assert launched[0].plan.dataset.name == "support-triage-train"
    told = shell.refuse(DESCRIPTOR.replace("support-triage-train", "$df"))
    assert 'client.datasets.register("NAME", data)' in told
    assert "  dataset: $df\n" in told
    assert "the name $nowhere is not defined" in shell.refuse(
        DESCRIPTOR.replace("support-triage-train", "$nowhere")
    )


def test_a_dry_run_shows_the_resolved_plan(shell: Shell, launched: list[Run]) -> None:
    shell.do(DESCRIPTOR.replace("--into run", "--dry-run --into plan"))
    assert isinstance(shell.ns["plan"], ResolvedView)
    (bundle,) = shell.bundles
    assert "config.hyperparams.training" in bundle["text/plain"]
    assert "10 updates of 8 sequences" in bundle["text/plain"]
    assert "attention sdpa" in bundle["text/html"]
    assert not launched


def test_a_smoke_check_by_a_flag(shell: Shell, launched: list[Run]) -> None:
    shell.do(FLAT.replace("--name first", "--smoke --into run"))
    shell.do(DESCRIPTOR.replace("%%train", "%%train --smoke"))
    for run in launched:
        assert run.plan.smoke is not None
        assert stored.row_of(run).kind == "smoke"
    found = {"passed": True, "score": 0.99, "threshold": 0.98, "layer": None, "worst": []}
    launched[1]._store.put_verdict(launched[1]._key, found)
    stored.finish(launched[1], ended="smoke check passed")
    assert "smoke check passed: score 0.990, needed 0.980" in repr(launched[1])


def test_a_submission_again_is_told(shell: Shell, launched: list[Run]) -> None:
    cell = DESCRIPTOR + "submissionId: monday\n"
    shell.do(cell)
    shell.do(cell)
    assert len(launched) == 1
    assert shell.ns["run"] == launched[0]
    assert (
        f"submissionId 'monday' was started before: {launched[0].title}"
        in shell.bundles[0]["text/plain"].splitlines()
    )
    told = shell.refuse(cell.replace("epochs: 2", "epochs: 3"))
    assert "submissionId 'monday' was used before" in told
    assert "submissionId: monday\n    " in told


CHECK = """
import json, pathlib, sys
out = sys.argv[sys.argv.index("--out") + 1]
print(json.dumps({"doing": "rows: 40 of 40"}), flush=True)
check = {"name": "end token", "measured": 0, "unit": "rows without", "said": "", "warn": None,
         "refuse": 0, "at_least": False}
pathlib.Path(out).write_text(json.dumps({"checks": [check], "problems": []}))
"""


def test_checks_alone(
    shell: Shell, launched: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    monkeypatch.setattr(checking, "COMMAND", (sys.executable, str(script)))
    shell.do(DESCRIPTOR.replace("--into run", "--dry-run --check --into report"))
    assert isinstance(shell.ns["report"], CheckReport)
    texts = [bundle["text/plain"] for bundle in shell.bundles]
    assert texts[0].endswith(": beginning")
    assert texts[1].endswith(": rows: 40 of 40")
    assert "a run of this plan would train; 1 start check" in texts[-1]
    outputs = shell.ip.display_pub.outputs
    assert len({output["transient"]["display_id"] for output in outputs}) == 1
    assert not launched
    told = shell.refuse(DESCRIPTOR.replace("--into run", "--check"))
    assert "--check needs --dry-run" in told
    assert "    %%train --check\n            ^" in told


def test_small_listings(shell: Shell) -> None:
    assert list(shell.do("%train datasets")["name"]) == ["support-triage-train"]
    assert list(shell.do("%train datasets list")["rows"]) == [40]
    page = shell.do("%train datasets support-triage-train")
    assert len(page) == 5
    assert "My invoice 0 is wrong." in page._repr_html_()
    workloads = shell.do("%train workloads").set_index("name")
    assert set(workloads.index) == {"support-triage", "sums", "calculator"}
    assert workloads.loc["sums", "held_out"] > 0
    assert shell.do("%train workloads support-triage").name == "support-triage"
    assert len(shell.do("%train models")) == 0
    assert "takes one name at most" in shell.refuse("%train datasets a b")
    result = shell.run("%train models nowhere")
    assert isinstance(result.error_in_exec, CellError)
    assert "no model is called" in str(result.error_in_exec)


def test_a_listing_marks_what_it_cannot_read(shell: Shell) -> None:
    workload = default_client().workloads.get("support-triage")
    about = workload._workload.folder / "workload.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"version": 0}))
    listed = shell.do("%train workloads")
    note = "unreadable: written by another version; register it again"
    assert list(listed.columns[:2]) == ["name", "note"]
    assert listed.set_index("name").loc["support-triage", "note"] == note
    assert note in repr(listed)
    assert note in listed._repr_html_()


def test_options_of_a_supervised_run(shell: Shell) -> None:
    table = repr(shell.do("%train options --method sft"))
    assert "max_seq_length" in table
    assert "config.hyperparams.training.epochs" in table
    assert "group_size" not in table
    assert "group_size" in repr(shell.do("%train options --method gspo"))
    assert "--method is 'ppo'" in shell.refuse("%train options --method ppo")
