"""The option table: complete, consistent, and checked as strictly as it says."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import BaseModel

from nbtrain.plan.defaults import (
    EFFORTS,
    STALE_GSPO_CLIP,
    budgets,
    checkpoint_interval,
    concurrency,
)
from nbtrain.plan.fields import Option, check, show
from nbtrain.plan.listing import list_options, model_options
from nbtrain.plan.options import OPTIONS

calm = settings(deadline=None)
TINY = BaseModel()

# name: (type, min, max, fixed default or "computed"), of the options that the documents promise
PROMISED: dict[str, tuple[str, Any, Any, Any]] = {
    "num_steps": ("integer", 1, 100_000, 100),
    "algorithm": ("text", None, None, "gspo"),
    "batch_size": ("integer", 1, 256, 32),
    "group_size": ("integer", 2, 32, 8),
    "min_trajectories_per_group": ("integer", 1, 32, "computed"),
    "learning_rate": ("number", 1e-8, 1e-2, 1e-4),
    "lr_warmup_steps": ("integer", 0, ..., 15),
    "lr_hold_steps": ("integer", 0, ..., 135),
    "lr_min_ratio": ("number", 0, 1, 0.1),
    "max_staleness": ("integer", 0, 100, 3),
    "load_weights_only": ("boolean", None, None, False),
    "density_aware_training": ("boolean", None, None, False),
    "train_on_truncation": ("boolean", None, None, "computed"),
    "train_on_timeout": ("boolean", None, None, False),
    "train_on_error": ("boolean", None, None, False),
    "train_on_all_fail": ("boolean", None, None, False),
    "train_on_all_pass": ("boolean", None, None, False),
    "train_on_zero_advantage": ("boolean", None, None, False),
    "max_concurrent_trajectories": ("integer", 1, 1024, "computed"),
    "max_turns_per_trajectory": ("integer", 1, 500, 200),
    "max_output_tokens_per_turn": ("integer", 1, ..., "computed"),
    "max_output_tokens_per_trajectory": ("integer", 1, 2_097_152, "computed"),
    "trajectory_timeout_seconds": ("integer", 1, 36_000, 7200),
    "batch_timeout_seconds": ("integer", 1, 38_400, 9600),
    "reasoning_effort": ("text", None, None, "computed"),
    "temperature": ("number", 0, 2, 1.0),
    "top_p": ("number", 0, 1, 1.0),
    "top_k": ("integer", -1, ..., -1),
    "val_enabled": ("boolean", None, None, True),
    "val_interval_steps": ("integer", 0, 100, 1),
    "val_num_tasks": ("integer", 1, ..., 50),
    "val_trajectories_per_task": ("integer", 1, ..., 1),
    "val_max_concurrent_trajectories": ("integer", 1, ..., 50),
    "val_final_wait_timeout_seconds": ("integer", 0, ..., 7200),
    "val_reasoning_effort": ("text", None, None, "computed"),
    "val_temperature": ("number", 0, 2, "computed"),
    "val_top_p": ("number", 0, 1, "computed"),
    "val_top_k": ("integer", -1, ..., "computed"),
    "val_max_output_tokens_per_turn": ("integer", 1, ..., "computed"),
    "val_max_output_tokens_per_trajectory": ("integer", 1, ..., "computed"),
    "val_max_turns_per_trajectory": ("integer", 1, ..., "computed"),
    "val_trajectory_timeout_seconds": ("integer", 1, ..., "computed"),
}
EXTENSIONS: dict[str, tuple[str, Any, Any, Any]] = {
    "kl_beta": ("number", 0, 1, 0.0),
    "weight_decay": ("number", 0, ..., 0.01),
    "max_grad_norm": ("number", ..., ..., 1.0),
    "clip_low": ("number", 0, ..., "computed"),
    "clip_high": ("number", 0, ..., "computed"),
    "lora_rank": ("integer", 1, 512, 16),
    "lora_alpha": ("number", ..., ..., "computed"),
    "lora_target_modules": ("text", None, None, "default"),
    "seed": ("integer", 0, ..., 42),
    "precision": ("text", None, None, "computed"),
    "sampler": ("text", None, None, "auto"),
    "gpus": ("integer", 1, 64, 1),
    "reward_workers": ("integer", 1, 256, None),
    "environment_workers": ("integer", 1, 1024, None),
    "reward_timeout_seconds": ("number", ..., ..., 60.0),
    "checkpoint_interval_steps": ("integer", 1, ..., "computed"),
    "keep_checkpoints": ("integer", 1, ..., None),
    "max_total_trajectories": ("integer", 1, ..., None),
    "max_total_output_tokens": ("integer", 1, ..., None),
    "max_wall_clock_seconds": ("integer", 1, ..., None),
}
bounded = st.sampled_from([o for o in OPTIONS.values() if o.min is not None or o.max is not None])


def test_the_table_holds_the_promised_options_and_the_extensions_no_more() -> None:
    assert len(PROMISED) == 42
    assert {n for n, o in OPTIONS.items() if o.origin == "seed"} == set(PROMISED)
    assert {n for n, o in OPTIONS.items() if o.origin == "extension"} == set(EXTENSIONS)


@pytest.mark.parametrize("name", [*PROMISED, *EXTENSIONS])
def test_type_bounds_and_default_are_the_promised_ones(name: str) -> None:
    option = OPTIONS[name]
    kind, low, high, default = (PROMISED | EXTENSIONS)[name]
    assert option.type == kind
    assert low is ... or option.min == low
    assert option.max is not None if high is ... else option.max == high
    assert (option.compute is not None) == (default == "computed") == bool(option.computed)
    if default != "computed":
        assert option.default == default
        assert check(option, option.default) == (option.default, None)
    assert option.help.endswith(".")


def test_a_computed_default_looks_only_at_options_before_it() -> None:
    values: dict[str, Any] = {}
    for option in OPTIONS.values():
        values[option.name] = option.compute(values, TINY) if option.compute else option.default
    assert values["min_trajectories_per_group"] == 4
    assert values["max_concurrent_trajectories"] == 512
    assert values["val_max_output_tokens_per_turn"] == values["max_output_tokens_per_turn"] == 256
    assert values["lora_alpha"] == 32
    assert (values["clip_low"], values["clip_high"]) == STALE_GSPO_CLIP
    assert values["precision"] == "fp32"
    json.dumps(values, allow_nan=False)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("num_steps", 8.0, 8),
        ("num_steps", np.int64(8), 8),
        ("learning_rate", np.float32(0.5e-2), float(np.float32(0.5e-2))),
        ("temperature", 1, 1.0),
        ("temperature", 0, 0.0),
        ("val_enabled", np.bool_(False), False),
        ("top_p", None, None),
        ("top_k", -1, -1),
        ("top_k", None, None),
        ("val_temperature", None, None),
        ("keep_checkpoints", None, None),
        ("algorithm", "grpo", "grpo"),
        ("lora_target_modules", r".*\.(q|v)_proj", r".*\.(q|v)_proj"),
        ("seed", 0, 0),
    ],
)
def test_good_values_are_kept_in_their_own_type(name: str, value: object, kept: object) -> None:
    found, problem = check(OPTIONS[name], value)
    assert problem is None
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize(
    ("name", "value", "message", "hint"),
    [
        ("val_enabled", "false", 'needs true or false, found the text "false"', "Write false"),
        ("val_enabled", "no", 'found the text "no"', "Write false"),
        ("val_enabled", "on", 'found the text "on"', "Write true"),
        ("val_enabled", "", 'found the text ""', "Write false"),
        ("val_enabled", 0, "found 0", "Write false"),
        ("val_enabled", 1, "found 1", "Write true"),
        ("val_enabled", None, "found null", "Leave it out for the default, true"),
        ("batch_size", True, "needs a whole number, found true", None),
        ("batch_size", 8.5, "needs a whole number, found 8.5", None),
        ("batch_size", "8", 'found the text "8"', "Write 8, without quotes"),
        ("batch_size", "1_000", 'found the text "1_000"', "Write 1000"),
        ("batch_size", "many", 'found the text "many"', None),
        ("batch_size", None, "found null", "the default, 32"),
        ("batch_size", [8], "found a list", None),
        ("batch_size", {"a": 1}, "found a mapping", None),
        ("batch_size", object(), "found an object of type object", None),
        ("batch_size", 257, "is out of bounds: found 257", None),
        ("num_steps", 10**400, "out of bounds", None),
        ("learning_rate", "1e-4", 'needs a number, found the text "1e-4"', "Write 1e-4"),
        ("learning_rate", "inf", 'found the text "inf"', "finite"),
        ("learning_rate", math.nan, "needs a number, found nan", None),
        ("learning_rate", math.inf, "needs a number, found inf", None),
        ("learning_rate", False, "needs a number, found false", None),
        ("learning_rate", 0, "out of bounds: found 0", None),
        ("learning_rate", 10**400, "out of bounds", None),
        ("group_size", 1, "out of bounds: found 1", None),
        ("top_p", 0, "top_p is out of bounds: found 0", None),
        ("val_top_p", 0.0, "val_top_p is out of bounds: found 0.0", None),
        ("temperature", 1e-40, "is 0 (greedy) or at least 0.01, found 1e-40", None),
        ("top_k", 0, "is -1 (no limit) or at least 1, found 0", None),
        ("algorithm", "ppo", "has no choice 'ppo'", None),
        ("algorithm", "GRPO", "has no choice 'GRPO'", "Write grpo"),
        ("algorithm", 3, "needs text, found 3", "Put it in quotes"),
        ("algorithm", "sft", "has no choice 'sft'", None),
        ("sampler", "sglang", "has no choice 'sglang'", None),
        ("reasoning_effort", "most", "has no choice 'most'", None),
        ("reasoning_effort", "LOW", "has no choice 'LOW'", "Write low"),
        ("precision", "fp16", "has no choice 'fp16'", None),
        ("lora_target_modules", [".*q_proj"], "needs text, found a list", "regular expression"),
        ("lora_target_modules", "*.q_proj", "is no valid regular expression", "whole module path"),
        ("lora_target_modules", " ", "is a regular expression or", "whole module path"),
    ],
)
def test_bad_values_are_refused_by_name(
    name: str, value: object, message: str, hint: str | None
) -> None:
    found, problem = check(OPTIONS[name], value)
    assert found is None
    assert problem is not None
    assert problem.field == name
    assert problem.message.startswith(f"{name} ")
    assert message in problem.message
    assert problem.allowed == OPTIONS[name].allowed()
    if hint is not None:
        assert problem.hint is not None
        assert hint in problem.hint


def test_a_bound_that_is_left_out_is_said_and_listed() -> None:
    _, problem = check(OPTIONS["top_p"], 0)
    assert problem is not None
    assert problem.allowed == "above 0, at most 1, or null"
    exclusive = {option.name for option in model_options(TINY) if option.exclusive_min}
    assert exclusive == {"top_p", "val_top_p"}


def test_the_context_of_the_model_bounds_a_reply() -> None:
    option = OPTIONS["max_output_tokens_per_turn"]
    assert check(option, 256, model=TINY) == (256, None)
    _, problem = check(option, 257, model=TINY)
    assert problem is not None
    assert problem.message.endswith("found 257, more than the base model's context")
    assert problem.allowed == "1 to 256, or null"
    _, problem = check(option, 0, model=TINY)
    assert problem is not None
    assert problem.message.endswith("found 0")
    assert check(option, 257) == (257, None)


def test_a_bound_that_is_only_technical_is_not_told() -> None:
    assert OPTIONS["max_total_trajectories"].allowed() == "at least 1, or null"
    _, problem = check(OPTIONS["max_total_trajectories"], 10**12 + 1)
    assert problem is not None
    assert problem.allowed == "1 to 1,000,000,000,000, or null"


@calm
@given(bounded, st.data())
def test_every_value_within_bounds_passes_and_is_kept(option: Option, data: st.DataObject) -> None:
    value = data.draw(_values(option, option.min, option.max))
    found, problem = check(option, value)
    broken = option.complaint and option.complaint(value)
    if broken or (option.above_min and value == option.min):
        assert problem is not None
    else:
        assert problem is None
        assert found == value
        assert isinstance(found, int if option.type == "integer" else float)


@calm
@given(bounded, st.data())
def test_every_value_out_of_bounds_is_refused(option: Option, data: st.DataObject) -> None:
    above = _values(option, option.max, None) if option.max is not None else st.nothing()
    below = _values(option, None, option.min) if option.min is not None else st.nothing()
    value = data.draw(above | below)
    found, problem = check(option, value)
    if value == option.max or (value == option.min and not option.above_min):
        assert problem is None
    else:
        assert found is None
        assert problem is not None
        assert "out of bounds" in problem.message
        assert problem.allowed is not None
        assert show(option.min if value < option.min else option.max) in problem.allowed


def _values(option: Option, low: Any, high: Any) -> st.SearchStrategy[Any]:
    if option.type == "integer":
        return st.integers(low, high)
    return st.floats(low, high, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (1024, "1,024"),
        (1e-8, "1e-8"),
        (1e-4, "0.0001"),
        (0.5, "0.5"),
    ],
)
def test_values_are_shown_as_a_person_writes_them(value: object, shown: str) -> None:
    assert show(value) == shown


@pytest.mark.parametrize(
    ("num_steps", "val_interval", "expected"),
    [
        (100, None, 5),
        (100, 1, 5),
        (100, 10, 5),
        (60, 10, 5),
        (50, 10, 5),
        (20, 10, 1),
        (100, 3, 6),
        (100, 7, 7),
        (30, 7, 7),
        (12, 1, 1),
        (1, 100, 1),
        (1000, 100, 50),
        (1000, 7, 56),
        (101, None, 6),
    ],
)
def test_checkpoints_line_up_with_validation(
    num_steps: int, val_interval: int | None, expected: int
) -> None:
    assert checkpoint_interval(num_steps, val_interval) == expected


@calm
@given(st.integers(1, 100_000), st.integers(1, 100))
def test_checkpoints_line_up_for_every_length(num_steps: int, val_interval: int) -> None:
    interval = checkpoint_interval(num_steps, val_interval)
    assert num_steps // interval <= 20
    assert interval % val_interval == 0 or val_interval % interval == 0


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(8, (1, 2, 4, 8)), (100, (13, 25, 50, 100)), (256, (32, 64, 128, 256)), (1, (1,))],
)
def test_density_gives_an_eighth_a_quarter_a_half_and_all(
    limit: int, expected: tuple[int, ...]
) -> None:
    assert budgets(limit) == expected


@calm
@given(st.integers(1, 2_097_152))
def test_budgets_rise_to_the_limit_and_never_round_down(limit: int) -> None:
    found = budgets(limit)
    assert found[-1] == limit
    assert list(found) == sorted(set(found))
    assert len(found) == 4 or limit < 5
    assert (found[0] - 1) * 8 < limit <= found[0] * 8


def test_levels_of_thinking_are_the_model_s() -> None:
    thinker = BaseModel("thinker", thinking=("off", "low", "high"))
    option = OPTIONS["reasoning_effort"]
    assert option.offered(None) == EFFORTS
    assert check(option, "high", model=thinker) == ("high", None)
    _, problem = check(option, "medium", model=thinker)
    assert problem is not None
    assert "has no choice 'medium' with thinker" in problem.message
    assert problem.allowed == "off or low or high, or null"
    _, problem = check(option, "low", model=TINY)
    assert problem is not None
    assert problem.allowed == "null"
    listed = {info.name: info for info in model_options(thinker)}
    assert listed["reasoning_effort"].choices == ("off", "low", "high")
    assert listed["val_reasoning_effort"].choices == ("off", "low", "high")
    assert {info.name: info.choices for info in model_options(TINY)}["reasoning_effort"] == ()


@pytest.mark.parametrize(
    ("levels", "lowest"),
    [
        ((), None),
        (("off", "on"), "on"),
        (("off", "minimal", "low"), "minimal"),
        (("low", "high"), "low"),
        (("off", "max"), "max"),
    ],
)
def test_left_out_is_the_least_thinking_and_never_none(
    levels: tuple[str, ...], lowest: str | None
) -> None:
    compute = OPTIONS["reasoning_effort"].compute
    assert compute is not None
    assert compute({}, BaseModel(thinking=levels)) == lowest


def test_the_clip_of_gspo_widens_with_staleness() -> None:
    low, high = (OPTIONS[name].compute for name in ("clip_low", "clip_high"))
    assert low is not None
    assert high is not None

    def clip(algorithm: str, staleness: int) -> tuple[float, float]:
        values = {"algorithm": algorithm, "max_staleness": staleness}
        return low(values, TINY), high(values, TINY)

    assert clip("gspo", 0) == (3e-4, 4e-4)
    assert clip("gspo", 1) == clip("gspo", 100) == STALE_GSPO_CLIP
    assert clip("grpo", 0) == clip("grpo", 8) == (0.2, 0.2)
    assert "for gspo (0.0003 at max_staleness 0), 0.2 for grpo" in OPTIONS["clip_low"].computed
    assert "clips most sequences" in OPTIONS["clip_low"].help


def test_no_text_speaks_of_what_is_not_there() -> None:
    for info in model_options(TINY):
        assert "version" not in info.description
        assert " yet" not in info.description


def test_the_default_concurrency_is_clamped_to_its_bound() -> None:
    assert concurrency(32, 8) == 512
    assert concurrency(256, 32) == OPTIONS["max_concurrent_trajectories"].max == 1024


def test_the_catalog_lists_every_option_of_every_model_with_its_bounds() -> None:
    catalog = list_options([TINY, BaseModel("big", max_context=4096)])
    assert [m.base_model_slug for m in catalog.models] == ["nbtrain/tiny", "big"]
    assert list(catalog) == catalog.items == catalog.models
    assert len(catalog) == 2
    tiny, big = ({o.name: o for o in m.options} for m in catalog)
    assert list(tiny) == list(OPTIONS)
    assert tiny["max_output_tokens_per_turn"].max == 256
    assert big["max_output_tokens_per_turn"].max == 4096
    assert tiny["max_output_tokens_per_trajectory"].max == 2_097_152
    rows = catalog.rows()
    assert len(rows) == 2 * len(OPTIONS)
    assert rows[0]["base_model_slug"] == "nbtrain/tiny"
    assert rows[0]["name"] == "num_steps"
    json.dumps(rows, allow_nan=False)


def test_a_computed_default_is_listed_as_null() -> None:
    for info in model_options(TINY):
        computed = OPTIONS[info.name].compute is not None
        assert (info.default_kind == "computed") == computed
        assert info.default is None or not computed
        assert ("Left out: " in info.description) == computed
    listed = {info.name: info for info in model_options(None)}
    assert listed["max_staleness"].default == 3
    assert listed["algorithm"].choices == ("gspo", "grpo")
    assert listed["val_interval_steps"].default == 1


def test_an_evaluation_takes_a_subset_with_its_own_defaults() -> None:
    training = {info.name: info for info in model_options(TINY)}
    evaluation = {info.name: info for info in model_options(TINY, "evaluation")}
    assert set(evaluation) < set(training)
    assert {"temperature", "val_num_tasks", "max_output_tokens_per_turn"} <= set(evaluation)
    assert not set(evaluation) & {"num_steps", "learning_rate", "group_size", "val_enabled"}
    assert training["val_num_tasks"].default == 50
    assert evaluation["val_num_tasks"].default is None
    assert evaluation["val_num_tasks"].default_kind == "computed"


def test_there_are_two_modes() -> None:
    with pytest.raises(ValueError, match="found 'serving'"):
        list_options([TINY], "serving")  # type: ignore[arg-type]
