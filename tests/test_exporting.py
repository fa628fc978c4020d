"""The tables of a run as files: whole, equal to what is stored, harmless in a spreadsheet."""

from __future__ import annotations

import csv
import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import openpyxl
import pandas as pd
import pyarrow.parquet as pq
import pytest
import stored

from nbtrain.client import Client, Run, export_tables
from nbtrain.client.exporting import export
from nbtrain.errors import NotWritten, Refused
from nbtrain.report import writers

FORMULA = '=HYPERLINK("http://x","click")'


@pytest.fixture
def client(home: Path) -> Client:
    return Client()


def fed(client: Client, steps: int = 3) -> Run:
    run = stored.create(client)
    stored.train(run)
    for number in range(1, steps + 1):
        stored.step(run, number, 0.5, rewards=(0.0, None), metrics={"terms": {"exact": 0.5}})
    text = {
        "prompt": [{"role": "user", "content": FORMULA}],
        "completion": f"{FORMULA}\n\x07 ä \ud800" + "x" * 40_000,
        "terms": {"exact": 1.0},
        "error": "+1 traceback",
    }
    row = {"step": steps + 1, "avg_reward": None, "completed_groups": 1}
    odd = {"trajectory_id": 9000, "group_id": 90, "task_id": "cd" * 8, "status": "completed",
           "reward": 1.0, "eligible": True, "verdict": "-1", "text": text}  # fmt: skip
    stored.writer(run).commit_step(row, [{"group_id": 90, "size": 1}], [odd])
    stored.validate(run, 0, 0.25)
    stored.save(run, 2)
    return run


def same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    """Equal values in equal columns; nothing is nothing, whatever stands for it."""
    assert list(found.columns) == list(expected.columns)
    for name in found.columns:
        pairs = zip(found[name].tolist(), expected[name].tolist(), strict=True)
        assert all((pd.isna(a) and pd.isna(b)) or a == b for a, b in pairs), name


def manifest(files: list[Path]) -> dict[str, Any]:
    assert files[-1].name == "manifest.json"
    told: dict[str, Any] = json.loads(files[-1].read_text("utf-8"))
    return told


def test_parquet_reads_back_equal(client: Client, tmp_path: Path) -> None:
    run = fed(client)
    files = run.export(tmp_path / "out")
    told = manifest(files)
    assert {path.stem for path in files[:-1]} == set(told["tables"])
    for name in ("metrics", "rewards", "groups", "validation", "checkpoints", "events"):
        found = pd.read_parquet(tmp_path / "out" / f"{name}.parquet")
        same(found, getattr(run, name))
    rows = pq.read_table(tmp_path / "out" / "trajectories.parquet").to_pylist()
    assert len(rows) == 7
    expected = {item.trajectory_id: item for item in client.trajectories.list(run)}
    for row in rows[:-1]:
        item = expected[row["trajectory_id"]]
        assert json.loads(row["prompt"]) == item.prompt
        assert row["completion"] == item.completion
        assert json.loads(row["terms"]) == item.terms
        assert row["reward"] == item.reward
    assert rows[-1]["completion"].startswith(f"{FORMULA}\n\x07 ä \ufffdxxx")
    assert rows[-1]["traceback"] == "+1 traceback"
    assert len(rows[-1]["completion"]) == len(FORMULA) + 40_006


def test_the_manifest_tells_hashes_and_what_every_column_means(
    client: Client, tmp_path: Path
) -> None:
    run = fed(client)
    files = run.export(tmp_path / "out", "csv")
    told = manifest(files)
    assert told["run"]["config_hash"] == run.config_hash
    for path in files[:-1]:
        assert told["files"][path.name]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    for table in told["tables"].values():
        assert table["holds"]
        for name, column in table["columns"].items():
            assert column["meaning"], name
    supervised = stored.create_supervised(client)
    stored.loss(supervised, 1, 2.0)
    columns = [column for table in export_tables.tables_of(supervised) for column in table.columns]
    assert [column.name for column in columns if not column.meaning] == []


