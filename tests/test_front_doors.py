"""Descriptors through the client: read, resolved, shown, started once, checked alone."""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import descriptors
import pandas as pd
import pytest
import stored
from datasets_world import chat
from descriptors import REINFORCEMENT, SUPERVISED, small

from nbtrain.client import Client, Run, SubmittedBefore, checking
from nbtrain.client.resolved_descriptor import DescriptorView
from nbtrain.errors import PlanRefused, Problem, Refused
from nbtrain.plan.phases import Phase
from nbtrain.plan.resolved import ModelRef


@pytest.fixture
def client(home: Path) -> Client:
    return Client()


@pytest.fixture
def ready(client: Client) -> Client:
    """A client with what ``small`` names."""
    client.workloads.create("support-triage")
    client.datasets.register("support-triage-train", descriptors.TICKETS)
    return client


def refused(call: Callable[[], object]) -> list[Problem]:
    with pytest.raises(PlanRefused) as error:
        call()
    return list(error.value.problems)


# The documents


def test_the_samples_of_a_document_are_there_when_they_are_named(client: Client) -> None:
    problems = refused(lambda: client.training.resolve(SUPERVISED))
    assert [problem.field for problem in problems] == ["baseModel"]
    mine = client.datasets.register("support-triage-train", [chat()])
    assert client.datasets.get("support-triage-train").dataset_id == mine.dataset_id
    assert client.datasets.get("support-triage-validation").rows == 96
    assert client.workloads.get("support-triage").grader == "json-label-match"


@pytest.mark.parametrize(
    ("document", "names"),
    [
        (SUPERVISED.replace("support-triage", "letters"), {"workload", "dataset", "baseModel"}),
        (REINFORCEMENT, {"workload", "dataset", "baseModel", "reward.terms[0].bundle"}),
    ],
)
def test_what_is_not_registered_is_refused_all_at_once(
    client: Client, document: str, names: set[str]
) -> None:
    problems = refused(lambda: client.training.resolve(document))
    assert {problem.field for problem in problems} == names
    assert all(problem.where and problem.where.line for problem in problems)
    assert len(client.training.runs.list()) == 0


def test_both_documents_resolve_as_they_are(client: Client, tmp_path: Path) -> None:
    descriptors.register(client, tmp_path)
    one, two = client.training.resolve(SUPERVISED), client.training.resolve(REINFORCEMENT)
    assert one.config["hyperparams"]["lora"] == {
        "rank": 8, "alpha": 16, "dropout": 0, "targetModules": "default",
    }  # fmt: skip
    assert one.execution["saveEvery"] == 20
    assert one.config["loss"]["assistantTurns"] == "last"
    # 40 rows, 8 to an update, twice
    assert one.plan.total_steps == 10
    assert one.plan["learning_rate"] == 1e-4
    assert two.plan.total_steps == 100
    assert two.plan["kl_beta"] == 0.001
    assert two.config["rlHyperparams"]["lora"]["alpha"] == 64
    assert one.origins["config.hyperparams.lora.rank"] == "stated"
    assert one.origins["config.hyperparams.lora.alpha"] == "computed"
    assert one.origins["config.data.packing"] == "default"
    assert "10 updates of 8 sequences" in repr(one.estimate)
    assert "6,400" in repr(two.estimate)


def test_a_document_is_a_mapping_a_file_or_text(client: Client, tmp_path: Path) -> None:
    descriptors.register(client, tmp_path)
    as_json, as_yaml = tmp_path / "run.json", tmp_path / "run.yaml"
    as_json.write_text(SUPERVISED)
    as_yaml.write_text(AS_YAML)
    views = [
        client.training.resolve(given)
        for given in (json.loads(SUPERVISED), SUPERVISED, as_json, str(as_json), as_yaml)
    ]
    assert len({view.config_hash for view in views}) == 1
    assert all(view.config == views[0].config for view in views)


AS_YAML = """kind: run
workload: support-triage
baseModel: unsloth/Llama-3.2-1B-Instruct
config:
  dataset: support-triage-train
  hyperparams: {lora: {rank: 8}, training: {epochs: 2}}
"""


