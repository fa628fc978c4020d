"""Opening a store: where, for whom, which schema; and what its references mean."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from nbtrain.errors import AmbiguousReference, NotFound, StoreError
from nbtrain.plan.phases import Phase
from nbtrain.store import RunWriter, Store, StoredRun, home_folder, new_id, open_store, short
from nbtrain.store.ids import check_id
from nbtrain.store.schema import MIGRATIONS, REVISIONS
from nbtrain.store.tables import metadata

RESOLVED: dict[str, Any] = {
    "settings": {"algorithm": {"value": "gspo", "origin": "default"}},
    "workload": {"workload_id": "a" * 64, "name": "sums"},
    "base_model": {"slug": "nbtrain/tiny"},
    "parent": None,
    "display_name": "first",
    "start_step": 0,
    "total_steps": 10,
    "config_hash": "c" * 64,
}


def make_run(store: Store, name: str | None = "first", run_id: str = "", **more: Any) -> StoredRun:
    """A new run, as the client makes one."""
    resolved = {**RESOLVED, "display_name": name, **more}
    return store.create_run(run_id or new_id(), plan={"num_steps": 10}, resolved=resolved)


def training(store: Store, **more: Any) -> tuple[StoredRun, RunWriter]:
    """A run in TRAINING and the writer of its rank."""
    run = make_run(store, **more)
    assert store.start_attempt(run.key, 1, host_pid=1)
    assert store.move_phase(run.key, Phase.TRAINING, attempt=1)
    return store.run(run.key), RunWriter(store, run.key, 1)


def in_processes(count: int, imports: str, code: str, *args: object) -> list[str]:
    """Run ``code`` in several fresh interpreters at the same moment; what each printed.

    ``imports`` runs before that moment. Arguments are this folder, ``args`` and the interpreter's
    number.
    """
    ready = "import sys; sys.path.insert(0, sys.argv[1])\n" + imports + "\nprint(); input()\n"
    argv = [sys.executable, "-u", "-c", ready + code, str(Path(__file__).parent), *map(str, args)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*argv, str(n)], **pipes) for n in range(count)]
    assert [process.stdout.readline() for process in started if process.stdout] == ["\n"] * count
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * count
    return answers


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- where, and for whom ----------------------------------------------------------------------


def test_the_home_is_the_stated_one_or_the_users_data_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert home_folder() == home
    monkeypatch.delenv("NBTRAIN_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert home_folder() == tmp_path / "data" / "nbtrain"
    assert mode(home_folder()) == 0o700


def test_nobody_else_can_read_anything(home: Path) -> None:
    before = os.umask(0)
    try:
        store = open_store()
        run, writer = training(store)
        writer.commit_step({"step": 1})
        folder = store.run_folder(run.run_id)
    finally:
        os.umask(before)
    assert folder == home / "runs" / run.run_id
    assert {path.name: mode(path) for path in (home, home / "runs", folder)} == {
        home.name: 0o700,
        "runs": 0o700,
        run.run_id: 0o700,
    }
    assert {path.name: mode(path) for path in home.glob("nbtrain.db*")} == {
        "nbtrain.db": 0o600,
        "nbtrain.db-wal": 0o600,
        "nbtrain.db-shm": 0o600,
    }


def test_a_store_that_others_could_read_is_narrowed_and_a_full_folder_left_alone(
    home: Path,
) -> None:
    open_store().close()
    (home / "nbtrain.db").chmod(0o644)
    home.chmod(0o755)
    open_store()
    assert mode(home / "nbtrain.db") == 0o600
    assert mode(home) == 0o755  # it may be the user's own home folder


@pytest.mark.parametrize("name", ["with space", "ünï", "per%20cent%", "quest?ion", "ha#sh"])
def test_a_store_opens_under_any_path_and_again_by_its_url(tmp_path: Path, name: str) -> None:
    home = tmp_path / name
    store = open_store(home)
    make_run(store)
    assert (home / "nbtrain.db").exists()
    again = open_store(tmp_path / "elsewhere", store.url)
    assert again.find_run("first").name == "first"
    assert not (tmp_path / "elsewhere" / "nbtrain.db").exists()


def test_a_url_in_the_environment_wins_and_is_made_absolute(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NBTRAIN_STORE_URL", "sqlite:///shared.db")
    store = open_store()
    assert store.home == home
    assert store.url == f"sqlite:///{tmp_path}/shared.db"
    assert not (home / "nbtrain.db").exists()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("postgresql://host/db", "names postgresql, which is not built yet"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("nonsense", "is no store URL"),
        ("sqlite:////no/such/folder/x.db", "cannot be used: No such file or directory"),
    ],
)
def test_a_url_that_cannot_be_a_store_is_refused(home: Path, url: str, sentence: str) -> None:
    with pytest.raises(StoreError, match=sentence):
        open_store(url=url)


@pytest.mark.parametrize("bad", ["", "abcd", "../../etc", "A" * 64, "a" * 63 + "\n", "a" * 65])
def test_only_an_id_becomes_a_path(home: Path, bad: str) -> None:
    store = open_store()
    with pytest.raises(ValueError, match="is not an id"):
        store.run_folder(bad)
    with pytest.raises(ValueError, match="is not an id"):
        make_run(store, run_id=bad or "-")
    assert not (home / "runs").exists() or not list((home / "runs").iterdir())


def test_ids_are_64_digits_and_shown_as_12() -> None:
    one, other = new_id(), new_id()
    assert check_id(one) == one != other
    assert len(one) == 64
    assert short(one) == one[:12]


# --- the journal ------------------------------------------------------------------------------


def test_a_store_is_in_wal_mode(home: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = open_store()
    assert store.journal == "wal"
    with store.database.reading() as connection:
        pragmas = [
            connection.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "foreign_keys", "busy_timeout", "synchronous")
        ]
    assert pragmas == ["wal", 1, 20_000, 1]


def test_without_shared_memory_it_falls_back_to_a_journal_and_says_so(home: Path) -> None:
    # This VFS of SQLite's own locks by files and has no shared memory, as some file systems
    url = f"sqlite:///file:{home}.db?vfs=unix-dotfile&uri=true"
    with pytest.warns(RuntimeWarning, match="no shared memory for SQLite's WAL"):
        store = open_store(url=url)
    assert store.journal == "delete"
    run, writer = training(store)
    writer.commit_step({"step": 1, "avg_reward": 0.5})
    assert [row["avg_reward"] for row in store.rewards(run.key)] == [0.5]
    with store.database.reading() as connection:
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2
    assert mode(Path(f"{home}.db")) == 0o600


# --- the schema -------------------------------------------------------------------------------


def test_the_migrations_make_the_tables_of_the_code(home: Path) -> None:
    store = open_store()
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        found = inspect(connection)
        indices = {
            index["name"]: index["column_names"]
            for name in metadata.tables
            for index in found.get_indexes(name)
        }
        made = connection.execute(text("SELECT sql FROM sqlite_master WHERE type = 'table'"))
        keeping = [sql for sql in made.scalars() if "AUTOINCREMENT" in sql]
    stated = {
        index.name: [column.name for column in index.columns]
        for table in metadata.tables.values()
        for index in table.indexes
    }
    assert indices == stated
    assert len(keeping) == len(metadata.tables) - 1  # all but the texts, which have no own key


def test_the_code_knows_every_migration_in_order() -> None:
    script = ScriptDirectory(str(MIGRATIONS))
    assert tuple(m.revision for m in script.walk_revisions())[::-1] == REVISIONS


def test_opening_a_current_store_does_not_load_alembic(home: Path) -> None:
    open_store().close()
    code = """
