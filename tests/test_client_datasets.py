"""Datasets, models and bare workloads through the client, as a notebook uses them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import descriptors
import pandas as pd
import pytest
import stored

from nbtrain.client import Client
from nbtrain.data.masks import LossRules
from nbtrain.errors import NotFound, Refused
from nbtrain.store import new_id

TINY = "nbtrain/tiny"
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "content": f"{a + b}"},
        ],
        "level": a,
    }
    for a in range(5)
    for b in range(8)
]


@pytest.fixture
def client(home: Path) -> Client:
    return Client()


@pytest.fixture
def sums(client: Client, tmp_path: Path) -> Client:
    """A client with forty rows under the name ``sums``, registered from a file with blank lines."""
    file = tmp_path / "sums.jsonl"
    file.write_text("\n\n" + "".join(json.dumps(row) + "\n" for row in ROWS))
    client.datasets.register("sums", file)
    return client


# Datasets


def test_the_same_rows_are_one_dataset_whatever_they_come_from(sums: Client) -> None:
    item = sums.datasets.get("sums")
    assert len(item) == item.rows == 40
    assert item.columns == ("level",)
    for source in (ROWS, pd.DataFrame(ROWS)):
        assert sums.datasets.register("again", source) == item
    assert sums.datasets.get(item.id[:8]) == sums.datasets.get(item) == item
    assert [found.id for found in sums.datasets.list()] == [item.id]
    assert "40 rows, columns level" in repr(item)
    table = sums.datasets.list().to_frame()
    assert table.loc[0, "rows"] == 40


def test_a_name_moves_and_says_so(sums: Client) -> None:
    first = sums.datasets.get("sums")
    second = sums.datasets.register("sums", ROWS[:3])
    assert first.id[:12] in repr(second)
    assert second.note is not None
    assert sums.datasets.get("sums") == second
    back = sums.datasets.name("sums", first.id)
    assert sums.datasets.get("sums") == first == back
    assert second.id[:12] in str(back.note)
    with pytest.raises(NotFound, match="nowhere"):
        sums.datasets.name("sums", "nowhere")


def test_bad_rows_are_refused_by_line(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    lines = [json.dumps(row) for row in ROWS[:4]]
    lines[2] = '{"messages": "hello"}'
    file.write_text("\n".join(["", *lines]))
    with pytest.raises(Refused) as refused:
        client.datasets.register("bad", file)
    (problem,) = refused.value.problems
    assert problem.where is not None
    assert problem.where.line == 4
    with pytest.raises(NotFound, match=r"no dataset is called .bad."):
        client.datasets.get("bad")


def test_rows_by_page(sums: Client) -> None:
    page = sums.datasets.rows("sums", offset=30, limit=4)
    assert [row.index for row in page] == [30, 31, 32, 33]
    assert [row.line for row in page] == [33, 34, 35, 36]
    assert page[0].messages == ROWS[30]["messages"]
    assert list(page.to_frame()["level"]) == [3, 3, 4, 4]
    assert repr(page).splitlines()[0] == "rows 30 to 33 of 40 of sums"
    assert "What is 3 + 6?" in page._repr_html_()
    assert len(sums.datasets.rows("sums")) == 25
    assert "no rows of sums there" in repr(sums.datasets.rows("sums", offset=40))


def test_rows_by_words(sums: Client) -> None:
    page = sums.datasets.rows("sums", search="IS 4")
    assert [row.index for row in page] == list(range(32, 40))
    assert [row.index for row in sums.datasets.rows("sums", 2, 3, search="is 4")] == [34, 35, 36]
    assert "0 rows of sums with 'never'" in repr(sums.datasets.rows("sums", search="never"))


def test_rows_said_twice_are_told(client: Client) -> None:
    client.datasets.register("twice", [*ROWS[:3], {**ROWS[1], "level": 7}])
    page = client.datasets.rows("twice")
    assert [row.duplicates for row in page] == [(), (3,), (), (1,)]
    assert "same messages as row 3" in repr(page[1])


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"limit": 101}, {"limit"}),
        ({"limit": 0, "offset": -1, "search": " "}, {"limit", "offset", "search"}),
        ({"offset": 1.5}, {"offset"}),
        ({"limit": True}, {"limit"}),
    ],
)
def test_a_page_out_of_bounds_is_refused(
    sums: Client, given: dict[str, object], fields: set[str]
) -> None:
    with pytest.raises(Refused) as refused:
        sums.datasets.rows("sums", **given)  # type: ignore[arg-type]
    assert {problem.field for problem in refused.value.problems} == fields


def test_texts_of_rows_are_escaped(client: Client) -> None:
    messages = [{"role": "user", "content": "<b>hi"}, {"role": "assistant", "content": "x"}]
    client.datasets.register("tags", [{"messages": messages}])
    assert "<b>" not in client.datasets.rows("tags")._repr_html_()


# With a model: the side process answers, and nothing heavy is imported here


def test_what_a_model_reads(sums: Client, capfd: pytest.CaptureFixture[str]) -> None:
    before = set(sys.modules)
    page = sums.datasets.rows("sums", 30, 3, model=TINY)
    starting = "starting the process that knows tokenizers; this takes some seconds\n"
    assert capfd.readouterr().err == starting
    assert [row.index for row in page] == [30, 31, 32]
    assert all(row.tokens and row.tokens > (row.trained_tokens or 0) > 0 for row in page)
    assert page[0].marked is not None
    assert page[0].marked.index("[[9") > page[0].marked.index("3 + 6")
    found = sums.datasets.rows("sums", search="+ 6", model=sums.base_models.get(TINY))
    assert [row.index for row in found] == [6, 14, 22, 30, 38]
    assert found[3].marked == page[0].marked
    analysis = sums.datasets.analyze("sums", TINY, max_length=page[0].tokens or 0)
    assert (analysis.rows, analysis.refused) == (40, 0)
    assert analysis.tokens.max >= analysis.tokens.median > analysis.trained.max
    table = analysis.to_frame().set_index("figure")
    assert table.loc["tokens", "max"] == analysis.tokens.max
    assert repr(analysis).startswith("sums under nbtrain/tiny: 40 rows, 0 refused")
    assert "trained tokens" in analysis._repr_html_()
    preview = sums.datasets.preview("sums", 30, TINY)
    assert (preview.row, preview.line) == (30, 33)
    assert preview.text == page[0].marked
    assert "<mark" in preview._repr_html_()
    assert capfd.readouterr().err == "", "it is told when it starts, and never again"
    assert not {"torch", "transformers"} & set(sys.modules) - before


def test_the_loss_decides_what_is_marked(client: Client) -> None:
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
    ]
    client.datasets.register("turns", [{"messages": messages}])
    last = client.datasets.preview("turns", 0, TINY)
    every = client.datasets.preview("turns", 0, TINY, loss={"assistantTurns": "all"})
    same = client.datasets.preview("turns", 0, TINY, loss={"assistant_turns": "all"})
    assert (last.text.count("[["), every.text.count("[[")) == (1, 2)
    assert same == every


@pytest.mark.parametrize(
    ("loss", "fields"),
    [
        ("all", ["loss"]),
        ({"assistantTurns": "some", "turns": 1}, ["loss.assistantTurns", "loss.turns"]),
        ({"trainOnToolCalls": 1}, ["loss.trainOnToolCalls"]),
        ({"assistantTurns": "all", "assistant_turns": "last"}, ["loss.assistantTurns"]),
        ({"explicitLossMaskColumn": "mask"}, ["loss.explicitLossMaskColumn"]),
        (LossRules(mask_column="messages"), ["loss.explicitLossMaskColumn"]),
    ],
)
def test_a_loss_that_is_none_is_refused(sums: Client, loss: object, fields: list[str]) -> None:
    with pytest.raises(Refused) as refused:
        sums.datasets.analyze("sums", TINY, loss=loss)
    assert [problem.field for problem in refused.value.problems] == fields


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"nonsense": 1}, "loss has no field nonsense"),
        (5, "loss needs a mapping, found 5"),
        ({"assistantTurns": "all"}, "no model is stated"),
    ],
)
def test_rows_without_a_model_take_no_loss(sums: Client, loss: object, words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        sums.datasets.rows("sums", -1, loss=loss)
    fields = [problem.field.partition(".")[0] for problem in refused.value.problems]
    assert fields == ["offset", "loss"]


@pytest.mark.parametrize("row", [-1, 40, 10**30, 1.5, "0", None, True])
def test_a_row_that_is_none_is_refused(sums: Client, row: Any) -> None:
    with pytest.raises(Refused, match=r"row is .*allowed: 0 .* 39") as refused:
        sums.datasets.preview("sums", row, TINY)
    assert [problem.field for problem in refused.value.problems] == ["row"]
    for ask in (sums.datasets.rows, sums.datasets.preview):
        with pytest.raises(Refused, match="no column 'mask'"):
            ask("sums", 0, model=TINY, loss={"explicitLossMaskColumn": "mask"})


def test_what_a_preview_needs_is_refused_by_name(sums: Client) -> None:
    with pytest.raises(Refused, match="model is missing"):
        sums.datasets.preview("sums", 0)
    with pytest.raises(Refused, match="max_length is 0"):
        sums.datasets.analyze("sums", TINY, max_length=0)
    with pytest.raises(NotFound, match="nbtrain/huge"):
        sums.datasets.preview("sums", 0, "nbtrain/huge")


# Bare workloads


def test_a_bare_workload_has_a_name_and_no_tasks(sums: Client) -> None:
    plain = sums.workloads.create("triage")
    full = sums.workloads.create(
        "triage", base_model=TINY, dataset="sums", grader="json-label-match"
    )
    assert not plain.has_tasks
    assert full != plain
    assert plain.id[:12] in str(full.note)
    assert (full.dataset, full.grader, full.base_model) == ("sums", "json-label-match", TINY)
    assert sums.workloads.create("triage") == plain
    assert sums.workloads.create("other") != plain, "its name is part of a bare one"
    by_id = sums.datasets.get("sums").id
    again = sums.workloads.create("triage", base_model=TINY, dataset=by_id,
                                  grader="json-label-match")  # fmt: skip
    assert again == full
    assert "no tasks of its own, base model nbtrain/tiny, dataset sums" in repr(full)
    table = sums.workloads.list().to_frame().set_index("name")
    assert table.loc["triage", "train"] == 0
    assert table.loc["sums", "train"] > 0


def test_a_workload_with_tasks_may_have_a_dataset_too(sums: Client) -> None:
    tasks = [{"prompt": str(n), "answer": str(n)} for n in range(20)]
    import nbtrain

    parts = {"tasks": tasks, "rewards": nbtrain.rewards.exact("answer")}
    bare = sums.workloads.create("one", **parts)
    full = sums.workloads.create("two", **parts, dataset="sums", grader="json-label-match")
    assert sums.workloads.create("three", **parts) == bare
    assert full != bare
    assert full.has_tasks
    assert full.dataset == "sums"


def test_everything_wrong_with_a_workload_is_told_at_once(client: Client) -> None:
    with pytest.raises(Refused) as refused:
        client.workloads.create(
            "a b", dataset="nowhere", grader="label-match", held_out=0.5, raw=True
        )
    fields = {problem.field for problem in refused.value.problems}
    assert fields == {"name", "dataset", "grader", "held_out", "raw"}


# Models


@pytest.mark.parametrize("damage", ["version", "gone"])
def test_a_damaged_entry_is_marked_and_the_others_are_listed(
    sums: Client, tmp_path: Path, damage: str
) -> None:
    (tmp_path / "scoring").mkdir()
    (tmp_path / "scoring" / "reward.py").write_text(descriptors.SCORING)
    old = {
        "workload": sums.workloads.create("old"),
        "dataset": sums.datasets.register("old", ROWS[:3]),
        "bundle": sums.bundles.register("old", tmp_path / "scoring"),
    }
    sums.workloads.create("mine")
    (tmp_path / "scoring" / "reward.py").write_text(f"{descriptors.SCORING}\n")
    sums.bundles.register("mine", tmp_path / "scoring")
    home = stored.store_of(sums).home
    files = {
        "workload": home / "workloads" / old["workload"].id / "workload.json",
        "dataset": home / "datasets" / old["dataset"].id / "about.json",
        "bundle": home / "bundles" / old["bundle"].id / "bundle.zip",
    }
    for kind, file in files.items():
        if damage == "gone" or kind == "bundle":
            file.unlink()
        else:
            file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 0}))
    listed = {
        "workload": sums.workloads.list(),
        "dataset": sums.datasets.list(),
        "bundle": sums.bundles.list(),
    }
    for kind, found in listed.items():
        other = damage == "version" and kind != "bundle"
        why = "written by another version" if other else "gone or damaged"
        note = f"unreadable: {why}; register it again"
        short = old[kind].id[:12]
        assert f"<{kind.capitalize()} old {short}: {note}>" in repr(found)
        table = found.to_frame().set_index("name")
        assert table.loc["old", "note"] == note
        assert table.loc["old", f"{kind}_id"] == old[kind].id
        (whole,) = {"mine", "sums"} & set(table.index) if kind != "workload" else ["mine"]
        assert pd.isna(table.loc[whole, "note"])
    assert listed["workload"].to_frame().set_index("name").loc["sums", "train"] > 0
    assert listed["dataset"].to_frame().set_index("name").loc["sums", "rows"] == 40


def test_models_are_listed_named_and_found(sums: Client) -> None:
    run = stored.create(sums, "first")
    checkpoint = stored.save(run, 4)
    row = stored.row_of(run)
    model_id = new_id()
    assert len(sums.models.list()) == 0
    assert "name" in sums.models.list().to_frame()
    stored.store_of(sums).put_model(
        model_id,
        run=row.key,
        checkpoint_id=checkpoint,
        base_model_slug=row.base_model_slug,
        base_fingerprint="ab" * 32,
        config_hash=row.config_hash,
        workload_id=row.workload_id,
        weights_digest="cd" * 32,
        path="/adapters/first",
    )
    (item,) = sums.models.list()
    assert (item.model_id, item.run_name, item.method, item.step) == (model_id, "first", "gspo", 4)
    assert sums.models.list("first").items == [item]
    assert sums.models.get(model_id[:6]) == item
    named = sums.models.name("best", item)
    assert named.name == "best"
    assert sums.models.get("best") == named
    assert "gspo on nbtrain/tiny, step 4 of run first" in repr(named)
    info = sums._parts.registry.model("best")
    assert info.name == "best"
    assert info.lora["lora_rank"] == 16
    assert info.path == "/adapters/first"
    with pytest.raises(NotFound, match="did you mean 'best'"):
        sums.models.get("bets")
    with pytest.raises(Refused, match="cannot be a model's name"):
        sums.models.name("a b", item)


def test_bundles_are_wired(client: Client, tmp_path: Path) -> None:
    (tmp_path / "scoring").mkdir()
    (tmp_path / "scoring" / "reward.py").write_text(descriptors.SCORING)
    item = client.bundles.register("scoring", tmp_path / "scoring")
    assert client._parts.registry.bundle(item).modules == ("reward",)


def test_the_machine_is_told(client: Client) -> None:
    machine = client._parts.registry.machine()
    assert machine.memory_gib is not None
    assert machine.memory_gib > 0.5
    assert machine.device_profile in ("cpu", "gpu")
