"""Text into values with line and column: YAML 1.2, strict JSON, names, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbtrain.errors import PlanRefused, Problem
from nbtrain.plan.source import BROKEN, SourcedList, parse

CASES = Path(__file__).parent / "cases"
calm = settings(deadline=None)


def problems(text: str, **how: Any) -> tuple[Problem, ...]:
    with pytest.raises(PlanRefused) as refused:
        parse(text, **how)
    return refused.value.problems


def place(problem: Problem) -> tuple[int | None, int | None]:
    assert problem.where is not None
    return problem.where.line, problem.where.column


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2e-5", 2e-5),
        ("1E-4", 1e-4),
        ("1.5e+3", 1500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-3", -3),
        ("+3", 3),
        ("012", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("off", "off"),
        ("yes", "yes"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("'1e-4'", "1e-4"),
        ('"true"', "true"),
        ("|\n  two\n  lines\n", "two\nlines\n"),
        ("nbtrain/tiny", "nbtrain/tiny"),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(text: str, value: object) -> None:
    found = parse(f"a: {text}", syntax="yaml")["a"]
    assert found == value
    assert type(found) is type(value)


def test_nan_is_a_number_that_resolving_refuses() -> None:
    assert math.isnan(parse("a: .nan")["a"])


def test_keys_are_their_own_text() -> None:
    assert dict(parse("5: a\nno: b\ntrue: c")) == {"5": "a", "no": "b", "true": "c"}


def test_yaml_and_json_give_the_same_values() -> None:
    as_yaml = parse((CASES / "numbers.yaml").read_text(), source="numbers.yaml")
    as_json = parse((CASES / "numbers.json").read_text(), source="numbers.json")
    assert as_yaml == as_json == json.loads((CASES / "numbers.json").read_text())


def test_every_key_and_value_knows_its_place() -> None:
    found = parse("\n# top\nnum_steps:   20\nlist:\n  - 1\n  - {a: 2}\n", source="run.yaml")
    assert str(found.where_key("num_steps")) == "run.yaml, line 3, column 1"
    assert str(found.where_value("num_steps")) == "run.yaml, line 3, column 14"
    inner = found["list"]
    assert isinstance(inner, SourcedList)
    assert str(inner.where_item(1)) == "run.yaml, line 6, column 5"
    assert str(inner[1].where_value("a")) == "run.yaml, line 6, column 9"
    assert inner.where_item(2) is None
    assert found.where_key("other") is None
    assert found.where_value("other") is None


def test_json_places_and_the_offset_of_a_cell() -> None:
    found = parse('{"a": 1,\n  "b": [true,\n   null]}', offset_lines=1)
    assert str(found.where_key("b")) == "line 3, column 3"
    assert str(found["b"].where_item(1)) == "line 4, column 4"


def test_sourced_values_are_plain() -> None:
    found = parse("a: {b: [1, two]}")
    assert json.dumps(found) == '{"a": {"b": [1, "two"]}}'
    assert found == {"a": {"b": [1, "two"]}}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("empty.yaml", "nothing"),
        ("comments.yaml", "nothing"),
        ("list.yaml", "a list"),
        ("number.yaml", "a number"),
    ],
)
def test_a_file_must_hold_a_mapping(name: str, found: str) -> None:
    (problem,) = problems((CASES / name).read_text(), source=name)
    assert problem.message == f"{name}: a mapping is needed, found {found}"


@pytest.mark.parametrize(
    ("text", "found"), [("hello", "a text"), ("true", "true or false"), ("[1]", "a list")]
)
def test_a_body_must_hold_a_mapping(text: str, found: str) -> None:
    (problem,) = problems(text, empty_ok=True)
    assert problem.message == f"a mapping is needed, found {found}"


@pytest.mark.parametrize("text", ["", "  \n\n", "# only a comment\n", "---\n", "\ufeff"])
def test_an_empty_body_is_an_empty_mapping_where_that_is_allowed(text: str) -> None:
    assert parse(text, empty_ok=True) == {}
    assert "found nothing" in problems(text)[0].message


@pytest.mark.parametrize(
    ("name", "message", "line"),
    [
        ("two-documents.yaml", "a second document", 2),
        ("tab.yaml", "a tab stands", 3),
        ("tag.yaml", "the tag !!python/object/apply:os.getcwd is not read", 1),
        ("duplicate.yaml", "num_steps is written twice, on lines 2 and 4", 4),
    ],
)
def test_what_yaml_files_may_not_hold(name: str, message: str, line: int) -> None:
    (problem,) = problems((CASES / name).read_text(), source=name)
    assert message in problem.message
    assert place(problem)[0] == line
    assert name in str(problem)


def test_anchors_and_aliases_are_refused_where_they_stand() -> None:
    found = problems((CASES / "anchor.yaml").read_text())
    assert [place(p) for p in found] == [(1, 11), (2, 15)]
    assert all("anchors and aliases" in p.message for p in found)


def test_aliases_cannot_blow_up() -> None:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 9))
    assert len(problems("l0: &l0 x\n" + levels)) == 9 + 8 * 9


def test_duplicates_are_refused_at_every_depth_all_at_once() -> None:
    found = problems((CASES / "duplicate.json").read_text(), source="duplicate.json")
    assert [(p.field, place(p)) for p in found] == [("nested.a", (4, 4)), ("num_steps", (5, 2))]
    assert "on lines 3 and 4" in found[0].message
    assert "on lines 2 and 5" in found[1].message
    found = problems("a:\n  - {b: 1, b: 2}\n  - {c: 1}\na: 3\n", offset_lines=10)
    assert [p.field for p in found] == ["a.0.b", "a"]
    assert "on line 12" in found[0].message
    assert "on lines 11 and 14" in found[1].message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": NaN}', "NaN is no value"),
        ('{"a": -Infinity}', "-Infinity is no value"),
        ('{"a": 01}', '"," or "}" is needed, found "1"'),
        ('{"a": 1,}', "a key in double quotes is needed"),
        ("{'a': 1}", "a key in double quotes is needed"),
        ('{"a" 1}', '":" is needed after the key a'),
        ('{"a": }', 'a value is needed, found "}"'),
        ('{"a": 1', "found the end of the text"),
        ('{"a": "x', "Unterminated string"),
        ('{"a": "\t"}', "Invalid control character"),
        ('{"a": 1} {}', "after the end"),
        ('{"a": 1e999}', "too large"),
        ('{"a": "\\ud800"}', "half a character"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
        ('{"a": ' + "[" * 1000, "nested"),
    ],
)
def test_json_is_strict(text: str, message: str) -> None:
    (problem,) = problems(text, syntax="json")
    assert message in problem.message
    assert place(problem)[0] == 1


def test_the_place_of_broken_json_is_exact() -> None:
    (problem,) = problems('{\n  "a": 1,\n  "b": nope\n}', source="run.json")
    assert place(problem) == (3, 8)


def test_a_body_that_is_almost_json_is_read_as_yaml() -> None:
    assert parse('{"a": 1, b: .5,} # a comment') == {"a": 1, "b": 0.5}
    assert parse("{num_steps: $n}", names={"n": 3}) == {"num_steps": 3}
    (problem,) = problems('{"a": 1 "b": 2}')
    assert "not valid JSON" in problem.message


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("a: 1\n b: 2", "mapping values are not allowed", (2, 3)),
        ("a: @x", "cannot start any token", (1, 4)),
        ("a: 'x", "unexpected end of stream", (1, 6)),
        ("a: \x01", "a character that text may not contain", (1, 4)),
        ("? [a]\n: 1", "a key must be text", (1, 3)),
        ("'': 1", "a key must be text", (1, 1)),
        ("a: " + "[" * 100 + "]" * 100, "nested", (1, 68)),
        ("a: 1e999", "too large", (1, 4)),
    ],
)
def test_broken_yaml_is_refused_with_its_place(
    text: str, message: str, where: tuple[int, int]
) -> None:
    (problem,) = problems(text)
    assert message in problem.message
    assert place(problem) == where


def test_a_name_becomes_the_object_itself() -> None:
    rate, tasks = 3e-4, {"prompt": []}
    found = parse(
        'learning_rate: $rate\nworkload: "$tasks"\nlist: [$rate]',
        names={"rate": rate, "tasks": tasks},
    )
    assert found["learning_rate"] == rate
    assert found["workload"] is tasks
    assert found["list"] == [rate]


def test_only_a_whole_scalar_is_a_name() -> None:
    text = "a: $$x\nb: cost $x\nc: $x.y\nd: $5\ne: '$$$x'\n$x: f"
    found = parse(text, names={"x": 1})
    assert dict(found) == {
        "a": "$x", "b": "cost $x", "c": "$x.y", "d": "$5", "e": "$$x", "$x": "f",
    }  # fmt: skip


def test_without_names_a_dollar_is_a_dollar() -> None:
    assert dict(parse("a: $x\nb: $$x")) == {"a": "$x", "b": "$$x"}


def test_an_undefined_name_is_refused_with_its_place() -> None:
    (problem,) = problems("a: 1\nb:  $rat", names={"rate": 1}, offset_lines=1)
    assert "the name $rat is not defined" in problem.message
    assert place(problem) == (3, 5)
    assert problem.hint is not None
    assert "$rate?" in problem.hint
    assert "$$rat" in problem.hint


def test_deferred_problems_stay_with_what_could_be_read() -> None:
    text = "a: $nope\nb: !!str 5\nc: 1\nc: 2\nd: 4"
    found = parse(text, names={}, defer=True)
    assert dict(found) == {"a": BROKEN, "b": BROKEN, "c": 1, "d": 4}
    assert [place(p)[0] for p in found.problems] == [1, 2, 4]
    with pytest.raises(PlanRefused) as refused:
        parse(text, names={})
    assert refused.value.problems == found.problems


def test_what_cannot_be_read_is_refused_even_when_deferred() -> None:
    assert len(problems("a: 1\na: 2\nb: 'x", defer=True)) == 1
    assert len(problems("- 1", defer=True)) == 1


words = st.text(st.characters(exclude_categories=["Cs"]))
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(words.filter(str.strip), inner, max_size=4)
    ),
    max_leaves=12,
)


@calm
@given(st.dictionaries(words.filter(str.strip), plain, max_size=5), st.sampled_from([None, 2]))
def test_json_text_reads_back_as_json_loads_reads_it(data: dict[str, Any], indent: Any) -> None:
    text = json.dumps(data, indent=indent, ensure_ascii=indent is None)
    assert parse(text, syntax="json") == json.loads(text) == data


@calm
@given(st.text(max_size=60) | st.text("abcx12:{}[]\"'\\ \n\t,-#&*!|>$.", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse(text, names={}, defer=True)
    except PlanRefused as refused:
        deferred = refused.problems
    else:
        deferred = found.problems
        if not deferred:
            assert parse(text, names={}) == found
            return
    assert problems(text, names={}) == deferred


@pytest.mark.parametrize("text", ["a: 1\nb: [1, 2\n\n \n", "a: 1\nb: [1, 2\n", "a: 1\nb: [1, 2"])
def test_what_is_missing_at_the_end_is_missed_on_the_last_written_line(text: str) -> None:
    with pytest.raises(PlanRefused) as refused:
        parse(text)
    where = refused.value.problems[0].where
    assert where is not None
    assert (where.line, where.column) == (2, 9)


@pytest.mark.parametrize("number", ["1e-400", "-0.5E-999", "2e-9999"])
@pytest.mark.parametrize("form", ["{}: {}", '{{"{}": {}}}'], ids=["yaml", "json"])
def test_a_number_too_small_to_be_one_is_refused(number: str, form: str) -> None:
    with pytest.raises(PlanRefused) as refused:
        parse(form.format("learning_rate", number))
    (problem,) = refused.value.problems
    assert problem.message == "learning_rate: this number is too small: it would be read as 0"
    for zero in ("0e-400", "-0.0", "0.000e5"):
        assert parse(form.format("learning_rate", zero))["learning_rate"] == 0
    assert parse(form.format("learning_rate", "5e-324"))["learning_rate"] > 0
