"""json-label-match: the share of expected fields; what is no JSON; what is not scored at all."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbtrain import rewards
from nbtrain.errors import Refused
from nbtrain.rewards import GradeRequest, RewardPool, as_terms, check_columns, labels, pack
from nbtrain.rewards.labels import find_json, json_label_match, match_labels, why_unscored


def score(answer: str, expected: Any) -> float | None:
    return json_label_match()(answer, {"answer": expected})


TRIAGE = '{"queue": "billing", "urgent": true, "customer": {"tier": 1, "tags": ["a", "b"]}}'


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (TRIAGE, 1.0),
        (f"```json\n{TRIAGE}\n```", 1.0),
        (f"Sure! Here it is:\n```\n{TRIAGE}\n```\nAnything else {{or}} [not]?", 1.0),
        (f'Let me think: {{"queue": "x"}}. No:\n{TRIAGE}', 1.0),
        (json.dumps(json.loads(TRIAGE), indent=4), 1.0),
        ('{"customer": {"tags": ["a", "b"], "tier": 1.0}, "urgent": true, "queue": "billing"}', 1),
        ('{"queue": "billing", "more": 1}', 0.25),
        ('{"queue": "Billing", "urgent": true, "customer": {"tier": 2, "tags": ["a", "b"]}}', 0.5),
        ('{"queue": "billing", "urgent": 1, "customer": {"tier": true}}', 0.25),
        ('{"queue": "billing", "urgent": "true", "customer": ["a", "b"]}', 0.25),
        ('{"queue": "billing", "customer": {"tags": ["b", "a"]}}', 0.25),
        ("the queue is billing", 0.0),
        ("", 0.0),
        ("{'queue': 'billing'}", 0.0),
        ('{"queue": "billing", ', 0.0),
        (f"[{TRIAGE}]", 0.0),
        ("{" * 5000, 0.0),
        ('{"a":' * 5000, 0.0),
        ("[" * 5000, 0.0),
    ],
)
def test_the_share_of_expected_fields_that_match(answer: str, wanted: float) -> None:
    assert score(answer, TRIAGE) == wanted


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("1", "1.0", True),
        ("0.1", "0.10", True),
        ("1e2", "100", True),
        ("9007199254740993", "9007199254740992", False),
        ("9007199254740993", "9007199254740993.0", True),
        ("1e400", "1e401", False),
        ("true", "1", False),
        ("1", "true", False),
        ("false", "0", False),
        ("true", "true", True),
        ("null", "null", True),
        ("null", "0", False),
        ('"1"', "1", False),
        ('"a"', '"A"', False),
        ('"\\u00e9"', '"é"', True),
        ("[1, true]", "[1.0, true]", True),
        ("[1, true]", "[1, 1]", False),
        ("[1]", "[1, 1]", False),
        ('[{"a": 1}]', '[{"a": 1.0}]', True),
        ('[{"a": 1}]', '[{"a": 1, "b": 2}]', False),
        ("{}", "{}", True),
        ("[]", "{}", False),
        ("NaN", "NaN", False),
    ],
)
def test_values_are_the_same_as_json_has_them(left: str, right: str, same: bool) -> None:
    expected = f'{{"v": {right}, "w": 0}}'
    if right == "NaN":
        assert score(f'{{"v": {left}}}', expected) is None  # NaN is no JSON
    else:
        assert score(f'{{"v": {left}, "w": 0}}', expected) == (1.0 if same else 0.5)


def test_a_missing_field_is_not_null() -> None:
    assert score("{}", '{"a": null}') == 0.0
    assert score('{"a": null}', '{"a": null}') == 1.0


def test_lists_and_the_empty_object_are_one_field() -> None:
    assert score("so [1, 2]", "[1, 2]") == 1.0
    assert score('{"a": 1} and [1]', "[1, 2]") == 0.0
    assert score("nothing: {}", "{}") == 1.0
    assert score('{"a": 1}', "{}") == 0.0


@pytest.mark.parametrize("expected", ["plain text", "42", '"quoted"', "true", "", None, 3, True])
def test_an_expected_answer_without_json_is_not_scored(expected: Any) -> None:
    assert score('{"a": 1}', expected) is None
    assert why_unscored(expected)


def test_an_expected_answer_may_be_a_value_of_the_row() -> None:
    assert score('{"a": {"b": 0.10}, "c": [1]}', {"a": {"b": 0.1}, "c": [2]}) == 0.5
    assert why_unscored({"a": 1}) is None
    assert why_unscored("x") == "holds no JSON object or list: 'x'"


def test_fields_are_told_by_their_path() -> None:
    match = match_labels('{"customer": {"tier": 1}, "queue": "x"}', TRIAGE)
    assert match is not None
    assert match.fields == {
        "queue": False,
        "urgent": False,
        "customer.tier": True,
        "customer.tags": False,
    }
    dotted = match_labels('{"a.b": 1}', '{"a.b": 1, "a": {"b": 2}}')
    assert dotted is not None
    assert dotted.fields == {'"a.b"': True, "a.b": False}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, width=32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(
    st.dictionaries(st.text(), JSON, min_size=1, max_size=4), st.sampled_from(["", "So: ", "[1"])
)
def test_an_answer_that_says_the_expected_scores_1_in_any_wording(
    value: dict[str, Any], before: str
) -> None:
    text = json.dumps(value, allow_nan=True)
    wanted = None if "Infinity" in text else 1.0
    if wanted is None:
        return
    assert score(f"{before}\n```json\n{text}\n```", text) == wanted
    assert score(json.dumps(value, indent=1, sort_keys=True), text) == wanted


@given(st.text('{}[]",:1a\\ \n'))
def test_any_text_is_searched_without_an_error(text: str) -> None:
    assert find_json(text) is None or isinstance(find_json(text), (dict, list))
    assert score(text, '{"a": 1}') in (0.0, 1.0)


@pytest.mark.parametrize(
    "junk", ["{", "[1,", '{"a":', "[" * 900 + "1," * 20_000, '["\\"', "{'a': "]
)
def test_braces_that_begin_no_json_cost_no_more_than_a_bound(
    junk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    read = labels._DECODER.raw_decode

    def counted(text: str, start: int) -> Any:
        tries.append(start)
        return read(text, start)

    monkeypatch.setattr(labels, "_DECODER", SimpleNamespace(raw_decode=counted))
    few = junk * (2_000 // len(junk)) if len(junk) < 10 else "[1,2"
    assert find_json(few + ' so {"a": 1}') == {"a": 1}, "what stands behind some is found"
    tries.clear()
    assert find_json(junk * (600_000 // len(junk))) is None
    assert len(tries) <= labels.MOST_EFFORT // 500
    assert sum(tries) // 30 <= labels.MOST_EFFORT + 600_000, "the lines before each are counted"


def test_it_is_a_built_in_like_the_others() -> None:
    assert rewards.json_label_match is json_label_match
    (term,) = as_terms(json_label_match("label"))
    assert term.name == "json-label-match"
    assert pack([term])[1] == [
        {"name": "json-label-match", "weight": 1.0, "kind": "json-label-match", "column": "label"}
    ]
    assert "reads the column 'label'" in str(check_columns([term], ["answer"])[0])
    with pytest.raises(Refused, match="column is ''"):
        json_label_match("")
    with pytest.raises(Refused, match="Call it, for example"):
        as_terms(json_label_match)


def test_in_a_worker_the_reason_is_logged_once(tmp_path: Path) -> None:
    file = tmp_path / "rewards.pkl"
    file.write_bytes(pack(as_terms(json_label_match()))[0])
    log = tmp_path / "rewards.log"
    with RewardPool(file, workers=1, timeout_seconds=10, log_path=log) as pool:
        for number, answer in enumerate(['{"a": 1}', "plain"]):
            request = GradeRequest("?", ['{"a": 1}', "no", '{"a": 2}'], {"answer": answer})
            pool.submit(number, request)
        grades: dict[int, Any] = {}
        while len(grades) < 2:
            grades |= dict(pool.finished(5))
    assert [g.reward for g in grades[0]] == [1.0, 0.0, 0.0]
    assert [(g.reward, g.kind) for g in grades[1]] == [(None, "missing")] * 3
    said = log.read_text().splitlines()
    assert [line for line in said if "not scored" in line] == [
        "json-label-match: not scored, the column 'answer': holds no JSON object or list: 'plain'"
    ]