def test_csv_has_no_formula_and_plain_values(client: Client, tmp_path: Path) -> None:
    run = fed(client)
    run.export(tmp_path / "out", "csv")
    with (tmp_path / "out" / "trajectories.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[-1]["completion"].startswith(f"'{FORMULA}\n\x07 ä \ufffd")
    assert rows[-1]["traceback"] == "'+1 traceback"
    assert rows[-1]["verdict"] == "'-1"
    assert rows[0]["reward"] == "0.0"
    assert rows[1]["reward"] == ""
    assert rows[0]["eligible"] == "True" or rows[0]["eligible"] == "true"
    with (tmp_path / "out" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        metrics = list(csv.DictReader(file))
    assert [row["step"] for row in metrics] == ["1", "2", "3", "4"]
    assert metrics[0]["terms.exact"] == "0.5"
    assert metrics[3]["avg_reward"] == ""
    assert metrics[0]["created_at"].endswith("Z")
    found = pd.read_csv(tmp_path / "out" / "rewards.csv")
    pd.testing.assert_frame_equal(found, run.rewards, check_dtype=False)


def test_a_workbook_holds_texts_as_texts_and_says_what_it_cut(
    client: Client, tmp_path: Path
) -> None:
    run = fed(client)
    files = run.export(tmp_path / "out", "xlsx")
    assert [path.name for path in files] == ["tables.xlsx", "manifest.json"]
    book = openpyxl.load_workbook(files[0])
    sheet = book["trajectories"]
    names = [cell.value for cell in sheet[1]]
    last = sheet[sheet.max_row]
    completion = last[names.index("completion")]
    assert completion.data_type == "s"
    assert completion.value.startswith(f"{FORMULA}\n\ufffd ä \ufffd")
    assert len(completion.value) == 32_767
    assert last[names.index("traceback")].data_type == "s"
    assert last[names.index("traceback")].quotePrefix
    assert manifest(files)["tables"]["trajectories"]["left_out"] == [
        "1 texts cut to 32,767 characters, the most that a cell holds",
        "1 texts with characters that no workbook holds, each replaced by \ufffd",
    ]
    assert book["metrics"]["A2"].value == 1
    assert book["events"]["A2"].value.year > 2000
    for each in book.worksheets:
        assert all(cell.data_type != "f" for row in each.iter_rows() for cell in row)


def test_a_workbook_can_be_read_whatever_character_a_text_holds(tmp_path: Path) -> None:
    """XML 1.0 forbids more than control characters; every one is replaced and counted."""
    fine = "\t\n\x20\x7f\x85\ud7ff\ue000\ufffd\U00010000\U0010ffff"
    forbidden = [chr(n) for n in range(32) if n not in (9, 10, 13)]
    forbidden += ["\ud800", "\udbff", "\udc00", "\udfff", "\ufffe", "\uffff"]
    columns = [writers.Column("t", "text"), writers.Column("odd \x07\ufffe\ud800", "json")]
    rows = [{"t": f"a{char}b", columns[1].name: [char]} for char in forbidden]
    with writers.writer_for("xlsx", tmp_path) as writer:
        written = writer.write("t", columns, [[*rows, {"t": fine}]])
    sheet = openpyxl.load_workbook(written.path)["t"]
    values = [row[0].value for row in sheet.iter_rows()]
    assert values == ["t", *["a\ufffdb"] * len(forbidden), fine]
    assert sheet["B1"].value == "odd \ufffd\ufffd\ufffd"
    # JSON spells control characters out; what it leaves as they are are the other six
    count = len(forbidden) + 6
    assert written.said == [
        f"{count} texts with characters that no workbook holds, each replaced by \ufffd"
    ]


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_column_of_any_name_is_written(tmp_path: Path, form: str) -> None:
    columns = [writers.Column("=1\ud800", "integer")]
    with writers.writer_for(form, tmp_path) as writer:
        path = writer.write("t", columns, [[{"=1\ud800": 1}]]).path
    found = pd.read_parquet(path) if form == "parquet" else pd.read_csv(path)
    assert list(found.columns) == ["=1\ufffd" if form == "parquet" else "'=1\ufffd"]
    assert found.iloc[0, 0] == 1


def test_a_sheet_that_is_full_says_what_is_left_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "ROW_LIMIT", 3)
    columns = [writers.Column("n", "integer")]
    with writers.writer_for("xlsx", tmp_path) as writer:
        written = writer.write("t", columns, [[{"n": n} for n in range(5)]])
    assert written.rows == 3
    assert written.said == ["2 rows left off, as a sheet holds 4"]


def test_refusals_come_all_at_once_and_touch_nothing(client: Client, tmp_path: Path) -> None:
    run = stored.create(client)
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / "mine").write_text("x")
    with pytest.raises(Refused, match="2 problems") as caught:
        run.export(folder, "excel")
    assert [problem.field for problem in caught.value.problems] == ["format", "folder"]
    assert caught.value.problems[0].allowed == "parquet, csv, xlsx"
    assert [path.name for path in folder.iterdir()] == ["mine"]
    with pytest.raises(Refused, match="is a file"):
        run.export(folder / "mine")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run.export(empty)


