"""Workloads: rows made plain or refused all at once, content hash, split, registration."""

from __future__ import annotations

import dataclasses
import json
import random
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from nbtrain.catalog import (
    Catalog,
    Task,
    WorkloadSpec,
    build_workload,
    load_workload,
    sums_rows,
)
from nbtrain.catalog.rows import read_rows
from nbtrain.catalog.splitting import split_tasks
from nbtrain.errors import NotFound, Refused
from nbtrain.store import open_store

IDENTITY = [{"name": "exact", "weight": 1.0, "kind": "exact", "column": "answer"}]


def rows(count: int = 20) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {n}?", "answer": n} for n in range(count)]


def build(tasks: object = None, name: str = "w", **more: Any) -> WorkloadSpec:
    tasks = rows() if tasks is None else tasks
    given = {"rewards": b"packed", "reward_identity": IDENTITY} | more
    return build_workload(name, tasks=tasks, **given)


def refusals(tasks: object = None, **more: Any) -> list[str]:
    with pytest.raises(Refused) as refused:
        build(tasks, **more)
    return [str(problem) for problem in refused.value.problems]


# --- rows


def test_a_frame_and_a_list_of_dicts_are_the_same_workload() -> None:
    frame = pd.DataFrame(rows())
    assert isinstance(frame["answer"].iloc[0], np.int64)
    assert build(frame).workload_id == build(rows()).workload_id


def test_numpy_values_become_plain_ones() -> None:
    message = {"role": "user", "content": np.str_("hi")}
    row = {
        "prompt": np.array([message], dtype=object),
        "int": np.int32(3),
        "float": np.float32(0.5),
        "flag": np.bool_(True),
        "list": (1, np.int64(2)),
        "array": np.array([[1, 2], [3, 4]]),
        "null": None,
    }
    read, problems = read_rows([row], field="tasks", raw=False)
    assert not problems
    expected = {
        "prompt": [{"role": "user", "content": "hi"}],
        "int": 3,
        "float": 0.5,
        "flag": True,
        "list": [1, 2],
        "array": [[1, 2], [3, 4]],
        "null": None,
    }
    assert read == [expected]
    assert json.loads(json.dumps(read)) == [expected]
    assert type(read[0]["int"]) is int
    assert type(read[0]["flag"]) is bool


def test_no_prompt_column_lists_the_columns_there_are() -> None:
    (said,) = refusals([{"question": "a", "answer": 1}])
    assert "no column 'prompt'; its columns are: question, answer" in said
    assert "Rename" in said


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "the prompt is empty"),
        ("  \n", "the prompt is empty"),
        ([], "the prompt is empty"),
        (None, "the prompt is null"),
        (3, "the prompt is a number"),
        ({"role": "user", "content": "x"}, "the prompt is a mapping"),
        (["hello"], "message 1 of the prompt is text"),
        ([{"role": "human", "content": "x"}], 'has the role "human"'),
        ([{"content": "x"}], "has the role null"),
        ([{"role": "user"}], "null as content"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "a list as content"),
        ([{"role": "user", "content": " "}], "message 1 of the prompt is empty"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
            "last message is the assistant's",
        ),
    ],
)
def test_prompts_of_wrong_shape(prompt: object, said: str) -> None:
    problems = refusals([*rows(1), {"prompt": prompt, "answer": 0}])
    assert len(problems) == 1
    assert said in problems[0]
    assert "row 2" in problems[0]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "NaN"),
        (np.float64("nan"), "NaN"),
        (float("inf"), "infinite"),
        (pd.NA, "missing value"),
        (pd.NaT, "missing value"),
        (pd.Timestamp("2026-01-01"), "Timestamp, which has no JSON form"),
        (np.datetime64("2026-01-01"), "date"),
        ({1, 2}, "a set, which has no JSON form"),
        (b"x", "bytes"),
        ({1: "x"}, "keys are not all text"),
        ([1, [float("nan")]], "NaN"),
        ("\ud800", "not valid Unicode"),
        (object(), "object"),
        (1 + 2j, "complex"),
    ],
)
def test_values_without_a_json_form_are_named_by_row(value: object, said: str) -> None:
    (problem,) = refusals([*rows(2), {"prompt": "x", "answer": value}])
    assert said in problem
    assert "row 3" in problem
    assert "'answer'" in problem


