"""The store when the disk, another process or a kill gets in its way."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from test_store import in_processes, make_run, training

from nbtrain.errors import StoreError
from nbtrain.store import RunWriter, Store, connect, open_store
from nbtrain.store.connect import Database, _patiently, file_url
from nbtrain.store.schema import REVISIONS, _migrate, version

IMPORTS = """
from test_store import training
from test_store_faults import assert_whole, step
from nbtrain.store import open_store
"""


def step(number: int, size: int = 500) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """A step with four trajectories whose texts do not compress to nothing."""
    words = os.urandom(size).hex()
    trajectory = {"reward": 1.0, "output_tokens": 5, "text": {"completion": words}}
    return {"step": number, "update_applied": True}, [{"group_id": number}], [trajectory] * 4


def assert_whole(store: Store, run_key: int) -> int:
    """Check that every step of the run is there with all that belongs to it; how many there are."""
    run, steps = store.run(run_key), store.steps(run_key)
    numbers = [row["step"] for row in steps]
    assert numbers == list(range(1, len(steps) + 1))
    assert run.completed_steps == run.updates_applied == len(steps)
    assert Counter(row["step"] for row in store.groups(run_key)) == dict.fromkeys(numbers, 1)
    rows = store.trajectories(run_key)
    assert Counter(row["step"] for row in rows) == dict.fromkeys(numbers, 4)
    assert len(store.texts(row["id"] for row in rows)) == len(rows)
    assert run.attempted_trajectories == run.graded_trajectories == len(rows)
    assert run.output_tokens == 5 * len(rows)
    with store.database.reading() as connection:
        assert connection.execute(text("PRAGMA integrity_check")).scalar() == "ok"
        assert connection.execute(text("PRAGMA foreign_key_check")).all() == []
    return len(steps)


def limit_pages(store: Store, pages: int) -> None:
    """Let SQLite find its disk full at that many pages."""
    store.close()
    event.listen(
        store.engine, "connect", lambda dbapi, _: dbapi.execute(f"PRAGMA max_page_count={pages}")
    )


def test_a_full_disk_leaves_nothing_half_written_and_the_step_can_be_tried_again(
    home: Path,
) -> None:
    store = open_store()
    run, writer = training(store)
    writer.commit_step(*step(1))
    limit_pages(store, 60)
    steps = (step(number, 5000) for number in range(2, 1000))
    with pytest.raises(StoreError) as refusal:
        any(writer.commit_step(*(made := one)) is None for one in steps)
    number = made[0]["step"]
    assert str(refusal.value).startswith(f"the disk of the store {home}/nbtrain.db is full (")
    assert str(refusal.value).endswith("free some space and try again")
    assert assert_whole(store, run.key) == number - 1
    limit_pages(store, 100_000)
    writer.commit_step(*made)
    assert assert_whole(store, run.key) == number


def test_a_disk_that_fills_up_at_the_commit_itself(home: Path) -> None:
    # The system refuses to let files grow past a limit; SQLite meets it when it writes its log
    code = """
store = open_store()
run, writer = training(store)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
number = 0
try:
    while number < 1000:
        number += 1
        made = step(number, 5000)
        writer.commit_step(*made)
except StoreError as error:
    print(error)
assert assert_whole(store, run.key) == number - 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.commit_step(*made)
print(assert_whole(store, run.key) == number)
"""
    imports = "import resource\nfrom nbtrain.errors import StoreError\n" + IMPORTS
    [answer] = in_processes(1, imports, code)
    sentence, whole = answer.splitlines()
    assert sentence.startswith(f"the disk of the store {home}/nbtrain.db ")
    assert "Nothing was half-written" in sentence
    assert whole == "True"


def test_a_store_that_may_only_be_read_can_be_read(home: Path) -> None:
    writable = open_store()
    run, writer = training(writable)
    writer.commit_step(*step(1))
    store = open_store(url=f"sqlite:///file:{home}/nbtrain.db?mode=ro&uri=true")
    assert assert_whole(store, run.key) == 1
    for write in (
        lambda: RunWriter(store, run.key, 1).commit_step(*step(2)),
        lambda: store.request(run.key, "cancel"),
        lambda: make_run(store),
    ):
        with pytest.raises(StoreError, match="cannot be written: the file or its folder is read-"):
            write()
    assert assert_whole(writable, run.key) == 1


def test_a_damaged_store_says_so(home: Path) -> None:
    store = open_store()
    run, writer = training(store)
    for number in range(1, 20):
        writer.commit_step(*step(number))
    with store.database.reading() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    path = home / "nbtrain.db"
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    with pytest.raises(StoreError, match=f"the store {path} is damaged .* restore a copy"):
        open_store().steps(run.key)


def test_a_file_that_is_no_database_is_not_taken_for_one(home: Path) -> None:
    home.mkdir()
    (home / "nbtrain.db").write_text("my notes\n" * 1000)
    with pytest.raises(StoreError, match="is not an nbtrain store"):
        open_store()
    assert (home / "nbtrain.db").read_text().startswith("my notes")


def test_a_folder_in_the_place_of_the_store_is_refused(home: Path) -> None:
    (home / "nbtrain.db").mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot be opened"):
        open_store()


def test_a_locked_store_is_waited_for_and_then_given_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "BUSY_SECONDS", 0.05)
    impatient = open_store()
    run, writer = training(impatient)
    monkeypatch.undo()
    monkeypatch.setenv("NBTRAIN_HOME", str(home))
    patient = open_store()
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with patient.database.writing():
            holding.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    holding.wait(30)
    with pytest.raises(StoreError, match="was locked by another process"):
        writer.commit_step(*step(1))
    assert impatient.steps(run.key) == []  # readers do not wait
    waiting = threading.Thread(target=lambda: RunWriter(patient, run.key, 1).commit_step(*step(1)))
    waiting.start()
    release.set()
    holder.join()
    waiting.join()
    assert assert_whole(impatient, run.key) == 1


def test_locked_is_asked_again_and_anything_else_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 1,200 new stores that three processes opened at once, 7 answered "locked" to the change
    # to WAL without waiting at all
    answers = ["database is locked", "database is locked", None, "disk I/O error"]

    def ask() -> str:
        answer = answers.pop(0)
        if answer is not None:
            raise sqlite3.OperationalError(answer)
        return "wal"

    assert _patiently(ask) == "wal"
    with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
        _patiently(ask)
    monkeypatch.setattr(connect, "BUSY_SECONDS", 0.0)
    answers.append("database is locked")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        _patiently(ask)


def test_a_migration_that_is_cut_short_leaves_nothing_behind(home: Path) -> None:
    home.mkdir()
    database = Database(file_url(home / "nbtrain.db"))

    def cut_short() -> None:
        with database.writing() as connection:
            _migrate(connection)
            assert version(connection) == REVISIONS[-1]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_short()
    with database.reading() as connection:
        assert version(connection) is None
    assert open_store().runs() == []


# --- several at once --------------------------------------------------------------------------

WRITE = """
store = open_store()
run, writer = training(store, name=f"run {sys.argv[-1]}")
for number in range(1, int(sys.argv[2]) + 1):
    writer.commit_step(*step(number))
    print(number, flush=True)
    store.heartbeat(run.key, 1)
