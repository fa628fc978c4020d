"""Rewards: forms, terms, built-ins, and how outcomes become a grade."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import reward_functions as functions
from hypothesis import given
from hypothesis import strategies as st

from nbtrain import rewards
from nbtrain.errors import Refused
from nbtrain.rewards.builtins import last_number
from nbtrain.rewards.contract import Outcome, TermInfo, as_terms, check_columns, combine
from nbtrain.rewards.forms import ALLOWED_FORMS, Form, read_signature


class Callable:
    def __call__(self, completion: str, task: dict[str, Any]) -> float:
        return 1.0


def generator(completions: list[str], **kw: Any) -> Any:
    yield 1.0


def needs_more(completion: str, temperature: float) -> float:
    return temperature


def both(completion: str, completions: list[str]) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (lambda completion, task: 1.0, Form.SAMPLE),
        (lambda completion: 1.0, Form.SAMPLE),
        (lambda completion, task, scale=2: 1.0, Form.SAMPLE),
        (lambda prompts, completions, **kw: [], Form.GROUP),
        (lambda completions, answer: [], Form.GROUP),
        (functools.partial(needs_more, temperature=1.0), Form.SAMPLE),
        (functions.compute_score, Form.VERL),
        (functions.waits, Form.GROUP),
        (Callable(), Form.SAMPLE),
        (rewards.exact("answer"), Form.SAMPLE),
    ],
)
def test_the_form_is_told_by_the_names_of_the_parameters(function: Any, form: Form) -> None:
    signature = read_signature(function)
    assert not isinstance(signature, str), signature
    assert signature.form is form


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda text: 1.0, "takes (text)"),
        (lambda completion, task, /: 1.0, "takes (completion, task)"),
        (functions.everything, "takes (**kw)"),
        (needs_more, "nothing can be given for temperature"),
        (both, "takes (completion, completions)"),
        (Callable, "is a class"),
        (generator, "is a generator"),
        (rewards.exact, "Call it, for example nbtrain.rewards.exact(…)"),
        ("exact", 'nbtrain.rewards.exact("answer")'),
        (3.0, "cannot be called"),
        (max, "does not say which parameters"),
    ],
)
def test_other_signatures_are_refused_with_the_allowed_ones(function: Any, says: str) -> None:
    with pytest.raises(Refused) as refused:
        as_terms([function])
    assert says in str(refused.value)
    assert ALLOWED_FORMS in str(refused.value)
    assert refused.value.problems[0].field == "rewards[1]"


def test_terms_have_weights_and_unique_names() -> None:
    terms = as_terms(
        [
            functions.right,
            (lambda completion: 1.0, 0.5),
            (lambda completion: 0.0, np.float32(2)),
            rewards.exact("a"),
            (rewards.exact("b"), 0),
        ]
    )
    assert [(t.name, t.weight) for t in terms] == [
        ("right", 1.0),
        ("lambda", 0.5),
        ("lambda#2", 2.0),
        ("exact", 1.0),
        ("exact#2", 0.0),
    ]
    assert as_terms(functions.right)[0].weight == 1.0
    assert as_terms((functions.right, 3))[0].weight == 3.0
    assert as_terms(terms) == terms


def test_everything_wrong_with_the_terms_is_said_at_once() -> None:
    weights = [True, math.nan, math.inf, "1", None]
    with pytest.raises(Refused) as refused:
        as_terms(
            [(functions.right, weight) for weight in weights] + [(functions.everything, math.nan)]
        )
    fields = [problem.field for problem in refused.value.problems]
    assert fields == [f"rewards[{n}]" for n in (1, 2, 3, 4, 5, 6, 6)]


@pytest.mark.parametrize("items", [[], [(functions.right, 0)]])
def test_rewards_that_could_never_teach_are_refused(items: list[Any]) -> None:
    with pytest.raises(Refused, match="at least one"):
        as_terms(items)


def test_columns_are_checked_before_anything_runs() -> None:
    terms = as_terms(
        [functions.group_right, rewards.exact("gold"), functions.compute_score, functions.right]
    )
    found = [problem.found for problem in check_columns(terms, ["question", "prompts"])]
    assert found == ["answer", "gold", "ground_truth", "prompts"]
    assert check_columns(terms, ["answer", "gold", "reward_model"]) == []


# --- built-ins -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "completion", "score"),
    [
        (rewards.exact("answer"), " <answer>99</answer>\n", 1.0),
        (rewards.exact("answer"), "<answer>98</answer>", 0.0),
        (rewards.exact("answer"), "it is <answer>99</answer>", 0.0),
        (rewards.exact("nothing"), "x", None),
        (rewards.numeric("answer"), "first 12, then 99.0.", 1.0),
        (rewards.numeric("answer"), "99 or 100", 0.0),
        (rewards.numeric("answer", tolerance=1), "100", 1.0),
        (rewards.numeric("answer", tolerance=1), "1e999999999", 0.0),
        (rewards.numeric("answer"), "no number", 0.0),
        (rewards.numeric("nothing"), "99", None),
        (rewards.regex(r"\d\d"), "so 99 it is", 1.0),
        (rewards.regex(r"^\d+$"), "so 99 it is", 0.0),
        (rewards.format(r"<think>.*</think>\d+"), "<think>a\nb</think>7 ", 1.0),
        (rewards.format(r"\d+"), "7 apples", 0.0),
        (rewards.length(3), "abc", 1.0),
        (rewards.length(3), "abcd", 0.0),
    ],
)
def test_built_in_rewards(reward: Any, completion: str, score: float | None) -> None:
    task = {"answer": "<answer>99</answer>", "nothing": None, "prompt": "?"}
    signature = read_signature(reward)
    assert not isinstance(signature, str)
    given = {"completion": completion, "task": task}
    assert reward(**{k: v for k, v in given.items() if k in signature.names}) == score
    assert json.loads(json.dumps(reward.identity()))["kind"] == reward.name


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("10-12", "12"),
        ("= -12", "-12"),
        ("1,234.50", "1234.50"),
        ("a .5 b", ".5"),
        ("99.", "99"),
        ("3,4", "4"),
        ("\u22127", "-7"),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    found = last_number(text)
    assert (None if found is None else float(found)) == (None if number is None else float(number))


@given(st.text(alphabet="0123456789.,eE+- \n", max_size=40))
def test_any_text_has_a_last_number_or_none(text: str) -> None:
    reward = rewards.numeric("gold", tolerance=0.5)
    assert reward(text, {"gold": 1}) in (0.0, 1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: rewards.exact(""),
        lambda: rewards.numeric("a", tolerance=math.nan),
        lambda: rewards.numeric("a", tolerance=True),
        lambda: rewards.regex("("),
        lambda: rewards.format(None),  # type: ignore[arg-type]
        lambda: rewards.length(-1),
    ],
)
def test_built_ins_refuse_bad_parameters_when_made(make: Any) -> None:
    with pytest.raises(Refused, match="allowed: "):
        make()


def test_a_missing_column_is_named() -> None:
    with pytest.raises(LookupError, match=r"no column 'gold'; it has: answer, prompt"):
        rewards.exact("gold")("x", {"prompt": "?", "answer": 1})


# --- from outcomes to a grade ----------------------------------------------------------------

TERMS = (
    TermInfo("a", 0.5, Form.SAMPLE),
    TermInfo("b", 2.0, Form.GROUP),
    TermInfo("shown", 0.0, Form.SAMPLE),
)
FAILED = Outcome("nonfinite", error="reward returned nan")


def test_a_reward_is_the_weighted_sum() -> None:
    grade = combine(TERMS, [Outcome("ok", 1.0), Outcome("ok", 0.25), Outcome("ok", 9.0)])
    assert (grade.reward, grade.kind, grade.error) == (1.0, "ok", None)
    assert grade.terms == {"a": 1.0, "b": 0.25, "shown": 9.0}


def test_a_failed_term_leaves_the_completion_ungraded_never_zero() -> None:
    grade = combine(TERMS, [Outcome("ok", 1.0), FAILED, Outcome("ok", 1.0)])
    assert (grade.reward, grade.kind, grade.error) == (None, "nonfinite", FAILED.error)
    assert grade.terms == {"a": 1.0, "b": None, "shown": 1.0}


def test_a_term_of_weight_zero_only_shows() -> None:
    grade = combine(TERMS, [Outcome("ok", 1.0), Outcome("ok", 1.0), FAILED])
    assert (grade.reward, grade.kind, grade.error) == (2.5, "ok", None)
    assert grade.terms["shown"] is None
    assert grade.failures == {"shown": FAILED.error}


def test_a_sum_that_overflows_is_no_grade() -> None:
    grade = combine(TERMS, [Outcome("ok", 0.0), Outcome("ok", 1.7e308), Outcome("ok", 0.0)])
    assert (grade.reward, grade.kind) == (None, "nonfinite")


def test_importing_rewards_is_cheap() -> None:
    code = (
        "import sys, nbtrain.rewards\n"
        "heavy = {'torch', 'pandas', 'numpy', 'pebble', 'cloudpickle', 'asyncio', 'sqlalchemy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_completion_offers_the_public_names_only() -> None:
    assert dir(rewards) == sorted(rewards.__all__)