def test_a_file_is_named_with_line_and_column(ready: Client, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "kind: run\nworkload: support-triage\nbaseModel: nbtrain/tiny\nconfig:\n"
        "  dataset: support-triage-train\n  hyperparams:\n    lora: {rnk: 8}\n"
    )
    (problem,) = refused(lambda: ready.training.start(file))
    assert str(problem.where) == "run.yaml, line 7, column 12"
    assert "rank" in str(problem)


@pytest.mark.parametrize(
    ("given", "field", "told"),
    [
        ({"workload": "sums", "num_steps": 3}, "kind", "kind is missing"),
        ("workload: sums\n", "kind", "options are stated as options="),
        ("nowhere.json", "descriptor", "nowhere.json cannot be read: No such file"),
        ("~nobody-of-that-name/run.json", "descriptor", "is no path that can be used"),
        ("a\0b.json", "descriptor", "is no path that can be used"),
        ("x" * 5000 + ".yaml", "descriptor", "is no path that can be used"),
        (["kind"], "descriptor", "a list"),
        ('{"kind": "run", ', "descriptor", "line 1"),
    ],
)
def test_what_is_no_descriptor_is_refused(
    client: Client, given: object, field: str, told: str
) -> None:
    problem, *_ = refused(lambda: client.training.resolve(given))
    assert problem.field == field
    assert told in str(problem)


def test_a_run_is_stated_by_a_descriptor_or_by_options(ready: Client) -> None:
    both = refused(lambda: ready.training.start(small(), options={"num_steps": 3}))
    assert [problem.field for problem in both] == ["options"]


def test_what_stands_beside_a_descriptor(ready: Client) -> None:
    view = ready.training.resolve(small(), display_name="first", bench_id="support-triage")
    assert view.plan.display_name == "first"
    assert view.given["descriptor"]["kind"] == "run"
    assert view.given["arguments"] == {"display_name": "first", "workload": "support-triage"}
    ready.base_models.select(ready.base_models.get("nbtrain/tiny").location, "other")
    (problem,) = refused(lambda: ready.training.resolve(small(), model="other"))
    assert problem.field == "baseModel"
    assert "twice" in problem.message


def test_the_flat_form_is_the_same_recipe(ready: Client) -> None:
    flat = ready.training.resolve(
        options={
            "algorithm": "sft", "dataset": "support-triage-train", "max_seq_length": 512,
            "lora_rank": 4, "epochs": 2,
        },
        bench_id="support-triage",
        base_model_slug="nbtrain/tiny",
    )  # fmt: skip
    nested = small()
    nested["config"]["hyperparams"] = {"lora": {"rank": 4}, "training": {"epochs": 2}}
    view = ready.training.resolve(nested)
    assert flat.config_hash == view.config_hash
    assert flat.config == view.config
    assert type(flat) is type(view)


# What a descriptor's plan looks like


def test_the_frame_has_a_row_for_every_field(ready: Client) -> None:
    view = ready.training.resolve(small(description="a try", smoke={"sliceSize": 10}))
    table = view.to_frame().set_index("path")
    assert table.index.is_unique
    assert list(table.columns) == ["value", "origin", "hashed"]
    assert table.loc["config.hyperparams.lora.rank", "value"] == 8
    assert table.loc["config.maxSeqLength"].tolist() == [512, "stated", True]
    assert table.loc["execution.gpus"].tolist() == [1, "default", False]
    assert table.loc["description"].tolist() == ["a try", "stated", False]
    assert table.loc["smoke.sliceSize", "value"] == 10
    inner = {path for path in view.origins if path.startswith(("config.", "execution."))}
    assert inner <= set(table.index)


def test_a_plan_is_shown_in_the_order_of_the_document(ready: Client) -> None:
    document = small()
    document["config"]["data"] = {"packing": True}
    view = ready.training.resolve(document)
    text = repr(view)
    groups = [line for line in text.splitlines() if line.startswith(("config", "execution"))]
    assert groups == [
        "config", "config.hyperparams.lora", "config.hyperparams.optimizer",
        "config.hyperparams.scheduler", "config.hyperparams.training", "config.model",
        "config.data", "config.loss", "execution",
    ]  # fmt: skip
    assert "attention sdpa · packing on" in text
    assert "dataset support-triage-train" in text
    assert "  rank           8  (default)" in text
    html = view._repr_html_()
    assert "config.hyperparams.lora" in html
    assert "attention sdpa · packing on" in html


