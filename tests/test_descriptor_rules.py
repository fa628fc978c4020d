"""Rules of descriptors: methods, sizes, data, rewards, warm starts, the machine, checkpoints."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import Adapter, Bundle, Dataset, World, described_world, descriptor, digest, put

from nbtrain.errors import PlanRefused, Problem
from nbtrain.plan.descriptor.misnamed import snake
from nbtrain.plan.descriptor.sizing import largest_pass
from nbtrain.plan.descriptor.terms import TERMS
from nbtrain.plan.registry import MachineInfo
from nbtrain.plan.resolve import resolve
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.plan.source import parse
from nbtrain.rewards import builtins
from nbtrain.rewards.labels import json_label_match
from nbtrain.rewards.terms import KINDS, parameters_of

calm = settings(deadline=None)


@pytest.fixture
def world() -> World:
    return described_world()


def problems(world: World, document: Any, **beside: Any) -> list[Problem]:
    with pytest.raises(PlanRefused) as refused:
        resolve(document, registry=world, **beside)
    return list(refused.value.problems)


def the(world: World, document: Any, **beside: Any) -> Problem:
    (problem,) = problems(world, document, **beside)
    return problem


def plan(world: World, document: Any, **beside: Any) -> ResolvedPlan:
    return resolve(document, registry=world, **beside)


def sft(**training: Any) -> dict[str, Any]:
    return descriptor(config={"hyperparams": {"training": training}})


def rl(**own: Any) -> dict[str, Any]:
    return descriptor("grpo", config={"rlHyperparams": own})


# --- what the document is ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "told"),
    [("pipeline", "kind pipeline is not built yet"), ("Run", "kind has no choice 'Run'"),
     (3, "kind needs text")],
)  # fmt: skip
def test_only_a_run_is_read(kind: object, told: str, world: World) -> None:
    assert told in the(world, descriptor() | {"kind": kind}).message


@pytest.mark.parametrize("value", [[], "x", 3, None])
@pytest.mark.parametrize("group", ["config", "execution", "config.data", "smoke"])
def test_groups_are_mappings(group: str, value: object, world: World) -> None:
    problem = the(world, put(descriptor(), group, value))
    name = group.removeprefix("config.")
    assert problem.field == name
    assert problem.message.startswith(f"{name} needs a mapping, found ")


def test_nothing_stated_is_told_once_each(world: World) -> None:
    found = problems(world, {"kind": "run"})
    assert [p.field for p in found] == ["workload", "dataset"]
    found = problems(world, {"kind": "run", "workload": "t", "config": {"dataset": "d"}})
    assert [p.field for p in found] == ["baseModel"]


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("config.hyperparams.learning_rate", "config.hyperparams.optimizer.learningRate"),
        ("config.hyperparams.lr", "config.hyperparams.optimizer.learningRate"),
        ("config.hyperparams.epochs", "config.hyperparams.training.epochs"),
        ("config.epochs", "config.hyperparams.training.epochs"),
        ("config.hyperparams.lora.r", "config.hyperparams.lora.rank"),
        ("config.max_length", "config.maxSeqLength"),
        ("config.packing", "config.data.packing"),
        ("config.seed", "config.hyperparams.training.seed"),
        ("config.validationDataset", "config.data.validationDataset"),
        ("model_name", "baseModel"),
        ("hyperparams", "config.hyperparams"),
        ("dataset", "config.dataset"),
        ("gpus", "execution.gpus"),
        ("config.data.format", None),
        ("config.chatTemplate", None),
    ],
)
def test_what_people_write_is_led_to_the_field(path: str, near: str | None, world: World) -> None:
    problem = the(world, put(descriptor(), path, 1))
    assert problem.field == path
    assert problem.message == f"there is no field {path}"
    assert problem.hint is not None
    assert (problem.hint == f"Did you mean {near}?") == (near is not None)


def test_under_reinforcement_its_own_groups_are_meant(world: World) -> None:
    document = put(rl(), "config.num_generations", 4)
    assert the(world, document).hint == "Did you mean config.rlHyperparams.groupSize?"


def test_everything_wrong_is_told_in_the_order_of_the_text(world: World) -> None:
    text = """kind: run
workload: nothing
baseModel: tiny
config:
  dataset: missing
  maxSeqLength: -4
  hyperparams:
    optimizer: {weightDecay: -1}
    scheduler: {kind: linear, minLearningRateRatio: 0.1}
    lora: {rank: 8, rank: 4}
  model: {precision: bf16}
  lossy: 3
