"""A first look takes smaller values for what is not stated; a smoke check by a switch."""

from __future__ import annotations

from typing import Any

import pytest
from plan_world import World, described_world, descriptor, put

from nbtrain.plan import small
from nbtrain.plan.descriptor.table import FIELDS
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.resolved import ResolvedPlan

FLAT = {"algorithm": "sft", "dataset": "d", "workload": "t", "base_model_slug": "tiny"}


@pytest.fixture
def world() -> World:
    return described_world()


def test_every_value_is_one_that_the_tables_allow_and_lowers_what_it_is_for() -> None:
    by_name = {field.name: field.option for field in FIELDS.values()}
    for table, names in ((small.OPTIONS, OPTIONS), (small.FIELDS, by_name)):
        for name, value in table.items():
            option = names[name]
            assert option.min <= value <= option.max
            assert option.compute is None
            assert value != option.default
            sparser = "interval" in name
            capped = option.default == 0
            assert capped or (value > option.default if sparser else value < option.default)


def test_what_is_not_stated_gets_smaller(world: World) -> None:
    plan = world.plan({"batch_size": 8}, first_look=True)
    assert (plan["batch_size"], plan.origins["batch_size"]) == (8, "stated")
    for name in ("group_size", "val_num_tasks", "val_interval_steps"):
        assert (plan[name], plan.origins[name]) == (small.OPTIONS[name], "small")
        assert plan.settings[name].note == f"in place of {OPTIONS[name].default}"
    assert plan["min_trajectories_per_group"] == 2, "computed from the smaller group"
    assert plan["num_steps"] == 100
    stated = {name: plan[name] for name in small.OPTIONS}
    assert world.plan(stated).config_hash == plan.config_hash != world.plan().config_hash
    assert ResolvedPlan.from_json(plan.to_json()) == plan


def test_with_nothing_left_to_lower_it_says_so(world: World) -> None:
    stated = dict(small.OPTIONS)
    plan = world.plan(stated, first_look=True)
    assert any("small changes nothing: batch_size" in hint for hint in plan.hints)
    assert not any("small" in hint for hint in world.plan({}, first_look=True).hints)


def test_both_other_doors(world: World) -> None:
    plan = world.plan(FLAT, first_look=True, workload=None)
    assert (plan["max_steps"], plan.origins["max_steps"]) == (30, "small")
    assert plan["validation_frequency_steps"] == 100, "nothing is validated"
    assert plan.total_steps == 30
    assert plan.field_origins is not None
    assert plan.field_origins["config.hyperparams.training.maxSteps"] == "small"
    same = world.plan(descriptor(), first_look=True, workload=None)
    assert same.config_hash == plan.config_hash
    grpo = world.plan(descriptor("grpo", grader="json-label-match"), first_look=True, workload=None)
    assert (grpo["batch_size"], grpo["num_steps"]) == (4, 30)
    assert grpo.origins["batch_size"] == "small"
    for zero, kept in (({"max_steps": 0}, 0), ({"max_steps": 7}, 7)):
        assert world.plan(FLAT | zero, first_look=True, workload=None)["max_steps"] == kept


def test_it_leaves_alone_what_would_change_the_hash_alone(world: World) -> None:
    held = {"validation_dataset": "held-out"}
    assert (
        world.plan(FLAT | held, first_look=True, workload=None).options[
            "validation_frequency_steps"
        ]
        == small.FIELDS["training.validationFrequencySteps"]
    )
    short = FLAT | {"epochs": 1}
    plan = world.plan(short, first_look=True, workload=None)
    assert (plan["max_steps"], plan.origins["max_steps"], plan.total_steps) == (0, "default", 13)
    assert plan.config_hash == world.plan(short, workload=None).config_hash
    assert any("small changes nothing: training.maxSteps" in hint for hint in plan.hints)


