"""The config hash: one recipe, one hash."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import World, digest

from nbtrain.plan.fields import Option
from nbtrain.plan.identity import canonical, config_hash, hashed_options, same_plan
from nbtrain.plan.options import OPTIONS

calm = settings(deadline=None)

NOT_HASHED = {
    "trajectory_timeout_seconds", "batch_timeout_seconds", "reward_timeout_seconds", "sampler",
    "gpus", "reward_workers", "environment_workers", "checkpoint_interval_steps",
    "keep_checkpoints", "max_total_trajectories",
    "max_total_output_tokens", "max_wall_clock_seconds",
    *(name for name in OPTIONS if name.startswith("val_")),
}  # fmt: skip
RECIPE: dict[str, Any] = {
    "base_fingerprint": digest("base"),
    "workload_id": digest("workload"),
    "train_digest": digest("tasks"),
    "parent_checkpoint_id": None,
}


def test_hashed_is_what_changes_the_trained_weights() -> None:
    values = World().plan({}).options
    assert set(OPTIONS) - set(hashed_options(values)) == NOT_HASHED
    fresh = hashed_options(values | {"max_staleness": 0})
    assert set(OPTIONS) - set(fresh) == NOT_HASHED | {"max_concurrent_trajectories"}


def test_a_hash_is_64_hex_digits_and_stays_the_same_between_versions() -> None:
    """A change here makes every earlier run another recipe: raise VERSION and say so."""
    plan = World().plan({})
    assert len(plan.config_hash) == 64
    assert plan.config_hash == config_hash(
        plan.options,
        base_fingerprint=plan.base_model.fingerprint,
        workload_id=plan.workload.workload_id,
        train_digest=plan.workload.train_digest,
        parent_checkpoint_id=None,
    )
    assert World().plan({"max_staleness": 0}).config_hash.startswith("089c8bbd7ad4")


@pytest.mark.parametrize(
    "change",
    [
        {"base_fingerprint": digest("other")},
        {"workload_id": digest("other")},
        {"train_digest": digest("other")},
        {"parent_checkpoint_id": digest("parent")},
        {"admission": "as_graded"},
    ],
)
def test_everything_of_a_recipe_counts(change: dict[str, str]) -> None:
    values = World().plan({}).options
    assert config_hash(values, **(RECIPE | change)) != config_hash(values, **RECIPE)


def test_the_same_number_written_otherwise_is_the_same_recipe() -> None:
    world = World()
    assert canonical({"b": 2e-5, "a": 1.0}) == canonical({"a": 1, "b": 0.00002})
    hashes = {
        world.plan(options).config_hash
        for options in ({"kl_beta": 0}, {"kl_beta": 0.0}, {}, {"temperature": 1}, {"seed": 42.0})
    }
    assert len(hashes) == 1


def test_names_and_ways_to_name_things_do_not_count() -> None:
    world = World()
    one = world.plan({}, workload="sums", display_name="a")
    two = world.plan({}, workload=world.workloads[0].workload_id, base_model="nbtrain/tiny")
    assert one.config_hash == two.config_hash


def test_a_parent_makes_another_recipe() -> None:
    world = World()
    first = world.plan({})
    resumed = world.plan({}, parent=world.save(first, 5))
    again = world.plan({}, parent=world.save(first, 10))
    weights = world.plan({}, parent=world.checkpoints[0], load_weights_only=True)
    hashes = {p.config_hash for p in (first, resumed, again, weights)}
    assert len(hashes) == 4


def test_same_plan_looks_at_every_value_and_at_nothing_else() -> None:
    world = World()
    plan = world.plan({})
    assert same_plan(plan, world.plan({"num_steps": 100}, display_name="other"))
    assert not same_plan(plan, world.plan({"num_steps": 99}))
    # not hashed, but another run all the same
    assert plan.config_hash == world.plan({"val_num_tasks": 5}).config_hash
    assert not same_plan(plan, world.plan({"val_num_tasks": 5}))
    held_out = replace(plan, workload=replace(plan.workload, held_out_tasks=3))
    assert not same_plan(plan, held_out)


def _value(option: Option) -> st.SearchStrategy[Any]:
    if option.type == "boolean":
        return st.booleans()
    if option.type == "text":
        return st.sampled_from(option.choices or ("a", "b"))
    if option.type == "integer":
        return st.integers(int(option.min or 0), int(min(option.max or 100, 100)))
    return st.floats(option.min, option.max)


values = st.fixed_dictionaries({name: _value(option) for name, option in OPTIONS.items()})


@calm
@given(values, st.sampled_from(list(OPTIONS)), st.data())
def test_a_hash_changes_exactly_with_what_is_hashed(
    one: dict[str, Any], name: str, data: st.DataObject
) -> None:
    two = one | {name: data.draw(_value(OPTIONS[name]))}
    same = hashed_options(one) == hashed_options(two)
    assert (config_hash(one, **RECIPE) == config_hash(two, **RECIPE)) == same
    shuffled = dict(sorted(one.items(), reverse=True))
    assert config_hash(shuffled, **RECIPE) == config_hash(one, **RECIPE)