execution: {gpus: 65}
smoke: {threshold: 1.5}
"""
    found = problems(world, parse(text, defer=True))
    assert [(p.where and p.where.line, p.field) for p in found] == [
        (2, "workload"), (5, "dataset"), (6, "maxSeqLength"), (8, "optimizer.weightDecay"),
        (9, "scheduler.minLearningRateRatio"), (10, "config.hyperparams.lora.rank"),
        (11, "model.precision"), (12, "config.lossy"), (13, "execution.gpus"),
        (14, "smoke.threshold"),
    ]  # fmt: skip
    assert found[6].hint == "Write BF16"


@pytest.mark.parametrize("key", ["workload", "base_model", "algorithm"])
def test_beside_the_document_the_same_is_fine_and_another_refused(key: str, world: World) -> None:
    same = {"workload": "t", "base_model": "tiny", "algorithm": "sft"}[key]
    other = {"workload": "gsm8k", "base_model": "big", "algorithm": "grpo"}[key]
    assert plan(world, descriptor(), **{key: same})
    assert "stated twice, differently" in the(world, descriptor(), **{key: other}).message


def test_the_method_may_stand_beside_alone(world: World) -> None:
    document = descriptor()
    del document["config"]["method"]
    assert plan(world, document).method == "sft"
    assert plan(world, document, algorithm="gspo").method == "gspo"
    assert plan(world, document, display_name="one").display_name == "one"


def test_names_and_labels_say_what_keeps_them_from_being_one_line(world: World) -> None:
    named = the(world, descriptor(), display_name="96f1ba6785eb")
    assert (named.field, named.found) == ("display_name", "96f1ba6785eb")
    assert "looks like the beginning of an id" in named.message
    label = the(world, descriptor(configName="a\u200db"))
    assert label.message == (
        "configName has U+200D (ZERO WIDTH JOINER) as character 2 "
        '(one line of 1 to 200 characters is allowed), found the text "a\\u200db"'
    )


# --- methods -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "field", "told"),
    [
        (descriptor("grpo", config={"hyperparams": {}}), "hyperparams", "this run is grpo"),
        (descriptor(config={"rlHyperparams": {}}), "rlHyperparams", "this run is sft"),
        (descriptor(config={"reward": {"terms": []}}), "reward", "this run is sft"),
        (descriptor(warmStartModelId="answers"), "warmStartModelId", "this run is sft"),
        (descriptor("gspo", smoke={}), "smoke", "this run is gspo"),
        (descriptor("gspo", config={"data": {"packing": True}}), "data.packing", "is for sft"),
        (descriptor("grpo", config={"loss": {"assistantTurns": "all"}}), "loss.assistantTurns",
         "takes its loss from the reward"),
        (descriptor("grpo", config={"data": {"validationDataset": "d"}}),
         "data.validationDataset", "is for sft"),
        (descriptor("grpo", config={"data": {"packing": "no"}}), "data.packing", "needs true"),
        (rl(scheduler={"kind": "linear"}), "scheduler.kind", "constant or cosine"),
        (descriptor(config={"method": "dpo"}), "method", "has no choice 'dpo'"),
    ],
)  # fmt: skip
def test_what_belongs_to_the_other_method_is_refused(
    document: Any, field: str, told: str, world: World
) -> None:
    problem = the(world, document)
    assert problem.field == field
    assert told in problem.message


def test_groups_that_only_write_out_defaults_ask_for_nothing(world: World) -> None:
    asked = {
        "data": {"packing": False, "shuffle": True, "validationDataset": None},
        "loss": {"assistantTurns": "last", "explicitLossMaskColumn": None},
    }
    base = plan(world, descriptor("grpo"))
    assert plan(world, descriptor("grpo", config=asked)).config_hash == base.config_hash


@pytest.mark.parametrize("kind", ["linear", "constant"])
def test_only_a_cosine_has_a_floor(kind: str, world: World) -> None:
    scheduler = {"kind": kind, "minLearningRateRatio": 0.1}
    problem = the(world, descriptor(config={"hyperparams": {"scheduler": scheduler}}))
    assert problem.field == "scheduler.minLearningRateRatio"
    assert "only a cosine falls to a floor" in problem.message


def test_a_constant_reinforcement_schedule_warms_up_and_stays(world: World) -> None:
    p = plan(world, rl(maxSteps=40, scheduler={"warmupRatio": 0.1}))
    assert (p["lr_warmup_steps"], p["lr_hold_steps"], p["num_steps"]) == (4, 40, 40)
    cosine = {"kind": "cosine", "minLearningRateRatio": 0.2}
    p = plan(world, rl(maxSteps=40, scheduler=cosine))
    assert (p["lr_warmup_steps"], p["lr_hold_steps"], p["lr_min_ratio"]) == (1, 0, 0.2)


def test_updates_of_a_reinforcement_run(world: World) -> None:
    assert plan(world, rl(epochs=3)).total_steps == 38  # 100 rows, 8 prompts a step
    assert plan(world, rl(epochs=3, maxSteps=90)).total_steps == 90


# --- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "size"), [(128, 8), (512, 8), (513, 4), (1300, 2), (2048, 2), (2049, 1), (9000, 1)]
)
def test_a_pass_fits_4096_tokens_and_divides_an_update(length: int, size: int) -> None:
    assert largest_pass(length) == size


@pytest.mark.parametrize(
    ("stated", "micro", "passes"),
    [
        ({}, 2, 4), ({"microBatchPerGpu": 4}, 4, 2), ({"gradientAccumulation": 8}, 1, 8),
        ({"gradientAccumulation": 1}, 8, 1), ({"microBatchPerGpu": 8}, 8, 1),
        ({"microBatchPerGpu": 3, "gradientAccumulation": 5}, 3, 5),
        ({"microBatchPerGpu": 0, "gradientAccumulation": 0}, 2, 4),
    ],
)  # fmt: skip
def test_an_update_keeps_eight_sequences_unless_both_halves_are_stated(
    stated: dict[str, int], micro: int, passes: int, world: World
) -> None:
    p = plan(world, sft(**stated))
    assert (p["micro_batch_per_gpu"], p["gradient_accumulation"]) == (micro, passes)
    same = sft(microBatchPerGpu=micro, gradientAccumulation=passes)
    assert plan(world, same).config_hash == p.config_hash


@pytest.mark.parametrize("key", ["microBatchPerGpu", "gradientAccumulation"])
@pytest.mark.parametrize("value", [3, 5, 16])
def test_an_update_is_never_rounded(key: str, value: int, world: World) -> None:
    problem = the(world, sft(**{key: value}))
    assert problem.field == f"training.{key}"
    assert "does not divide the 8 sequences" in problem.message


@pytest.mark.parametrize(("gpus", "fits"), [(1, True), (2, True), (4, True), (3, False)])
def test_passes_are_shared_by_the_devices_or_refused(gpus: int, fits: bool, world: World) -> None:
    document = put(sft(), "execution.gpus", gpus)
    if fits:
        assert plan(world, document)["gradient_accumulation"] == 4
        assert plan(world, document).config_hash == plan(world, sft()).config_hash
        return
    problem = the(world, document)
    assert problem.field == "execution.gpus"
    assert "training.gradientAccumulation 4 / execution.gpus 3 is not whole" in problem.message
    assert problem.hint == (
        "State execution.gpus: 2, or training.gradientAccumulation: 6 with "
        "training.microBatchPerGpu: 2, for updates of 12 sequences"
    )
    stated = {"gradientAccumulation": 6, "microBatchPerGpu": 2}
    p = plan(world, put(sft(**stated), "execution.gpus", 3))
    assert (p["gradient_accumulation"], p["gpus"]) == (6, 3)


def test_a_pass_beyond_what_the_model_is_qualified_at_is_refused(world: World) -> None:
    document = put(sft(microBatchPerGpu=8), "config.maxSeqLength", 16_384)
    problem = the(world, document)
    assert problem.field == "training.microBatchPerGpu"
    assert "131,072 tokens, more than the 65,536" in problem.message
    assert problem.allowed == "1 to 4"
    one = put(sft(), "config.maxSeqLength", 32_768)
    assert plan(world, one)["micro_batch_per_gpu"] == 1


@pytest.mark.parametrize(
    ("training", "total"),
    [({"epochs": 1}, 13), ({}, 39), ({"maxSteps": 5}, 5), ({"maxSteps": 500}, 39)],
)
def test_updates_of_a_supervised_run(training: dict[str, int], total: int, world: World) -> None:
    assert plan(world, sft(**training)).total_steps == total


def test_length_follows_the_model(world: World) -> None:
    p = plan(world, descriptor() | {"baseModel": "nbtrain/tiny"})
    assert (p["max_seq_length"], p.origins["max_seq_length"]) == (256, "computed")
    problem = the(world, put(descriptor() | {"baseModel": "nbtrain/tiny"}, "config.maxSeqLength",
                             257))  # fmt: skip
    assert "more than the base model's context" in problem.message
    long = plan(world, put(descriptor(), "config.maxSeqLength", 4097))
    assert (long["gradient_checkpointing"], long.origins["gradient_checkpointing"]) == (
        True, "computed",
    )  # fmt: skip
    problem = the(world, put(rl(maxCompletionLength=512), "config.maxSeqLength", 512))
    assert "leaves no room for a prompt" in problem.message
    assert plan(world, put(rl(), "config.maxSeqLength", 200))["max_output_tokens_per_turn"] == 100


def test_a_smoke_check_takes_a_slice_and_has_updates_of_its_own(world: World) -> None:
    p = plan(world, descriptor(smoke={}) | {"config": {"dataset": "support-triage-train"}})
    assert p.smoke is not None
    assert (p.smoke.slice_size, p.smoke.max_steps, p.smoke.threshold) == (200, 2000, 0.98)
    assert (p.workload.train_tasks, p.total_steps) == (200, 2000)
    assert p.workload.split == "the first 200 rows of dataset support-triage-train"
    small = plan(world, descriptor(smoke={}))
    assert small.workload.train_tasks == 100
    assert any("more than the 100 rows" in hint for hint in small.hints)
    assert plan(world, descriptor()).config_hash == small.config_hash
    for wrong in (1.5, -0.1):
        assert the(world, descriptor(smoke={"threshold": wrong})).field == "smoke.threshold"


# --- data --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "fact", "told"),
    [
        ("sft", "images", "2 rows (the first on line 7) with images; images are not built yet"),
        ("grpo", "images", "reinforcement runs cannot train on images"),
        ("sft", "unanswered", "2 rows (the first on line 7) whose last message is not the"),
        ("gspo", "tools", "with tools are not built yet"),
        ("sft", "tools", None),
        ("grpo", "unanswered", None),
    ],
)
def test_rows_that_cannot_be_trained_on_are_counted(
    method: str, fact: str, told: str | None, world: World
) -> None:
    world.datasets.append(Dataset("odd", facts={fact: (2, 7)}))
    document = descriptor(method, config={"dataset": "odd"})
    if told is None:
        assert plan(world, document)
        return
    problem = the(world, document)
    assert problem.field == "dataset"
    assert told in problem.message


def test_columns_that_rewards_get_from_the_run_are_refused(world: World) -> None:
    world.datasets.append(Dataset("odd", columns=("prompts", "label")))
    problem = the(world, descriptor("grpo", config={"dataset": "odd"}))
    assert "has a column prompts" in problem.message
    assert plan(world, descriptor(config={"dataset": "odd"}))


def test_the_validation_dataset_is_another_one(world: World) -> None:
    document = descriptor(config={"data": {"validationDataset": "held-out"}})
    p = plan(world, document)
    assert p.validation_dataset is not None
    assert p.workload.held_out_tasks == 20
    world.datasets.append(replace(world.dataset("d")))
    same = descriptor(config={"data": {"validationDataset": world.dataset("d").dataset_id}})
    assert "is the training dataset" in the(world, same).message
    unknown = descriptor(config={"data": {"validationDataset": "nothing"}})
    assert the(world, unknown).field == "data.validationDataset"


def test_a_mask_column_is_one_of_the_dataset_s(world: World) -> None:
    problem = the(world, descriptor(config={"loss": {"explicitLossMaskColumn": "mask"}}))
    assert problem.field == "loss.explicitLossMaskColumn"
    assert problem.allowed == "label"


# --- rewards -----------------------------------------------------------------------------------


def reward(*terms: Any, **parts: Any) -> dict[str, Any]:
    return descriptor("grpo", config={"reward": {"terms": list(terms)}}, **parts)


@pytest.mark.parametrize("kind", [k for k in TERMS if k != "rule"])
def test_terms_take_what_their_functions_take(kind: str) -> None:
    function = json_label_match if kind == "json-label-match" else getattr(builtins, kind)
    known = inspect.signature(function).parameters
    stated = {snake(option.name): option for option in TERMS[kind]}
    assert set(stated) == set(known)
    for name, parameter in known.items():
        if parameter.default is not parameter.empty:
            assert stated[name].default == parameter.default


def test_the_job_builds_every_kind_that_a_plan_takes() -> None:
    assert {
        kind: {snake(option.name): option.default is None for option in options}
        for kind, options in TERMS.items()
    } == {kind: parameters_of(kind) for kind in KINDS}


def test_terms_are_recorded_for_the_job_and_hashed_without_their_names(world: World) -> None:
    terms = [
        {"kind": "length", "maxChars": 20, "weight": 0.5}, {"kind": "exact"},
        {"kind": "numeric", "column": "label", "tolerance": 0.1, "name": "close"},
        {"kind": "rule", "bundle": "scoring", "module": "tools.more", "function": "f"},
        {"kind": "regex", "pattern": "a+"}, {"kind": "regex", "pattern": "b"},
    ]  # fmt: skip
    p = plan(world, reward(*terms))
    assert p.reward is not None
    assert [t["name"] for t in p.reward["terms"]] == [
        "length", "exact", "close", "tools.more:f", "regex", "regex-2",
    ]  # fmt: skip
    assert p.reward["terms"][0] == {
        "kind": "length", "weight": 0.5, "max_chars": 20, "name": "length",
    }  # fmt: skip
    assert p.reward["terms"][1]["column"] == "answer"
    assert p.reward["terms"][3]["bundle"] == world.bundle("scoring").bundle_id
    snake = [{"kind": "length", "max_chars": 20, "weight": 0.5}, *terms[1:]]
    snake[2] = {k: v for k, v in snake[2].items() if k != "name"}
    assert plan(world, reward(*snake)).config_hash == p.config_hash
    assert plan(world, reward(*terms[1:])).config_hash != p.config_hash


@pytest.mark.parametrize(
    ("term", "field", "told"),
    [
        ({"kind": "judge", "model": "x"}, "kind", "judge is not built yet"),
        ({"kind": "http", "url": "x"}, "kind", "http is not built yet"),
        ({"kind": "exakt"}, "kind", "has no choice"),
        ({"weight": 1}, "kind", "is missing"),
        ({"kind": "exact", "weight": "1"}, "weight", "needs a number"),
        ({"kind": "exact", "weight": float("nan")}, "weight", "needs a number"),
        ({"kind": "exact", "weight": 0}, None, "nothing could be learned"),
        ({"kind": "exact", "column": "labels"}, "column", "is no column of the dataset"),
        ({"kind": "regex", "pattern": "("}, "pattern", "is no valid regular expression"),
        ({"kind": "regex"}, "pattern", "is missing"),
        ({"kind": "length", "maxChars": -1}, "maxChars", "is out of bounds"),
        ({"kind": "length", "max_char": 3}, "max_char", "there is no parameter"),
        ({"kind": "rule", "bundle": "scoring"}, "module", "is missing"),
        ({"kind": "rule", "bundle": "x", "module": "reward"}, "bundle", "no bundle 'x'"),
        ({"kind": "rule", "bundle": "scoring", "module": "rewards"}, "module",
         "is no module of bundle scoring"),
        (3, "", "needs a mapping"),
    ],
)  # fmt: skip
def test_terms_are_checked_by_name(term: Any, field: str | None, told: str, world: World) -> None:
    problem = the(world, reward(term))
    name = "reward.terms" if field is None else "reward.terms[0]" + (f".{field}" if field else "")
    assert problem.field == name
    assert told in problem.message


@pytest.mark.parametrize("value", [[], 3, {}, {"term": []}, {"terms": 3}, {"terms": []}])
def test_a_reward_has_a_list_of_terms(value: Any, world: World) -> None:
    assert the(world, descriptor("grpo", config={"reward": value})).field.endswith(
        ("reward", "reward.terms", "reward.term")
    )


def test_a_reward_falls_back_to_the_run_s_grader_then_the_workload_s(world: World) -> None:
    default = plan(world, descriptor("grpo"))
    assert default.reward is not None
    assert (default.reward["terms"][0]["kind"], default.reward["origin"]) == (
        "json-label-match", "default",
    )  # fmt: skip
    assert default.field_origins is not None
    assert default.field_origins["config.reward"] == "default"
    own = plan(world, descriptor("grpo", grader="bundle:scoring#reward:judge"))
    bundle = world.bundle("scoring").bundle_id
    assert own.reward is not None
    assert own.reward["terms"] == [
        {"kind": "rule", "weight": 1.0, "bundle": bundle, "module": "reward", "function": "judge",
         "name": "reward:judge"}
    ]  # fmt: skip
    assert own.reward["origin"] == "the run's grader"
    assert own.grader == f"bundle:{bundle}#reward:judge"
    world.workloads = [
        replace(w, grader="bundle:scoring#reward") if w.name == "t" else w for w in world.workloads
    ]
    theirs = plan(world, descriptor("grpo"))
    assert theirs.reward is not None
    assert theirs.reward["origin"] == "the workload's grader"
    stated = {"terms": [{"kind": "json-label-match"}]}
    again = plan(world, descriptor("grpo", config={"reward": stated}))
    assert again.config_hash == default.config_hash


@pytest.mark.parametrize("grader", ["model:judge-1", "http:https://example.org/score"])
def test_a_grader_of_evaluations_is_refused_only_as_the_reward(grader: str, world: World) -> None:
    assert plan(world, descriptor(grader=grader)).grader == grader
    exact = {"terms": [{"kind": "exact"}]}
    stated = descriptor("grpo", grader=grader, config={"reward": exact})
    assert plan(world, stated).grader == grader
    problem = the(world, descriptor("grpo", grader=grader))
    assert problem.field == "grader"
    assert "not built yet" in problem.message


@pytest.mark.parametrize("grader", ["judge", "model:", "bundle:scoring", "http:nowhere", 3])
def test_a_grader_has_one_of_the_forms(grader: object, world: World) -> None:
    assert the(world, descriptor(grader=grader)).field == "grader"


def test_a_grader_s_bundle_is_looked_up(world: World) -> None:
    assert "no bundle 'x'" in the(world, descriptor(grader="bundle:x#reward")).message
    assert "is no module" in the(world, descriptor(grader="bundle:scoring#rewards")).message


# --- warm starts -------------------------------------------------------------------------------

WARM = descriptor("grpo", warmStartModelId="answers") | {"baseModel": "nbtrain/tiny"}


def test_a_warm_start_keeps_the_adapter_s_shape_and_sets_its_recipe(world: World) -> None:
    p = plan(world, WARM)
    assert p.warm_start is not None
    assert p.config is not None
    assert (p["lora_rank"], p["lora_alpha"], p.origins["lora_rank"]) == (4, 16.0, "inherited")
    assert p.config["warmStartConfigHash"] == p.warm_start.config_hash
    cold = {key: value for key, value in WARM.items() if key != "warmStartModelId"}
    assert plan(world, cold).config_hash != p.config_hash
    same = put(WARM, "config.rlHyperparams.lora.rank", 4)
    assert plan(world, same).config_hash == p.config_hash
    stated = put(WARM, "config.warmStartConfigHash", digest("recipe"))
    assert plan(world, stated).config_hash == p.config_hash
    assert not any("no signal" in hint for hint in p.hints)
    alone = {key: value for key, value in WARM.items() if key != "baseModel"}
    assert plan(world, alone).base_model.slug == "nbtrain/tiny"
    world.adapters[0] = Adapter(weights_digest=digest("others"))
    assert plan(world, WARM).config_hash != p.config_hash


@pytest.mark.parametrize(
    ("path", "value", "field", "told"),
    [
        ("config.rlHyperparams.lora.rank", 8, "lora.rank", "does not match model answers"),
        ("config.warmStartConfigHash", "abc", "warmStartConfigHash", "does not fit"),
        ("baseModel", "big", "warmStartModelId", "belongs to nbtrain/tiny"),
        ("warmStartModelId", "nothing", "warmStartModelId", "no model 'nothing'"),
    ],
)
def test_a_warm_start_that_does_not_fit_is_refused(
    path: str, value: object, field: str, told: str, world: World
) -> None:
    problem = the(world, put(WARM, path, value))
    assert problem.field == field
    assert told in problem.message


# --- machine and engine ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "path", "value", "told"),
    [
        (MachineInfo(gpus=2), "execution.gpus", 4, "more than the 2 of this machine"),
        (MachineInfo(gpus=2), "execution.deviceProfile", "cpu", "this machine's is gpu"),
        (MachineInfo(memory_gib=8.0), "execution.hostMemoryGiB", 9, "this machine's 8.0"),
        (MachineInfo(), "config.model.precision", "INT4", "needs bitsandbytes"),
    ],
)
def test_what_the_machine_has(
    here: MachineInfo, path: str, value: object, told: str, world: World
) -> None:
    world.here = here
    problem = the(world, put(descriptor(), path, value))
    assert problem.field == path.removeprefix("config.")
    assert told in problem.message


def test_a_profile_and_memory_that_fit_are_recorded(world: World) -> None:
    execution = {"deviceProfile": "cpu", "hostMemoryGiB": 900, "engine": "trl"}
    p = plan(world, descriptor(execution=execution))
    assert p.execution is not None
    assert p.execution["deviceProfile"] == "cpu"
    assert p.config_hash == plan(world, descriptor()).config_hash


@pytest.mark.parametrize(
    ("method", "name", "value", "told"),
    [
        ("sft", "engine.forward_prefetch", True, None),
        ("grpo", "rollout.max_num_seqs", 8, None),
        ("sft", "engine.forward_prefetch", 1, "needs true or false"),
        ("sft", "engine.pad_to_length_bucket", 0, "out of bounds"),
        ("sft", "rollout.enforce_eager", True, "a supervised run does not have"),
        ("grpo", "trainer.seed", 1, "not a setting that a run may set: the seed is"),
        ("grpo", "model.path", "x", "a path is never set this way"),
        ("grpo", "engine.forward_prefetc", True, "not a setting that a run may set"),
    ],
)
def test_engine_settings_are_checked_and_then_refused(
    method: str, name: str, value: object, told: str | None, world: World
) -> None:
    given = {"engine": "verl", "settings": {name: value}}
    found = problems(world, descriptor(method, config={"engineSettings": given}))
    fields = [p.field for p in found]
    assert fields == [f"engineSettings.settings.{name}"] * (told is not None) + ["engineSettings"]
    assert "needs verl, which is not built yet" in found[-1].message
    assert told is None or told in found[0].message


def test_engine_settings_are_whole(world: World) -> None:
    found = problems(world, descriptor(config={"engineSettings": {}}))
    assert {p.field for p in found} == {
        "engineSettings.engine", "engineSettings.settings", "engineSettings",
    }  # fmt: skip


@pytest.mark.parametrize(("value", "told"), [(0.5, "verl"), (1.0, "bounds"), (0, "bounds")])
def test_a_memory_share_has_a_range(value: float, told: str, world: World) -> None:
    problem = the(world, put(rl(), "execution.rollout.memoryShare", value))
    assert problem.field == "execution.rollout.memoryShare"
    assert told in problem.message
    supervised = the(world, put(descriptor(), "execution.rollout.memoryShare", 0.5))
    assert "no rollout engine" in supervised.message


# --- hints -------------------------------------------------------------------------------------

SAVED = {"execution": {"saveEvery": 5}}


@pytest.mark.parametrize(
    ("document", "hint"),
    [
        (descriptor(), "execution.saveEvery is off: an interrupted run has nothing to restart"),
        (descriptor(**SAVED), None),
        (put(descriptor(**SAVED), "config.data.packing", True), "a step has more"),
        (put(descriptor(**SAVED), "config.loss.trainOnToolCalls", True), "changes nothing with"),
        (put(sft(validationFrequencySteps=5), "execution.saveEvery", 5), "evaluates nothing"),
        (descriptor(execution={"saveEvery": 39}), "saves nothing before the end, at step 39: an"),
        (descriptor(execution={"saveEvery": 38}), None),
        (put(rl(maxSteps=4), "execution.saveEvery", 9), "execution.saveEvery 9 saves nothing"),
        (descriptor(execution={"keepAdapters": 1}), "execution.keepAdapters 1 changes nothing"),
        (descriptor(grader="json-label-match", **SAVED), "grader is recorded and shown: this"),
        (reward({"kind": "length", "maxChars": 9}, grader="json-label-match", **SAVED),
         "grader is recorded and shown"),
        (descriptor("grpo", grader="json-label-match", **SAVED), "a reward of json-label-match"),
        (put(sft(seed=0), "execution.saveEvery", 5), "training.seed 0 takes the default, 42"),
        (put(rl(temperature=0), "execution.saveEvery", 5), "every group ties"),
        (descriptor("grpo", **SAVED), "a reward of json-label-match alone"),
        (reward({"kind": "exact"}, {"kind": "format", "pattern": "a"}, **SAVED), None),
        (put(reward({"kind": "length", "maxChars": 9}, **SAVED),
             "config.rlHyperparams.promptsPerStep", 128), "more than the 100 rows"),
    ],
)  # fmt: skip
def test_what_works_but_not_as_wanted_is_hinted_at(
    document: Any, hint: str | None, world: World
) -> None:
    hints = plan(world, document).hints
    if hint is None:
        assert hints == ()
    else:
        assert any(hint in one for one in hints)


# --- checkpoints -------------------------------------------------------------------------------


def _saved(world: World, step: int = 10, **changes: Any) -> Any:
    document = put(descriptor(), "config.hyperparams.lora.rank", 4)
    return world.save(plan(world, put(document, "execution.saveEvery", 5)), step, **changes)


def test_what_is_not_stated_is_the_parent_s(world: World) -> None:
    parent = _saved(world)
    p = plan(world, {"kind": "run"}, parent=parent)
    assert (p.method, p["lora_rank"], p.origins["lora_rank"]) == ("sft", 4, "inherited")
    assert (p["save_every"], p.origins["micro_batch_per_gpu"]) == (5, "computed")
    assert (p.start_step, p.total_steps) == (10, 39)
    assert p.parent is not None
    assert p.dataset is not None
    assert p.dataset.dataset_id == world.dataset("d").dataset_id
    assert (p.workload.name, p.base_model.slug) == ("t", "tiny")
    assert p.config_hash != plan(world, descriptor()).config_hash
    grandchild = plan(world, {"kind": "run"}, parent=world.save(p, 20))
    assert (grandchild["lora_rank"], grandchild.start_step) == (4, 20)
    flat = plan(world, {}, parent=parent)
    assert (flat.config_hash, flat.options) == (p.config_hash, p.options)


def test_updates_count_from_the_beginning(world: World) -> None:
    parent = _saved(world)
    longer = {"kind": "run", "config": {"hyperparams": {"training": {"maxSteps": 12}}}}
    assert plan(world, longer, parent=parent).total_steps == 12
    short = put(longer, "config.hyperparams.training.maxSteps", 10)
    problem = the(world, short, parent=parent)
    assert problem.field == "training.maxSteps"
    assert "no update remains" in problem.message
    fresh = plan(world, short, parent=parent, load_weights_only=True)
    assert (fresh.start_step, fresh.total_steps) == (0, 10)
    assert fresh["load_weights_only"] is True
    assert fresh.config_hash != plan(world, longer, parent=parent).config_hash


@pytest.mark.parametrize(
    ("path", "value", "field", "weights"),
    [
        ("config.hyperparams.lora.rank", 8, "lora.rank", False),
        ("config.dataset", "held-out", "dataset", True),
        ("execution.gpus", 2, "execution.gpus", True),
        ("config.data.shuffle", False, "data.shuffle", True),
        ("config.hyperparams.training.seed", 7, "training.seed", True),
        ("baseModel", "big", "parent_checkpoint_id", False),
        ("config.method", "grpo", "parent_checkpoint_id", False),
    ],
)
def test_what_must_stay_is_refused_with_both_values(
    path: str, value: object, field: str, weights: bool, world: World
) -> None:
    parent = _saved(world)
    document = put({"kind": "run", "config": {}}, path, value)
    assert field in [p.field for p in problems(world, document, parent=parent)]
    if weights:
        assert plan(world, document, parent=parent, load_weights_only=True)
    else:
        found = problems(world, document, parent=parent, load_weights_only=True)
        assert field in [p.field for p in found]


def test_a_checkpoint_must_hold_what_is_asked_of_it(world: World) -> None:
    bare = _saved(world, has_training_state=False, resumable=[(4, "ab" * 32)])
    refused = the(world, {"kind": "run"}, parent=bare)
    assert "holds no training state" in refused.message
    assert "these hold training state: step 4 (abababababab)" in (refused.hint or "")
    assert plan(world, {"kind": "run"}, parent=bare, load_weights_only=True)
    empty = _saved(world, has_weights=False)
    assert "holds no weights" in the(world, {"kind": "run"}, parent=empty).message
    unknown = the(world, {"kind": "run"}, parent="abcdef")
    assert unknown.field == "parent_checkpoint_id"
    alone = the(world, descriptor(), load_weights_only=True)
    assert alone.field == "load_weights_only"
    options = world.save(world.plan({}), 5)
    told = the(world, descriptor() | {"baseModel": "nbtrain/tiny"}, parent=options)
    assert "is of a run by options" in told.message


def test_a_smoke_check_goes_on_in_the_rows_that_were_trained_on(world: World) -> None:
    parent = _saved(world)
    part = {"kind": "run", "smoke": {"sliceSize": 20, "maxSteps": 50}}
    problem = the(world, part, parent=parent)
    assert problem.field == "smoke"
    assert "would train on the first 20 rows of the dataset, checkpoint" in problem.message
    assert "was trained on all 100 rows" in problem.message
    assert "load_weights_only: true" in (problem.hint or "")
    assert plan(world, part, parent=parent, load_weights_only=True).smoke is not None
    assert plan(world, {}, parent=parent, smoke=True).workload.train_tasks == 100
    checked = world.save(plan(world, descriptor(smoke={"sliceSize": 20})), 6)
    assert plan(world, part, parent=checked).total_steps == 50
    assert the(world, {"kind": "run"}, parent=checked).field == "smoke"
    over = the(world, put(part, "smoke.maxSteps", 6), parent=checked)
    assert over.field == "smoke.maxSteps"
    assert "smoke.maxSteps counts from the beginning" in (over.hint or "")


def test_what_follows_from_a_refused_field_is_not_refused_too(world: World) -> None:
    parent = _saved(world)
    assert the(world, {"lora_rank": 8}, parent=parent).field == "lora_rank"
    assert the(world, {"lora_rank": 0.5}, parent=parent).field == "lora_rank"
    assert the(world, {"lora_alpha": 3}, parent=parent).field == "lora_alpha"


@pytest.mark.parametrize("none", [0, None])
def test_a_stated_null_is_no_value_of_the_parent_s(none: object, world: World) -> None:
    document = put(descriptor(execution={"saveEvery": 5, "microBatchSequences": 2}),
                   "config.loss.explicitLossMaskColumn", "label")  # fmt: skip
    parent = world.save(plan(world, document), 10)
    off = plan(world, {"save_every": none, "micro_batch_sequences": none}, parent=parent)
    assert (off["save_every"], off["micro_batch_sequences"]) == (None, None)
    assert any("save_every is off" in hint for hint in off.hints)
    assert off["explicit_loss_mask_column"] == "label"
    bare = plan(world, {"explicit_loss_mask_column": None}, parent=parent)
    assert (bare["explicit_loss_mask_column"], bare["save_every"]) == (None, 5)


def test_a_supervised_checkpoint_is_told_to_options_of_rewards(world: World) -> None:
    parent = _saved(world)
    problem = the(world, {}, parent=parent, algorithm="grpo")
    assert problem.field == "parent_checkpoint_id"
    assert "is of a run by method sft, this one is by options of method grpo" in problem.message
    assert "warmStartModelId" in (problem.hint or "")
    found = problems(world, {"nothing": 1}, parent=parent, algorithm="gspo")
    assert [one.field for one in found] == ["parent_checkpoint_id", "nothing"]
    back = world.save(plan(world, rl(maxSteps=20)), 5)
    problem = the(world, {}, parent=back, algorithm="sft")
    assert "this one is by options of method sft" in problem.message
    assert "Leave the method out" in (problem.hint or "")


def test_a_reinforcement_descriptor_goes_on_too(world: World) -> None:
    parent = world.save(plan(world, rl(maxSteps=20, groupSize=6)), 5)
    p = plan(world, {"kind": "run"}, parent=parent)
    assert (p.method, p["group_size"], p["num_steps"]) == ("grpo", 6, 15)
    assert (p.start_step, p.total_steps, p["lr_hold_steps"]) == (5, 20, 20)


# --- the flat form -----------------------------------------------------------------------------

FLAT = {"algorithm": "sft", "workload": "t", "base_model_slug": "tiny", "dataset": "d"}


def test_the_flat_form_is_the_same_recipe(world: World) -> None:
    p = plan(world, FLAT)
    assert p.config_hash == plan(world, descriptor()).config_hash
    assert p.config == plan(world, descriptor()).config
    whole = plan(world, FLAT | {k: v for k, v in p.options.items() if k != "load_weights_only"})
    assert (whole.config_hash, whole.options) == (p.config_hash, p.options)
    assert set(whole.origins.values()) <= {"stated", "computed", "default"}


def test_the_flat_form_is_refused_under_its_own_names(world: World) -> None:
    wrong = {
        "lora_rank": 0.5, "precision": "fp16", "micro_batch_per_gpu": 3, "num_steps": 5,
        "learningRate": 1, "packing": "no", "validation_dataset": "d", "group_size": 4,
        "config": {},
    }  # fmt: skip
    found = {p.field: p for p in problems(world, FLAT | wrong)}
    assert set(found) == set(wrong)
    assert found["lora_rank"].message.startswith("lora_rank needs a whole number")
    assert found["num_steps"].hint == "Did you mean max_steps?"
    assert found["learningRate"].hint == "Did you mean learning_rate?"
    assert found["micro_batch_per_gpu"].message.startswith("micro_batch_per_gpu 3 does not divide")
    assert "group of a descriptor" in found["config"].message
    missing = problems(world, {"algorithm": "sft"})
    assert [p.field for p in missing] == ["workload", "dataset"]


def test_the_flat_form_resumes(world: World) -> None:
    parent = _saved(world)
    p = plan(world, {"parent_checkpoint_id": parent.checkpoint_id, "display_name": "more"})
    assert (p.method, p.start_step, p.display_name) == ("sft", 10, "more")
    fresh = plan(world, {"load_weights_only": True}, parent=parent)
    assert (fresh.start_step, fresh.origins["load_weights_only"]) == (0, "stated")


# --- anything ----------------------------------------------------------------------------------

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["terms", "lora", "rank", "kind", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
PATHS = st.sampled_from(
    [
        "config", "config.reward", "config.method", "config.hyperparams", "config.data",
        "config.rlHyperparams.lora", "execution", "smoke", "grader", "workload", "config.dataset",
        "config.engineSettings", "config.engineSettings.settings", "config.reward.terms",
        "description", "config.loss.explicitLossMaskColumn", "warmStartModelId", "baseModel",
        "config.maxSeqLength", "execution.rollout", "submissionId",
    ]
)  # fmt: skip


@calm
@given(st.sampled_from(["sft", "grpo"]), st.lists(st.tuples(PATHS, junk), max_size=3))
def test_anything_makes_a_plan_or_refusals(method: str, changes: list[tuple[str, Any]]) -> None:
    document = descriptor(method)
    for path, value in changes:
        try:
            document = put(document, path, value)
        except (AttributeError, TypeError):  # something stands where a group would
            continue
    told: tuple[Problem, ...] = ()
    try:
        assert plan(described_world(), document).config_hash
    except PlanRefused as refused:
        told = refused.problems
    assert all(p.field and p.message for p in told)
    assert len({str(p) for p in told}) == len(told)


def test_bundles_are_named_by_content(world: World) -> None:
    one = reward({"kind": "rule", "bundle": "scoring", "module": "reward"})
    two = reward({"kind": "rule", "bundle": Bundle().bundle_id[:8], "module": "reward"})
    assert plan(world, one).config_hash == plan(world, two).config_hash