open_store().runs()
print([name for name in ("alembic", "numpy", "pandas", "torch", "pydantic") if name in sys.modules])
"""
    assert in_processes(1, "from nbtrain.store import open_store", code) == ["[]\n"]


def test_a_newer_store_is_refused_with_a_sentence(home: Path) -> None:
    store = open_store()
    with store.database.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0999'"))
    with pytest.raises(StoreError) as refusal:
        open_store()
    assert str(refusal.value) == (
        f"the store {home}/nbtrain.db was written by a newer nbtrain (schema 0999; this version "
        f"knows up to {REVISIONS[-1]}). Update nbtrain, or name another folder with NBTRAIN_HOME"
    )


def test_somebody_elses_database_is_refused_and_left_alone(home: Path) -> None:
    store = open_store()
    with store.database.writing() as connection:
        connection.execute(text("DROP TABLE alembic_version"))
    with pytest.raises(StoreError, match="it is not an nbtrain store"):
        open_store()
    with store.database.reading() as connection:
        names = connection.execute(text("SELECT name FROM sqlite_master")).scalars().all()
    assert "alembic_version" not in names


def test_several_processes_open_a_new_store_at_once(home: Path) -> None:
    code = """
for name in range(6):
    make_run(open_store(pathlib.Path(sys.argv[2]) / str(name)), sys.argv[3])
