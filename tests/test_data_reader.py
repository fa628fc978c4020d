"""The reader: physical lines, exact values, every complaint in one pass, memory that stays flat."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from datasets_world import CASES, chat, refusal, refusals, text, written
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.data import reader
from nbtrain.data.datasets import DatasetRegistry
from nbtrain.data.findings import Findings
from nbtrain.data.rows import MOST_DEPTH, decode, encode
from nbtrain.store import open_store


@pytest.fixture
def registry(home: Path) -> DatasetRegistry:
    return DatasetRegistry(open_store())


def line_of(problem: Any) -> int:
    assert problem.where is not None
    return int(problem.where.line)


# --- lines


def test_blank_lines_and_crlf_are_no_rows_and_lines_stay_physical(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    data = (CASES / "DF-02.blank.jsonl").read_bytes()
    assert b"\r\n   \r\n" in data
    assert not data.endswith(b"\n")
    found = registry.register("d", CASES / "DF-02.blank.jsonl")
    assert [found.line_of(place) for place in range(found.rows)] == [1, 4]
    broken = written(tmp_path, data.replace(b'"d"', b"d"))
    findings = Findings()
    assert [line for line, _, _ in reader.read_jsonl(broken, findings)] == [1]
    assert findings.refusals[0].lines == [4]


def test_line_separators_inside_texts_end_no_line(registry: DatasetRegistry) -> None:
    found = registry.register("d", CASES / "EV-05.uni.jsonl")
    assert found.rows == 1
    (row,) = found.open_rows()
    assert "\u2028" in row["messages"][0]["content"]
    assert "😀" in row["messages"][0]["content"]


def test_a_byte_order_mark_is_tolerated_and_lines_without_numbers_follow(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    marked = registry.register("d", written(tmp_path, b"\xef\xbb\xbf" + text(chat()).encode()))
    assert marked == registry.register("e", [chat()])


def test_a_line_that_is_too_long_is_named_and_the_next_one_is_read(
    registry: DatasetRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MOST_BYTES", 2**20)
    path = written(tmp_path, text(chat(), chat("x" * 3 * 2**20), chat(), {"messages": 1}))
    problems = refusals(registry, path)
    assert [line_of(problem) for problem in problems] == [2, 4]
    assert "more than 1 MiB" in problems[0].message


# --- what is no row


@pytest.mark.parametrize(
    ("name", "line", "column", "said"),
    [
        ("DF-03.cut.jsonl", 4, 33, "the row is cut off"),
        ("DF-03.list.jsonl", 4, None, "the row is an empty list"),
        ("DF-15.latin.jsonl", 2, None, "byte 47 of the line is not UTF-8 (0xc0)"),
        ("CY-03.dup.jsonl", 1, None, "the key 'messages' stands twice in the row"),
    ],
)
def test_a_bad_row_is_named_by_path_line_and_column(
    registry: DatasetRegistry, name: str, line: int, column: int | None, said: str
) -> None:
    problem = refusal(registry, CASES / name)
    assert problem.message.startswith(said)
    assert problem.where is not None
    assert (problem.where.line, problem.where.column) == (line, column)
    assert str(problem.where).startswith(str(CASES / name))


@pytest.mark.parametrize(
    ("name", "said", "command"),
    [
        ("DF-14.array.jsonl", "is a JSON array (first character [)", "json.load(open(sys.argv[1]"),
        ("DF-14.pretty.jsonl", "an object that runs over several lines", "jq -c ."),
    ],
)
def test_a_file_that_is_one_value_is_recognised_as_a_whole(
    registry: DatasetRegistry, name: str, said: str, command: str
) -> None:
    problem = refusal(registry, CASES / name)
    assert said in problem.message
    assert command in (problem.hint or "")


def test_the_command_that_converts_an_array_makes_rows(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    path = written(tmp_path, (CASES / "DF-14.array.jsonl").read_bytes(), "it's.jsonl")
    hint = refusal(registry, path).hint or ""
    command = hint.split(": ", 1)[1].replace("python -c", f"{sys.executable} -c", 1)
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert registry.register("d", tmp_path / "rows.jsonl").rows == 1


@pytest.mark.parametrize("data", ["[{}, {}]\n\n", "[\n{}\n]", '[{"a":\n1}]', "[", "[1"])
def test_arrays_of_other_layouts_are_arrays_too(
    registry: DatasetRegistry, tmp_path: Path, data: str
) -> None:
    assert "is a JSON array" in refusal(registry, written(tmp_path, data)).message


@pytest.mark.parametrize(
    ("head", "kind", "command"),
    [
        (gzip.compress(b"{}"), "a gzip file", "gunzip -c"),
        (b"PK\x03\x04....", "a zip file", "unzip -p"),
        (b"PAR1....", "a Parquet file", "read_parquet"),
        ("{}".encode("utf-16"), "a UTF-16 text", "iconv -f UTF-16 "),
        ("{}".encode("utf-16-le"), "a UTF-16 text", "iconv -f UTF-16LE "),
        ("{}".encode("utf-16-be"), "a UTF-16 text", "iconv -f UTF-16BE "),
        ("{}".encode("utf-32"), "a UTF-32 text", "iconv -f UTF-32 "),
        ("{}".encode("utf-32-le"), "a UTF-32 text", "iconv -f UTF-32LE "),
        ("{}".encode("utf-32-be"), "a UTF-32 text", "iconv -f UTF-32BE "),
        (b"\x00\x00\xfe\xff" + "{}".encode("utf-32-be"), "a UTF-32 text", "iconv -f UTF-32 "),
        (b"\x28\xb5\x2f\xfd..", "a zstd file", "zstd -dc"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer", "git lfs pull"),
    ],
)
def test_other_formats_are_told_by_their_first_bytes_whatever_the_name(
    registry: DatasetRegistry, tmp_path: Path, head: bytes, kind: str, command: str
) -> None:
    problem = refusal(registry, written(tmp_path, head))
    assert f"data.jsonl is {kind}" in problem.message
    assert command in (problem.hint or "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"a": 1} {"a": 2}', "more stands on the line"),
        ("{'a': 1}", "the row is not JSON: expecting property name"),
        ("hello", "the row is not JSON: expecting value"),
        ('"hello"', "the row is text"),
        ("12", "the row is a number"),
        ("null", "the row is null"),
        ('{"a": {"b": [1, NaN]}}', "a.b[1] is no finite number"),
        ('{"a": -Infinity}', "a is no finite number"),
        ('{"a": 1e999}', "a is no finite number"),
        ('{"a": ["\\ud83d"]}', "a[0] holds half of a surrogate pair"),
        ('{"\\udc00": 1}', "a key of the row holds half of a surrogate pair"),
        ('{"a": [{"b": 1, "c": 2, "b": 3}]}', "the key 'b' stands twice in a[0]"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", "the row is nested more than 200 levels"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "the row is nested more than 200 levels"),
        (
            '{"a": {"b": 1, "b": 2}, "c": ' + "[" * 9999 + "]" * 9999 + "}",
            "the row is nested more than 200 levels",
        ),
        ('{"a": ' + "9" * 5000 + "}", "a whole number has more than 4,300 digits"),
        ('{"a": "\x01"}', "the row is not JSON: invalid control character"),
        ("\ufeff{}", "the row is not JSON: expecting value"),
    ],
)
def test_values_without_exact_json_are_refused_by_place(
    registry: DatasetRegistry, tmp_path: Path, line: str, said: str
) -> None:
    problem = refusal(registry, written(tmp_path, text(chat()) + "\n" + line + "\n" + text(chat())))
    assert problem.message.startswith(said)
    assert line_of(problem) == 3
    assert len(str(problem)) < 400  # the row is not echoed


def test_a_deep_row_that_is_allowed_can_be_read_back(registry: DatasetRegistry) -> None:
    value: Any = 1
    for _ in range(MOST_DEPTH - 1):
        value = [value]
    (row,) = registry.register("d", [chat(deep=value)]).open_rows()
    assert row["deep"] == value
    findings = Findings()
    assert encode(chat(deep=[value]), 1, findings) is None
    assert findings.refused


def test_half_a_surrogate_pair_in_raw_bytes_is_not_utf_8(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    problem = refusal(registry, written(tmp_path, b'{"a": "\xed\xa0\xbd"}\n'))
    assert "not UTF-8 (0xed)" in problem.message


@pytest.mark.parametrize("data", ["", "\n \r\n", "\ufeff"])
def test_a_file_without_rows_is_refused(
    registry: DatasetRegistry, tmp_path: Path, data: str
) -> None:
    assert refusal(registry, written(tmp_path, data)).message == "there are no rows"


# --- values


def test_no_type_is_inferred_across_rows(registry: DatasetRegistry, tmp_path: Path) -> None:
    rows = [chat("q", "a", para="1a" if n == 1998 else n % 50) for n in range(2000)]
    found = registry.register("d", written(tmp_path, text(*rows)))
    values = [row["para"] for row in found.open_rows()]
    assert values[1998] == "1a"
    assert values[:3] == [0, 1, 2]
    assert {type(value) for value in values} == {int, str}


def test_whole_numbers_of_any_size_stay_exact(registry: DatasetRegistry) -> None:
    first, second = registry.register("d", CASES / "DF-17.ints.jsonl").open_rows()
    assert (first["id"], first["n"]) == (10254939386542155531, 9007199254740993)
    assert second["n"] is None


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**30, max_value=10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Equal in values, types, signs and the order of keys."""
    return repr(one) == repr(other)