def test_a_reward_is_shown_with_its_short_bundle(client: Client, tmp_path: Path) -> None:
    descriptors.register(client, tmp_path)
    view = client.training.resolve(REINFORCEMENT)
    bundle = client.bundles.get("gsm8k-scoring")
    (line,) = [each for each in repr(view).splitlines() if "gsm8k" not in each and "rule" in each
               and "terms" in each]  # fmt: skip
    assert bundle.id[:12] in line
    assert bundle.id not in line
    assert line.endswith("(stated)")


def test_texts_are_escaped(ready: Client) -> None:
    view = ready.training.resolve(small(description="<b>bold</b>"))
    assert "<b>bold" not in view._repr_html_()


# Starting


def test_a_start_records_the_annotations(ready: Client, launched: list[Run]) -> None:
    run = ready.training.start(small(description="a try", configName="r8"), display_name="first")
    row = stored.row_of(run)
    assert launched == [run]
    assert (row.name, row.kind, row.method) == ("first", "train", "sft")
    assert (row.description, row.config_name) == ("a try", "r8")
    assert row.plan["descriptor"]["description"] == "a try"
    assert "attention sdpa" in repr(run.plan)
    ready.training.runs.annotate(run, description="another")
    assert stored.row_of(run).description == "another"
    assert stored.row_of(run).config_name == "r8"
    ready.training.runs.annotate("first", config_name=None)
    assert stored.row_of(run).config_name is None
    with pytest.raises(Refused, match="description needs text, found 3"):
        ready.training.runs.annotate(run, description=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name"):
        ready.training.runs.annotate(run, name="x")


def test_notes_of_a_run_are_bound_as_in_its_descriptor(ready: Client, launched: list[Run]) -> None:
    run = ready.training.start(small(description="x" * 4000))
    ready.training.runs.annotate(run, description="y" * 4000)
    with pytest.raises(Refused) as refused:
        ready.training.runs.annotate(run, description="z" * 4001, config_name="two\nlines")
    problems = {problem.field: str(problem) for problem in refused.value.problems}
    assert problems.keys() == {"description", "config_name"}
    assert "1 to 4,000 characters" in problems["description"]
    assert "one line" in problems["config_name"]
    assert stored.row_of(run).description == "y" * 4000


def test_a_smoke_check_is_a_run_of_its_own_kind(ready: Client, launched: list[Run]) -> None:
    run = ready.training.start(small(smoke={"sliceSize": 8}))
    assert stored.row_of(run).kind == "smoke"
    assert "smoke check" in repr(run.plan)


def test_earlier_runs_of_the_recipe_with_their_last_reading(
    ready: Client, launched: list[Run]
) -> None:
    assert repr(ready.training.start(small()).earlier_runs) == "no earlier run of this recipe"
    first = launched[0]
    stored.train(first)
    for step, loss in ((1, 3.0), (2, 2.0)):
        stored.writer(first).commit_validation(
            {"step": step, "policy_version": step, "loss": loss, "perplexity": loss + 1,
             "round_completed": True, "completed_samples": 5, "expected_samples": 5,
             "trained_tokens": 9, "seconds": 1.0}
        )  # fmt: skip
    assert first._store.move_phase(first._key, Phase.COMPLETED, attempt=1)
    other = small()
    other["config"]["maxSeqLength"] = 256
    ready.training.start(other)
    stated = small(description="other words")
    stated["config"] |= {"method": "sft", "hyperparams": {"lora": {"rank": 8}}}
    again = ready.training.start(stated)
    assert again.config_hash == first.config_hash
    assert list(again.earlier_runs) == [first]
    row = again.earlier_runs.to_frame().iloc[0]
    assert (row["status"], row["validation_step"]) == ("succeeded", 2)
    assert (row["validation_loss"], row["perplexity"]) == (2.0, 3.0)
    assert pd.isna(row["held_out_reward"])
    assert "validation loss 2 (perplexity 3) at step 2" in repr(again.earlier_runs)


def test_a_submission_is_one_run(ready: Client, launched: list[Run]) -> None:
    first = ready.training.start(small(submissionId="monday"))
    with pytest.warns(SubmittedBefore, match="monday") as told:
        second = ready.training.start(small(submissionId="monday", description="other words"))
    assert first == second
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third = ready.training.start(small(submissionId="tuesday"))
    assert third != first
    assert launched == [first, third]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ((Phase.COMPLETED, None), "which succeeded"),
        (
            (Phase.FAILED, "CUDA out of memory.\nTraceback"),
            "which failed: CUDA out of memory; state another submissionId to try again",
        ),
        (
            (Phase.CANCELLED, None),
            "which was cancelled; state another submissionId to try again",
        ),
    ],
)
def test_a_submission_that_is_over_says_how_it_ended(
    ready: Client, launched: list[Run], end: tuple[Phase, str | None], told: str
) -> None:
    first = ready.training.start(small(submissionId="monday"))
    stored.finish(first, end[0], failure=end[1])
    with pytest.warns(SubmittedBefore) as warned:
        ready.training.start(small(submissionId="monday"))
    assert str(warned[0].message) == (
        f"submissionId 'monday' was started before: {first.title}, {told}"
    )


