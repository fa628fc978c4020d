"""The run descriptor: its table, the two documented examples, every field's way, one hash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from descriptors import REINFORCEMENT, SUPERVISED
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import World, at, described_world, descriptor, digest, put

from nbtrain.errors import PlanRefused, Problem
from nbtrain.plan.descriptor.resolve import resolve_descriptor
from nbtrain.plan.descriptor.table import FIELDS, METHODS, fields_of, named
from nbtrain.plan.identity import same_plan
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.registry import MachineInfo
from nbtrain.plan.resolve import resolve
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.plan.schedule import schedule_of, trace
from nbtrain.plan.source import parse

CASES = Path(__file__).parent / "cases"
calm = settings(deadline=None, max_examples=60)
WORLD = described_world()
WORLD.here = MachineInfo(memory_gib=16.0, int4=True)


def plan(document: Any, **beside: Any) -> ResolvedPlan:
    return resolve(document, registry=WORLD, **beside)


def problems(document: Any, world: World = WORLD, **beside: Any) -> list[Problem]:
    with pytest.raises(PlanRefused) as refused:
        resolve(document, registry=world, **beside)
    return list(refused.value.problems)


# --- the documented examples -------------------------------------------------------------------


def test_the_supervised_example_resolves() -> None:
    p = plan(parse(SUPERVISED))
    assert (p.method, p.door, p.admission, p.total_steps) == ("sft", "descriptor", "filtered", 126)
    assert (p.description, p.config_name) == ("two epochs at rank 8", "r8-e2")
    assert p.dataset is not None
    assert (p.dataset.name, p.dataset.rows, p.workload.train_tasks) == (
        "support-triage-train", 500, 500,
    )  # fmt: skip
    assert p.workload.train_digest == p.dataset.dataset_id
    assert p.reward is None
    expected = {
        "algorithm": "sft", "lora_rank": 8, "lora_alpha": 16.0, "lora_dropout": 0.0,
        "lora_target_modules": "default", "optimizer_kind": "adamw", "learning_rate": 1e-4,
        "weight_decay": 0.0, "max_grad_norm": 1.0, "scheduler_kind": "linear", "warmup_ratio": 0.0,
        "min_learning_rate_ratio": 0.0, "epochs": 2, "max_steps": 0, "micro_batch_per_gpu": 2,
        "gradient_accumulation": 4, "validation_frequency_steps": 100, "seed": 42,
        "max_seq_length": 2048, "precision": "bf16", "gradient_checkpointing": False,
        "attention_implementation": "sdpa", "truncation": "error", "packing": False,
        "shuffle": True, "assistant_turns": "last", "train_on_tool_calls": True,
        "train_on_tool_results": False, "explicit_loss_mask_column": None, "gpus": 1,
        "micro_batch_sequences": None, "save_every": 20, "keep_adapters": 4,
        "load_weights_only": False,
    }  # fmt: skip
    assert p.options == expected
    origins = p.origins
    assert (origins["lora_rank"], origins["lora_alpha"], origins["seed"]) == (
        "stated", "computed", "default",
    )  # fmt: skip


def test_the_reinforcement_example_resolves_to_every_option() -> None:
    p = plan(parse(REINFORCEMENT))
    assert (p.method, p.admission, p.total_steps) == ("grpo", "as_graded", 100)
    assert set(OPTIONS) | {"max_seq_length", "micro_batch_sequences"} == set(p.options)
    expected = {
        "batch_size": 8, "group_size": 8, "kl_beta": 0.001, "temperature": 1.0, "num_steps": 100,
        "max_output_tokens_per_turn": 512, "max_output_tokens_per_trajectory": 512,
        "max_turns_per_trajectory": 1, "max_staleness": 0, "val_enabled": False, "lora_rank": 32,
        "lora_alpha": 64.0, "learning_rate": 1e-5, "weight_decay": 0.01, "lr_warmup_steps": 1,
        "lr_hold_steps": 100, "min_trajectories_per_group": 1, "train_on_truncation": True,
        "train_on_all_fail": True, "precision": "bf16", "seed": 42, "gpus": 1,
        "checkpoint_interval_steps": 10, "keep_checkpoints": 4, "max_seq_length": 1536,
    }  # fmt: skip
    assert {name: p[name] for name in expected} == expected
    assert trace(schedule_of(p.options, p.total_steps)) == [1e-5] * 100
    bundle = WORLD.bundle("gsm8k-scoring").bundle_id
    term = {"kind": "rule", "weight": 1.0, "bundle": bundle, "module": "reward",
            "function": "compute_score"}  # fmt: skip
    assert p.config is not None
    assert p.config["reward"] == {"terms": [term]}
    assert p.reward == {"terms": [term | {"name": "reward"}], "origin": "stated"}


@pytest.mark.parametrize("text", [SUPERVISED, REINFORCEMENT])
def test_a_plan_survives_json_and_its_own_config_makes_it_again(text: str) -> None:
    document = json.loads(text)
    p = plan(document)
    again = ResolvedPlan.from_json(json.loads(json.dumps(p.to_json(), allow_nan=False)))
    assert again == p
    assert same_plan(p, again)
    whole = plan(document | {"config": _restated(p), "execution": p.execution})
    assert whole.config_hash == p.config_hash
    assert whole.config == p.config
    assert same_plan(p, whole)


def _restated(p: ResolvedPlan) -> dict[str, Any]:
    config = json.loads(json.dumps(p.config))
    config.pop("warmStartConfigHash", None)
    return config  # type: ignore[no-any-return]


# --- the table ---------------------------------------------------------------------------------


def test_accessors() -> None:
    with pytest.raises(ValueError, match="found 'dpo'"):
        fields_of("dpo")
    for method in METHODS:
        assert len(named(method)) == len(fields_of(method))
    assert all(field.option.help.endswith(".") for field in FIELDS.values())
    assert all(path == field.path for path, field in FIELDS.items())


OTHER: dict[str, Any] = {
    "config.maxSeqLength": 512,
    "config.hyperparams.lora.rank": 4, "config.hyperparams.lora.alpha": 3.0,
    "config.hyperparams.lora.dropout": 0.1, "config.hyperparams.lora.targetModules": ".*q_proj",
    "config.hyperparams.optimizer.learningRate": 2e-4,
    "config.hyperparams.optimizer.weightDecay": 0.1,
    "config.hyperparams.optimizer.maxGradNorm": 0.5,
    "config.hyperparams.scheduler.kind": "constant",
    "config.hyperparams.scheduler.warmupRatio": 0.1,
    "config.hyperparams.training.epochs": 5, "config.hyperparams.training.maxSteps": 7,
    "config.hyperparams.training.microBatchPerGpu": 4,
    "config.hyperparams.training.gradientAccumulation": 8,
    "config.hyperparams.training.validationFrequencySteps": 10,
    "config.hyperparams.training.seed": 7,
    "config.model.precision": "INT4", "config.model.gradientCheckpointing": True,
    "config.model.attentionImplementation": "eager", "config.data.truncation": "right",
    "config.data.packing": True, "config.data.shuffle": False, "config.loss.assistantTurns": "all",
    "config.loss.trainOnToolCalls": False, "config.loss.trainOnToolResults": True,
    "config.loss.explicitLossMaskColumn": "label",
    "config.data.validationDataset": "held-out",
    "execution.gpus": 2, "execution.microBatchSequences": 3, "execution.saveEvery": 6,
    "execution.keepAdapters": 2, "execution.hostMemoryGiB": 8.0,
    "config.rlHyperparams.epochs": 2, "config.rlHyperparams.maxSteps": 9,
    "config.rlHyperparams.groupSize": 6, "config.rlHyperparams.promptsPerStep": 4,
    "config.rlHyperparams.klBeta": 0.0, "config.rlHyperparams.temperature": 0.0,
    "config.rlHyperparams.maxCompletionLength": 128, "config.rlHyperparams.lora.rank": 4,
    "config.rlHyperparams.lora.alpha": 3.0,
    "config.rlHyperparams.lora.targetModules": ".*q_proj",
    "config.rlHyperparams.optimizer.learningRate": 2e-4,
    "config.rlHyperparams.optimizer.weightDecay": 0.1,
    "config.rlHyperparams.optimizer.maxGradNorm": 0.5,
    "config.rlHyperparams.scheduler.kind": "cosine",
    "config.rlHyperparams.scheduler.warmupRatio": 0.1,
    "smoke.sliceSize": 20, "smoke.maxSteps": 30, "smoke.threshold": 0.5,
    "grader": "model:judge-1", "submissionId": "abc", "description": "why", "configName": "c",
}  # fmt: skip
"""A value of its own for every field that a run can follow; the rest is in the tables below."""
REFERENCES = {
    "kind": "run", "workload": "support-triage", "baseModel": "Qwen/Qwen3-0.6B",
    "config.dataset": "held-out", "config.method": "gspo", "warmStartModelId": "answers",
}  # fmt: skip
TOGETHER = {
    "config.hyperparams.scheduler.minLearningRateRatio": 0.1,
    "config.rlHyperparams.scheduler.minLearningRateRatio": 0.1,
}
"""Fields that another one must allow."""
REFUSED: dict[str, tuple[Any, str]] = {
    "config.hyperparams.optimizer.kind": ("lion", "has no choice"),
    "config.rlHyperparams.optimizer.kind": ("lion", "has no choice"),
    "config.rlHyperparams.lora.dropout": (0.1, "without dropout"),
    "config.rlHyperparams.stalenessThreshold": (1, "rollouts of the current weights"),
    "config.warmStartConfigHash": (digest("x"), "there is no warmStartModelId"),
    "config.model.weightPrecision": ("bf16", "needs verl, which is not built yet"),
    "config.engineSettings.engine": ("verl", "needs verl, which is not built yet"),
    "execution.rolloutGpus": (1, "rollouts run on the training devices"),
    "execution.deviceProfile": ("gpu", "this machine's is cpu"),
    "execution.engine": ("verl", "verl is not built yet"),
    "execution.rollout.memoryShare": (0.4, "needs verl, which is not built yet"),
    "execution.memory.offload.weights": (True, "needs verl, which is not built yet"),
}
RL_REFUSED = {
    "config.model.precision": "INT4 is not built yet for grpo",
    "config.model.gradientCheckpointing": "is not built yet for grpo",
    "config.model.attentionImplementation": "is not built yet for grpo",
}


def test_the_tables_name_every_field() -> None:
    assert set(OTHER) | set(REFERENCES) | set(TOGETHER) | set(REFUSED) == set(FIELDS)


def _method_of(path: str) -> str:
    return "grpo" if "sft" not in FIELDS[path].methods else "sft"


@pytest.mark.parametrize("path", list(OTHER))
def test_every_field_is_found_in_the_resolved_plan_and_where_promised_in_the_hash(
    path: str,
) -> None:
    field, value, method = FIELDS[path], OTHER[path], _method_of(path)
    document = descriptor(method)
    base, p = plan(document), plan(put(document, path, value))
    assert p.field_origins is not None
    assert p.field_origins[path] == "stated"
    assert (p.config_hash != base.config_hash) == (field.part == "config")
    if path == "config.data.validationDataset":
        value = WORLD.dataset(value).dataset_id
    found = {
        "config": lambda: at({"config": p.config}, path),
        "execution": lambda: at({"execution": p.execution}, path),
        "smoke": lambda: p.to_json()["smoke"][
            {"sliceSize": "slice_size", "maxSteps": "max_steps"}.get(field.key, field.key)
        ],
    }.get(field.part)
    names = {"grader": "grader", "submissionId": "submission_id", "description": "description",
             "configName": "config_name"}  # fmt: skip
    assert (found() if found else getattr(p, names[path])) == value
    setting = field.setting if method == "sft" else field.rl_setting
    if setting is not None and not field.looked_up:
        expected = value.lower() if setting == "precision" else value
        assert p[setting] == expected
        assert p.origins[setting] == "stated"
        assert base[setting] != expected


@pytest.mark.parametrize("path", list(TOGETHER))
def test_a_floor_goes_with_a_cosine(path: str) -> None:
    method = _method_of(path)
    document = put(descriptor(method), path.replace("minLearningRateRatio", "kind"), "cosine")
    p = plan(put(document, path, 0.1))
    assert at({"config": p.config}, path) == 0.1
    assert p.config_hash != plan(document).config_hash
    rates = trace(schedule_of(p.options, p.total_steps))
    assert rates[-1] == pytest.approx(0.1 * p["learning_rate"])


@pytest.mark.parametrize("path", list(REFUSED))
def test_what_cannot_be_followed_is_refused_by_name(path: str) -> None:
    value, told = REFUSED[path]
    method = "grpo" if path == "execution.rollout.memoryShare" else _method_of(path)
    found = problems(put(descriptor(method), path, value))
    named_here = [p for p in found if p.field == FIELDS[path].name or path.startswith(
        f"config.{p.field}.")]  # fmt: skip
    assert named_here
    assert any(told in p.message for p in named_here)


@pytest.mark.parametrize("path", list(RL_REFUSED))
def test_what_the_reinforcement_loop_lacks_is_refused_by_name(path: str) -> None:
    (problem,) = problems(put(descriptor("grpo"), path, OTHER[path]))
    assert problem.field == FIELDS[path].name
    assert RL_REFUSED[path] in problem.message


@pytest.mark.parametrize("path", list(REFERENCES))
def test_what_is_named_is_looked_up(path: str) -> None:
    value = REFERENCES[path]
    method = "grpo" if path in ("warmStartModelId", "config.method") else "sft"
    document = descriptor(method)
    if path == "warmStartModelId":
        document["baseModel"] = "nbtrain/tiny"
    base, p = plan(document), plan(put(document, path, value))
    changes = path not in ("kind", "workload")
    assert (p.config_hash != base.config_hash) == changes
    if FIELDS[path].looked_up:
        (problem,) = problems(put(document, path, "nothing"))
        assert problem.field == FIELDS[path].name
        assert problem.message.startswith(f"{FIELDS[path].name}: no ")


@pytest.mark.parametrize("path", [p for p, f in FIELDS.items() if f.option.type != "text"])
def test_numbers_and_booleans_are_strict(path: str) -> None:
    document, name = descriptor(_method_of(path)), FIELDS[path].name
    for wrong in ("8", "false", [1]):
        (problem,) = [p for p in problems(put(document, path, wrong)) if p.field == name]
        assert problem.message.startswith(f"{name} needs ")
    if FIELDS[path].option.type != "boolean":
        for wrong in (-1, True):
            assert name in [p.field for p in problems(put(document, path, wrong))]


ZEROES = [
    p for p, f in FIELDS.items()
    if f.option.type in ("integer", "number") and not f.keeps_zero
]  # fmt: skip


@pytest.mark.parametrize("path", ZEROES)
def test_zero_is_the_default(path: str) -> None:
    document = descriptor(_method_of(path))
    if path.startswith("smoke"):
        document["smoke"] = {}
    base, p = plan(document), plan(put(document, path, 0))
    assert p.config_hash == base.config_hash
    assert same_plan(p, base)
    assert p.field_origins == base.field_origins
    option = FIELDS[path].option
    becomes = bool(option.default) or option.compute is not None
    assert becomes == any(f"{option.name} 0 takes the default, " in hint for hint in p.hints)
    assert ("(0 is the default)" in option.allowed()) == (option.default != 0)


def test_zero_is_kept_where_it_means_something() -> None:
    kept = {f.name for f in FIELDS.values() if f.keeps_zero}
    assert kept == {
        "training.maxSteps", "rlHyperparams.maxSteps", "rlHyperparams.klBeta",
        "rlHyperparams.temperature", "rlHyperparams.stalenessThreshold",
        "execution.rollout.memoryShare",
    }  # fmt: skip
    p = plan(descriptor("grpo", config={"rlHyperparams": {"klBeta": 0, "maxSteps": 0}}))
    assert (p["kl_beta"], p["num_steps"], p.origins["kl_beta"]) == (0.0, 13, "stated")
    assert plan(descriptor("grpo"))["kl_beta"] == 0.04


# --- one recipe, one hash ----------------------------------------------------------------------


def _defaults(method: str) -> dict[str, Any]:
    p = plan(descriptor(method))
    assert p.config is not None
    tree = {"config": p.config, "execution": p.execution}
    paths = [f.path for f in fields_of(method) if f.part in ("config", "execution")]
    return {path: at(tree, path) for path in paths if not FIELDS[path].by_verl}


DEFAULTS = {method: _defaults(method) for method in METHODS}
HASHES = {method: plan(descriptor(method)).config_hash for method in METHODS}


@calm
@given(st.data())
def test_stated_defaults_never_change_the_hash(data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(METHODS))
    document = descriptor(method)
    sized = {"config.hyperparams.training.microBatchPerGpu"}
    for path in data.draw(st.sets(st.sampled_from(sorted(set(DEFAULTS[method]) - sized)))):
        value = DEFAULTS[method][path]
        if value is not None or FIELDS[path].option.nullable:
            document = put(document, path, value)
    p = plan(document)
    assert p.config_hash == HASHES[method]
    assert same_plan(p, plan(descriptor(method)))


@calm
@given(st.data())
def test_the_order_of_keys_and_the_syntax_do_not_matter(data: st.DataObject) -> None:
    document = json.loads(data.draw(st.sampled_from([SUPERVISED, REINFORCEMENT])))

    def shuffled(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        keys = data.draw(st.permutations(list(tree)))
        return {key: shuffled(tree[key]) for key in keys}

    text = json.dumps(shuffled(document), indent=1)
    forms = [parse(text, syntax=syntax) for syntax in ("json", "yaml")]
    assert {plan(form).config_hash for form in forms} == {plan(document).config_hash}


def test_names_do_not_count_and_what_they_mean_does() -> None:
    world = described_world()
    document = descriptor("grpo", config={"dataset": "gsm8k-train"})
    base = resolve(document, registry=world)
    by_id = put(document, "config.dataset", world.dataset("gsm8k-train").dataset_id[:10])
    for same in (by_id, document | {"workload": "gsm8k"}, document | {"description": "x"}):
        assert resolve(same, registry=world).config_hash == base.config_hash
    other = resolve(put(document, "config.dataset", "d"), registry=world)
    assert other.config_hash != base.config_hash


def test_options_and_descriptor_never_have_one_hash() -> None:
    options = resolve({"algorithm": "grpo"}, registry=WORLD, workload="sums", base_model="tiny")
    assert options.config_hash not in HASHES.values()


def test_resolve_descriptor_is_what_resolve_calls() -> None:
    document = descriptor()
    assert resolve_descriptor(document, WORLD) == plan(document)
    assert resolve_descriptor(document, WORLD, algorithm="sft", workload="t") == plan(document)


# --- cases from the field ----------------------------------------------------------------------


def case(name: str) -> Any:
    return parse((CASES / name).read_text(), source=name, defer=True)


def test_numbers_mean_the_same_in_yaml_and_json() -> None:
    # CY-01
    plans = [plan(case(f"CY-01.run.{end}")) for end in ("yaml", "json")]
    assert plans[0].config_hash == plans[1].config_hash
    assert [p["learning_rate"] for p in plans] == [1e-4, 1e-4]
    for text, value in (("1e-4", 1e-4), ("2e-5", 2e-5), ("1E-4", 1e-4), (".5", 0.5)):
        yaml = f"{(CASES / 'CY-01.run.yaml').read_text()}".replace("1e-4", text)
        assert plan(parse(yaml))["learning_rate"] == value
    told = problems(parse((CASES / "CY-01.run.yaml").read_text().replace("1e-4", "'1e-4'")))
    assert [p.field for p in told] == ["optimizer.learningRate"]
    assert told[0].hint == "Write 1e-4, without quotes"


@pytest.mark.parametrize(("end", "lines"), [("yaml", "lines 6 and 7"), ("json", "line 1")])
def test_a_key_written_twice_is_refused(end: str, lines: str) -> None:
    # CY-03
    (problem,) = problems(case(f"CY-03.dup.{end}"))
    assert lines in problem.message
    assert problem.field == "config.maxSeqLength"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("CY-04.empty.yaml", "CY-04.empty.yaml: a mapping is needed, found nothing"),
        ("CY-04.list.yaml", "CY-04.list.yaml: a mapping is needed, found a list"),
        ("CY-04.num.yaml", "CY-04.num.yaml: a mapping is needed, found a number"),
        ("CY-04.two.yaml", "a second document begins here"),
        ("CY-04.tab.yaml", "a tab stands where YAML takes only spaces"),
        ("CY-04.tag.yaml", "the tag !!python/object/apply:os.getcwd is not read"),
    ],
)
def test_what_is_no_mapping_is_refused_with_a_sentence(name: str, told: str) -> None:
    # CY-04
    with pytest.raises(PlanRefused) as refused:
        plan(case(name))
    assert told in str(refused.value)


def test_types_are_strict_and_all_told_at_once() -> None:
    # CY-06
    found = problems(case("CY-06.types.json"))
    assert [(p.field, p.where and p.where.line) for p in found] == [
        ("data.packing", 8), ("data.shuffle", 9), ("lora.rank", 13), ("execution.gpus", 18),
    ]  # fmt: skip
    (group,) = problems(descriptor("grpo", config={"rlHyperparams": {"groupSize": True}}))
    assert group.field == "rlHyperparams.groupSize"
    assert plan(descriptor(config={"maxSeqLength": 512.0}))["max_seq_length"] == 512


def test_misspelt_keys_are_told_with_the_nearest_at_every_depth_in_one_pass() -> None:
    # CY-07
    found = problems(case("CY-07.typo.yaml"))
    assert [(p.field, p.hint) for p in found] == [
        ("config.datasets", "Did you mean config.dataset?"),
        ("config.hyperparams.optimiser", "Did you mean config.hyperparams.optimizer?"),
        ("execution.saveevery", "Did you mean execution.saveEvery?"),
    ]
    text = (CASES / "CY-07.typo.yaml").read_text().replace("kind: run", "kind: Run")
    kinds = problems(parse(text))
    assert [p.field for p in kinds[:1]] == ["kind"]
    assert kinds[0].hint == "Write run"
    assert len(kinds) == 4


def test_target_modules_are_one_regular_expression() -> None:
    # AL-05; whether a pattern matches a module is checked in the job
    def lora(name: str) -> Any:
        return put(descriptor(), "config.hyperparams", at(case(name), "config.hyperparams"))

    (problem,) = problems(lora("AL-05.list.yaml"))
    assert problem.field == "lora.targetModules"
    assert "one regular expression matched against the whole module path" in str(problem.hint)
    for name in ("AL-05.ok.yaml", "AL-05.bad.yaml"):
        pattern = at(case(name), "config.hyperparams.lora.targetModules")
        assert plan(lora(name))["lora_target_modules"] == pattern


def test_a_capped_run_decays_over_the_updates_that_it_has() -> None:
    # RS-12
    p = plan(case("RS-12.run.json"))
    rates = trace(schedule_of(p.options, p.total_steps))
    assert len(rates) == 10
    assert rates[-1] == pytest.approx(0.1 * 1e-3, rel=1e-2)


@pytest.mark.parametrize("value", [1, -3, 33])
def test_a_group_has_at_least_two(value: int) -> None:
    # SZ-02
    (problem,) = problems(descriptor("grpo", config={"rlHyperparams": {"groupSize": value}}))
    assert (problem.field, problem.allowed) == (
        "rlHyperparams.groupSize", "2 to 32 (0 is the default)",
    )  # fmt: skip
    assert "at least two completions" in str(problem.hint)
    assert plan(descriptor("grpo", config={"rlHyperparams": {"groupSize": 0}}))["group_size"] == 4


def test_every_device_has_a_prompt() -> None:
    # SZ-03
    document = descriptor(
        "grpo", config={"rlHyperparams": {"promptsPerStep": 2}}, execution={"gpus": 4}
    )
    (problem,) = problems(document)
    assert problem.field == "rlHyperparams.promptsPerStep"
    assert "less than execution.gpus 4" in problem.message
    uneven = plan(put(document, "config.rlHyperparams.promptsPerStep", 6))
    assert uneven["batch_size"] == 6
    assert any("Set it to a multiple" in hint for hint in uneven.hints)
