"""Resolving: every value with its origin, rules between options, parents, all refusals at once."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import BaseModel, Checkpoint, Workload, World, digest

from nbtrain.errors import PlanRefused, Problem
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.registry import MachineInfo
from nbtrain.plan.resolve import resolve
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.plan.rules import validation_rounds
from nbtrain.plan.schedule import schedule_of, trace
from nbtrain.plan.source import parse

CASES = Path(__file__).parent / "cases"
calm = settings(deadline=None)


@pytest.fixture
def world() -> World:
    return World()


def fields(problems: list[Problem]) -> list[str]:
    return [p.field for p in problems]


def the(problems: list[Problem]) -> Problem:
    (problem,) = problems
    return problem


# --- one value after another -------------------------------------------------------------------

OTHER: dict[str, Any] = {
    "num_steps": 7, "algorithm": "grpo", "batch_size": 4, "group_size": 6,
    "min_trajectories_per_group": 3, "learning_rate": 2e-5, "lr_warmup_steps": 0,
    "lr_hold_steps": 3, "lr_min_ratio": 0.5, "load_weights_only": True,
    "density_aware_training": True, "train_on_truncation": True, "train_on_timeout": True,
    "train_on_error": True, "train_on_all_fail": True, "train_on_all_pass": True,
    "train_on_zero_advantage": True, "max_concurrent_trajectories": 300,
    "max_turns_per_trajectory": 3, "max_output_tokens_per_turn": 16,
    "max_output_tokens_per_trajectory": 32, "trajectory_timeout_seconds": 60,
    "batch_timeout_seconds": 8000, "reasoning_effort": "high", "temperature": 0.7, "top_p": 0.9,
    "top_k": 20, "max_staleness": 2, "val_enabled": False, "val_interval_steps": 5,
    "val_num_tasks": 8, "val_trajectories_per_task": 2, "val_max_concurrent_trajectories": 10,
    "val_final_wait_timeout_seconds": 5, "val_reasoning_effort": "off", "val_temperature": 0.0,
    "val_top_p": 0.5, "val_top_k": 5, "val_max_output_tokens_per_turn": 8,
    "val_max_output_tokens_per_trajectory": 9, "val_max_turns_per_trajectory": 2,
    "val_trajectory_timeout_seconds": 9, "kl_beta": 0.04, "weight_decay": 0.0,
    "max_grad_norm": 0.5, "clip_low": 0.1, "clip_high": 0.3, "lora_rank": 8, "lora_alpha": 8.0,
    "lora_target_modules": ".*q_proj", "seed": 0, "precision": "bf16", "sampler": "vllm",
    "gpus": 2,
    "reward_workers": 2, "environment_workers": 3, "reward_timeout_seconds": 5.0,
    "checkpoint_interval_steps": 3, "keep_checkpoints": 2,
    "max_total_trajectories": 100, "max_total_output_tokens": 1000, "max_wall_clock_seconds": 60,
}  # fmt: skip


def test_the_table_below_names_every_option() -> None:
    assert set(OTHER) == set(OPTIONS)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_every_option_is_found_in_plan_and_hash(name: str, world: World) -> None:
    option = OPTIONS[name]
    world.here = MachineInfo(vllm=True)
    world.models[0] = BaseModel(thinking=("off", "low", "high"))
    parent = world.save(world.plan({}), 5) if name == "load_weights_only" else None
    how = {"parent": parent} if parent else {}
    base = world.plan({}, **how)
    assert OTHER[name] != base[name]
    plan = world.plan({name: OTHER[name]}, **how)
    assert plan[name] == OTHER[name]
    assert plan.settings[name].origin == "stated"
    assert (plan.config_hash != base.config_hash) == (option.hashed != "never")


@pytest.mark.parametrize("name", list(OPTIONS))
def test_every_option_may_be_stated_at_its_default(name: str, world: World) -> None:
    base = world.plan({})
    value = base[name]
    plan = world.plan({name: value})
    assert plan[name] == base[name]
    assert plan.config_hash == base.config_hash
    computed = OPTIONS[name].compute is not None and value is None
    assert plan.settings[name].origin == ("computed" if computed else "stated")


@pytest.mark.parametrize("name", [n for n, o in OPTIONS.items() if o.compute])
def test_null_asks_for_the_computed_value(name: str, world: World) -> None:
    base = world.plan({})
    plan = world.plan({name: None})
    assert plan.settings[name] == base.settings[name]


def test_validation_follows_training_and_may_say_the_same(world: World) -> None:
    plan = world.plan({"temperature": 0.5, "top_k": 20, "max_output_tokens_per_turn": 16})
    assert plan["val_temperature"] == 0.5
    assert plan["val_top_k"] == 20
    assert plan["val_max_output_tokens_per_turn"] == 16
    assert plan.settings["val_temperature"].origin == "computed"
    assert plan.settings["val_temperature"].note == "as in training"
    plan = world.plan({"temperature": 0.5, "val_temperature": 0.5})
    assert plan.settings["val_temperature"].origin == "stated"
    plan = world.plan({"temperature": 0.5, "val_temperature": 1.0, "val_top_k": 3})
    assert (plan["temperature"], plan["val_temperature"], plan["val_top_k"]) == (0.5, 1.0, 3)
    parent = world.save(plan, 5)
    child = world.plan({"top_k": 7}, parent=parent)
    assert (child["val_temperature"], child.origins["val_temperature"]) == (1.0, "inherited")
    assert (child["val_top_k"], child["val_top_p"]) == (3, 1.0)
    again = world.plan({"temperature": 0.25}, parent=world.save(world.plan({}), 5))
    assert (again["val_temperature"], again.origins["val_temperature"]) == (0.25, "computed")


def test_the_model_s_own_top_p_and_top_k_are_null(world: World) -> None:
    plan = world.plan({"top_p": None, "top_k": None})
    assert (plan["top_p"], plan["top_k"]) == (None, None)
    assert (plan["val_top_p"], plan["val_top_k"]) == (None, None)
    assert plan.settings["top_p"].origin == "stated"


def test_computed_values_follow_what_is_stated(world: World) -> None:
    plan = world.plan({"batch_size": 4, "group_size": 5, "lora_rank": 8, "algorithm": "grpo"})
    assert plan["min_trajectories_per_group"] == 2
    assert plan["max_concurrent_trajectories"] == 40
    assert plan["lora_alpha"] == 16.0
    assert (plan["clip_low"], plan["clip_high"]) == (0.2, 0.2)
    big = world.plan({}, base_model="big")
    assert (big["precision"], big["max_output_tokens_per_turn"]) == ("bf16", 4096)


def test_computed_concurrency_is_clamped_and_says_so(world: World) -> None:
    plan = world.plan({"batch_size": 256, "group_size": 32})
    assert plan["max_concurrent_trajectories"] == 1024
    assert plan.settings["max_concurrent_trajectories"].origin == "computed"
    assert plan.settings["max_concurrent_trajectories"].note is not None
    assert "16,384" in plan.settings["max_concurrent_trajectories"].note


# --- training across updates -------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 1, 3, 100])
def test_staleness_is_taken_as_stated(value: int, world: World) -> None:
    assert world.plan({})["max_staleness"] == 3
    plan = world.plan({"max_staleness": value})
    assert plan["max_staleness"] == value
    assert plan["clip_low"] == (0.02 if value else 3e-4)
    assert (plan.config_hash == world.plan({}).config_hash) == (value == 3)


def test_staleness_out_of_bounds_is_out_of_bounds(world: World) -> None:
    assert "out of bounds" in the(world.problems({"max_staleness": 101})).message


def test_density_turns_on_training_on_what_is_cut(world: World) -> None:
    plan = world.plan({"density_aware_training": True})
    assert (plan["train_on_truncation"], plan.origins["train_on_truncation"]) == (True, "computed")
    assert world.plan({})["train_on_truncation"] is False
    both = {"density_aware_training": True, "train_on_truncation": True}
    assert world.plan(both).origins["train_on_truncation"] == "stated"


DENSE_WITHOUT_CUT = {"density_aware_training": True, "train_on_truncation": False}


def test_density_refuses_to_leave_out_what_is_cut(world: World) -> None:
    body = parse("num_steps: 5\ntrain_on_truncation: false\ndensity_aware_training: true")
    problem = the(world.problems(body))
    assert problem.field == "train_on_truncation"
    assert "contradicts density_aware_training true" in problem.message
    assert problem.allowed == "true"
    assert problem.where is not None
    assert problem.where.line == 2


def test_only_a_resume_with_training_state_may_leave_out_what_is_cut(world: World) -> None:
    parent = world.save(world.plan({"train_on_truncation": False}), 5)
    assert world.plan(DENSE_WITHOUT_CUT, parent=parent)["train_on_truncation"] is False
    fresh = {"load_weights_only": True, "density_aware_training": True}
    problem = the(world.problems(fresh, parent=parent))
    assert "train_on_truncation false (inherited)" in problem.message
    assert world.plan({"density_aware_training": True}, parent=parent)
    quiet = world.problems(DENSE_WITHOUT_CUT, parent="abcdef")
    assert fields(quiet) == ["parent_checkpoint_id"]


# --- sampler, ranks, thinking ------------------------------------------------------------------

GPUS = MachineInfo(gpus=2)
WITH_VLLM = MachineInfo(gpus=2, vllm=True)
CPU_VLLM = MachineInfo(vllm=True)


@pytest.mark.parametrize(
    ("model", "needs", "machine", "picked"),
    [
        ("nbtrain/tiny", "ragged", MachineInfo(), "ragged"),
        ("nbtrain/tiny", "ragged", WITH_VLLM, "ragged"),
        ("big", "ragged", MachineInfo(), "ragged"),
        ("big", "ragged", GPUS, "ragged"),
        ("big", "ragged", CPU_VLLM, "ragged"),
        ("big", "ragged", WITH_VLLM, "vllm"),
        ("big", "generate", MachineInfo(), "generate"),
        ("big", "generate", GPUS, "generate"),
        ("big", "generate", WITH_VLLM, "vllm"),
    ],
)
def test_auto_is_the_sampler_that_it_stands_for_here(
    model: str, needs: Any, machine: MachineInfo, picked: str, world: World
) -> None:
    world.here = machine
    world.models = [replace(m, sampler=needs) for m in world.models]
    for options in ({}, {"sampler": "auto"}):
        plan = world.plan(options, base_model=model)
        assert (plan["sampler"], plan.origins["sampler"]) == (picked, "computed")
        assert (
            plan.config_hash
            == world.plan(
                {"sampler": picked} if picked != "vllm" or machine.vllm else {}, base_model=model
            ).config_hash
        )
    assert (plan.settings["sampler"].note is None) == (picked == "ragged" and machine is not GPUS)


def test_a_parent_s_computed_sampler_is_chosen_anew(world: World) -> None:
    parent = world.save(world.plan({}, base_model="big"), 5)
    stated = world.save(world.plan({"sampler": "ragged"}, base_model="big"), 5)
    world.here = WITH_VLLM
    assert world.plan({}, parent=parent)["sampler"] == "vllm"
    plan = world.plan({}, parent=stated)
    assert (plan["sampler"], plan.origins["sampler"]) == ("ragged", "inherited")


def test_a_sampler_that_cannot_work_here_is_refused(world: World) -> None:
    problem = the(world.problems({"sampler": "vllm"}))
    assert problem.message == "sampler vllm needs vLLM, which is not installed"
    assert problem.hint is not None
    assert "nbtrain[vllm]" in problem.hint
    world.here = CPU_VLLM
    assert world.plan({"sampler": "vllm"})["sampler"] == "vllm"
    world.models = [replace(m, sampler="generate") for m in world.models]
    problem = the(world.problems(parse("seed: 1\nsampler: ragged")))
    assert "cannot hold the cache of nbtrain/tiny" in problem.message
    assert problem.allowed == "generate or vllm"
    assert problem.where is not None
    assert problem.where.line == 2
    assert world.plan({"sampler": "generate"})["sampler"] == "generate"


def test_training_state_goes_on_in_as_many_ranks(world: World) -> None:
    two = world.save(world.plan({"gpus": 2}), 10)
    problem = the(world.problems({"gpus": 3}, parent=two))
    assert problem.field == "gpus"
    assert problem.message == (
        f"gpus 3 does not fit checkpoint {two.checkpoint_id[:12]}, whose run had 2: training state "
        "is restored in as many ranks"
    )
    assert problem.allowed == "2"
    assert "load_weights_only: true" in str(problem.hint)
    assert "gpus: 2" in str(problem.hint)
    assert world.plan({}, parent=two)["gpus"] == world.plan({"gpus": 2}, parent=two)["gpus"] == 2
    assert world.plan({"gpus": 3, "load_weights_only": True}, parent=two)["gpus"] == 3
    # plans of before there were ranks had one
    old = world.save(world.plan({}), 10)
    settings = {k: v for k, v in old.resolved["settings"].items() if k != "gpus"}
    world.checkpoints.append(
        replace(old, checkpoint_id=digest("old"), resolved={**old.resolved, "settings": settings})
    )
    assert world.plan({}, parent=digest("old"))["gpus"] == 1
    problem = the(world.problems({"gpus": 2}, parent=digest("old")))
    assert (problem.field, problem.allowed) == ("gpus", "1")
    # without training state that is the only problem
    bare = world.save(world.plan({}), 10, has_training_state=False)
    assert the(world.problems({"gpus": 2}, parent=bare)).field == "parent_checkpoint_id"


TOOLS_TOLD = "the chat template of m shows no tools, and the environment of workload sums offers"
CHAT_TOLD = "base_model_slug m has no chat template, and the environment of workload sums speaks"


@pytest.mark.parametrize(
    ("form", "template", "told"),
    [
        ("tools", "plain", TOOLS_TOLD),
        ("tools", "none", CHAT_TOLD),
        ("tools", "tools", None),
        ("tools", None, None),
        ("step", "plain", None),
        ("step", "none", CHAT_TOLD),
        ("unknown", "plain", None),
        ("unknown", "none", CHAT_TOLD),
        (None, "none", None),
        (None, "plain", None),
    ],
)
def test_an_environment_needs_a_template_that_shows_it(
    form: Any, template: Any, told: str | None
) -> None:
    model = BaseModel("m", template=template)
    world = World([Workload(environment_form=form, base_model="m")], models=[model])
    if told is None:
        assert world.plan({})
        return
    problem = the(world.problems(parse("num_steps: 3\nbase_model_slug: m\n", source="x")))
    assert problem.field == "base_model_slug"
    assert told in problem.message
    assert problem.where is not None
    assert problem.where.line == 2
    hint = "tool template, or write the environment in the step form" if told == TOOLS_TOLD else ""
    assert hint in str(problem.hint)


def test_more_gpus_than_there_are_is_refused(world: World) -> None:
    world.here = GPUS
    assert world.plan({"gpus": 2}).settings["gpus"].note is None
    problem = the(world.problems({"gpus": 3}))
    assert (problem.field, problem.allowed) == ("gpus", "1 to 2")
    assert problem.message == "gpus 3 is more than the 2 of this machine"


def test_without_a_gpu_ranks_run_on_the_cpu_and_say_so(world: World) -> None:
    plan = world.plan({"gpus": 4})
    assert plan.settings["gpus"].note == "4 CPU ranks: this machine has no GPU"
    assert plan.config_hash == world.plan({}).config_hash
    assert world.plan({}).settings["gpus"].note is None


def test_every_rank_needs_a_task_of_its_own() -> None:
    world = World([Workload(tasks=3)])
    assert world.plan({"gpus": 3})
    problem = the(world.problems({"gpus": 4}))
    assert problem.message == "gpus 4 is more than the 3 training tasks: a rank has none"
    assert problem.allowed == "1 to 3"


def test_thinking_follows_the_model_and_validation_follows_training(world: World) -> None:
    world.models.append(BaseModel("thinker", thinking=("off", "low", "high")))
    plan = world.plan({}, base_model="thinker")
    assert (plan["reasoning_effort"], plan["val_reasoning_effort"]) == ("low", "low")
    assert plan.settings["reasoning_effort"].note == "the lowest level that thinks"
    assert plan.origins["val_reasoning_effort"] == "computed"
    plan = world.plan({"reasoning_effort": "high"}, base_model="thinker")
    assert (plan["reasoning_effort"], plan["val_reasoning_effort"]) == ("high", "high")
    plan = world.plan({"val_reasoning_effort": "off"}, base_model="thinker")
    assert (plan["reasoning_effort"], plan["val_reasoning_effort"]) == ("low", "off")
    tiny = world.plan({})
    assert (tiny["reasoning_effort"], tiny.settings["reasoning_effort"].note) == (None, None)
    for name in ("reasoning_effort", "val_reasoning_effort"):
        problem = the(world.problems({name: "low"}))
        assert problem.message == f"{name} has no choice 'low' with nbtrain/tiny"
        assert problem.allowed == "null"


# --- rules between options ---------------------------------------------------------------------


def test_a_group_cannot_need_more_than_it_has(world: World) -> None:
    problem = the(world.problems({"group_size": 4, "min_trajectories_per_group": 5}))
    assert problem.field == "min_trajectories_per_group"
    assert problem.message.startswith("min_trajectories_per_group 5 is more than group_size 4")
    assert problem.allowed == "1 to 4"
    assert world.plan({"group_size": 4, "min_trajectories_per_group": 4})
    problem = the(world.problems({"min_trajectories_per_group": 9}))
    assert "group_size 8 (default)" in problem.message


def test_a_batch_must_have_time_for_a_trajectory(world: World) -> None:
    problem = the(world.problems({"batch_timeout_seconds": 7000}))
    assert problem.field == "batch_timeout_seconds"
    assert "less than trajectory_timeout_seconds 7,200 (default)" in problem.message
    assert problem.allowed == "at least 7,200"
    assert world.plan({"batch_timeout_seconds": 100, "trajectory_timeout_seconds": 100})


def test_interval_zero_turns_validation_off(world: World) -> None:
    plan = world.plan({"val_interval_steps": 0})
    assert plan["val_enabled"] is False
    assert plan.settings["val_enabled"].origin == "computed"
    assert plan.settings["val_enabled"].note == "val_interval_steps is 0"
    assert world.plan({"val_interval_steps": 0, "val_enabled": False})["val_enabled"] is False
    assert world.plan({"val_enabled": False})["val_interval_steps"] == 1


def test_validation_cannot_be_both_on_and_never(world: World) -> None:
    problem = the(world.problems({"val_enabled": True, "val_interval_steps": 0}))
    assert problem.field == "val_enabled"
    assert "val_interval_steps 0 turns validation off" in problem.message


def test_a_rule_keeps_quiet_about_a_refused_value(world: World) -> None:
    problems = world.problems({"group_size": 1, "min_trajectories_per_group": 9})
    assert fields(problems) == ["group_size"]
    problems = world.problems({"val_enabled": True, "val_interval_steps": "0"})
    assert fields(problems) == ["val_interval_steps"]
    assert fields(World([Workload(stated_held_out=0)]).problems({"val_interval_steps": "0"})) == [
        "val_interval_steps"
    ]
    split_off = World([Workload(fraction_held_out=9)])
    parent = split_off.save(split_off.plan({}), 5)
    problems = split_off.problems({"val_enabled": "no"}, parent=parent)
    assert fields(problems) == ["val_enabled"]


def test_a_broken_value_is_listed_once(world: World) -> None:
    body = parse("workload: $w\nalgorithm: $a\nseed: $s", names={}, defer=True)
    problems = world.problems(body, workload="nowhere", algorithm="grpo")
    assert fields(problems) == ["workload", "algorithm", "seed"]


# --- tasks -------------------------------------------------------------------------------------


def test_a_workload_without_tasks_is_refused() -> None:
    world = World([Workload(tasks=0)])
    problem = the(world.problems({}))
    assert problem.field == "workload"
    assert "no task to train on" in problem.message


def test_validation_needs_held_out_tasks() -> None:
    world = World([Workload(stated_held_out=0)])
    problem = the(world.problems({}))
    assert problem.field == "val_enabled"
    assert "no held-out task" in problem.message
    assert world.plan({"val_enabled": False}).workload.held_out_tasks == 0
    assert world.plan({"val_interval_steps": 0}).workload.train_tasks == 90


def test_without_validation_nothing_is_split_off() -> None:
    world = World([Workload(stated_held_out=0, fraction_held_out=9)])
    on, off = world.plan({}), world.plan({"val_interval_steps": 0})
    assert (on.workload.train_tasks, on.workload.held_out_tasks) == (81, 9)
    assert (off.workload.train_tasks, off.workload.held_out_tasks) == (90, 0)
    assert on.workload.split == "81 train, 9 split off, 0 stated"
    assert on.config_hash != off.config_hash


# --- references --------------------------------------------------------------------------------


def test_what_body_and_arguments_may_name(world: World) -> None:
    workload, model = world.workloads[0], world.models[1]
    plans = [
        world.plan({}, workload="sums", base_model="big"),
        world.plan({"workload": "sums", "base_model_slug": "big"}, workload=None),
        world.plan({"workload": workload, "base_model_slug": model}, workload=None),
        world.plan({"workload": workload.workload_id[:8]}, workload="sums", base_model=model),
    ]
    assert len({plan.config_hash for plan in plans}) == 1
    assert plans[0].base_model.slug == "big"
    assert plans[0].base_model.fingerprint == model.fingerprint
    assert plans[0].workload.workload_id == workload.workload_id


def test_the_base_model_may_come_from_the_workload(world: World) -> None:
    assert world.plan({}).base_model.slug == "nbtrain/tiny"
    world.workloads[0] = Workload(base_model=None)
    problem = the(world.problems({}))
    assert problem.field == "base_model_slug"
    assert "missing" in problem.message
    assert problem.allowed == "big, nbtrain/tiny, or any repository or local folder"


def test_a_missing_workload_is_refused_once(world: World) -> None:
    assert fields(world.problems({}, workload=None)) == ["workload"]
    assert "missing" in world.problems({}, workload=None)[0].message


@pytest.mark.parametrize("value", [3, True, ["sums"], {"name": "sums"}, ""])
def test_a_reference_needs_a_name(value: object, world: World) -> None:
    problem = the(world.problems({"workload": value}, workload=None))
    assert problem.message.startswith("workload needs a name or an id")


def test_unknown_names_are_refused_with_what_there_is(world: World) -> None:
    problems = world.problems({"workload": "nowhere", "base_model_slug": "gpt-9"}, workload=None)
    assert fields(problems) == ["workload", "base_model_slug"]
    assert "there is sums" in problems[0].message
    assert "there are nbtrain/tiny and big" in problems[1].message
    assert fields(world.problems({"workload": "nowhere"}, workload="nowhere")) == ["workload"]


def test_a_catalog_s_own_refusal_is_passed_on_with_the_place(world: World) -> None:
    body = parse("num_steps: 5\nbase_model_slug: quantised")
    problem = the(world.problems(body))
    assert "quantised" in problem.message
    assert problem.where is not None
    assert problem.where.line == 2


@pytest.mark.parametrize(
    ("body", "beside"),
    [
        ({"algorithm": "grpo"}, {"algorithm": "grpo"}),
        ({"display_name": "a"}, {"display_name": "a"}),
        ({"base_model_slug": "big"}, {"base_model": "big"}),
        ({"algorithm": None}, {"algorithm": "grpo"}),
    ],
)
def test_stated_twice_and_equal_is_fine(
    body: dict[str, Any], beside: dict[str, Any], world: World
) -> None:
    assert world.plan(body, **beside).config_hash == world.plan({}, **beside).config_hash


@pytest.mark.parametrize(
    ("body", "beside", "field"),
    [
        ({"algorithm": "grpo"}, {"algorithm": "gspo"}, "algorithm"),
        ({"display_name": "a"}, {"display_name": "b"}, "display_name"),
        ({"base_model_slug": "big"}, {"base_model": "nbtrain/tiny"}, "base_model_slug"),
        ({"load_weights_only": False}, {"load_weights_only": True}, "load_weights_only"),
    ],
)
def test_stated_twice_and_different_is_refused(
    body: dict[str, Any], beside: dict[str, Any], field: str, world: World
) -> None:
    problem = the(world.problems(body, **beside))
    assert problem.field == field
    assert "stated twice, differently" in problem.message


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "is empty"),
        ("  ", "is blank"),
        ("a\nb", "has a line break as character 2"),
        ("a\tb", "has U+0009 (a control character) as character 2"),
        ("abc \u202eRTL", "has U+202E (RIGHT-TO-LEFT OVERRIDE) as character 5"),
        ("x" * 201, "has 201 characters, 200 at most"),
        ("96f1ba6785eb", "looks like the beginning of an id"),
        ("0123456789" * 2, "looks like the beginning of an id"),
        (5, "needs text"),
        (["a"], "needs text"),
    ],
)
def test_a_name_is_one_short_line(name: object, why: str, world: World) -> None:
    problem = the(world.problems({"display_name": name}))
    assert problem.field == "display_name"
    assert problem.message.startswith(f"display_name {why}, found ")
    assert problem.allowed == "one line of 1 to 200 characters, and not the beginning of an id"


@pytest.mark.parametrize("name", ["cafe", "96f1ba6785e", "96F1BA6785EB", "run-96f1ba6785eb"])
def test_a_name_that_is_no_id_as_ids_are_shown(name: str, world: World) -> None:
    assert world.plan({"display_name": name}).display_name == name


def test_the_name_is_kept_and_not_hashed(world: World) -> None:
    plan = world.plan({"display_name": "first"})
    assert plan.display_name == "first"
    assert plan.config_hash == world.plan({}).config_hash


# --- documents ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("lerning_rate", "learning_rate"),
        ("learningRate", "learning_rate"),
        ("group-size", "group_size"),
        ("num_step", "num_steps"),
        ("stesp", "num_steps"),
        ("steps", "num_steps"),
        ("method", "algorithm"),
        ("model", "base_model_slug"),
        ("from", "parent_checkpoint_id"),
        ("name", "display_name"),
        ("bench_id", "workload"),
        ("workloads", "workload"),
        ("max_completion_length", "max_output_tokens_per_turn"),
        ("loss_type", "algorithm"),
        ("epsilon_high", "clip_high"),
        ("use_vllm", "sampler"),
        ("warmup_steps", "lr_warmup_steps"),
        ("save_steps", "checkpoint_interval_steps"),
        ("eval_steps", "val_interval_steps"),
        ("zzz", None),
    ],
)
def test_unknown_options_are_refused_with_the_nearest_name(
    key: str, near: str | None, world: World
) -> None:
    problem = the(world.problems({key: 1}))
    assert problem.message == f"there is no option {key}"
    assert problem.hint is not None
    assert (f"Did you mean {near}?" if near else "%train options") in problem.hint


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("per_device_train_batch_size", "batch_size counts the groups of an update, group_size"),
        ("gradient_accumulation_steps", "batch_size groups make one update"),
        ("num_train_epochs", "num_steps counts updates"),
        ("max_prompt_length", "Prompts are never cut"),
        ("vllm_mode", "sampler: vllm"),
        ("warmup_ratio", "lr_warmup_steps counts steps"),
        ("lr_scheduler_type", "lr_hold_steps and falls along a cosine to lr_min_ratio"),
        ("logging_steps", "Every step is recorded"),
    ],
)
def test_names_of_elsewhere_without_a_counterpart_are_explained(
    key: str, told: str, world: World
) -> None:
    problem = the(world.problems({key: 1}))
    assert problem.message == f"there is no option {key}"
    assert problem.hint is not None
    assert told in problem.hint


def test_misspelt_keys_are_refused_all_in_one_pass_with_their_places(world: World) -> None:
    body = parse((CASES / "misspelt.yaml").read_text(), source="misspelt.yaml")
    problems = world.problems(body, workload=None)
    assert [(p.field, p.where and p.where.line) for p in problems] == [
        ("num_step", 2),
        ("learningRate", 3),
        ("group-size", 4),
        ("lora", 5),
    ]


def test_types_are_strict(world: World) -> None:
    body = parse((CASES / "types.json").read_text(), source="types.json")
    problems = world.problems(body, workload=None)
    assert [(p.field, p.where and p.where.line) for p in problems] == [
        ("train_on_error", 3),
        ("train_on_timeout", 4),
        ("group_size", 5),
        ("batch_size", 6),
        ("lora_rank", 7),
        ("val_enabled", 8),
    ]
    assert world.plan({"num_steps": 8.0})["num_steps"] == 8


def test_yaml_and_json_make_the_same_plan(world: World) -> None:
    texts = [(CASES / name).read_text() for name in ("numbers.yaml", "numbers.json")]
    plans = [resolve(parse(text), registry=world) for text in texts]
    assert plans[0].options == plans[1].options
    assert plans[0].config_hash == plans[1].config_hash
    assert plans[0]["learning_rate"] == 0.0001


def test_an_all_wrong_document_has_every_problem_listed_once_in_order(world: World) -> None:
    text = (CASES / "all-wrong.yaml").read_text()
    body = parse(text, names={}, source="all-wrong.yaml", defer=True)
    problems = world.problems(body, workload=None)
    assert [(p.where and p.where.line, p.field) for p in problems] == [
        (3, "workload"),
        (4, "base_model_slug"),
        (5, "lerning_rate"),
        (6, "learning_rate"),
        (7, "batch_size"),
        (9, "min_trajectories_per_group"),
        (10, "val_enabled"),
        (12, "temperature"),
        (14, "batch_size"),
        (15, "seed"),
    ]
    with pytest.raises(PlanRefused) as refused:
        resolve(body, registry=world)
    assert "10 problems" in str(refused.value)
    assert refused.value.status == 422


def test_a_refusal_travels_between_processes(world: World) -> None:
    with pytest.raises(PlanRefused) as refused:
        world.plan({"batch_size": object(), "seed": {"a": 1}, "workload": world}, workload=None)
    again = pickle.loads(pickle.dumps(refused.value))
    assert again.problems == refused.value.problems
    assert len(again.problems) == 3


def test_a_document_is_options_or_a_descriptor_and_never_a_mix(world: World) -> None:
    body = parse("num_steps: 5\nconfig: {dataset: d}\nsmoke: {}\n")
    found = world.problems(body)
    assert [(p.field, p.where and p.where.line) for p in found] == [("config", 2), ("smoke", 3)]
    assert "a document without kind is options" in found[0].message
    assert found[0].hint == "Write kind: run for a descriptor"
    body = parse("kind: run\nnum_steps: 5\nworkload: sums\nconfig: {dataset: d}\n")
    (problem,) = world.problems(body)
    assert "num_steps is an option, and a document with kind is a descriptor" in problem.message
    assert problem.hint == "Did you mean config.hyperparams.training.maxSteps?"


def test_the_algorithm_says_which_options_are_meant(world: World) -> None:
    flat = world.plan({"algorithm": "sft", "dataset": "d", "lora_rank": 4})
    assert (flat.method, flat.door, flat["lora_rank"]) == ("sft", "descriptor", 4)
    assert world.plan({"dataset": "d", "lora_rank": 4}, algorithm="sft") == flat
    twice = the(world.problems({"algorithm": "gspo"}, algorithm="sft"))
    assert "stated twice, differently" in twice.message
    twice = the(world.problems({"algorithm": "sft"}, algorithm="grpo"))
    assert "stated twice, differently" in twice.message


@pytest.mark.parametrize(("body", "found"), [([], "a list"), (42, "42"), ("x", 'the text "x"')])
def test_options_are_a_mapping(body: object, found: str, world: World) -> None:
    problem = the(world.problems(body))
    assert problem.message == f"options: a mapping is needed, found {found}"


def test_no_options_are_all_defaults(world: World) -> None:
    plan = world.plan(None)
    assert plan == world.plan({})
    assert set(plan.origins.values()) == {"default", "computed"}
    assert plan.admission == "filtered"
    assert (plan.start_step, plan.total_steps) == (0, 100)


def test_a_plan_survives_json(world: World) -> None:
    parent = world.save(world.plan({"lora_rank": 8}), 5)
    plan = world.plan({"top_k": None}, parent=parent, display_name="again")
    again = ResolvedPlan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False)))
    assert again == plan


# --- parents -----------------------------------------------------------------------------------

PARENT = {
    "num_steps": 40, "batch_size": 4, "group_size": 4, "learning_rate": 5e-4, "lora_rank": 8,
    "val_interval_steps": 10, "lr_warmup_steps": 0, "max_output_tokens_per_turn": 16,
}  # fmt: skip


@pytest.fixture
def parent(world: World) -> Checkpoint:
    return world.save(world.plan(PARENT), 30)


@pytest.mark.parametrize("only_weights", [False, True])
def test_what_is_not_stated_is_inherited(
    only_weights: bool, world: World, parent: Checkpoint
) -> None:
    options = {"load_weights_only": True} if only_weights else {}
    plan = world.plan(options, parent=parent)
    before = world.plan(PARENT)
    for name, option in OPTIONS.items():
        setting = plan.settings[name]
        if name in ("num_steps", "load_weights_only"):
            assert setting.origin == ("stated" if name in options else "default")
        elif (option.compute or name == "sampler") and name not in PARENT:
            assert setting.origin == "computed"
        else:
            assert setting.origin == "inherited"
            assert setting.value == before[name]
    assert plan["num_steps"] == 100
    assert plan.workload.workload_id == parent.workload_id
    assert plan.base_model.slug == "nbtrain/tiny"
    assert plan.parent is not None
    assert plan.parent.checkpoint_id == parent.checkpoint_id
    assert plan.parent.step == 30
    assert (plan.start_step, plan.total_steps) == ((0, 100) if only_weights else (30, 130))


def test_steps_of_a_resumed_run_are_further_steps(world: World, parent: Checkpoint) -> None:
    plan = world.plan({"num_steps": 20, "lr_hold_steps": 20}, parent=parent.checkpoint_id[:12])
    assert (plan.start_step, plan.total_steps) == (30, 50)
    rates = trace(schedule_of(plan.options, plan.total_steps), start_step=plan.start_step)
    assert len(rates) == 20
    assert rates[-1] == pytest.approx(5e-5)


def test_what_is_stated_wins_and_computed_values_follow(world: World, parent: Checkpoint) -> None:
    plan = world.plan({"batch_size": 8, "group_size": 6}, parent=parent)
    assert plan["batch_size"] == 8
    assert plan.settings["batch_size"].origin == "stated"
    assert plan["max_concurrent_trajectories"] == 96
    assert plan["min_trajectories_per_group"] == 3


def test_a_grandchild_inherits_through_its_parent(world: World, parent: Checkpoint) -> None:
    child = world.save(world.plan({"learning_rate": 1e-5, "num_steps": 5}, parent=parent), 35)
    plan = world.plan({}, parent=child)
    assert plan["learning_rate"] == 1e-5
    assert plan["batch_size"] == 4
    assert plan.origins["batch_size"] == "inherited"
    assert plan.total_steps == 135


@pytest.mark.parametrize("name", list(PARENT))
def test_null_leaves_the_parent_s_value(name: str, world: World, parent: Checkpoint) -> None:
    if not OPTIONS[name].inherited:
        assert "found null" in the(world.problems({name: None}, parent=parent)).message
        return
    plan = world.plan({name: None}, parent=parent)
    assert plan.settings[name] == world.plan({}, parent=parent).settings[name]
    assert plan.origins[name] == "inherited"


def test_null_is_a_value_where_it_stands_for_the_model_s_own(
    world: World, parent: Checkpoint
) -> None:
    plan = world.plan({"top_p": None}, parent=parent)
    assert (plan["top_p"], plan.origins["top_p"]) == (None, "stated")


def test_loading_only_weights_is_not_inherited(world: World, parent: Checkpoint) -> None:
    options = {"load_weights_only": True, "num_steps": 10}
    child = world.save(world.plan(options, parent=parent), 10)
    plan = world.plan({"num_steps": 5}, parent=child)
    assert plan["load_weights_only"] is False
    assert (plan.start_step, plan.total_steps) == (10, 15)


def test_validation_that_only_the_interval_turned_off_comes_back(world: World) -> None:
    child = world.save(world.plan({"val_interval_steps": 0}), 5)
    assert world.plan({}, parent=child)["val_enabled"] is False
    assert world.plan({"val_interval_steps": 5}, parent=child)["val_enabled"] is True
    stated = world.save(world.plan({"val_enabled": False, "val_interval_steps": 0}), 5)
    silent = world.save(world.plan({}, parent=stated), 10)
    plan = world.plan({"val_interval_steps": 5}, parent=silent)
    assert (plan["val_enabled"], plan.origins["val_enabled"]) == (False, "inherited")


def test_true_against_an_inherited_interval_of_zero_is_refused(world: World) -> None:
    child = world.save(world.plan({"val_interval_steps": 0}), 5)
    problem = the(world.problems({"val_enabled": True}, parent=child))
    assert "val_interval_steps 0 (inherited)" in problem.message


def test_rules_look_at_inherited_values_too(world: World) -> None:
    child = world.save(world.plan({"min_trajectories_per_group": 6}), 5)
    body = parse("num_steps: 5\ngroup_size: 4")
    problem = the(world.problems(body, parent=child))
    assert problem.field == "min_trajectories_per_group"
    assert "6 (inherited) is more than group_size 4" in problem.message
    assert problem.where is not None
    assert problem.where.line == 2


def test_a_checkpoint_of_another_base_model_is_refused(world: World, parent: Checkpoint) -> None:
    problem = the(world.problems({}, parent=parent, base_model="big"))
    assert problem.field == "base_model_slug"
    assert "big does not match checkpoint" in problem.message
    assert problem.allowed == "nbtrain/tiny"


def test_a_base_model_that_changed_is_refused_with_both_fingerprints(
    world: World, parent: Checkpoint
) -> None:
    world.models[0] = BaseModel(fingerprint=digest("other"))
    problem = the(world.problems({}, parent=parent))
    assert "has changed since" in problem.message
    assert digest("other")[:12] in problem.message
    assert digest("tiny")[:12] in problem.message


def test_a_checkpoint_must_hold_what_is_asked_of_it(world: World, parent: Checkpoint) -> None:
    plan = world.plan(PARENT)
    bare = world.save(plan, 12, has_training_state=False)
    problem = the(world.problems({}, parent=bare))
    assert "no training state" in problem.message
    assert problem.hint is not None
    assert "--weights-only" in problem.hint
    assert "no checkpoint of its run holds training state" in problem.hint
    held = [(step, digest(str(step))) for step in (2, 4, 8, 10, 14, 18, 20)]
    some = world.save(plan, 12, has_training_state=False, resumable=held)
    hint = the(world.problems({}, parent=some)).hint
    assert hint is not None
    assert f"step 8 ({digest('8')[:12]}), step 10 ({digest('10')[:12]})" in hint
    assert hint.endswith(f"step 18 ({digest('18')[:12]}) and 2 others")
    assert world.plan({}, parent=bare, load_weights_only=True).start_step == 0
    empty = world.save(plan, 13, has_weights=False)
    assert "no weights" in the(world.problems({}, parent=empty)).message


@pytest.mark.parametrize(
    ("name", "value"), [("lora_rank", 4), ("lora_alpha", 8), ("lora_target_modules", ".*q_proj")]
)
@pytest.mark.parametrize("only_weights", [False, True])
def test_an_adapter_keeps_its_shape(
    name: str, value: object, only_weights: bool, world: World, parent: Checkpoint
) -> None:
    problem = the(world.problems({name: value}, parent=parent, load_weights_only=only_weights))
    assert problem.field == name
    assert "does not match the adapter" in problem.message


def test_a_resume_keeps_its_tasks() -> None:
    world = World([Workload(stated_held_out=0, fraction_held_out=9), Workload(digest("b"), "b")])
    parent = world.save(world.plan({}), 5)
    problem = the(world.problems({"val_interval_steps": 0}, parent=parent))
    assert problem.field == "val_enabled"
    assert "90 training tasks" in problem.message
    assert "81" in problem.message
    body = parse("num_steps: 5\nworkload: b")
    problem = the(world.problems(body, parent=parent))
    assert problem.field == "workload"
    assert "another workload" in problem.message
    assert problem.where is not None
    assert problem.where.line == 2
    only_weights = world.plan({"workload": "b"}, parent=parent, load_weights_only=True)
    assert only_weights.workload.name == "b"


def test_an_unknown_checkpoint_is_refused_without_other_complaints(world: World) -> None:
    problem = the(world.problems({"num_steps": 5}, parent="abcdef"))
    assert problem.field == "parent_checkpoint_id"
    assert "no checkpoint 'abcdef'" in problem.message


def test_only_weights_of_nothing_is_refused(world: World) -> None:
    problem = the(world.problems({"load_weights_only": True}))
    assert problem.field == "load_weights_only"
    assert "no checkpoint to load from" in problem.message


# --- notes and hints ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"temperature": 0}, "temperature 0 is greedy: every group ties"),
        ({"min_trajectories_per_group": 1}, "groups of one"),
        ({"batch_size": 100}, "batch_size 100 is more than the 90 training tasks"),
        ({"num_steps": 10}, "lr_warmup_steps 15 is more than the final step 10"),
        ({"num_steps": 10}, "state lr_warmup_steps: 0"),
        ({"batch_size": 1, "group_size": 2}, "validation samples about 1,010 trajectories"),
        ({"batch_size": 2, "gpus": 3}, "gpus 3 is more than batch_size 2"),
        ({"batch_size": 3, "density_aware_training": True}, "batch_size 3 is less than the 4 "),
        (
            {"density_aware_training": True, "max_output_tokens_per_turn": 32},
            "max_output_tokens_per_turn 32 is within the smallest budget",
        ),
    ],
)
def test_what_will_work_but_not_as_wanted_is_hinted_at(
    options: dict[str, Any], hint: str, world: World
) -> None:
    assert any(hint in found for found in world.plan(options).hints)


@pytest.mark.parametrize(
    "options",
    [
        {},
        # the computed default of 1 is nobody's wish
        {"group_size": 3},
        # on-policy it only bounds how many are sampled at a time, whatever it is
        {"max_staleness": 0, "max_concurrent_trajectories": 1},
        {"max_staleness": 0, "max_concurrent_trajectories": 1024},
        {"num_steps": 60, "batch_size": 8, "lr_warmup_steps": 0, "val_interval_steps": 10},
    ],
)
def test_usual_plans_have_no_hints(options: dict[str, Any], world: World) -> None:
    assert world.plan(options).hints == ()


@pytest.mark.parametrize(
    ("weights", "options", "hint"),
    [
        ((1.0,), {}, None),
        ((0.5, 0.5, -0.2), {}, None),
        ((0.1,) * 10, {}, None),
        ((0.5,), {}, "sum to 0.5, and train_on_all_pass: false takes 1 for a pass: no group"),
        ((1.0, 0.5), {}, "sum to 1.5, and train_on_all_pass: false takes 1 for a pass: less than"),
        ((0.5,), {"train_on_all_pass": True}, None),
    ],
)
def test_a_pass_needs_weights_that_sum_to_one(
    weights: tuple[float, ...], options: dict[str, Any], hint: str | None
) -> None:
    told = [h for h in World([Workload(weights=weights)]).plan(options).hints if "weights" in h]
    assert (hint is None) == (not told)
    assert all(str(hint) in sentence for sentence in told)


@pytest.mark.parametrize(
    ("concurrent", "hint"),
    [
        (256, "is not above batch_size x group_size = 256"),
        (257, None),
        (768, None),
        (769, "is above 768, 3 times"),
    ],
)
def test_with_staleness_collection_should_keep_ahead(
    concurrent: int, hint: str | None, world: World
) -> None:
    plan = world.plan({"max_concurrent_trajectories": concurrent, "max_staleness": 2})
    told = [h for h in plan.hints if "max_concurrent" in h]
    assert (hint is None) == (not told)
    assert all(str(hint) in sentence for sentence in told)


@pytest.mark.parametrize("name", ["algorithm", "clip_low", "clip_high"])
def test_on_policy_the_ratio_s_options_say_that_they_change_nothing(
    name: str, world: World
) -> None:
    stated = {"algorithm": "grpo", "clip_high": 0.3}
    note = world.plan({**stated, "max_staleness": 0}).settings[name].note
    assert note is not None
    assert world.plan(stated).settings[name].note is None
    assert "every ratio is 1" in note
    assert "every ratio is 1" in OPTIONS[name].help


def test_notes_explain_values(world: World) -> None:
    plan = world.plan({"max_output_tokens_per_trajectory": 1000})
    note = plan.settings["max_output_tokens_per_trajectory"].note
    assert note == "the context of 256 tokens ends a trajectory first"
    assert plan.settings["lr_hold_steps"].note is not None
    assert "after step 150" in plan.settings["lr_hold_steps"].note
    assert world.plan({"num_steps": 151}).settings["lr_hold_steps"].note is None


@pytest.mark.parametrize(
    ("start", "total", "interval", "rounds"),
    [(0, 100, 1, 101), (0, 100, 10, 11), (0, 60, 10, 7), (0, 5, 10, 2), (30, 50, 10, 3)],
)
def test_rounds_of_validation(start: int, total: int, interval: int, rounds: int) -> None:
    assert validation_rounds(start, total, interval) == rounds


# --- properties --------------------------------------------------------------------------------

junk = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.lists(st.integers(), max_size=2), st.binary(max_size=3),
)  # fmt: skip
bodies = st.dictionaries(st.sampled_from([*OPTIONS, "workload", "display_name", "x"]), junk)


@calm
@given(bodies)
def test_any_options_make_a_plan_or_refusals_that_name_their_fields(body: dict[str, Any]) -> None:
    world = World()
    problems: tuple[Problem, ...] = ()
    try:
        plan = resolve(body, registry=world, base_model="nbtrain/tiny")
    except PlanRefused as refused:
        problems = refused.problems
    listed = [(p.field, p.message) for p in problems]
    assert len(set(listed)) == len(listed)
    assert all(p.field in p.message for p in problems)
    if not problems:
        assert set(plan.options) == set(OPTIONS)
        assert plan.options == world.plan(plan.options).options
