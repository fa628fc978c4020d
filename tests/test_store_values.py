from __future__ import annotations

import json
import math
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.rollout.types import TerminationReason
from nbtrain.store import tables
from nbtrain.store.texts import TOGETHER, pack, unpack
from nbtrain.store.values import RowShape, plain

TRAJECTORY = RowShape(tables.trajectories)
STEP = RowShape(tables.steps, {"settled": True})
PLACE = {"run": 1, "attempt": 1, "step": 1, "split": "train"}


class Level(IntEnum):
    HIGH = 3


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.array(2.5), 2.5),
        (np.str_("a"), "a"),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(3), 3),
        (torch.tensor(True), True),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (Decimal("0.25"), 0.25),
        (True, True),
        (Level.HIGH, 3),
        (Colour.RED, "red"),
        (TerminationReason.ENV_DONE, "ENV_DONE"),
        (Path("/a/b"), "/a/b"),
        ((1, [np.int8(2)]), [1, [2]]),
        ({TerminationReason.ERROR: np.float16(1), 3: None}, {"ERROR": 1.0, "3": None}),
    ],
)
def test_scalars_of_every_kind_become_plain_ones(value: Any, expected: Any) -> None:
    found = plain(value, "x", [])
    assert found == expected
    assert json.loads(json.dumps(found)) == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.zeros(3), torch.zeros(2), b"bytes", 1j, lambda: 1]
)
def test_what_is_no_plain_value_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"kl\.mean\[1\] is a "):
        plain({"mean": [0, value]}, "kl", [])


def test_a_key_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="metrics has a key of type tuple"):
        plain({(1, 2): 3}, "metrics", [])


@pytest.mark.parametrize(
    "bad",
    [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf), Decimal("NaN")],
)
def test_what_is_not_finite_becomes_none_and_is_named(bad: Any) -> None:
    names: list[str] = []
    assert plain({"a": {"b": bad}, "c": 1.0}, "", names) == {"a": {"b": None}, "c": 1.0}
    assert names == ["a.b"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_everything_plain_is_strict_json_and_only_nonfinite_numbers_change(value: Any) -> None:
    names: list[str] = []
    found = plain(value, "x", names)
    assert json.dumps(found, allow_nan=False)
    assert (found == value) or names


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("reward", True, 1.0),
        ("reward", 1, 1.0),
        ("reward", np.float32(0.5), 0.5),
        ("reward", None, None),
        ("turns", np.int32(4), 4),
        ("turns", 4.0, 4),
        ("turns", True, 1),
        ("eligible", 1, True),
        ("eligible", np.bool_(False), False),
        ("verdict", TerminationReason.STALE, "STALE"),
        ("error", "caf\udce9", "caf?"),  # an undecodable byte in a file name
        ("error", "né", "né"),
    ],
)
def test_a_value_fits_its_column_alone_and_among_others(
    column: str, value: Any, expected: Any
) -> None:
    assert TRAJECTORY.row({**PLACE, column: value}, "", [])[column] == expected
    rows = [{column: value}, {}, {column: value}]
    assert TRAJECTORY.columns(rows, PLACE, [])[column] == [expected, None, expected]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("reward", "high"),
        ("turns", 1.5),
        ("turns", 2**63),
        ("turns", "4"),
        ("eligible", 2),
        ("eligible", "yes"),
        ("verdict", 3),
        ("verdict", ["a"]),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_key(column: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"here.{column} is .* not a|here.{column} is .* not true"):
        TRAJECTORY.row({**PLACE, column: value}, "here.", [])
    with pytest.raises(TypeError, match=rf"trajectories\[1\].{column} is "):
        TRAJECTORY.columns([{}, {column: value}], PLACE, [])


def test_unknown_and_missing_keys_are_refused() -> None:
    with pytest.raises(TypeError, match="rewrad is no column of trajectories"):
        TRAJECTORY.row({**PLACE, "rewrad": 1.0}, "", [])
    with pytest.raises(TypeError, match=r"trajectories\[…\].rewrad is no column"):
        TRAJECTORY.columns([{"rewrad": 1.0}], PLACE, [])
    with pytest.raises(TypeError, match="step is missing; steps needs it"):
        STEP.row({"run": 1, "attempt": 1}, "", [])
    with pytest.raises(TypeError, match=r"trajectories\[0\].split is missing"):
        TRAJECTORY.columns([{}], {"run": 1, "attempt": 1, "step": 1}, [])


REWARDS = st.lists(
    st.none()
    | st.floats()
    | st.integers(-5, 5)
    | st.booleans()
    | st.floats(width=32).map(np.float32)
)


@given(REWARDS)
def test_rows_taken_together_are_what_they_are_one_by_one(rewards: list[Any]) -> None:
    given_rows = [{"reward": value} for value in rewards]
    names: list[str] = []
    together = TRAJECTORY.columns(given_rows, PLACE, names)["reward"]
    alone_names: list[str] = []
    alone = [TRAJECTORY.row({**PLACE, **row}, "", alone_names)["reward"] for row in given_rows]
    assert together == alone
    assert len(names) == len(alone_names)
    assert all(value is None or type(value) is float for value in together)


TEXT = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["What is 1 + 1?", "", "é\n\n"]) | st.lists(st.text(max_size=5)),
        "completion": st.text() | st.just("cut \ud800 here"),
        "terms": st.dictionaries(
            st.text(), st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
        ),
        "error": st.none() | st.text(),
    }
)


@given(st.lists(st.none() | TEXT, max_size=3 * TOGETHER))
def test_texts_come_back_as_they_went_in(texts: list[Any]) -> None:
    found: dict[int, Any] = {}
    for first, data in pack(texts, []):
        found |= {first + n: entry for n, entry in enumerate(unpack(data)) if entry is not None}
    assert found == {n: text for n, text in enumerate(texts) if text is not None}


def test_texts_go_through_the_same_boundary() -> None:
    names: list[str] = []
    terms = {"a": math.nan, "b": np.float32(1), "c": torch.tensor(2)}
    [(_, data)] = pack([{"completion": "x", "terms": terms}, None], names)
    assert unpack(data) == [{"completion": "x", "terms": {"a": None, "b": 1.0, "c": 2}}, None]
    assert names == ["trajectories[0].text.terms.a"]
    with pytest.raises(TypeError, match=r"trajectories\[1\].text.terms.a is a "):
        pack([None, {"terms": {"a": object()}}], [])


def test_a_prompt_that_a_group_shares_is_stored_once() -> None:
    prompt = "".join(chr(97 + n * n % 26) for n in range(2000))
    [(_, alone)] = pack([{"prompt": prompt}], [])
    [(_, shared)] = pack([{"prompt": prompt} for _ in range(TOGETHER)], [])
    assert len(shared) < len(alone) + 200