def test_every_problem_of_every_row_comes_at_once() -> None:
    bad = [
        {"prompt": "", "answer": float("nan")},
        {"prompt": "fine", "answer": 1},
        {"prompt": [], "answer": set()},
    ]
    problems = refusals(bad, name="no good", base_model=3, held_out=1.5, raw="yes")
    assert len(problems) == 7
    assert sum("row 1" in p for p in problems) == 1
    assert sum("row 3" in p for p in problems) == 1
    assert sum("rows: 1, 3" in p for p in problems) == 1


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([], "tasks is empty"),
        (pd.DataFrame(), "tasks is empty"),
        ("prompts.csv", "tasks is a str"),
        (5, "tasks is a int"),
        ({"prompt": ["a"]}, "tasks is a dict"),
        ([{"prompt": "a"}, "b"], "a row of tasks is a str"),
        ([{"prompt": "a", "n": 1}, {"prompt": "b"}], "has no 'n', which other rows have"),
        ([{"prompt": "a", 7: 1}], "a column of tasks is named 7"),
        (pd.DataFrame([["a", 1, 2]], columns=["prompt", "x", "x"]), "the same name: x"),
    ],
)
def test_tables_of_wrong_shape(tasks: object, said: str) -> None:
    assert said in refusals(tasks)[0]


def test_a_raw_workload_takes_texts_only() -> None:
    chat = [{"role": "user", "content": "x"}]
    assert build(raw=True).raw
    (problem,) = refusals([{"prompt": chat}], raw=True)
    assert "a list in a raw workload" in problem


# --- content hash


def test_the_hash_covers_everything_that_is_content_and_not_the_name() -> None:
    base = build()
    same = build(name="other", rewards=b"packed differently")
    assert same.workload_id == base.workload_id
    changed = [
        build(rows(21)),
        build(list(reversed(rows()))),
        build(base_model="nbtrain/tiny"),
        build(held_out=0.2),
        build(held_out=[{"prompt": "y", "answer": 0}]),
        build(raw=True),
        build(reward_identity=[IDENTITY[0] | {"weight": 2.0}]),
        build([row | {"answer": float(row["answer"])} for row in rows()]),
    ]
    assert len({base.workload_id, *(spec.workload_id for spec in changed)}) == len(changed) + 1


def test_the_hash_is_pinned() -> None:
    # A change here makes every registered workload another one: then raise the version.
    expected = "d7889382718baffe859a5d2ff83599c00ef9004ed4d305de6fdeecf5ba588b60"
    assert build(rows(2)).workload_id == expected


def test_the_order_of_columns_is_no_content() -> None:
    turned = [dict(reversed(list(row.items()))) for row in rows()]
    assert build(turned).workload_id == build().workload_id


# --- split


def tasks_of(prompts: list[str]) -> list[Task]:
    return [Task.from_row({"prompt": p, "n": n}) for n, p in enumerate(prompts)]


@given(
    prompts=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=60),
    fraction=st.floats(0.001, 0.999),
)
def test_the_split_is_a_partition_by_prompt(prompts: list[str], fraction: float) -> None:
    tasks = tasks_of(prompts)
    split = split_tasks(tasks, [], fraction, validation=True)
    train, out = split.train_tasks, split.held_out_tasks
    assert sorted([*train, *out], key=tasks.index) == tasks
    assert not {t.prompt for t in train} & {t.prompt for t in out}
    assert train  # never empty
    assert bool(out) == (len(set(prompts)) >= 2)
    shuffled = list(tasks)
    random.Random(0).shuffle(shuffled)
    again = split_tasks(shuffled, [], fraction, validation=True)
    assert {t.prompt for t in again.held_out_tasks} == {t.prompt for t in out}


def test_adding_tasks_moves_none_that_was_there() -> None:
    few, many = tasks_of([f"p{n}" for n in range(200)]), tasks_of([f"p{n}" for n in range(400)])
    before = {t.prompt for t in split_tasks(few, [], 0.1, validation=True).held_out_tasks}
    after = {t.prompt for t in split_tasks(many, [], 0.1, validation=True).held_out_tasks}
    assert before == {p for p in after if int(str(p)[1:]) < 200}
    assert 0.05 < len(after) / 400 < 0.16


def test_without_validation_nothing_is_split_off() -> None:
    split = split_tasks(tasks_of(["a", "b", "c"]), [], 0.5, validation=False)
    assert (split.train, split.held_out) == (3, 0)
    assert "validation is off" in split.description


def test_stated_held_out_tasks_never_train_and_the_split_says_what_it_moved() -> None:
    tasks, stated = tasks_of(["a", "b", "b", "c"]), tasks_of(["b", "z"])
    for validation in (True, False):
        split = split_tasks(tasks, stated, None, validation=validation)
        assert [t.prompt for t in split.train_tasks] == ["a", "c"]
        assert split.held_out_tasks == stated
        assert "2 of 4 tasks have the prompt of a held-out one" in split.description


