"""Calling one reward function and judging what it returns, without any process."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import reward_functions as functions
import torch

from nbtrain.rewards.builtins import environment
from nbtrain.rewards.contract import GradeRequest, Outcome, as_terms, check_columns
from nbtrain.rewards.scoring import ERROR_LIMIT, Unit, describe, judge, score_units

CHAT = [{"role": "user", "content": "1+1?"}]


def score(function: Any, completions: list[Any], **columns: Any) -> list[Outcome]:
    request = GradeRequest(CHAT, completions, columns)
    return score_request(function, request)


def score_request(function: Any, request: GradeRequest) -> list[Outcome]:
    terms = as_terms(function)
    count = len(request.completions)
    one = terms[0].form.per_sample
    units = [Unit(0, n) for n in range(count)] if one else [Unit(0, None)]
    done, left = score_units(terms, request, units, budget=60)
    assert left == []
    assert [unit for unit, _ in done] == units
    return [outcome for _, outcomes in done for outcome in outcomes]


def kinds(outcomes: list[Outcome]) -> list[str]:
    return [outcome.kind for outcome in outcomes]


def seen(request: GradeRequest) -> dict[str, Any]:
    """What a function in the form of TRL is given."""
    given: dict[str, Any] = {}

    def group(**kw: Any) -> list[float]:
        given.update(kw)
        return [0.0] * len(request.completions)

    def with_names(prompts: Any, completions: Any, **kw: Any) -> list[float]:
        return group(prompts=prompts, completions=completions, **kw)

    score_request(with_names, request)
    return given


def test_chat_rewards_get_message_lists_and_columns_as_long_as_the_group() -> None:
    given = seen(GradeRequest(CHAT, ["2", "3"], {"answer": "2", "level": 1}))
    assert given == {
        "prompts": [CHAT, CHAT],
        "completions": [
            [{"role": "assistant", "content": "2"}],
            [{"role": "assistant", "content": "3"}],
        ],
        "answer": ["2", "2"],
        "level": [1, 1],
    }


def test_raw_rewards_get_texts() -> None:
    given = seen(GradeRequest("1+1=", ["2", "3"], {}, raw=True))
    assert given == {"prompts": ["1+1=", "1+1="], "completions": ["2", "3"]}


def test_turns_reach_one_sample_as_text_and_a_group_as_messages() -> None:
    said = [("assistant", "a"), ("tool", "b"), ("assistant", "c"), ("user", "d")]
    turns = [{"role": role, "content": content} for role, content in said]
    assert seen(GradeRequest(CHAT, [turns]))["completions"] == [turns]
    assert score(lambda completion: float(completion == "c"), [turns])[0].score == 1.0
    assert score(lambda completion: float(completion == ""), [turns[1:2]])[0].score == 1.0


def test_environments_reach_rewards_as_their_state() -> None:
    states = [{"found": 2, "reward": 1}, {"found": 3, "reward": "much"}, {"reward": float("nan")}]
    request = GradeRequest(CHAT, ["a", "b", "c"], environments=states)

    def group(completions: Any, environments: Any) -> list[float | None]:
        return [getattr(e, "found", None) for e in environments]

    def one(completion: str, environment: Any) -> float:
        environment.found = environment.found + 1  # on a copy of its own
        return float(environment.found)

    assert [o.score for o in score_request(group, request)] == [2.0, 3.0, None]
    assert [o.score for o in score_request(one, request)] == [3.0, 4.0, None]
    missing = score_request(one, request)[2].error
    assert "without a public plain attribute 'found'; it has: reward" in str(missing)
    assert [o.score for o in score_request(environment(), request)] == [1.0, None, None]
    assert states[0]["found"] == 2


def test_a_reward_that_reads_the_environment_needs_one() -> None:
    terms = as_terms([environment(), lambda completions, environments: [0.0]])
    assert len(check_columns(terms, ["answer"])) == 2
    assert check_columns(terms, ["answer"], environment=True) == []


def test_one_sample_gets_its_text_and_a_task_of_its_own() -> None:
    def changes(completion: str, task: dict[str, Any]) -> float:
        assert task.pop("answer") == "2"
        assert task["prompt"] == CHAT
        return float(completion)

    assert [o.score for o in score(changes, ["2", "3"], answer="2")] == [2.0, 3.0]


def test_a_function_gets_only_the_columns_it_names() -> None:
    outcomes = score(functions.group_right, ["2", "3"], answer="2", other=1)
    assert [o.score for o in outcomes] == [1.0, 0.0]


@pytest.mark.parametrize(
    "columns", [{"ground_truth": "2"}, {"reward_model": {"ground_truth": "2"}, "data_source": "x"}]
)
def test_verl_functions_are_called_by_their_names(columns: dict[str, Any]) -> None:
    assert [o.score for o in score(functions.compute_score, ["2", "3"], **columns)] == [1.0, 0.0]


@pytest.mark.parametrize("function", [functions.group_right, functions.compute_score])
def test_a_needed_column_that_is_missing_is_named(function: Any) -> None:
    (outcome,) = score(function, ["2"], question="?")
    assert outcome.kind == "exception"
    assert "the task has no column 'answer'" in str(outcome.error) or (
        "the task has no column 'ground_truth'" in str(outcome.error)
    )
    assert "its columns: question" in str(outcome.error)


# --- what is a score -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        (Fraction(1, 4), 0.25),
        (np.float32(1), 1.0),
        (np.int64(0), 0.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (np.array([0.5]), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor([2], dtype=torch.int32), 2.0),
        ({"score": 0.75, "acc": True}, 0.75),
    ],
)
def test_numbers_of_every_kind_become_floats_once(value: Any, number: float) -> None:
    outcome = judge("r", value)
    assert outcome == Outcome("ok", number)
    assert type(outcome.score) is float


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        (None, "missing", "returned None for completion 3"),
        (float("nan"), "nonfinite", "returned nan"),
        (float("-inf"), "nonfinite", "returned -inf"),
        (np.float64("inf"), "nonfinite", "returned inf"),
        (torch.tensor(float("nan")), "nonfinite", "returned nan"),
        (10**400, "nonfinite", "returned inf"),
        ("1.0", "type", "returned str '1.0'"),
        (1j, "type", "returned complex 1j"),
        ([1.0], "type", "type list"),
        (np.array([1.0, 2.0]), "type", "type ndarray"),
        (np.array("1"), "type", "type ndarray"),
        (object(), "type", "type object"),
    ],
)
def test_what_is_no_finite_number_is_never_one(value: Any, kind: str, says: str) -> None:
    outcome = judge("r", value, 2)
    assert (outcome.kind, outcome.score) == (kind, None)
    assert says in str(outcome.error)


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        ([], "length", "reward 'returns' returned 0 values for 4 completions"),
        ([1.0], "length", "returned 1 value for 4 completions"),
        ((1.0,) * 5, "length", "returned 5 values for 4 completions"),
        (1.0, "type", "returned float 1.0 for 4 completions, where a list of 4 numbers"),
        (None, "type", "type NoneType for 4 completions"),
        (torch.tensor(1.0), "type", "type Tensor for 4 completions"),
        ("1111", "type", "returned str '1111' for 4 completions"),
        ({1, 2, 3, 4}, "type", "type set"),
        (["1"] * 4, "type", "returned str '1' for completion 1"),
        ((1, 2, 3, 4), "ok", ""),
        (np.ones(4, dtype=np.float32), "ok", ""),
        (torch.ones(4), "ok", ""),
        (np.ones((4, 2)), "type", "type list for completion 1"),
    ],
)
def test_a_group_gets_one_value_for_each_completion(value: Any, kind: str, says: str) -> None:
    def returns(completions: list[Any]) -> Any:
        return value

    outcomes = score(returns, ["a", "b", "c", "d"])
    assert kinds(outcomes) == [kind] * 4
    assert says in (outcomes[0].error or "")


def test_one_odd_value_leaves_the_others_their_scores() -> None:
    outcomes = score(functions.odd_numbers, ["a"] * 4)
    assert kinds(outcomes) == ["ok", "nonfinite", "ok", "nonfinite"]
    assert [o.score for o in outcomes] == [1.0, None, 0.0, None]


def test_a_column_that_was_lost_shows_as_a_wrong_length() -> None:
    assert [o.score for o in score(functions.no_answer_no_list, ["2"], answer="2")] == [1.0]
    (outcome,) = score(functions.no_answer_no_list, ["2"])
    assert outcome.error == "reward 'no_answer_no_list' returned 0 values for 1 completion"


# --- exceptions ------------------------------------------------------------------------------


def test_an_exception_is_kept_with_type_message_and_place() -> None:
    outcomes = score(functions.key_error, ["a", "b"])
    assert kinds(outcomes) == ["exception", "exception"]
    lines = str(outcomes[0].error).splitlines()
    assert lines[0] == "reward 'key_error' raised KeyError: 'missing_key'"
    assert lines[1] == "Traceback (most recent call last):"
    assert "reward_functions.py" in lines[2]
    assert lines[-1] == "KeyError: 'missing_key'"


def test_one_sample_that_raises_leaves_the_others() -> None:
    outcomes = score(functions.some_raise, ["a", "bad", "b"])
    assert kinds(outcomes) == ["ok", "exception", "ok"]
    error = str(outcomes[1].error)
    assert len(error) <= ERROR_LIMIT
    assert error.startswith("reward 'some_raise' raised ValueError: no no")
    assert "characters left out" in error


@pytest.mark.parametrize("function", [functions.strange_error, functions.leaves])
def test_exceptions_of_any_kind_survive_as_text(function: Any) -> None:
    (outcome,) = score(function, ["0"])
    assert outcome.kind == "exception"
    assert function.__name__ in str(outcome.error)


def test_an_exception_that_cannot_be_printed_is_described() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert "Mute" in describe(Mute())


# --- async -----------------------------------------------------------------------------------


def test_the_samples_of_an_async_function_run_concurrently() -> None:
    active = peak = 0

    async def counts(completion: str) -> float:
        nonlocal active, peak
        active += 1
        peak = max(peak, active)
        await asyncio.sleep(0.01)
        active -= 1
        if completion == "bad":
            raise ValueError(completion)
        return 1.0

    outcomes = score(counts, ["a", "bad", *"bcdefg"])
    assert peak == 8
    assert kinds(outcomes) == ["ok", "exception"] + ["ok"] * 6


def test_async_functions_of_a_group_are_awaited() -> None:
    assert kinds(score(functions.waits, ["a"] * 8)) == ["ok"] * 8


def test_async_functions_behind_objects_lambdas_and_partials_are_awaited() -> None:
    class Object:
        async def __call__(self, completion: str) -> float:
            await asyncio.sleep(0)
            return 1.0

    assert score(Object(), ["a"])[0].score == 1.0
    assert score(lambda completion: Object()(completion), ["a"])[0].score == 1.0


def test_a_coroutine_that_nothing_awaits_is_a_clear_error() -> None:
    outcomes = score(functions.never_awaited, ["a"])
    assert kinds(outcomes) == ["type"]
    assert "a coroutine that nothing awaited" in str(outcomes[0].error)


# --- budget ----------------------------------------------------------------------------------


def test_no_unit_is_begun_when_the_budget_is_over() -> None:
    terms = as_terms(functions.right)
    request = GradeRequest(CHAT, ["2", "3", "2"], {"answer": "2"})
    units = [Unit(0, n) for n in range(3)]
    done, left = score_units(terms, request, units, budget=0)
    assert [unit for unit, _ in done] == units[:1]
    assert left == units[1:]


@pytest.mark.parametrize("score", [1e200, -1e200, 1e101])
def test_rewards_too_large_for_their_spread_are_no_grades(score: float) -> None:
    from nbtrain.rewards.contract import TermInfo, combine

    (term,) = as_terms([_fine])
    info = TermInfo(term.name, 1.0, term.form)
    grade = combine([info], [Outcome("ok", score)])
    assert grade.reward is None
    assert grade.kind == "nonfinite"
    assert combine([info], [Outcome("ok", 1e99)]).reward == 1e99


def _fine(completion: str, task: dict[str, object]) -> float:
    return 1.0


def test_what_a_reward_changes_in_a_nested_value_stays_with_its_completion() -> None:
    def pops(completion: str, task: dict[str, Any]) -> float:
        task["nest"].pop()
        return float(len(task["nest"]))

    def pops_each(completions: Any, nest: Any, **_: Any) -> list[float]:
        for one in nest:
            one.pop()
        return [float(len(one)) for one in nest]

    for function in (pops, pops_each):
        outcomes = score(function, ["a", "b", "c"], nest=[1, 2, 3])
        assert [outcome.score for outcome in outcomes] == [2.0, 2.0, 2.0]