"""
    imports = "import pathlib, alembic.command; from test_store import make_run, open_store"
    in_processes(4, imports, code, home)
    for name in range(6):
        store = open_store(home / str(name))
        assert store.journal == "wal"
        assert {run.name for run in store.runs()} == {"0", "1", "2", "3"}
        with store.database.reading() as connection:
            assert connection.execute(text("PRAGMA integrity_check")).scalar() == "ok"


def test_a_forked_process_opens_connections_of_its_own(home: Path) -> None:
    code = """
store = open_store()
store.runs()
def connections():
    with store.database.reading() as connection:
        return id(connection.connection.driver_connection)
before = connections()
child = os.fork()
if child == 0:
    os._exit(0 if connections() != before and store.engine.pool.checkedin() == 1 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), connections() == before)
"""
    imports = "import os; from nbtrain.store import open_store"
    assert in_processes(1, imports, code) == ["0 True\n"]


# --- references -------------------------------------------------------------------------------


def test_a_run_is_found_by_id_by_name_and_by_prefix(home: Path) -> None:
    store = open_store()
    old = make_run(store, "first", "ab12" + "0" * 60)
    new = make_run(store, "first", "ab13" + "0" * 60)
    named = make_run(store, "ab12", "cd" * 32)
    for ref, expected in [
        (old.run_id, old),
        ("first", new),  # a name means its newest run
        ("ab120", old),
        ("ab13", new),
        ("ab12", named),  # a name goes before a prefix
        ("cdcd", named),
    ]:
        assert store.find_run(ref) == expected, ref
    assert store.runs(2) == [named, new]
    assert store.runs(name="first") == [new, old]


def test_an_id_as_it_is_shown_goes_before_a_name_like_it(home: Path) -> None:
    store = open_store()
    run = make_run(store, "first", "ab12" + "0" * 60)
    taken = make_run(store, run.run_id[:12], "cd" * 32)
    free = make_run(store, "ef" * 6, "12" * 32)
    assert store.find_run(run.run_id[:12]) == store.find_run(run.run_id) == run
    assert store.find_run(run.run_id[:11]) == run
    assert store.find_run("ef" * 6) == free, "a name that is no run's id"
    assert store.find_run("cdcd") == taken


def test_a_prefix_that_fits_two_runs_is_ambiguous(home: Path) -> None:
    store = open_store()
    ids = ["ab12" + digit + "0" * 59 for digit in "01"]
    for run_id in ids:
        make_run(store, None, run_id)
    with pytest.raises(AmbiguousReference) as refusal:
        store.find_run("ab12")
    assert str(refusal.value) == (
        "'ab12' fits several runs: ab1210000000, ab1200000000; give more digits"
    )


@pytest.mark.parametrize(
    ("ref", "sentence"),
    [
        ("frist", "no run has the name or id 'frist'; did you mean 'first'?"),
        ("zzz", "no run has the name or id 'zzz'; the newest are first, dead00000000"),
        (
            "dea",
            "no run has the name or id 'dea' (a prefix of an id has at least 4 digits); "
            "the newest are first, dead00000000",
        ),
        ("deae", "no run has the name or id 'deae'; the newest are first, dead00000000"),
        ("", "no run has the name or id ''; the newest are first, dead00000000"),
    ],
)
def test_a_run_that_is_not_there_is_refused_with_what_is_near(
    home: Path, ref: str, sentence: str
) -> None:
    store = open_store()
    make_run(store, None, "dead" + "0" * 60)
    make_run(store, "first")
    with pytest.raises(NotFound) as refusal:
        store.find_run(ref)
    assert str(refusal.value) == sentence


def test_nothing_is_found_in_an_empty_store(home: Path) -> None:
    store = open_store()
    with pytest.raises(NotFound, match="no run has the name or id 'first'; there is none yet"):
        store.find_run("first")
    with pytest.raises(NotFound, match="no checkpoint 'abcd'; there is none yet"):
        store.find_checkpoint("abcd")
    with pytest.raises(NotFound, match="no run with the key 7"):
        store.run(7)


def test_a_checkpoint_is_found_by_id_and_prefix(home: Path) -> None:
    store = open_store()
    run, writer = training(store)
    ids = ["ab12" + digit + "0" * 59 for digit in "01"]
    for step, checkpoint_id in enumerate(ids, 1):
        row = {"step": step, "weights": True, "training_state": step == 2, "path": f"/c/{step}"}
        writer.commit_checkpoint({**row, "checkpoint_id": checkpoint_id, "reason": "interval"})
    found = store.find_checkpoint("ab121")
    assert found == store.find_checkpoint(ids[1]) == store.checkpoints(run.key)[1]
    assert (found.run_id, found.step, found.training_state) == (run.run_id, 2, True)
    assert (found.path, found.pinned) == ("/c/2", False)
    assert store.run(run.key).saved_step == 2
    with pytest.raises(AmbiguousReference, match="fits several checkpoints: ab12"):
        store.find_checkpoint("ab12")
    with pytest.raises(NotFound, match="no checkpoint 'best'; the newest are ab1210000000, ab12"):
        store.find_checkpoint("best")


# --- what is registered -----------------------------------------------------------------------


def test_workloads_are_kept_by_content_and_their_names_move(home: Path) -> None:
    store = open_store()
    one, two = "ab" * 32, "cd" * 32
    first = store.put_workload(one, spec={"rewards": ["exact"]}, path="/w/1", name="sums")
    assert store.put_workload(one, spec={"ignored": 1}, path="/w/9") == first
    assert store.workload("sums") == store.workload("abab") == first
    store.put_workload(two, spec={}, path="/w/2", name="sums")
    found = store.workload("sums")
    assert found is not None
    assert (found["workload_id"], found["path"]) == (two, "/w/2")
    assert store.workload("nothing") is None
    assert [row["workload_id"] for row in store.workloads()] == [two, one]
    assert store.move_alias("workload", "sums", one) == two
    assert store.aliases("workload") == {"sums": one}
    assert store.alias("base_model", "sums") is None
    store.put_workload("abab" + "0" * 60, spec={}, path="/w/3")
    with pytest.raises(AmbiguousReference, match="fits several workloads"):
        store.workload("abab")


def test_a_base_model_is_what_its_slug_was_last_said_to_be(home: Path) -> None:
    store = open_store()
    for fingerprint in ("f1", "f2"):
        store.put_base_model(
            "mine", kind="gguf", location="/m.gguf", fingerprint=fingerprint, spec={"layers": 2}
        )
    [row] = store.base_models()
    assert row == store.base_model("mine")
    assert (row["fingerprint"], row["spec"], row["kind"]) == ("f2", {"layers": 2}, "gguf")
    assert store.base_model("other") is None