def test_the_digest_tells_train_sides_apart() -> None:
    tasks = tasks_of(["a", "b", "c", "d"])
    digests = {
        split_tasks(tasks, [], 0.5, validation=True).train_digest,
        split_tasks(tasks, [], 0.5, validation=False).train_digest,
        split_tasks(tasks[:3], [], 0.5, validation=False).train_digest,
    }
    assert len(digests) == 3


def test_equal_tasks_have_equal_ids() -> None:
    one = Task.from_row({"prompt": "a", "x": 1, "y": 2})
    assert one.task_id == Task.from_row({"y": 2, "prompt": "a", "x": 1}).task_id
    assert one.task_id != Task.from_row({"prompt": "a", "x": 1, "y": 3}).task_id
    assert len(one.task_id) == 16


def test_held_out_rows_are_checked_like_tasks() -> None:
    assert "held_out has no column 'answer'" in refusals(held_out=[{"prompt": "x"}])[0]
    assert "every task's prompt" in refusals(rows(1), held_out=rows(1))[0]
    assert "the prompt is empty" in refusals(held_out=[{"prompt": "", "answer": 1}])[0]
    for bad in (1, 1.5, -0.1, True, None, float("nan")):
        assert "held_out is" in refusals(held_out=bad)[0]


# --- registered


def test_a_registered_workload_is_read_back_whole(home: Path) -> None:
    catalog = Catalog(open_store(home))
    stated = [{"prompt": [{"role": "user", "content": "é ☃"}], "answer": None}]
    made = catalog.register_workload(
        build(held_out=stated, base_model="nbtrain/tiny", rewards=b"\0\1pickle")
    )
    read = Catalog(open_store(home)).workload("w")
    assert read.workload_id == made.workload_id
    assert [(t.prompt, t.columns) for t in read.tasks()] == [
        (row["prompt"], {"answer": row["answer"]}) for row in rows()
    ]
    assert read.held_out_tasks()[0].prompt == stated[0]["prompt"]
    assert read.held_out is None
    assert (read.name, read.base_model, read.raw) == ("w", "nbtrain/tiny", False)
    assert read.reward_names == ["exact"]
    assert read.columns == ["answer"]
    assert read.rewards_path.read_bytes() == b"\0\1pickle"


def test_files_are_private(home: Path) -> None:
    workload = Catalog(open_store(home)).register_workload(build())
    assert stat.S_IMODE(workload.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in workload.folder.iterdir()} == {0o600}


@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("held_out", [0.2, [{"prompt": "p3", "answer": "x"}]])
def test_the_split_is_known_without_reading_a_task(
    held_out: Any, validation: bool, home: Path
) -> None:
    catalog = Catalog(open_store(home))
    tasks = [{"prompt": f"p{n}", "answer": "x"} for n in range(10)]
    made = catalog.register_workload(build(tasks, held_out=held_out))
    split = catalog.workload("w").split(validation=validation)
    (made.folder / "tasks.jsonl").unlink()
    (made.folder / "held_out.jsonl").unlink()
    told = catalog.workload("w").split_info(validation=validation)
    for name in ("train", "held_out", "description", "train_digest", "held_out_digest"):
        assert getattr(told, name) == getattr(split, name)


@pytest.mark.parametrize("file", ["tasks.jsonl", "held_out.jsonl"])
def test_tasks_that_were_changed_are_noticed_where_they_are_read(file: str, home: Path) -> None:
    catalog = Catalog(open_store(home))
    made = catalog.register_workload(build(held_out=rows(3)))
    path = made.folder / file
    path.write_text(path.read_text().replace("1", "7"))
    with pytest.raises(NotFound, match="not those that were registered"):
        catalog.workload("w").split(validation=True)
    again = catalog.register_workload(build(held_out=rows(3)))
    assert again.split(validation=True).held_out == 3


def test_every_digit_of_a_number_counts_and_comes_back(home: Path) -> None:
    catalog = Catalog(open_store(home))
    numbers = [2**53, 2**53 + 1, -(10**40), 3, 3.0, 0.1, -0.0, 1e300, True, [2**60, {"a": 2**60}]]
    ids = set()
    for number in numbers:
        made = catalog.register_workload(build([{"prompt": "p", "n": number}], held_out=0))
        (task,) = made.tasks()
        assert repr(task.columns["n"]) == repr(number)
        ids.add((made.workload_id, task.task_id))
    assert len({w for w, _ in ids}) == len({t for _, t in ids}) == len(numbers)


def test_a_sample_of_another_version_is_registered_anew(home: Path) -> None:
    store = open_store(home)
    catalog = Catalog(store, {"s": lambda: build(name="s")})
    made = catalog.workload("s")
    about = made.folder / "workload.json"
    old = json.loads(about.read_text()) | {"version": 1}
    about.write_text(json.dumps(old))
    with pytest.raises(NotFound, match="another version of nbtrain"):
        load_workload(made.folder)
    with store.engine.begin() as connection:
        connection.execute(text("update workloads set spec = :s"), {"s": json.dumps(old)})
    assert catalog.workload("s").split_info(validation=True).train > 0


