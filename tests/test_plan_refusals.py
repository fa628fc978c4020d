"""What refusals of plans say: no false second problem, true hints, names as they were typed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from plan_world import World, described_world, descriptor, put

import nbtrain
from nbtrain.client import Client
from nbtrain.data.masks import MaskedRow, RowRefused, cut
from nbtrain.errors import PlanRefused, Problem, Refused
from nbtrain.notebook.cell import CellText, read_cell
from nbtrain.notebook.option_table import OptionTable
from nbtrain.notebook.refusals import CellRefused
from nbtrain.plan.descriptor.document import in_flat
from nbtrain.plan.fields import describe
from nbtrain.plan.preflight import estimate
from nbtrain.plan.registry import MachineInfo
from nbtrain.plan.resolve import resolve
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.plan.source import MOST, parse
from nbtrain.plan.supervised_estimate import UpdateRate, UpdateRates, estimate_supervised
from nbtrain.rewards.bundles import BundleRegistry
from nbtrain.store import open_store

FLAT = {"algorithm": "sft", "dataset": "d", "workload": "t", "base_model_slug": "tiny"}


@pytest.fixture
def world() -> World:
    world = described_world()
    world.here = MachineInfo(int4=True)
    return world


def problems(world: World, document: Any, **beside: Any) -> list[Problem]:
    with pytest.raises(PlanRefused) as refused:
        resolve(document, registry=world, **beside)
    assert str(refused.value)
    return list(refused.value.problems)


def the(world: World, document: Any, **beside: Any) -> Problem:
    (problem,) = problems(world, document, **beside)
    return problem


def flat(**options: Any) -> dict[str, Any]:
    return FLAT | options


def plan(world: World, document: Any, **beside: Any) -> ResolvedPlan:
    return resolve(document, registry=world, **beside)


# --- a method that cannot be told ---------------------------------------------------------------


@pytest.mark.parametrize("beside", [True, False])
def test_under_an_unknown_method_no_key_is_judged(beside: bool, world: World) -> None:
    options = flat(lora_rank=4, assistant_turns="all", num_steps=3)
    stated = {"algorithm": options.pop("algorithm") and "stf"}
    problem = the(world, options, **stated) if beside else the(world, options | stated)
    assert (problem.field, problem.allowed) == ("algorithm", "sft or grpo or gspo")
    assert (problem.message, problem.hint) == ("algorithm has no choice 'stf'", "Did you mean sft?")


def test_what_is_wrong_under_every_method_is_told_beside_it(world: World) -> None:
    found = problems(world, flat(algorithm="ppo", workload="nope", wrokload=1, display_name=""))
    assert {p.field for p in found} == {"algorithm", "workload", "wrokload", "display_name"}
    assert next(p for p in found if p.field == "algorithm").hint is None


def test_two_methods_are_one_problem(world: World) -> None:
    problem = the(world, flat(), algorithm="grpo")
    assert problem.message.startswith("algorithm is stated twice, differently")


@pytest.mark.parametrize("method", ["stf", "grop", "ppo", None, ["sft"]])
def test_a_descriptor_s_groups_are_not_judged_by_a_method_that_is_none(
    method: Any, world: World
) -> None:
    for group in ("hyperparams", "rlHyperparams"):
        document = descriptor(config={"method": method, group: {"lora": {"rank": 4}}})
        if method is not None:
            assert the(world, document).field == "method"


def test_a_bad_parent_judges_no_keys(world: World) -> None:
    for options in ({"max_steps": 70, "dataset": "d"}, {"num_steps": 3, "batch_size": 2}):
        problem = the(world, options, parent="abcdef")
        assert problem.field == "parent_checkpoint_id"
    document = descriptor(config={"rlHyperparams": {"groupSize": 4}})
    del document["config"]["method"]
    assert the(world, document, parent="abcdef").field == "parent_checkpoint_id"


def test_reinforcement_is_never_assumed(world: World) -> None:
    document = descriptor(config={"rlHyperparams": {}})
    del document["config"]["method"]
    problem = the(world, document)
    assert problem.field == "rlHyperparams"
    assert "this run is sft, the default method" in problem.message
    assert problem.hint == "State method: grpo"
    document["config"]["method"] = "grpo"
    assert plan(world, document).method == "grpo"


def test_the_line_is_called_by_its_flags(world: World) -> None:
    cell = read_cell(CellText("--method stf --workload nope", "lora_rank: 4\n"), {})
    with pytest.raises(CellRefused) as refused:
        cell.resolve(Client())
    assert [p.message.split(":")[0] for p in refused.value.problems] == [
        "--method has no choice 'stf'", "--workload",
    ]  # fmt: skip
    assert [p.where.line for p in refused.value.problems if p.where] == [1, 1]


# --- zeros ---------------------------------------------------------------------------------------


def test_a_zero_that_becomes_something_is_loud(world: World) -> None:
    document = put(descriptor("grpo"), "config.rlHyperparams.optimizer.weightDecay", 0)
    p = plan(world, document)
    told = "0 takes the default, 0.01; state 1e-12 for none"
    setting = p.settings["weight_decay"]
    assert (setting.value, setting.origin, setting.note) == (0.01, "default", told)
    assert f"optimizer.weightDecay {told}" in p.hints
    least = put(document, "config.rlHyperparams.optimizer.weightDecay", 1e-12)
    assert plan(world, least)["weight_decay"] == 1e-12
    supervised = plan(world, flat(epochs=0, lora_rank=0, seed=0, weight_decay=0))
    assert [hint for hint in supervised.hints if " 0 takes" in hint] == [
        "lora_rank 0 takes the default, 8", "epochs 0 takes the default, 3",
        "seed 0 takes the default, 42",
    ]  # fmt: skip


def test_a_refusal_by_a_value_that_a_zero_took_says_so(world: World) -> None:
    found = the(world, flat(max_steps=0, gradient_accumulation=0, gpus=3))
    assert found.field == "gpus"
    document = put(descriptor("grpo"), "config.rlHyperparams.promptsPerStep", 0)
    problem = the(world, put(document, "execution.gpus", 9))
    assert "rlHyperparams.promptsPerStep 8 (default, which the stated 0 takes)" in problem.message


# --- updates -------------------------------------------------------------------------------------


def test_a_cap_that_epochs_do_not_reach_is_told(world: World) -> None:
    p = plan(world, flat(max_steps=60))  # 13 updates an epoch
    assert p.total_steps == 39
    (told,) = [hint for hint in p.hints if "max_steps" in hint]
    assert told == (
        "max_steps 60 is not reached: epochs 3 (default) end the run at step 39; state epochs: 5 "
        "to reach it"
    )
    assert plan(world, flat(max_steps=60, epochs=5)).total_steps == 60
    assert not [h for h in plan(world, flat(max_steps=39)).hints if "max_steps" in h]


def test_steps_count_from_the_run_s_beginning(world: World) -> None:
    saved = world.save(plan(world, flat(max_steps=20)), 20)
    options = {"num_steps": 10}
    problem = the(world, options, parent=saved.checkpoint_id)
    assert problem.message == "there is no option num_steps with algorithm sft"
    assert problem.hint == (
        "Did you mean max_steps? It counts from the run's beginning: max_steps: 30 is 10 more "
        "than this checkpoint's 20"
    )
    assert plan(world, {"max_steps": 30}, parent=saved.checkpoint_id).total_steps == 30
    none = the(world, {"max_steps": 20}, parent=saved.checkpoint_id)
    assert none.hint is not None
    assert none.hint.startswith("epochs and max_steps count from the beginning")
    assert the(world, flat(num_steps=10)).hint == "Did you mean max_steps?"


@pytest.mark.parametrize("stated", [{}, {"gradientAccumulation": 2}, {"microBatchPerGpu": 1}])
@pytest.mark.parametrize("gpus", [3, 5, 6, 7])
def test_a_hint_on_devices_resolves(stated: dict[str, int], gpus: int, world: World) -> None:
    document = put(descriptor(config={"hyperparams": {"training": stated}}), "execution.gpus", gpus)
    problem = the(world, document)
    assert problem.hint is not None
    fewer, more = problem.hint.split(", or ")
    (count,) = re.findall(r"gpus: (\d+)", fewer)
    assert plan(world, put(document, "execution.gpus", int(count)))
    for name, value in re.findall(r"training\.(\w+): (\d+)", more):
        document = put(document, f"config.hyperparams.training.{name}", int(value))
    assert plan(world, document)["gradient_accumulation"] % gpus == 0


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["annotations", "tags", "note"])
def test_annotations_have_fields_of_their_own(key: str, world: World) -> None:
    hint = the(world, descriptor(**{key: "x"})).hint
    assert hint is not None
    assert "description" in hint
    assert "configName" in hint


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("smoke.foo", "smoke takes sliceSize, maxSteps and threshold"),
        ("config.loss.x", "loss takes assistantTurns, trainOnToolCalls, trainOnToolResults and "
         "explicitLossMaskColumn"),
        ("config.data.y", "data takes validationDataset, truncation, packing and shuffle"),
        ("config.hyperparams.q", "hyperparams takes lora, optimizer, scheduler and training"),
    ],
)  # fmt: skip
def test_a_small_group_is_listed(path: str, hint: str, world: World) -> None:
    assert the(world, put(descriptor(), path, 1)).hint == hint


def test_what_a_base_model_may_be(world: World) -> None:
    document = descriptor()
    del document["baseModel"]
    allowed = the(world, document).allowed
    assert allowed is not None
    assert allowed.endswith(", or any repository or local folder")


def test_a_missing_workload_can_be_made(world: World) -> None:
    document = descriptor()
    del document["workload"]
    hint = the(world, document).hint
    assert hint is not None
    assert hint.endswith('client.workloads.create("NAME")')


def test_a_bare_workload_needs_no_tasks() -> None:
    client = Client()
    client.datasets.register("qa-rows", [{"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}])  # fmt: skip
    made = nbtrain.workload("qa", base_model="nbtrain/tiny", dataset="qa-rows",
                            grader="json-label-match")  # fmt: skip
    assert (made.has_tasks, made.base_model, made.grader) == (
        False, "nbtrain/tiny", "json-label-match",
    )  # fmt: skip
    assert made.dataset == "qa-rows"
    with pytest.raises(Refused) as refused:
        nbtrain.workload("qa", rewards=lambda completion, task: 1.0)
    (problem,) = refused.value.problems
    assert problem.message.startswith("tasks is missing")


def test_the_flat_form_s_table_has_its_own_names(world: World) -> None:
    shown = repr(OptionTable.supervised(world.base_model("tiny")))
    assert "computed: 2 x lora_rank" in shown
    assert "allowed: 1 to 512 (0 is the default)" in shown
    before = [line.partition("In a descriptor")[0] for line in shown.split("\n")]
    assert not [line for line in before if "maxSeqLength" in line and "config." not in line]
    assert in_flat("Raise maxSeqLength or state data.truncation: right.") == (
        "Raise max_seq_length or state truncation: right."
    )


def test_a_plan_knows_what_its_settings_were_called(world: World) -> None:
    p = plan(world, flat())
    q = plan(world, descriptor())
    assert p.config_hash == q.config_hash
    assert (p.called("max_seq_length"), q.called("max_seq_length")) == (
        "max_seq_length", "maxSeqLength",
    )  # fmt: skip
    again = ResolvedPlan.from_json(json.loads(json.dumps(p.to_json())))
    assert again == p


def test_a_dollar_takes_a_plain_name() -> None:
    text = CellText("--from $r2.best()", "lora_rank: $run.model\ndisplay_name: $5.00\n")
    with pytest.raises(CellRefused) as refused:
        read_cell(text, {"r2": 1, "run": 2}).resolve(Client())
    hints = {p.field: p.hint for p in refused.value.problems}
    assert hints["parent_checkpoint_id"] == (
        "$ takes a plain name: write best = r2.best() first, and $best here"
    )
    text = CellText("--method sft", "lora_rank: $run.model\n")
    with pytest.raises(CellRefused) as refused:
        read_cell(text, {"run": 2}).resolve(Client())
    hints = {p.field: p.hint for p in refused.value.problems}
    assert hints["lora_rank"] == (
        "$ takes a plain name: write model = run.model first, and $model here"
    )


# --- estimates -----------------------------------------------------------------------------------


def test_a_smoke_check_is_estimated_as_one(world: World) -> None:
    p = plan(world, descriptor(smoke={"sliceSize": 8}))
    rate = UpdateRates((UpdateRate(0.1, 400.0, 100.0),))
    e = estimate_supervised(p, world.base_model("tiny"), measured=rate)
    first = e.sentences()[0]
    assert first == ("up to 2,000 updates of 8 sequences on 8 rows; ends when they are learned")
    assert "validation" not in repr(e)
    assert "times" not in repr(e)
    assert "at most about 3 min" in repr(e)


def test_as_graded_no_further_trajectories_are_sampled(world: World) -> None:
    p = plan(world, put(descriptor("grpo"), "config.rlHyperparams.maxSteps", 7))
    first = estimate(p, world.base_model("tiny")).sentences()[0]
    assert first.startswith("7 steps of 32 trajectories: 224 in all")
    assert "more" not in first
    filtered = world.plan({"num_steps": 7})
    assert "and more where groups teach nothing" in repr(
        estimate(filtered, world.base_model("nbtrain/tiny"))
    )


# --- rewards -------------------------------------------------------------------------------------


def rewarded(**reward: Any) -> dict[str, Any]:
    return descriptor("grpo", config={"reward": reward})


def test_terms_that_are_null_are_refused(world: World) -> None:
    assert the(world, rewarded(terms=None)).message == (
        "reward.terms needs a list of terms, found null"
    )
    assert the(world, rewarded(term=[])).field == "config.reward.term"
    assert the(world, rewarded(terms=np.array([1]))).field == "reward.terms"


def test_a_parameter_is_spelt_once(world: World) -> None:
    term = {"kind": "length", "maxChars": 10, "max_chars": 99}
    problem = the(world, rewarded(terms=[term]))
    assert problem.message == (
        "reward.terms[0].maxChars is stated twice, as maxChars and as max_chars"
    )


def test_a_rule_s_function_is_read_when_the_plan_is_made(world: World, tmp_path: Path) -> None:
    term = {"kind": "rule", "bundle": "scoring", "module": "reward", "function": "nope"}
    problem = the(world, rewarded(terms=[term]))
    assert problem.field == "reward.terms[0].function"
    assert "bundle scoring has no function 'nope'" in problem.message
    missing = the(world, rewarded(terms=[{"kind": "rule", "bundle": "scoring"}]))
    assert (missing.field, missing.allowed) == ("reward.terms[0].module", "reward or tools.more")
    assert the(world, descriptor("grpo", grader="bundle:scoring#reward:nope")).field == "grader"
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "reward.py").write_text("raise SystemExit\ndef good(completion, task): return 1\n")
    bundle = BundleRegistry(open_store(tmp_path / "home")).register("code", folder)
    assert bundle.lacking("reward", "good") is None
    lacking = bundle.lacking("reward", "nope")
    assert lacking is not None
    assert lacking[0] == "has no function 'nope' in its module 'reward'; functions there: good"


# --- odd values ----------------------------------------------------------------------------------


class Odd:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


ODD = [
    pd.DataFrame({"a": [1, 2]}), np.array([1, 2]), np.array([]), pd.NA, pd.NaT, Odd(), {1}, b"x",
    1j, int, "\ud800", "x" * 5000, 10**400, float("nan"), [Odd()],
]  # fmt: skip


@pytest.mark.parametrize(
    "path",
    ["config.method", "kind", "workload", "baseModel", "config.dataset", "grader",
     "config.data.validationDataset", "config.reward", "config.reward.terms", "description",
     "config.rlHyperparams.lora.rank", "config", "execution.deviceProfile"],
)  # fmt: skip
@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_odd_objects_are_refused_in_short(path: str, value: Any) -> None:
    document = descriptor("grpo", config={"dataset": "support-triage-train"})
    document |= {"workload": "support-triage", "baseModel": "nbtrain/tiny"}
    *groups, key = path.split(".")
    inner = document
    for group in groups:
        inner = inner.setdefault(group, {})
    inner[key] = value
    with pytest.raises(PlanRefused) as refused:
        Client().training.resolve(document)
    assert all(len(p.message) < 600 for p in refused.value.problems)
    assert str(refused.value).encode()


def test_describe_is_total() -> None:
    for value in ODD:
        assert len(describe(value)) < 100
    assert describe(np.float64(0.5)) == "0.5"


@pytest.mark.parametrize("path", ["description", "config.hyperparams.lora.targetModules", "grader"])
def test_half_characters_are_refused(path: str, world: World) -> None:
    problem = the(world, put(descriptor(), path, "a\ud800"))
    assert "holds half a character" in problem.message


def test_a_null_kind_is_not_left_out(world: World) -> None:
    assert the(world, descriptor(kind=None)).hint == "Write kind: run"


# --- texts ---------------------------------------------------------------------------------------

HEAD = "kind: run\nworkload: t\nbaseModel: tiny\nconfig:\n  dataset: d\n"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("!!float 1e-3", "the tag !!float is not read"),
        ("&a 1e-3", "anchors and aliases are not read"),
        ("9" * 500, "this number has more than 400 digits"),
    ],
)
def test_a_broken_value_hides_no_other(value: str, told: str, world: World) -> None:
    inner = f"{{optimizer: {{learningRate: {value}}}, lora: {{rank: 9999}}}}"
    text = f"{HEAD}  foo: 1\n  hyperparams: {inner}\n"
    found = problems(world, parse(text, defer=True))
    assert {p.field for p in found} == {
        "config.foo", "config.hyperparams.optimizer.learningRate", "lora.rank",
    }  # fmt: skip
    (broken,) = [p for p in found if p.field.endswith("learningRate")]
    assert broken.message == f"config.hyperparams.optimizer.learningRate: {told}"


def test_the_same_in_json(world: World) -> None:
    text = '{"kind": "run", "workload": "t", "baseModel": "tiny", "config": {"dataset": "d",\n'
    text += f'"maxSeqLength": {"9" * 500}, "foo": 1}}}}'
    found = problems(world, parse(text, defer=True))
    assert [(p.field, p.where and p.where.line) for p in found] == [
        ("config.maxSeqLength", 2), ("config.foo", 2),
    ]  # fmt: skip


def test_problems_within_an_object_point_at_its_name(world: World) -> None:
    names = {"m": {"learningRate": -1, "foo": 2}, "terms": [{"kind": "exact", "colunm": 1}]}
    text = f"{HEAD}  hyperparams: {{optimizer: $m}}\n"
    found = problems(world, parse(text, names=names, defer=True))
    assert [(p.where.line, p.where.column) for p in found if p.where] == [(6, 28), (6, 28)]
    text = f"{HEAD}  method: grpo\n  reward: {{terms: $terms}}\n"
    problem = the(world, parse(text, names=names, defer=True))
    assert problem.where is not None
    assert (problem.where.line, problem.where.column) == (7, 19)


def test_long_texts_are_cut_and_a_document_has_a_size(world: World) -> None:
    found = problems(world, descriptor(**{"x" * 100_000: 1, "baseModel": "y" * 5000}))
    assert len(found) == 2
    assert all(len(str(p)) < 500 for p in found)
    choice = the(world, put(descriptor(), "config.model.precision", "z" * 5000))
    assert len(str(choice)) < 200
    column = put(descriptor("grpo"), "config.loss.explicitLossMaskColumn", "z" * 5000)
    assert len(str(the(world, column))) < 300
    with pytest.raises(PlanRefused, match="characters; allowed: at most 1,048,576"):
        parse(f"kind: run\ndescription: {'x' * MOST}\n")


def test_places_in_one_long_line_are_right() -> None:
    text = '{"a": [\n' + "1," * 1000 + '1], "b": {"c": 2,\n "d": 1e999}}'
    with pytest.raises(PlanRefused) as refused:
        parse(text)
    (problem,) = refused.value.problems
    assert problem.where is not None
    assert (problem.field, problem.where.line, problem.where.column) == ("b.d", 3, 7)


def test_rows_are_refused_with_the_advice_that_would_be_accepted() -> None:
    def row(trained: list[bool]) -> MaskedRow:
        return MaskedRow(list(range(4)), trained, (), "abcd", [(n, n + 1) for n in range(4)])

    def hint(trained: list[bool]) -> str:
        with pytest.raises(RowRefused) as refused:
            cut(row(trained), 3, "error")
        return refused.value.problems[0].hint or ""

    assert "data.truncation: right" in hint([False, True, True, False])
    assert "truncation" not in hint([False, True, True, True])
    assert cut(row([False, True, True, False]), 3, "right").ids == [0, 1, 2]
