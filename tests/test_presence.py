"""A store whose file is removed or replaced while a process has it open."""

from __future__ import annotations

import html
import shutil
from pathlib import Path

import pytest
import stored
from test_store import make_run

from nbtrain.client import Client
from nbtrain.errors import NotFound, StoreError
from nbtrain.store import open_store


def remove(home: Path) -> None:
    for path in home.glob("nbtrain.db*"):
        path.unlink()


def test_a_store_that_is_gone_says_so_and_is_not_made_anew(home: Path) -> None:
    store = open_store(home)
    run = make_run(store)
    copy = home / "copy"
    store.close()
    shutil.copy(home / "nbtrain.db", copy)
    store.runs()
    remove(home)
    for _ in range(3):  # not only the first time
        with pytest.raises(StoreError, match=r"nbtrain\.db is gone"):
            store.run(run.key)
        with pytest.raises(StoreError, match=r"nbtrain\.db is gone"):
            store.annotate(run.key, description="x")
    assert not (home / "nbtrain.db").exists()
    shutil.move(copy, home / "nbtrain.db")
    assert store.run(run.key).run_id == run.run_id  # put back, it goes on


def test_another_store_in_its_place_is_read_and_a_run_it_lacks_is_told(home: Path) -> None:
    store = open_store(home)
    run = make_run(store)
    remove(home)
    other = open_store(home)
    assert store.runs() == []
    with pytest.raises(NotFound, match="another store was put in the place of"):
        store.run(run.key)
    found = make_run(other)
    assert [row.run_id for row in store.runs()] == [found.run_id]


def test_an_emptied_file_is_told_in_words(home: Path) -> None:
    store = open_store(home)
    run = make_run(store)
    remove(home)
    (home / "nbtrain.db").touch()
    with pytest.raises(StoreError, match="has no tables of nbtrain"):
        store.run(run.key)


def test_a_run_whose_store_is_gone_is_shown_in_a_sentence(home: Path) -> None:
    client = Client()
    run = stored.create(client)
    runs = client.training.runs.list()
    run._store.close()
    remove(home)
    told = f"<{run.title} cannot be read: the store {home / 'nbtrain.db'} is gone"
    assert repr(run).startswith(told)
    assert run._repr_mimebundle_() == {"text/plain": repr(run)}
    assert told in repr(runs)
    assert html.escape(told) in runs._repr_html_()
    with pytest.raises(StoreError, match="is gone"):
        run.glance().text()


def test_a_run_is_never_taken_for_another_of_its_key(home: Path) -> None:
    run = stored.create(Client())
    followed = run.glance().followed
    followed.refresh()
    run._store.close()
    remove(home)
    other = stored.create(Client(), "second")
    assert other._key == run._key
    looks = (lambda: run.status, lambda: run.rewards, lambda: run.trajectories, followed.refresh)
    for read in looks:
        with pytest.raises(NotFound, match="another store was put in the place of"):
            read()


def test_no_empty_store_is_made_beside_the_files_of_runs(home: Path, tmp_path: Path) -> None:
    with open_store(home) as store:
        folder = store.run_folder(make_run(store).run_id)
    remove(home)
    open_store(home).close()  # nothing of the run is left
    remove(home)
    (folder / "plan.json").write_text("{}")
    with pytest.raises(StoreError, match=r"is gone, but .*runs holds the files of 1 run\."):
        open_store(home)
    assert not (home / "nbtrain.db").exists()
    open_store(home, f"sqlite:///{tmp_path / 'elsewhere.db'}").close()  # may never have been here
    shutil.move(home / "runs", tmp_path / "old")
    open_store(home).close()