def test_names_move_and_ids_stay(home: Path) -> None:
    catalog = Catalog(open_store(home))
    first = catalog.register_workload(build())
    second = catalog.register_workload(build(rows(5)))
    assert catalog.workload("w").workload_id == second.workload_id
    assert catalog.workload(first.workload_id).workload_id == first.workload_id
    assert catalog.workload(first.workload_id[:12]).workload_id == first.workload_id
    assert catalog.workload(first) is first
    catalog.register_workload(build())
    assert catalog.workload("w").workload_id == first.workload_id
    left = [p.name for p in first.folder.parent.iterdir()]
    assert sorted(left) == sorted([first.workload_id, second.workload_id])


def test_unknown_workloads_name_the_nearest(home: Path) -> None:
    catalog = Catalog(open_store(home))
    catalog.register_workload(build(name="triage"))
    with pytest.raises(NotFound, match="did you mean 'triage'"):
        catalog.workload("traige")
    with pytest.raises(NotFound, match="known here: triage"):
        catalog.workload("0000")
    with pytest.raises(NotFound, match="is no workload"):
        catalog.workload(3)


def test_a_damaged_folder_says_so(home: Path) -> None:
    catalog = Catalog(open_store(home))
    workload = catalog.register_workload(build())
    (workload.folder / "tasks.jsonl").write_text('{"prompt"')
    with pytest.raises(NotFound, match="register the workload again"):
        load_workload(workload.folder).tasks()
    (workload.folder / "workload.json").unlink()
    with pytest.raises(NotFound, match="gone or damaged"):
        catalog.workload("w")
    assert len(catalog.register_workload(build()).tasks()) == 20
    assert len(catalog.workload("w").tasks()) == 20


def test_samples_are_registered_when_first_asked_for(home: Path) -> None:
    built = []

    def sums() -> WorkloadSpec:
        built.append(1)
        train, held_out = sums_rows()
        return build(train, name="sums", held_out=held_out, base_model="nbtrain/tiny")

    store = open_store(home)
    catalog = Catalog(store, samples={"sums": sums})
    assert not built
    split = catalog.workload("sums").split(validation=True)
    assert (split.train, split.held_out) == (2000, 200)
    catalog.workload("sums")
    assert built == [1]
    assert catalog.workload_names() == ["sums"]
    # A workload of one's own by that name comes first.
    sample = catalog.workload("sums")
    with pytest.raises(Refused, match="belongs to a sample workload") as refused:
        catalog.register_workload(build(name="sums"))
    assert [problem.field for problem in refused.value.problems] == ["name"]
    assert catalog.register_workload(sums()).workload_id == sample.workload_id

    # a home in which the name was once given away
    own = catalog.register_workload(build(name="own"))
    store.move_alias("workload", "sums", own.workload_id)
    assert catalog.sample("sums").workload_id == sample.workload_id
    assert catalog.workload("sums").workload_id == sample.workload_id


def test_what_is_wrong_alike_in_many_rows_is_told_once() -> None:
    tasks = [{"prompt": None, "answer": "1"} for _ in range(96)] + [{"prompt": "", "answer": "1"}]
    told = refusals(tasks)
    assert told == [
        "the prompt is null in 96 rows: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 …; "
        "allowed: text or a list of chat messages",
        "the prompt is empty; allowed: text or chat messages (row 97)",
    ]
    assert refusals(["x", "y"])[0] == "a row of tasks is a str in 2 rows: 1, 2; allowed: a dict"


def test_what_is_not_listed_is_counted_but_no_problem_of_its_own() -> None:
    tasks = [{"prompt": [{"role": f"role {n}", "content": "x"}]} for n in range(60)]
    told = refusals(tasks)
    assert len(told) == 50
    assert told[-1].endswith("(row 50). tasks has 10 more problems like these")


# --- the sample's rows


def test_sums_are_right_disjoint_and_always_the_same() -> None:
    train, held_out = sums_rows()
    prompts = [row["prompt"][0]["content"] for row in train + held_out]
    assert len(set(prompts)) == len(prompts) == 2200
    for row in train + held_out:
        a, b = (int(n) for n in row["prompt"][0]["content"][8:-1].split(" + "))
        assert row["answer"] == f"<answer>{a + b}</answer>"
    assert prompts[0] == "What is 1 + 71?"
    assert prompts[-1] == "What is 86 + 59?"


def test_a_spec_does_not_print_its_rows() -> None:
    assert "What is" not in repr(build())
    assert dataclasses.is_dataclass(build())