@pytest.mark.parametrize("form", writers.FORMATS)
def test_a_full_disk_leaves_nothing(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    run = fed(client)

    def full(_: Run) -> Any:
        yield {"id": 1}, {"id": 2}
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_tables, "_groups", lambda run: full(run))
    with pytest.raises(NotWritten, match=r"out cannot be written: the disk is full$"):
        run.export(tmp_path / "out", form)
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == []


def test_a_run_without_a_step_exports_empty_tables(client: Client, tmp_path: Path) -> None:
    run = stored.create(client)
    for form in writers.FORMATS:
        told = manifest(export(run, tmp_path / form, form))
        assert told["tables"]["metrics"]["rows"] == 0
        assert told["tables"]["trajectories"]["rows"] == 0
        assert told["tables"]["plan"]["rows"] > 40
    assert pd.read_parquet(tmp_path / "parquet" / "metrics.parquet").empty


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_trajectories_are_held_a_piece_at_a_time(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    run = stored.create(client)
    monkeypatch.setattr(export_tables, "_PIECE", 50)
    monkeypatch.setattr(export_tables, "tables_of", export_tables.tables_of)
    written = {}
    for count in (100, 1_000):
        text = {"prompt": "p", "completion": "", "terms": None, "error": None}
        rows = [
            {"trajectory_id": count * 10 + n, "group_id": 1, "status": "completed", "reward": 0.0,
             "text": {**text, "completion": f"{count}.{n} " * 1_000}}
            for n in range(count)
        ]  # fmt: skip
        step = {"step": count, "avg_reward": 0.0, "completed_groups": 1}
        stored.writer(run).commit_step(step, [{"group_id": 1, "size": count}], rows)
        folder = tmp_path / str(count)
        folder.mkdir()
        (table,) = (t for t in export_tables.tables_of(run) if t.name == "trajectories")
        tracemalloc.start()
        with writers.writer_for(form, folder) as writer:
            written[count] = writer.write("t", table.columns, table.pieces).rows
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if count == 100:
            first = peak
    assert written == {100: 100, 1_000: 1_100}
    assert peak < 1.5 * first  # eleven times as many


def test_values_are_plain() -> None:
    assert writers.kind_of([1, 2.5, None]) == "number"
    assert writers.kind_of([True, None]) == "flag"
    assert writers.kind_of(["a", 1]) == "json"
    assert writers.kind_of([]) == "text"
    assert writers.plain(float("nan"), "number") is None
    assert writers.plain({"a": 1}, "json") == '{"a": 1}'
    for text in ("=1", "+1", "-1", "@a", "\tx", "\rx"):
        assert writers._inert(text) == f"'{text}"
    assert writers._inert("1 = 1") == "1 = 1"
