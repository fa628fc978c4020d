"""What a run will take: counts exactly, memory near what was measured, time only from runs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import BaseModel, Workload, World, digest

from nbtrain.errors import Problem
from nbtrain.plan.memory import Memory, memory_of, memory_problem, size
from nbtrain.plan.preflight import Estimate, about, duration, estimate
from nbtrain.plan.rates import Measured, Rate
from nbtrain.plan.registry import ModelSizes
from nbtrain.plan.resolved import ModelRef, ResolvedPlan, Setting

calm = settings(deadline=None, max_examples=40)
SMOLLM2 = BaseModel(
    "smollm2", "folder", "/s", digest("s"), 8192, "bf16", 134_515_008,
    sizes=ModelSizes(576, 1536, 30, 9, 3, 64, 49_152),
)  # fmt: skip
QWEN3 = BaseModel(
    "qwen3", "folder", "/q", digest("q"), 40_960, "bf16", 596_049_920,
    sizes=ModelSizes(1024, 3072, 28, 16, 8, 128, 151_665),
)  # fmt: skip


def told(model: BaseModel = SMOLLM2, options: Any = None, **how: Any) -> Estimate:
    world = World([Workload(stated_held_out=100, tasks=1000)], models=[model])
    return estimate(world.plan(options, base_model=model), model, **how)


def test_a_hundred_default_steps_are_a_hundred_and_one_validations() -> None:
    found = told()
    assert found.steps == 100
    assert (found.trajectories_per_step, found.trajectories) == (256, 25_600)
    assert (found.in_flight, found.max_staleness) == (512, 3)
    assert (found.validation_rounds, found.trajectories_per_round) == (101, 50)
    assert found.validation_trajectories == 5050
    assert found.all_trajectories == 30_650
    assert found.max_output_tokens == 30_650 * 8192
    assert found.expected_output_tokens is found.seconds is None
    assert "about 5,000 in 101 validation rounds" in found.line
    assert "trajectories: 5,050\n" in repr(found)
    assert "time unknown until the first step" in repr(found)
    json.dumps(found.figures(), allow_nan=False)


def test_the_documents_own_example() -> None:
    options = {
        "num_steps": 50, "max_concurrent_trajectories": 384, "val_interval_steps": 10,
        "val_num_tasks": 25,
    }  # fmt: skip
    found = told(options=options)
    assert (found.validation_rounds, found.validation_trajectories) == (6, 150)
    assert (found.trajectories, found.in_flight) == (12_800, 384)


def test_on_policy_no_more_than_a_batch_is_in_flight() -> None:
    found = told(options={"max_staleness": 0})
    assert found.in_flight == 256
    assert "each step sampled by the policy that it updates" in repr(found)


def test_without_validation_there_is_none() -> None:
    found = told(options={"val_interval_steps": 0})
    assert (found.validation_rounds, found.validation_trajectories) == (0, 0)
    assert "no validation" in repr(found)
    assert "validation" not in found.line


def test_tokens_are_bounded_by_the_tightest_limit() -> None:
    base = {"num_steps": 1, "batch_size": 1, "group_size": 2, "val_interval_steps": 0}
    one = {**base, "max_output_tokens_per_turn": 16}
    assert told(options=one).max_output_tokens == 2 * 16
    assert told(options=one, turns=True).max_output_tokens == 2 * 8192
    both = {**one, "max_output_tokens_per_trajectory": 40}
    assert told(options=both, turns=True).max_output_tokens == 2 * 40
    dense = {**base, "max_output_tokens_per_trajectory": 80, "density_aware_training": True}
    # 10, 20, 40 and 80 tokens: 37.5 on average
    assert told(options=dense).max_output_tokens == 2 * 38
    own = {**one, "val_interval_steps": 1, "val_max_output_tokens_per_turn": 4}
    assert told(options=own).max_output_tokens == 2 * 16 + 2 * 50 * 4


def test_time_and_tokens_come_from_what_was_measured() -> None:
    options = {"num_steps": 10, "batch_size": 2, "group_size": 5, "val_interval_steps": 0}
    measured = Measured((Rate(tokens=20.0, seconds=0.5, surplus=1.5),) * 3)
    found = told(options=options, measured=measured)
    assert (found.trajectories, found.sampled) == (100, 150)
    assert found.expected_output_tokens == 3000
    assert found.seconds == 75.0
    assert found.ranges is None
    assert "about 150 trajectories sampled in all, from 3 earlier runs of this" in repr(found)
    assert "about 75 s, from 3 earlier runs of this workload on this machine" in repr(found)
    assert "about 3,000 output tokens, about 75 s (from 3 earlier runs" in found.line
    assert "about 100 trajectories to train on, about 150 sampled in all, about" in found.line
    assert "output tokens for these" in told(options=options).line
    shorter = told(options={**options, "max_output_tokens_per_turn": 10}, measured=measured)
    assert (shorter.expected_output_tokens, shorter.seconds) == (1500, 37.5)


@pytest.mark.parametrize(
    ("budget", "measured", "steps"),
    [
        # 30,650 in all: 25,600 to train on and 5,050 of validation
        ({"max_total_trajectories": 6400}, None, 20),
        ({"max_total_trajectories": 25_600}, None, 83),
        ({"max_total_trajectories": 30_650}, None, None),
        ({"max_total_trajectories": 30_650}, Measured((Rate(10.0, 1.0, 2.0),)), 54),
        ({"max_total_output_tokens": 1000}, None, None),  # nobody knows how long replies are
        ({"max_wall_clock_seconds": 1000}, Measured((Rate(10.0, 1.0),)), 3),
    ],
)
def test_budgets_that_end_it_early_are_told(
    budget: dict[str, int], measured: Measured | None, steps: int | None
) -> None:
    found = told(options=budget, measured=measured)
    if steps is None:
        assert found.ends_early == ()
        return
    (sentence,) = found.ends_early
    assert next(iter(budget)) in sentence
    assert f"(validation counts) ends the run early, after about {steps} steps" in sentence
    assert sentence in repr(found)


def test_a_budget_caps_what_is_told() -> None:
    measured = Measured((Rate(10.0, 1.0),))
    half = {"num_steps": 10, "batch_size": 2, "group_size": 5, "val_interval_steps": 0}
    whole = told(options=half, measured=measured)
    assert (whole.sampled, whole.expected_output_tokens, whole.seconds) == (100, 1000, 100.0)
    for budget in (
        {"max_total_trajectories": 50},
        {"max_total_output_tokens": 500},
        {"max_wall_clock_seconds": 50},
    ):
        found = told(options={**half, **budget}, measured=measured)
        assert (found.sampled, found.expected_output_tokens, found.seconds) == (50, 500, 50.0)
        assert "(validation counts)" not in found.ends_early[0]
    assert told(options={**half, "max_total_output_tokens": 7}).max_output_tokens == 7
    assert told(options={**half, "max_total_trajectories": 7}).max_output_tokens == 7 * 8192


def test_newer_runs_count_more() -> None:
    found = Measured((Rate(40.0, 4.0), Rate(10.0, 1.0))).mean
    assert (found.tokens, found.seconds, found.surplus) == (30.0, 3.0, 1.0)


def test_other_workloads_give_a_range() -> None:
    options = {"num_steps": 10, "batch_size": 2, "group_size": 5, "val_interval_steps": 0}
    rates = (Rate(20.0, 0.5), Rate(80.0, 6.0, 2.0))
    found = told(options=options, measured=Measured(rates, same_workload=False))
    assert found.ranges is not None
    assert found.ranges.output_tokens == (2000.0, 16_000.0)
    assert found.ranges.seconds == (50.0, 1200.0)
    assert "2,000 to 16,000 output tokens, 50 s to 20 min (from 2 earlier runs of" in found.line
    assert "of this model with another workload, sampler or number of ranks" in repr(found)
    assert "100 to 200 trajectories sampled in all" in repr(found)
    capped = told(
        options={**options, "max_wall_clock_seconds": 600},
        measured=Measured(rates, same_workload=False),
    )
    assert capped.ranges is not None
    assert capped.ranges.seconds == (50.0, 600.0)
    alone = told(options=options, measured=Measured(rates[:1], same_workload=False))
    assert "about 2,000 output tokens, about 50 s (from 1 earlier run of" in alone.line
    json.dumps(found.figures(), allow_nan=False)


@pytest.mark.parametrize("same", [True, False])
def test_what_is_trained_as_graded_is_sampled_once(same: bool) -> None:
    """The surplus of runs that left groups out says nothing of one that leaves none out."""
    world = World([Workload(stated_held_out=100)])
    options = {"num_steps": 6, "batch_size": 4, "group_size": 4, "val_interval_steps": 0,
               "max_output_tokens_per_turn": 16}  # fmt: skip
    plan = replace(world.plan(options), admission="as_graded")
    rates = (Rate(12.0, 0.5, 3.5), Rate(20.0, 1.0, 2.2))
    found = estimate(plan, world.models[0], measured=Measured(rates, same_workload=same))
    assert (found.trajectories, found.sampled, found.max_output_tokens) == (96, 96, 1536)
    assert (found.ranges and found.ranges.sampled) == (None if same else (96, 96))
    assert (found.ranges and found.ranges.output_tokens) == (None if same else (1152, 1536))
    assert "96 in all" in repr(found)
    assert "sampled in all" not in repr(found) + found.line


def test_a_resumed_run_counts_its_further_steps() -> None:
    world = World([Workload(stated_held_out=100)])
    parent = world.save(world.plan({}), 30)
    plan = world.plan({"num_steps": 20, "val_interval_steps": 10}, parent=parent)
    found = estimate(plan, world.models[0])
    assert (found.steps, found.validation_rounds) == (20, 3)


# --- memory ------------------------------------------------------------------------------------


def memory(model: BaseModel = SMOLLM2, longest: int = 64, **options: Any) -> Memory:
    world = World(models=[model])
    found = memory_of(
        world.plan(options, base_model=model), model, longest=longest, prompt_tokens=200
    )
    assert found is not None
    return found


def test_the_parts_are_the_model_s_own_arithmetic() -> None:
    found = memory(max_staleness=0)
    assert found.weights == 134_515_008 * 2
    # rank 16 on the seven linear maps of 30 layers, as peft counts them: 4,884,480
    assert found.adapter == 4_884_480 * 4 * 4
    assert found.kv_one == 2 * 30 * 3 * 64 * 2 * 264
    assert found.kv == 256 * found.kv_one
    stale = memory(max_staleness=3)
    assert stale.adapter == 4_884_480 * 4 * 8
    assert (stale.together, found.together) == (True, False)
    assert memory(gpus=2).kv == stale.kv // 2
    assert memory(precision="fp32", max_staleness=0).kv_one == 2 * found.kv_one
    assert memory(precision="fp32").weights == 2 * found.weights


def test_smollm2_needs_about_what_was_measured() -> None:
    """A step of 8 x 2 with prompts to 201 and replies to 64 tokens peaked at 2.1 to 2.2 GB."""
    found = memory(batch_size=2, group_size=8, max_staleness=0)
    assert 1.6e9 < found.peak() < 2.8e9


def test_a_reference_is_one_adapter_more_and_short_passes_hold_less() -> None:
    plan = World(models=[SMOLLM2]).plan({"max_staleness": 0}, base_model=SMOLLM2)

    def needs(changed: ResolvedPlan) -> Memory:
        found = memory_of(changed, SMOLLM2, longest=64, prompt_tokens=200)
        assert found is not None
        return found

    usual = needs(plan)
    warm = needs(replace(plan, warm_start=ModelRef("a", None, "b", "c", "d")))
    assert warm.adapter - usual.adapter == 4_884_480 * 4
    for sequences, less in ((2, True), (64, False)):
        cap = Setting("micro_batch_sequences", sequences, "stated")
        capped = needs(replace(plan, settings={**plan.settings, cap.name: cap}))
        assert (capped.loss_least < usual.loss_least) is less


def test_experts_get_no_adapter() -> None:
    dense = memory()
    sparse = memory(replace(SMOLLM2, sizes=replace(SMOLLM2.sizes, experts=8)))
    assert sparse.adapter < dense.adapter


def test_unknown_dimensions_are_said_to_be_unknown() -> None:
    found = told(replace(SMOLLM2, sizes=ModelSizes()), free_bytes=10**9)
    assert found.memory is None
    assert found.warnings == ()
    assert "memory unknown" in repr(found)


def test_long_replies_over_a_big_vocabulary_are_warned_of_before_the_start() -> None:
    # SZ-05
    options = {"max_output_tokens_per_turn": 4096, "group_size": 8}
    (warning,) = told(QWEN3, options, free_bytes=20 * 2**30).warnings
    assert "of the 21.5 GB that are free" in warning
    assert "lower max_output_tokens_per_turn" in warning
    assert told(QWEN3, options, free_bytes=80 * 2**30).warnings == ()
    short = {**options, "max_output_tokens_per_turn": 512}
    assert told(QWEN3, short, free_bytes=20 * 2**30).warnings == ()


def test_a_check_warns_at_80_percent_and_refuses_at_120() -> None:
    found = Memory(weights=60, adapter=10, kv=20, kv_one=1, loss=30, loss_least=30, together=False)
    assert found.certain == found.peak(300) == 100
    assert memory_problem(found, 125) is None
    assert isinstance(memory_problem(found, 124), str)
    assert isinstance(memory_problem(found, 84), str)
    refused = memory_problem(found, 83)
    assert isinstance(refused, Problem)
    assert refused.field == "memory"
    assert refused.found == 100
    assert memory_problem(found, None) is memory_problem(found, 0) is None
    assert memory_problem(None, 100) is None


def test_one_reply_must_fit_into_the_sampler_s_share() -> None:
    found = Memory(
        weights=10, adapter=0, kv=80, kv_one=40, loss=20, loss_least=20, together=False,
        kv_reply=34, reply_tokens=68,
    )  # fmt: skip
    refused = memory_problem(found, 99)
    assert isinstance(refused, Problem)
    assert "one reply of 68 tokens take 34 bytes, the sampler's share of memory is 33" in str(
        refused
    )
    assert refused.hint is not None
    assert "max_output_tokens_per_turn or max_output_tokens_per_trajectory" in refused.hint
    assert refused.hint.endswith("below 66")
    # a whole trajectory does not fit, its replies do
    assert isinstance(memory_problem(found, 102), str)
    assert memory_problem(found, 120) is None
    # what a resume takes over is the share
    assert memory_problem(found, 99, kv_bytes=40) is None
    # a cache that may be smaller never refuses
    assert memory_problem(replace(found, kv_reply=0), 99) is None


def test_one_reply_is_the_longest_turn_of_training_or_validation() -> None:
    token = 2 * 30 * 3 * 64 * 2
    short: dict[str, Any] = {"max_output_tokens_per_turn": 100}
    assert memory(**short).kv_reply == 100 * token
    assert memory(**short, max_output_tokens_per_trajectory=50).kv_reply == 50 * token
    longer = {**short, "val_max_output_tokens_per_turn": 300}
    assert memory(**longer).reply_tokens == 300
    assert memory(**longer, val_interval_steps=0).reply_tokens == 100
    assert memory(max_output_tokens_per_trajectory=100_000).reply_tokens == 8192
    assert memory(**short, sampler="generate").kv_reply == 0
    (warning,) = told(options=short, free_bytes=10**9, turns=True).warnings or ("",)
    assert "keys and values of one reply" not in warning
    long = replace(SMOLLM2, max_context=10**6)
    (warning,) = told(long, free_bytes=60 * 10**9).warnings
    assert "keys and values of one reply of 1,000,000 tokens take 23.0 GB" in warning


def test_long_replies_alone_never_refuse() -> None:
    found = Memory(weights=10, adapter=0, kv=0, kv_one=0, loss=900, loss_least=20, together=True)
    assert isinstance(memory_problem(found, 100), str)


@calm
@given(st.integers(1, 8192), st.integers(1, 8192), st.integers(0, 5))
def test_longer_replies_never_need_less(one: int, two: int, stale: int) -> None:
    short, long = sorted((one, two))
    a, b = (memory(longest=n, max_staleness=stale) for n in (short, long))
    assert a.peak() <= b.peak()
    assert a.certain <= a.peak() or a.loss_least <= a.loss
    assert a.peak(10**9) <= a.peak()


@pytest.mark.parametrize(
    ("count", "shown"),
    [(999, "999 bytes"), (1000, "1 kB"), (812_000_000, "812 MB"), (1_240_000_000, "1.2 GB")],
)
def test_bytes_are_shown_for_people(count: int, shown: str) -> None:
    assert size(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.2, "1 s"), (40, "40 s"), (720, "12 min"), (12_600, "3.5 h"), (181_440, "2.1 days")],
)
def test_durations_are_shown_for_people(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(("count", "near"), [(5050, 5000), (25_600, 26_000), (7, 7), (0, 0)])
def test_about_is_two_digits(count: int, near: int) -> None:
    assert about(count) == near


def test_it_is_shown_as_text_and_as_html() -> None:
    found = told(measured=Measured((Rate(5.0, 0.1),)))
    assert repr(found).splitlines()[0] == "expected of this run"
    assert found._repr_html_().count("<li>") == len(found.sentences())
    assert "1 earlier run of" in repr(found)
