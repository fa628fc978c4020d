"""The line of a magic is taken exactly as typed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.notebook.line import Flag, parse, split

FLAGS = (
    Flag("--name", "N", "a name"),
    Flag("--data", "D", "a path"),
    Flag("--wait", None, "wait"),
)


def texts(line: str) -> list[str]:
    words, problems = split(line)
    assert not problems
    return [word.text for word in words]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('--data "a b"', ["--data", "a b"]),
        ("--data='a b'", ["a b"]),
        ('--data="C:\\new dir\\t"', ["C:\\new dir\\t"]),
        (r"--out C:\temp\new", ["--out", r"C:\temp\new"]),
        ("--name 'it''s'", ["--name", "it's"]),
        ("--name it's", ["--name", "it's"]),
        ("--set 'config.reward={\"a\": {1}}'", ["--set", 'config.reward={"a": {1}}']),
        ("--note 'cost $HOME {x}'", ["--note", "cost $HOME {x}"]),
        ("--steps 20 # --lr 1e-3", ["--steps", "20"]),
        ('--name "run #7" # not this: --bogus', ["--name", "run #7"]),
        ("--name run#7", ["--name", "run#7"]),
        ("# all of it", []),
        ("  --wait   ", ["--wait"]),
        ("--name=", [""]),
        ("", []),
    ],
)
def test_split(line: str, expected: list[str]) -> None:
    got = [word.text for word in split(line)[0] if word.flag is None or word.value]
    flags = [word.flag for word in split(line)[0] if word.flag and not word.value]
    assert flags + got == expected if flags else got == expected


@given(st.text(alphabet="ab $\\{}#=-'\"\t", max_size=30))
def test_any_value_in_quotes_arrives_unchanged(value: str) -> None:
    for quote in "'\"":
        line = f"--name={quote}{value.replace(quote, quote * 2)}{quote} --wait"
        parsed = parse(line, FLAGS)
        assert parsed.text("--name") == value
        assert parsed.has("--wait")


@given(st.text(max_size=40))
def test_no_line_makes_it_fail(line: str) -> None:
    parsed = parse(line, FLAGS)
    for word in [*parsed.values.values(), *parsed.rest]:
        assert word.text == "" or word.text.strip("'\"") in line.replace("''", "'").replace(
            '""', '"'
        )


def test_columns_count_from_the_start_of_the_cell() -> None:
    words, _ = split("--name  x --data=y", offset=len("%%train "))
    cell = "%%train --name  x --data=y"
    for word in words:
        text = word.text if word.value else word.flag
        assert text is not None
        assert cell[word.column - 1 :].startswith(text)


def test_everything_wrong_is_told_at_once() -> None:
    parsed = parse("--nmae x --name --wait=yes --data d --data e loose", FLAGS)
    told = [str(problem) for problem in parsed.problems]
    assert len(told) == 6
    assert "did you mean '--name'?" in told[0]
    assert "'x' belongs to no flag" in told[1]
    assert "--name needs a value" in told[2]
    assert "--wait takes no value" in told[3]
    assert "--data is given twice" in told[4]
    assert "'loose'" in told[5]
    assert all(problem.where is not None for problem in parsed.problems)


def test_an_unknown_flag_is_told_of_the_known_ones() -> None:
    (problem,) = parse("--zzz", FLAGS).problems
    assert problem.allowed == ", ".join(flag.name for flag in FLAGS)


def test_an_unclosed_quote_is_told_with_its_column() -> None:
    parsed = parse("--name 'abc", FLAGS)
    (problem,) = parsed.problems
    assert problem.where is not None
    assert problem.where.column == 8


def test_text_behind_a_closing_quote_is_refused() -> None:
    assert "closing" in str(parse("--name 'a'b", FLAGS).problems[0])