@pytest.mark.parametrize(("name", "told"), [(None, "ab" * 6), ("triage", f"triage ({'ab' * 6})")])
def test_a_warm_start_is_told_by_the_name_it_has(
    ready: Client, name: str | None, told: str
) -> None:
    view = ready.training.resolve(small())
    model = ModelRef("ab" * 32, name, "cd" * 32, "ef" * 32, "/adapters/first")
    warm = DescriptorView(replace(view.plan, warm_start=model), None, {}, estimate=lambda: None)
    assert f"starts from model {told}" in repr(warm).splitlines()


def test_a_submission_is_never_another_plan(ready: Client, launched: list[Run]) -> None:
    first = ready.training.start(small(submissionId="monday"))
    (problem,) = refused(
        lambda: ready.training.start(small(submissionId="monday", execution={"saveEvery": 3}))
    )
    assert problem.field == "submissionId"
    assert first.id[:12] in problem.message
    assert launched == [first]
    assert stored.row_of(first).resolved == json.loads(
        (first.folder / "resolved.json").read_text()
    ), "the first run's plan stays as it was"


@pytest.mark.filterwarnings("ignore::nbtrain.client.SubmittedBefore")
def test_two_submissions_at_once_are_one_run(ready: Client, launched: list[Run]) -> None:
    views = [Client().training.resolve(small(submissionId="monday")) for _ in range(8)]
    gate = threading.Barrier(len(views))

    def start(view: Any) -> Run:
        client = Client()
        gate.wait()
        return client.training.launch(view)

    with ThreadPoolExecutor(len(views)) as pool:
        runs = list(pool.map(start, views))
    assert len(set(runs)) == len(launched) == 1


# What a descriptor may name


def test_options_cannot_train_a_bare_workload(ready: Client) -> None:
    (problem,) = refused(
        lambda: ready.training.resolve(
            options={"num_steps": 3}, bench_id="support-triage", base_model_slug="nbtrain/tiny"
        )
    )
    assert problem.field == "workload"
    assert "descriptor" in str(problem)
    assert "dataset" in str(problem)


def test_going_on_from_a_supervised_run(ready: Client, launched: list[Run]) -> None:
    document = small(execution={"saveEvery": 5})
    document["config"]["hyperparams"] = {"training": {"epochs": 2}}
    first = ready.training.start(document)
    stored.train(first)
    checkpoint = stored.save(first, 5)
    (problem,) = refused(
        lambda: ready.training.resolve(
            options={"algorithm": "sft", "epochs": 1}, parent_checkpoint_id=checkpoint
        )
    )
    assert problem.field == "epochs"
    document["config"]["hyperparams"]["training"]["epochs"] = 3
    view = ready.training.resolve(document, parent_checkpoint_id=checkpoint)
    assert (view.plan.start_step, view.plan.total_steps) == (5, 15)
    certificate = "step 5 to 15, 10 updates, learning rate 6e-5 before, 6.667e-5 after"
    assert certificate in view.notes
    flat = ready.training.resolve(
        options={"epochs": 3}, parent_checkpoint_id=checkpoint[:10], display_name="more"
    )
    assert flat.config_hash == view.config_hash
    (inherited,) = [note for note in flat.notes if note.startswith("goes on from")]
    assert "inherited: max_seq_length 512, save_every 5 and" in inherited


