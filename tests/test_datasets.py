"""The registry: identity by content, names that move, damage, full disks, writers at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from datasets_world import CASES, chat, refusal, refusals, text, written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nbtrain.data.datasets import Dataset, DatasetRegistry
from nbtrain.data.folders import EVERY
from nbtrain.errors import AmbiguousReference, NotFound, Refused, StoreError
from nbtrain.store import open_store


@pytest.fixture
def registry(home: Path) -> DatasetRegistry:
    return DatasetRegistry(open_store())


def entries(registry: DatasetRegistry) -> list[str]:
    return sorted(entry.name for entry in (registry._store.home / "datasets").iterdir())


# --- identity and names


def test_the_same_examples_are_the_same_dataset_whatever_the_file(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    rows = [chat("größe", "😀", n=1.5), chat("b", "c", n=2.0)]
    one = registry.register("d", written(tmp_path, text(*rows), "a.jsonl"))
    spaced = "\ufeff" + "\r\n \r\n".join(
        json.dumps(row, ensure_ascii=False, separators=(" , ", " : ")) for row in rows
    )
    two = registry.register("e", written(tmp_path, spaced, "b.jsonl"))
    assert one == two == registry.register("f", rows) == registry.register("g", pd.DataFrame(rows))
    assert len(registry.list()) == 1
    assert one.note is two.note is None
    # The lines are those of the file registered last; who holds the first keeps its lines.
    again = registry.register("d", tmp_path / "b.jsonl")
    assert [again.line_of(0), again.line_of(1)] == [1, 3]
    assert [one.line_of(0), one.line_of(1)] == [1, 2]
    assert (again.source, again.name) == (str(tmp_path / "b.jsonl"), "d")


@pytest.mark.parametrize(
    "other",
    [
        chat("a", "b", n=1),
        chat("a", "b", n=1.0, m=None),
        chat("a", "b", n="1.0"),
        {"n": 1.0, **chat("a", "b")},
    ],
)
def test_other_values_types_or_orders_of_keys_are_other_datasets(
    registry: DatasetRegistry, other: dict[str, Any]
) -> None:
    assert registry.register("d", [chat("a", "b", n=1.0)]) != registry.register("e", [other])


def test_the_id_is_the_digest_of_the_rows_as_compact_lines(registry: DatasetRegistry) -> None:
    found = registry.register("d", [chat("ü")])
    line = json.dumps(chat("ü"), ensure_ascii=False, separators=(",", ":")) + "\n"
    assert found.dataset_id == hashlib.sha256(line.encode()).hexdigest()


def test_a_name_moves_and_says_what_it_meant(registry: DatasetRegistry) -> None:
    first = registry.register("d", [chat("1")])
    second = registry.register("d", [chat("2")])
    assert second.note == f"d now means {second.dataset_id[:12]}; before {first.dataset_id[:12]}"
    assert registry.get("d") == second
    assert registry.get(first.dataset_id).name is None
    back = registry.move("d", first.dataset_id[:10])
    assert back == registry.get("d") == first
    assert back.note == f"d now means {first.dataset_id[:12]}; before {second.dataset_id[:12]}"
    assert registry.get(first.dataset_id).name == "d"
    assert registry.move("d", back).note is None


def test_what_is_not_there_is_named_with_what_is(registry: DatasetRegistry) -> None:
    with pytest.raises(NotFound, match="known here: none yet"):
        registry.get("triage")
    registry.register("triage-train", [chat("1")])
    with pytest.raises(NotFound, match="did you mean 'triage-train'"):
        registry.get("triage-trian")
    with pytest.raises(NotFound, match="is no dataset"):
        registry.get(3)
    with pytest.raises(NotFound, match="there is no file"):
        registry.register("d", "/nowhere/rows.jsonl")


def test_half_a_surrogate_pair_names_nothing(registry: DatasetRegistry) -> None:
    with pytest.raises(NotFound, match="no dataset is called"):
        registry.get("\ud800")


def test_an_ambiguous_prefix_is_refused(registry: DatasetRegistry) -> None:
    by_prefix: dict[str, str] = {}
    for n in range(2_000):
        line = json.dumps(chat(str(n)), separators=(",", ":")) + "\n"
        prefix = hashlib.sha256(line.encode()).hexdigest()[:4]
        if prefix in by_prefix:
            registry.register("a", [chat(by_prefix[prefix])])
            registry.register("b", [chat(str(n))])
            break
        by_prefix[prefix] = str(n)
    with pytest.raises(AmbiguousReference, match="fits several datasets"):
        registry.get(prefix)


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "x" * 101, "0123456789ab", None, 3])
def test_names_that_are_none_are_refused(registry: DatasetRegistry, name: Any) -> None:
    with pytest.raises(Refused, match="cannot be a dataset's name"):
        registry.register(name, [chat()])


@pytest.mark.parametrize("name", ["a", "2024", "größe", "triage-train.v1", "feed"])
def test_names_that_are_some_are_taken(registry: DatasetRegistry, name: str) -> None:
    if name == "größe":
        assert registry.register(name, [chat()]).name == name
    assert registry.get(registry.register(name, [chat()]).name).name == name


def test_files_are_private(registry: DatasetRegistry) -> None:
    found = registry.register("d", [chat()])
    assert stat.S_IMODE(found.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in found.folder.iterdir()} == {0o600}


# --- tables


def test_numpy_and_nullable_cells_become_plain_values(registry: DatasetRegistry) -> None:
    frame = pd.DataFrame(
        {
            "messages": [chat()["messages"], np.array(chat()["messages"])],
            "id": pd.array([10254939386542155531, 2], dtype="UInt64"),
            "n": pd.array([9007199254740993, None], dtype="Int64"),
            "text": ["x", None],
            "more": pd.array([None, "y"], dtype="string"),
            "score": np.array([1.5, 2.0]),
        }
    )
    first, second = registry.register("d", frame).open_rows()
    assert (first["id"], first["n"], first["text"]) == (10254939386542155531, 9007199254740993, "x")
    assert (second["n"], second["text"], first["more"]) == (None, None, None)
    assert second["messages"] == chat()["messages"]
    assert repr(second["score"]) == "2.0"


def test_a_table_survives_the_way_through_a_dataset_and_back(registry: DatasetRegistry) -> None:
    found = registry.register("d", CASES / "DF-17.ints.jsonl")
    again = registry.register("e", pd.DataFrame(list(found.open_rows()), dtype=object))
    assert again == found


def test_missing_cells_of_plain_columns_are_refused(registry: DatasetRegistry) -> None:
    frame = pd.DataFrame([chat(n=1), chat(n=2), chat()])
    problem = refusal(registry, frame)
    assert str(problem) == (
        "n holds NaN (a missing cell?); allowed: a JSON value (row 3). "
        "None or pd.NA stands for a missing value"
    )


def test_bad_tables_are_refused_by_row(registry: DatasetRegistry) -> None:
    circle: dict[str, Any] = chat()
    circle["me"] = circle
    rows = [chat(), "x", {1: chat()}, chat(when=pd.Timestamp("2024-01-01")), circle, chat(s={1})]
    problems = refusals(registry, rows)
    assert [problem.where.row for problem in problems if problem.where] == [2, 3, 4, 5, 6]
    many = [chat(**{f"k{n}": 1}) for n in range(1_500)]
    assert "more than 1,000 different keys" in refusal(registry, many).message
    for bad in ({"a": 1}, 3, pd.DataFrame([[1, 2]], columns=["a", "a"])):
        assert refusal(registry, bad).field == "source"
    assert "is a folder" in refusal(registry, registry._store.home).message


# --- reading


@pytest.mark.parametrize("start", [0, 1, EVERY - 1, EVERY, EVERY + 1, 299, 300, 400])
def test_rows_are_read_from_anywhere(registry: DatasetRegistry, start: int) -> None:
    rows = [chat(str(n)) for n in range(300)]
    found = registry.register("d", rows)
    assert list(found.open_rows(start)) == rows[start:]
    assert found.page(start, 3) == rows[start : start + 3]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_are_physical_wherever_blank_ones_stand(
    registry: DatasetRegistry, tmp_path: Path, blanks: list[int]
) -> None:
    lines: list[str] = []
    expected = []
    for place, count in enumerate(blanks):
        lines += [""] * count
        expected.append(len(lines) + 1)
        lines.append(text(chat(str(place))).strip())
    found = registry.register("d", written(tmp_path, "\n".join(lines)))
    assert [found.line_of(place) for place in range(found.rows)] == expected
    with pytest.raises(IndexError):
        found.line_of(found.rows)


def test_words_are_found_in_one_message_whatever_the_case(registry: DatasetRegistry) -> None:
    rows = [
        chat("The Red fox, jumps", "no"),
        chat("the red", "fox"),
        chat("a redder fox", "RED\nFOX!"),
        chat([{"type": "text", "text": "red "}, {"type": "text", "text": "fox"}]),  # type: ignore[arg-type]
        chat("你好世界", "STRASSE"),
    ]
    found = registry.register("d", rows)
    assert found.search("red fox") == [0, 2, 3]
    assert found.search("fox jumps") == [0]
    assert found.search("好世") == found.search("straße") == [4]
    assert found.search("red", offset=1, limit=2) == [1, 2]
    assert found.search("nothing") == []
    with pytest.raises(ValueError, match="needs a word"):
        found.search(" ")


def test_rows_with_the_same_messages_are_duplicates(registry: DatasetRegistry) -> None:
    rows = [chat("a"), chat("b"), chat("a", n=1), chat("c"), chat("b"), chat("a")]
    found = registry.register("d", rows)
    a, b = (0, 2, 5), (1, 4)
    assert found.duplicates == {0: a, 2: a, 5: a, 1: b, 4: b}


def test_the_repr_tells_facts_and_findings(registry: DatasetRegistry) -> None:
    found = registry.register("rw", CASES / "RW-07.rows.jsonl")
    assert repr(found) == f"<Dataset rw {found.dataset_id[:12]}: 1 rows, 1 unanswered>"
    assert (found.columns, found.facts) == (("answer",), {"unanswered": (1, 1)})
    assert found.created_at <= time.time()
    assert registry.list() == [found]


@pytest.mark.parametrize(
    ("answer", "holds"),
    [
        ('{"queue": "billing"}', True),
        ('So {x} and then\n```json\n{"a": [1]}\n```', True),
        ("[1, 2] it is", True),
        ("billing", False),
        ("{not: json} [nor this]", False),
        ("", False),
        ("{" * 200, True),
    ],
)
def test_answers_without_json_are_counted(
    registry: DatasetRegistry, answer: str, holds: bool
) -> None:
    parts = [{"type": "text", "text": answer or " "}]
    row = chat()
    row["messages"][-1] |= {"content": parts, "reasoning_content": '{"a": 1}'}
    found = registry.register("d", [chat("q", '{"a": 1}'), row])
    assert found.facts.get("answers_without_json") == (None if holds else (1, 2))
    assert ("1 answers without JSON" in repr(found)) is not holds
    same = hashlib.sha256((found.folder / "rows.jsonl").read_bytes()).hexdigest()
    assert found.dataset_id == same, "facts are no part of the identity"


def test_that_no_answer_holds_json_is_a_fact_but_not_worth_a_word(
    registry: DatasetRegistry,
) -> None:
    unanswered = {"messages": chat()["messages"][:1]}
    found = registry.register("d", [chat(), chat("other"), unanswered])
    assert found.facts == {"answers_without_json": (2, 1), "unanswered": (1, 3)}
    assert repr(found).endswith(": 3 rows, 1 unanswered>")


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x", "a\0b", "x" * 5000, ""])
def test_a_path_that_is_none_is_refused(registry: DatasetRegistry, path: str) -> None:
    with pytest.raises(Refused) as refused:
        registry.register("d", path)
    (problem,) = refused.value.problems
    assert problem.field == "source"
    assert "is no path that can be used" in problem.message
    assert len(problem.message) < 400


# --- images


def picture(path: str) -> dict[str, Any]:
    return chat([{"type": "image", "path": path}, {"type": "text", "text": "?"}])  # type: ignore[arg-type]


def test_images_beside_the_rows_are_part_of_what_a_dataset_is(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    path = written(tmp_path, text(picture("i/a.png"), picture("i/b.png"), picture("i/a.png")))
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / "a.png").write_bytes(b"picture")
    found = registry.register("d", path)
    digest = hashlib.sha256(b"picture").hexdigest()
    assert found.images == {"i/a.png": {"sha256": digest, "bytes": 7}, "i/b.png": None}
    assert found.facts["images"] == (3, 1)
    (note,) = found.findings
    assert (note.message, note.lines) == ("the image 'i/b.png' was not found beside the rows", [2])
    assert registry.register("d", path) == found
    (tmp_path / "i" / "b.png").write_bytes(b"another")
    assert registry.register("d", path) != found


# --- damage


@pytest.mark.parametrize("harm", ["gone", "cut", "about", "no about", "a file"])
def test_a_damaged_folder_says_so_and_registering_again_mends_it(
    registry: DatasetRegistry, harm: str
) -> None:
    rows = [chat(str(n)) for n in range(100)]
    found = registry.register("d", rows)
    if harm == "gone":
        shutil.rmtree(found.folder)
    elif harm == "cut":
        os.truncate(found.folder / "rows.jsonl", 100)
    elif harm == "about":
        (found.folder / "about.json").write_text("{")
    elif harm == "no about":
        (found.folder / "about.json").unlink()
    else:
        shutil.rmtree(found.folder)
        found.folder.write_text("")
    with pytest.raises(NotFound, match="register it again"):
        registry.get("d").open_rows()
    if harm in ("gone", "cut"):
        with pytest.raises(NotFound, match="register it again"):
            found.open_rows()
    assert registry.list() == []
    registry.register("d", rows)
    assert list(registry.get("d").open_rows()) == rows
    assert entries(registry) == [found.dataset_id]


def test_bytes_that_changed_are_found_by_verify(registry: DatasetRegistry) -> None:
    found = registry.register("d", [chat("abc")])
    found.verify()
    rows = found.folder / "rows.jsonl"
    rows.write_bytes(rows.read_bytes().replace(b"abc", b"abd"))
    with pytest.raises(NotFound, match=r"dataset d in .* is not what was registered; register it"):
        found.verify()


def test_a_row_added_to_the_file_and_to_what_is_said_of_it_is_found(
    registry: DatasetRegistry,
) -> None:
    found = registry.register("d", [chat("abc")])
    file, about = found.folder / "rows.jsonl", found.folder / "about.json"
    data = file.read_bytes() * 2
    file.write_bytes(data)
    spec = {**found.spec, "rows": 2, "bytes": len(data)}
    spec["rows_sha256"] = hashlib.sha256(data).hexdigest()
    about.write_text(json.dumps(spec))
    with pytest.raises(NotFound, match="is not what was registered"):
        registry.get("d").verify()
    about.write_text(json.dumps({**spec, "dataset_id": spec["rows_sha256"]}))
    with pytest.raises(NotFound, match="is not the one that was registered"):
        registry.get("d")


def test_images_and_lines_are_verified_too(registry: DatasetRegistry, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    source = written(tmp_path, "\n\n" + text(picture("a.png"), chat()))
    found = registry.register("d", source)
    assert found.verify() is found
    lines = found.folder / str(found.spec["lines"])
    kept = lines.read_bytes()
    lines.write_bytes(bytes(len(kept)))
    with pytest.raises(NotFound, match="is not what was registered"):
        registry.get("d").verify()
    lines.write_bytes(kept)
    images = found.folder / "images.json"
    images.write_text(images.read_text("utf-8").replace('"sha256": "c', '"sha256": "d'))
    with pytest.raises(NotFound, match="is not what was registered"):
        registry.get("d").verify()


def test_a_row_that_is_damaged_is_no_json_error(registry: DatasetRegistry) -> None:
    found = registry.register("d", [chat("abc"), chat("def")])
    rows = found.folder / "rows.jsonl"
    rows.write_bytes(rows.read_bytes().replace(b'"def"', b'"de"x'))
    with pytest.raises(NotFound, match="register it again"):
        list(found.open_rows())


def test_a_refusal_leaves_what_was_there(registry: DatasetRegistry) -> None:
    found = registry.register("d", [chat()])
    with pytest.raises(Refused):
        registry.register("d", [chat("other"), {}])
    assert registry.list() == [registry.get("d")] == [found]
    assert entries(registry) == [found.dataset_id]


def test_a_progress_that_raises_leaves_nothing(registry: DatasetRegistry) -> None:
    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registry.register("d", [chat()] * 1000, progress=stop)
    assert entries(registry) == []


def run(code: str, *arguments: str) -> subprocess.Popen[str]:
    head = (
        "import json, os, resource, sys, time\n"
        "from nbtrain.data.datasets import DatasetRegistry\n"
        "from nbtrain.store import open_store\n"
        "registry = DatasetRegistry(open_store())\n"
        "row = {'messages': [{'role': 'user', 'content': 'x' * 1000}]}\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + code, *arguments], stdout=subprocess.PIPE, text=True
    )


def test_a_full_disk_in_the_middle_registers_nothing(registry: DatasetRegistry) -> None:
    # The limit on a file's size fails a write in the middle, as a full disk does.
    ran = run(
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))\n"
        "from nbtrain.errors import StoreError\n"
        "try:\n"
        "    registry.register('d', [row] * 10_000)\n"
        "except StoreError as error:\n"
        "    print(error)\n"
    )
    said, _ = ran.communicate(timeout=60)
    assert "cannot be written" in said
    assert "nothing was registered" in said
    assert (registry.list(), entries(registry)) == ([], [])


@pytest.mark.parametrize("call", ["os.fsync", "fcntl.flock", "pathlib.Path.rename"])
def test_a_call_that_fails_registers_nothing(
    registry: DatasetRegistry, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(call, fails)
    with pytest.raises(StoreError, match="No space left on device"):
        registry.register("d", [chat()])
    monkeypatch.undo()
    assert (registry.list(), entries(registry)) == ([], [])


def test_a_writer_that_is_killed_leaves_nothing_registered_and_is_swept_up(
    registry: DatasetRegistry,
) -> None:
    ran = run(
        "def slow(*_):\n"
        "    print('now', flush=True)\n"
        "    time.sleep(60)\n"
        "registry.register('d', [row] * 3_000, progress=slow)\n"
    )
    assert ran.stdout is not None
    assert ran.stdout.readline() == "now\n"
    (left,) = entries(registry)
    assert left.startswith(".half-")
    old = time.time() - 3600
    folder = registry._store.home / "datasets" / left
    os.utime(folder, (old, old))
    other = registry.register("other", [chat()])
    assert entries(registry) == sorted([left, other.dataset_id])  # it is held: its writer lives
    ran.send_signal(signal.SIGKILL)
    ran.communicate(timeout=60)
    with pytest.raises(NotFound):
        registry.get("d")
    os.utime(folder, (old, old))
    registry.register("other", [chat()])
    assert entries(registry) == [other.dataset_id]


def test_two_writers_of_the_same_rows_agree(registry: DatasetRegistry) -> None:
    rows = [chat(str(n)) for n in range(500)]
    start = threading.Barrier(4)
    found: list[Dataset] = []

    def register() -> None:
        start.wait()
        for _ in range(3):
            dataset = registry.register("d", rows)
            assert list(dataset.open_rows()) == rows
            found.append(dataset)

    threads = [threading.Thread(target=register) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert len({one.dataset_id for one in found}) == 1
    assert entries(registry) == [found[0].dataset_id]
    assert list(registry.get("d").open_rows()) == rows