@given(st.dictionaries(st.text(), json_values, max_size=5), st.booleans())
def test_any_json_row_comes_back_exactly(row: dict[str, Any], ascii_only: bool) -> None:
    findings = Findings()
    read = decode(json.dumps(row, ensure_ascii=ascii_only, indent=1), 1, findings)
    assert read is not None
    data = encode(read, 1, findings)
    assert data is not None
    assert data.count(b"\n") == 1
    assert same(json.loads(data), row)
    assert not findings.refused


# --- many rows


def test_ten_kinds_of_bad_rows_are_ten_findings_in_one_pass(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    bad = [
        '{"messages": [',
        "[]",
        '{"messages": 1, "messages": 2}',
        '{"messages": "hello"}',
        '{"conversations": []}',
        '{"messages": [{"role": "robot", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": 5}]}',
        '{"messages": [{"role": "user", "content": ""}]}',
        text(chat("q", "a", x=float("nan"))).strip(),
        '{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}',
    ]
    lines = [text(chat()).strip() + "\n" + line for line in bad] * 3
    problems = refusals(registry, written(tmp_path, "\n".join(lines)))
    assert [line_of(problem) for problem in problems] == list(range(2, 22, 2))
    for place, problem in enumerate(problems):
        first = 2 * place + 2
        assert f"3 rows: lines {first}, {first + 20}, {first + 40}" in problem.message


def test_one_bad_row_among_ten_thousand_is_named_by_its_line(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    rows = [chat(str(n)) for n in range(10_000)]
    rows[4_999]["messages"][1]["content"] = None
    problem = refusal(registry, written(tmp_path, "\n" + text(*rows)))
    assert line_of(problem) == 5_001
    assert problem.message == "messages[1].content is null"


def test_rows_that_are_alike_are_counted_exactly_and_ten_are_named(
    registry: DatasetRegistry,
) -> None:
    problem = refusal(registry, CASES / "DF-09.sharegpt.jsonl")
    total = sum(1 for _ in (CASES / "DF-09.sharegpt.jsonl").open())
    shown = ", ".join(map(str, range(1, 11)))
    assert f"alike in {total} rows: lines {shown} …" in problem.message
    assert "its keys are: conversations" in problem.message
    assert "'value'" in (problem.hint or "")


def test_kinds_without_end_are_listed_up_to_fifty(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    rows = [{"messages": [{"role": f"r{n}", "content": "x"}]} for n in range(2000)]
    problems = refusals(registry, written(tmp_path, text(*rows)))
    assert len(problems) == 50
    assert "more kinds of problems" in (problems[-1].hint or "")


def test_the_progress_counts_rows_and_bytes(registry: DatasetRegistry, tmp_path: Path) -> None:
    told: list[tuple[int, int, int]] = []
    path = written(tmp_path, text(*(chat(str(n)) for n in range(2_500))))
    registry.register("d", path, progress=lambda *now: told.append(now))
    size = path.stat().st_size
    assert [rows for rows, _, _ in told] == [1000, 2000, 2500]
    assert told[-1] == (2500, size, size)
    assert all(done <= size for _, done, _ in told)


def test_memory_does_not_grow_with_the_number_of_rows(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    peaks = []
    for count in (2_000, 2_000, 10_000):  # the first warms caches up
        path = written(tmp_path, text(*(chat(str(n), "x" * 500) for n in range(count))))
        tracemalloc.start()
        found = registry.register("d", path)
        assert sum(1 for _ in found.open_rows()) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 200_000, peaks
    assert peaks[2] < 8_000_000, peaks


@pytest.mark.long
def test_a_hundred_thousand_rows_of_300_mb_are_read_in_little_memory(
    home: Path, tmp_path: Path
) -> None:
    script = tmp_path / "register.py"
    script.write_text(
        "import json, resource, sys, time\n"
        "from nbtrain.data.datasets import DatasetRegistry\n"
        "from nbtrain.store import open_store\n"
        "began = time.process_time()\n"
        "found = DatasetRegistry(open_store()).register('d', sys.argv[1])\n"
        "spent = time.process_time() - began\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "print(json.dumps({'rows': found.rows, 'peak': peak, 'cpu': spent}))\n"
    )
    path = tmp_path / "big.jsonl"
    body = 'wörter "quoted" {and} [so] on 😀 ' * 80
    with path.open("w", encoding="utf-8") as file:
        for n in range(100_000):
            file.write(json.dumps(chat(f"{n} {body}", str(n)), ensure_ascii=False) + "\n")
    assert path.stat().st_size > 290e6
    ran = subprocess.run(
        [sys.executable, str(script), str(path)], check=True, capture_output=True, text=True
    )
    told = json.loads(ran.stdout)
    print(f"{told['rows'] / told['cpu']:,.0f} rows/s, {told['peak'] / 2**20:,.0f} MiB")
    assert told["rows"] == 100_000
    assert told["peak"] < 300e6