@pytest.mark.parametrize(
    "data", [pd.DataFrame({"messages": [[]]}), [{"messages": []}], pd.DataFrame()]
)
def test_data_is_registered_before_it_is_named(ready: Client, data: object) -> None:
    document = small()
    document["config"]["dataset"] = data
    (problem,) = refused(lambda: ready.training.resolve(document))
    assert problem.field == "dataset"
    assert "client.datasets.register" in str(problem)


def test_objects_stand_for_their_names(ready: Client) -> None:
    document = small(workload=ready.workloads.get("support-triage"))
    document["config"]["dataset"] = ready.datasets.get("support-triage-train")
    view = ready.training.resolve(document)
    assert view.config_hash == ready.training.resolve(small()).config_hash
    assert view.given["descriptor"]["config"]["dataset"] == view.config["dataset"]


# Checks alone


SCRIPT = """
import json, pathlib, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
plan = json.loads(pathlib.Path(given["--plan"]).read_text())
print("a library says so", flush=True)
print(json.dumps({{"doing": "40 of 40 rows"}}), flush=True)
{more}
pathlib.Path(given["--out"]).write_text(json.dumps({{
    "checks": [
        {{"name": "rows", "measured": 0, "unit": "rows", "said": "every row trains", "warn": None,
          "refuse": 0, "at_least": False}},
        {{"name": "packing", "measured": {measured}, "unit": "", "said": plan["config_hash"],
          "warn": 0.005, "refuse": 0.025, "at_least": False}},
    ],
    "problems": {problems},
}}))
"""


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Puts a script in the place of the process that checks."""

    def put(measured: float = 0.001, problems: str = "[]", more: str = "") -> None:
        script = tmp_path / "check.py"
        script.write_text(SCRIPT.format(measured=measured, problems=problems, more=more))
        monkeypatch.setattr(checking, "COMMAND", (sys.executable, str(script)))

    return put


def test_checks_are_shown_as_figures(ready: Client, checker: Callable[..., None]) -> None:
    checker(0.01)
    told: list[str] = []
    view = ready.training.resolve(small())
    report = ready.training.check(view, told.append)
    assert told == ["40 of 40 rows"]
    assert report.ok
    assert (
        repr(report).splitlines()[0] == "a run of this plan would train; 2 start checks, 1 warned"
    )
    assert "0.01 (allowed: at most 0.005)" in repr(report)
    assert view.config_hash in repr(report)
    assert list(report.to_frame()["verdict"]) == ["passed", "warned"]
    assert "#9a6700" in report._repr_html_()
    assert not list((ready.training.runs._parts.store.home / "checks").iterdir())


def test_problems_of_checks_are_told_with_their_line(
    ready: Client, checker: Callable[..., None]
) -> None:
    problem = {"field": "rows", "message": "nothing trains", "found": None, "allowed": None,
               "where": {"line": 7, "column": None, "row": None, "source": "triage"},
               "hint": None}  # fmt: skip
    checker(0.5, problems=repr([problem]))
    report = ready.training.check(ready.training.resolve(small()))
    assert not report.ok
    assert "nothing trains (triage, line 7)" in repr(report)
    assert "1 problem" in repr(report).splitlines()[0]
    assert "nothing trains" in report._repr_html_()


def test_a_check_that_breaks_shows_the_end_of_its_log(
    ready: Client, checker: Callable[..., None]
) -> None:
    checker(more="raise SystemExit('no memory left')")
    with pytest.raises(checking.CheckingFailed, match=r"exit code 1.*\n.*no memory left"):
        ready.training.check(ready.training.resolve(small()))


def test_an_interrupted_check_leaves_nothing_running(
    ready: Client, checker: Callable[..., None], tmp_path: Path
) -> None:
    checker(
        more="import os, subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(json.dumps({'doing': f'{os.getpid()} {child.pid}'}), flush=True)\ntime.sleep(600)"
    )
    pids: list[int] = []

    def told(line: str) -> None:
        if not line.endswith("rows"):
            pids.extend(map(int, line.split()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ready.training.check(ready.training.resolve(small()), told)
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while any(_lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_lives(pid) for pid in pids)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] not in "ZX"
    except OSError:
        return False