@pytest.mark.parametrize("name", ["first_look", "smoke"])
@pytest.mark.parametrize("value", ["no", "false", [0], 1, {"maxSteps": 5}], ids=str)
@pytest.mark.parametrize("document", [FLAT, descriptor(), {"batch_size": 8}], ids=["f", "d", "o"])
def test_a_switch_is_true_or_false(
    name: str, value: Any, document: dict[str, Any], world: World
) -> None:
    workload = "sums" if "batch_size" in document else None
    (problem,) = world.problems(document, workload=workload, **{name: value})
    assert problem.field == {"first_look": "small", "smoke": "smoke"}[name]
    assert problem.allowed == "true or false"
    both = world.problems(document | {"nothing": 1}, workload=workload, **{name: value})
    assert [one.field for one in both][-1] == problem.field
    assert len(both) == 2
    assert world.plan(document, workload=workload, **{name: None}).smoke is None


def test_a_stated_zero_asks_for_the_default(world: World) -> None:
    config = {"rlHyperparams": {"promptsPerStep": 0}}
    plan = world.plan(
        descriptor("grpo", config=config, grader="json-label-match"), first_look=True, workload=None
    )
    assert (plan["batch_size"], plan.origins["batch_size"]) == (8, "default")


def test_it_makes_no_sense_from_a_checkpoint_or_with_a_smoke_check(world: World) -> None:
    parent = world.save(world.plan(), 5)
    for given in ({"options": {}}, {"options": {"parent_checkpoint_id": parent}}):
        options: Any = given["options"]
        beside = {} if options else {"parent": parent}
        (problem,) = world.problems(options, first_look=True, workload="sums", **beside)
        assert problem.field == "small"
        assert "inherits what is not stated" in problem.message
    (problem,) = world.problems(FLAT, first_look=True, smoke=True, workload=None)
    assert "a smoke check takes few rows anyway" in problem.message
    stated = descriptor(smoke={"sliceSize": 5})
    (problem,) = world.problems(stated, first_look=True, workload=None)
    assert problem.field == "small"


def test_a_smoke_check_by_a_switch_is_that_of_a_descriptor(world: World) -> None:
    by_switch = world.plan(FLAT, smoke=True, workload=None)
    by_block = world.plan(descriptor(smoke={}), workload=None)
    assert by_switch.smoke == by_block.smoke
    assert by_switch.smoke is not None
    assert by_switch.smoke.slice_size == 200
    both = world.plan(descriptor(smoke={"sliceSize": 5}), smoke=True, workload=None)
    assert both.smoke is not None
    assert both.smoke.slice_size == 5
    assert world.plan(FLAT, workload=None).smoke is None


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({"config.data.validationDataset": "held-out"}, "data.validationDataset held-out is left"),
        ({"config.hyperparams.training.validationFrequencySteps": 2}, "FrequencySteps 2 is left"),
        ({"config.hyperparams.training.epochs": 7}, "training.epochs 7 is left out"),
        ({"config.hyperparams.training.maxSteps": 80}, "ends when its rows are known, after smoke"),
    ],
)
def test_a_smoke_check_says_what_it_leaves_out(
    stated: dict[str, Any], told: str, world: World
) -> None:
    document = descriptor(smoke={"maxSteps": 12})
    for path, value in stated.items():
        document = put(document, path, value)
    plan = world.plan(document, workload=None)
    (hint,) = (one for one in plan.hints if "is left out" in one)
    assert told in hint
    assert plan.total_steps == 12
    assert (plan.validation_dataset, plan.workload.held_out_tasks) == (None, 0)
    run = {key: value for key, value in document.items() if key != "smoke"}
    assert plan.config_hash == world.plan(run, workload=None).config_hash
    assert world.plan(descriptor(smoke={"maxSteps": 12}), workload=None).hints == (
        *("smoke.sliceSize 200 is more than the 100 rows of the dataset: all are taken",),
    )


def test_a_smoke_check_of_rewards_is_refused_by_name_with_everything_else(world: World) -> None:
    told = [problem.message for problem in world.problems({"batch_size": 0}, smoke=True)]
    assert "smoke is for sft, this run is gspo: there are no answers to reproduce" in told
    assert any("batch_size is out of bounds" in message for message in told)
    assert len(told) == 2
    (problem,) = world.problems(
        descriptor("grpo", grader="json-label-match"), smoke=True, workload=None
    )
    assert "this run is grpo" in problem.message
