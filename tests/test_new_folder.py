"""Folders that a person names for exports: filled whole, and left the folders that they are."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import stored

from nbtrain.client import Client
from nbtrain.client.new_folder import NewFolder
from nbtrain.errors import NotWritten, Refused


def fill(given: str | Path, names: tuple[str, ...] = ("a", "last", "z")) -> list[str]:
    place = NewFolder(given, "an export")
    assert place.problems == []
    with place.filled("last") as half:
        for name in names:
            (half / name).write_text(name)
    return sorted(path.name for path in place.path.iterdir())


def test_an_empty_folder_stays_the_one_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    folder.chmod(0o2750)
    before = folder.stat()
    monkeypatch.chdir(folder)
    assert fill(".") == ["a", "last", "z"]
    after = folder.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert stat.S_IMODE(after.st_mode) == 0o2750
    assert sorted(os.listdir()) == ["a", "last", "z"]  # the current folder is still there


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_filled(tmp_path: Path, there: bool) -> None:
    real = tmp_path / "far" / "real"
    if there:
        real.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(real)
    assert fill(link) == ["a", "last", "z"]
    assert link.is_symlink()
    assert (real / "last").read_text() == "last"
    assert [path.name for path in real.parent.iterdir()] == ["real"]


@pytest.mark.parametrize("there", [True, False])
def test_after_an_error_nothing_is_left(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "far" / "folder"
    if there:
        folder.mkdir(parents=True)

    def failing() -> None:
        with NewFolder(folder, "an export").filled("last") as half:
            (half / "a").write_text("a")
            raise OSError(28, "No space left on device")

    with pytest.raises(NotWritten) as told:
        failing()
    assert str(told.value) == f"{folder} cannot be written: the disk is full"
    assert (type(told.value.__cause__), told.value.errno) == (OSError, 28)
    left = [path.name for path in tmp_path.rglob("*")]
    assert sorted(left) == (["far", "folder"] if there else [])


def test_an_error_while_files_are_moved_takes_those_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = Path.replace
    order: list[str] = []

    def failing(self: Path, target: Path) -> Path:
        order.append(target.name)
        if target.name == "last":
            raise OSError(5, "Input/output error")
        return move(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(NotWritten, match=r"cannot be written: Input/output error$"):
        fill(tmp_path)
    assert order[-1] == "last"
    assert sorted(order) == ["a", "last", "z"]
    assert list(tmp_path.iterdir()) == []


def test_what_got_into_the_folder_meanwhile_stays(tmp_path: Path) -> None:
    def meanwhile() -> None:
        with NewFolder(tmp_path, "an export").filled("last") as half:
            (half / "a").write_text("mine")
            (tmp_path / "a").write_text("theirs")

    with pytest.raises(Refused, match="holds something by now"):
        meanwhile()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "theirs"


def test_a_name_as_long_as_can_be(tmp_path: Path) -> None:
    assert fill(tmp_path / ("n" * 255)) == ["a", "last", "z"]


def test_what_is_no_folder_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for given, said in (
        ("~nobody-of-this-name/x", "no path that can be used"),
        ("", "it is empty"),
        ("a\0b", "null"),
        ("n" * 256, "File name too long"),
        (tmp_path / "loop", "no path that can be used"),
        (tmp_path / "file", "is a file: an export takes a new or an empty folder"),
        (tmp_path / "pipe", "is no folder"),
        (tmp_path / "file" / "x" / "y", "lies beneath .*file, which is no folder"),
    ):
        (problem,) = NewFolder(given, "an export").problems
        assert problem.field == "folder"
        with pytest.raises(Refused, match=said):
            raise Refused([problem])


def test_every_door_refuses_an_unknown_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report, export and adapter; the client's home and the environment's."""
    client = Client()
    run = stored.create(client)
    stored.step(run, 1)
    stored.save(run, 1)
    (checkpoint,) = run.checkpoint_list()
    unknown = "~nobody-of-this-name/x"
    monkeypatch.setenv("NBTRAIN_HOME", unknown)
    for door in (
        lambda: run.report(unknown),
        lambda: run.export(unknown),
        lambda: checkpoint.export(unknown),
        lambda: client.training.runs.compare(run, stored.create(client)).report(unknown),
        lambda: Client(home=unknown).training.runs.list(),
        lambda: Client().training.runs.list(),
    ):
        with pytest.raises(Refused, match="no path that can be used"):
            door()


def test_all_problems_of_an_export_come_at_once(home: Path) -> None:
    run = stored.create(Client())
    with pytest.raises(Refused, match="2 problems") as caught:
        run.export("~nobody-of-this-name/x", "excel")
    assert [problem.field for problem in caught.value.problems] == ["format", "folder"]


def test_a_place_that_takes_no_files_is_named_as_it_was_stated() -> None:
    place = NewFolder("/proc/export", "an export")
    assert place.problems == []
    with (
        pytest.raises(NotWritten, match=r"^/proc/export cannot be written: [^/.]*$"),
        place.filled("last"),
    ):
        pass


def test_a_folder_that_may_not_be_looked_at_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", forbidden)
    (problem,) = NewFolder(tmp_path / "x", "an export").problems
    assert "cannot be looked into (Permission denied)" in problem.message
