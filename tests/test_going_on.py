"""Going on from a run by a descriptor: what is taken over, under whose names, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
from plan_world import Adapter, Checkpoint, World, described_world, descriptor

from nbtrain.client.lineage import anew, notes
from nbtrain.plan.resolved import ResolvedPlan

EXACT = {"terms": [{"kind": "exact", "column": "label", "weight": 2}]}
REGEX = {"terms": [{"kind": "regex", "pattern": "a+"}]}
RULE = {"terms": [{"kind": "rule", "bundle": "scoring", "module": "reward", "function": "f"}]}
EMPTY: list[Any] = [{"kind": "run"}, {}, None, {"display_name": "more"}]


@pytest.fixture
def world() -> World:
    return described_world()


def before(world: World, *, step: int = 4, **parts: Any) -> tuple[ResolvedPlan, Checkpoint]:
    """A reinforcement run by a descriptor, and a checkpoint of it."""
    reward = parts.pop("reward", EXACT)
    config = {"rlHyperparams": {"maxSteps": 8}} | ({"reward": reward} if reward else {})
    document = descriptor("gspo", config=config, **parts)
    plan = world.plan(document, workload="t")
    return plan, world.save(plan, step)


@pytest.mark.parametrize("body", EMPTY)
@pytest.mark.parametrize("reward", [EXACT, RULE], ids=["exact", "rule"])
def test_the_reward_of_the_run_that_was_saved_goes_on(
    world: World, body: Any, reward: dict[str, Any]
) -> None:
    plan, saved = before(world, reward=reward, grader="json-label-match")
    resumed = world.plan(body, parent=saved)
    assert plan.reward is not None
    assert resumed.reward == {"terms": plan.reward["terms"], "origin": "inherited"}
    assert resumed.config == plan.config
    assert resumed.field_origins is not None
    assert resumed.field_origins["config.reward"] == "inherited"
    assert (resumed.grader, resumed.field_origins["grader"]) == ("json-label-match", "inherited")
    assert (resumed.door, resumed.method, resumed.start_step, resumed.total_steps) == (
        *("descriptor", "gspo"),
        *(4, 8),
    )
    again = world.plan(body, parent=world.save(resumed, 6))
    assert again.reward == resumed.reward


def test_a_stated_reward_is_another(world: World) -> None:
    plan, saved = before(world)
    resumed = world.plan({"kind": "run", "config": {"reward": REGEX}}, parent=saved)
    assert resumed.reward is not None
    assert resumed.reward["origin"] == "stated"
    assert [term["kind"] for term in resumed.reward["terms"]] == ["regex"]
    same = world.plan({"config": {"reward": EXACT}}, parent=saved)
    assert same.config == plan.config


def test_another_grader_is_another_reward_where_the_grader_was_the_reward(world: World) -> None:
    grader = "bundle:scoring#reward:f"
    _, saved = before(world, reward=None, grader="json-label-match")
    kinds = {
        name: [term["kind"] for term in (world.plan(body, parent=saved).reward or {})["terms"]]
        for name, body in (("none", {}), ("another", {"grader": grader}))
    }
    assert kinds == {"none": ["json-label-match"], "another": ["rule"]}
    _, saved = before(world, reward=EXACT)
    resumed = world.plan({"grader": grader}, parent=saved)
    assert resumed.grader is not None
    assert resumed.reward is not None
    assert [term["kind"] for term in resumed.reward["terms"]] == ["exact"]


def test_an_inherited_column_that_the_new_rows_lack_is_refused(world: World) -> None:
    _, saved = before(world)
    world.datasets[1] = type(world.datasets[1])("held-out", 20, ())
    body = {"kind": "run", "config": {"dataset": "held-out"}}
    (problem,) = world.problems(body, parent=saved, load_weights_only=True)
    assert problem.field == "reward.terms[0].column"
    assert "label is no column of the dataset" in problem.message


def test_words_of_options_are_refused_under_the_descriptors_names(world: World) -> None:
    _, saved = before(world)
    found = {
        p.field: p for p in world.problems({"num_steps": 5, "learning_rate": 1e-4}, parent=saved)
    }
    assert found.keys() == {"num_steps", "learning_rate"}
    assert found["num_steps"].message == (
        "num_steps is an option, and the checkpoint's run is by a descriptor, which goes on as one"
    )
    assert found["num_steps"].hint == (
        "Did you mean rlHyperparams.maxSteps? It counts from the run's beginning: "
        "rlHyperparams.maxSteps: 9 is 5 more than this checkpoint's 4"
    )
    assert "rlHyperparams.optimizer.learningRate" in (found["learning_rate"].hint or "")
    plan = world.plan({"config": {"rlHyperparams": {"maxSteps": 9}}}, parent=saved)
    assert (plan.start_step, plan.total_steps) == (4, 9)


def test_a_run_by_options_goes_on_by_options(world: World) -> None:
    saved = world.save(world.plan({"num_steps": 4}), 4)
    assert world.plan({"num_steps": 5}, parent=saved).total_steps == 9


def test_what_a_parent_does_not_hand_down_is_named(world: World) -> None:
    """Values that nobody states and that are others than the parent's: computed and own ones."""
    first = world.plan({"num_steps": 8})
    saved = world.save(first, 4)

    def told(**options: Any) -> str | None:
        return anew(world.plan(options, parent=saved), first)

    assert told(num_steps=5) is None
    own = "not inherited: num_steps 100 (default, 8 before)"
    assert told(checkpoint_interval_steps=3) == own
    computed = "not inherited: checkpoint_interval_steps 3 (computed, 1 before)"
    assert told(num_steps=60) == computed
    plan = world.plan({"num_steps": 60}, parent=saved)
    assert computed in notes(plan, first)
    assert anew(plan, None) is None


WARM = {"warmStartModelId": "answers"}


def warm(world: World) -> tuple[ResolvedPlan, Checkpoint]:
    model = world.base_model("tiny")
    world.adapters = [
        Adapter(base_model_slug="tiny", base_fingerprint=model.fingerprint),
        Adapter("others", base_model_slug="tiny", base_fingerprint=model.fingerprint),
    ]
    return before(world, **WARM)


@pytest.mark.parametrize("body", [*EMPTY, {"kind": "run", **WARM}])
def test_a_resume_keeps_the_model_that_its_run_started_from(world: World, body: Any) -> None:
    plan, saved = warm(world)
    resumed = world.plan(body, parent=saved)
    assert resumed.warm_start == plan.warm_start
    assert resumed.config == plan.config
    again = world.plan(body, parent=world.save(resumed, 6))
    assert again.warm_start == plan.warm_start
    assert len({plan.config_hash, resumed.config_hash, again.config_hash}) == 3
    assert resumed.config_hash == world.plan({}, parent=saved).config_hash


def test_another_model_beside_a_resume_is_refused(world: World) -> None:
    _, saved = warm(world)
    (problem,) = world.problems({"kind": "run", "warmStartModelId": "others"}, parent=saved)
    assert "two starts" in problem.message


def test_weights_alone_begin_a_lineage_of_their_own(world: World) -> None:
    _, saved = warm(world)
    assert world.plan({}, parent=saved, load_weights_only=True).warm_start is None
    (problem,) = world.problems({"kind": "run", **WARM}, parent=saved, load_weights_only=True)
    assert "two starts" in problem.message