"""


def test_processes_with_runs_of_their_own_write_at_once(home: Path) -> None:
    store = open_store()
    in_processes(2, IMPORTS, WRITE, 40)
    assert [assert_whole(store, run.key) for run in store.runs()] == [40, 40]


def test_threads_of_one_process_share_a_store(home: Path) -> None:
    store = open_store()
    run, writer = training(store)
    failures: list[BaseException] = []
    seen: list[int] = []
    done = threading.Event()

    def guarded(action: Any) -> None:
        try:
            while not done.is_set():
                action()
        except BaseException as error:
            failures.append(error)

    def poll() -> None:
        rows = store.trajectories(run.key, after=max(seen, default=0))
        seen.extend(row["id"] for row in rows)

    actions = (lambda: store.heartbeat(run.key, 1, "rank"), poll)
    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for number in range(1, 41):
        writer.commit_step(*step(number))
    done.set()
    for thread in threads:
        thread.join()
    poll()
    assert failures == []
    assert seen == [row["id"] for row in store.trajectories(run.key)]
    assert assert_whole(store, run.key) == 40


def test_of_many_that_try_at_once_one_gets_the_attempt_and_one_ends_the_run(home: Path) -> None:
    run = make_run(open_store())
    code = """
store = open_store()
key, number = map(int, sys.argv[2:])
print(store.start_attempt(key, 1, host_pid=number),
      store.move_phase(key, "FAILED", attempt=1, failure=f"seen gone by {number}"))
"""
    answers = [
        answer.split()
        for answer in in_processes(3, "from nbtrain.store import open_store", code, run.key)
    ]
    assert [sorted(column) for column in zip(*answers, strict=True)][1] == ["False"] * 2 + ["True"]
    taken = [n for n, (got, _) in enumerate(answers) if got == "True"]
    assert len(taken) <= 1  # none, when the run was ended before anybody asked
    [attempt] = open_store().attempts(run.key)
    assert attempt["host_pid"] == (taken[0] if taken else None)
    ender = next(n for n, (_, ended) in enumerate(answers) if ended == "True")
    assert open_store().run(run.key).failure == f"seen gone by {ender}"


@pytest.mark.parametrize("delay", [0.0, 0.03, 0.11])
def test_a_writer_killed_at_any_moment_loses_no_committed_step(home: Path, delay: float) -> None:
    store = open_store()
    code = f"import sys; sys.path.insert(0, sys.argv[1])\n{IMPORTS}{WRITE}"
    argv = [sys.executable, "-c", code, str(Path(__file__).parent), "100000"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        told = [1, *(int(line) for line in process.stdout.read().splitlines())]
    [run] = store.runs()
    whole = assert_whole(store, run.key)
    assert told[-1] <= whole <= told[-1] + 1
    RunWriter(store, run.key, 1).commit_step(*step(whole + 1))
    assert assert_whole(store, run.key) == whole + 1


def test_an_error_that_is_kept_does_not_keep_its_state_of_the_store(home: Path) -> None:
    store = open_store(home)
    run, writer = training(store)
    for number in range(1, 40):
        writer.commit_step(*step(number))
    kept: list[BaseException] = []
    try:
        with store.database.reading() as connection:
            unread = connection.execute(text("SELECT step FROM steps ORDER BY step"))
            assert unread.fetchone()[0] == 1
            raise RuntimeError
    except RuntimeError as error:
        kept.append(error)  # as a shell keeps the last traceback, and with it the cursor
    assert kept[0].__traceback__ is not None
    writer.commit_step(*step(40))
    other = sqlite3.connect(store.database.path, timeout=0.1)
    assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    other.close()
    assert len(store.steps(run.key)) == 40
