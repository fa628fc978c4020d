"""Runs with a stub rank, and what is left of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nbtrain.plan.phases import Phase
from nbtrain.processes import Identity, is_alive, marked
from nbtrain.store import Store, StoredRun

STUB = ("--rank-module", "tests.faults.rank_stub")
CHECKOUT = Path(__file__).parents[2]


def resolved(**changes: Any) -> dict[str, Any]:
    """A resolved plan, as far as the supervision reads one."""
    return {
        "settings": {"algorithm": {"value": "gspo", "origin": "default"}},
        "workload": {"workload_id": "5" * 64, "name": "sums"},
        "base_model": {
            "slug": "nbtrain/tiny",
            "kind": "embedded",
            "location": "",
            "fingerprint": "f" * 64,
        },
        "parent": None,
        "config_hash": "c" * 64,
        "start_step": 0,
        "total_steps": 10,
    } | changes


def create(
    store: Store, stub: Mapping[str, Any] | None = None, *, ranks: int = 1, **changes: Any
) -> StoredRun:
    """A run whose stub ranks have these orders."""
    plan = resolved(**changes)
    plan["settings"]["gpus"] = {"value": ranks, "origin": "stated"}
    folder = store.home / "workloads" / plan["workload"]["workload_id"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "workload.json").write_text("{}")
    return store.create_run(secrets.token_hex(32), plan={"stub": dict(stub or {})}, resolved=plan)


def until(true: Callable[[], object], seconds: float = 30.0) -> bool:
    """Whether ``true`` came true within ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.05)
    return bool(true())


def wait_phase(store: Store, run: StoredRun, *phases: Phase, seconds: float = 30.0) -> StoredRun:
    """The run once it is in one of ``phases``."""
    until(lambda: store.run(run.key).phase in phases, seconds)
    found = store.run(run.key)
    assert found.phase in phases, (found.phase, found.failure, host_log(store, run))
    return found


def host_log(store: Store, run: StoredRun) -> str:
    path = store.run_folder(run.run_id) / "logs" / "host.log"
    return path.read_text() if path.exists() else ""


def host_of(store: Store, run: StoredRun) -> Identity:
    row = store.attempts(run.key)[-1]
    return Identity(row["host_pid"], row["host_start_time"], row["boot_id"])


def ranks_of(store: Store, run: StoredRun) -> list[Identity]:
    row = store.attempts(run.key)[-1]
    return [Identity(pid, start_time, row["boot_id"]) for pid, start_time in row["rank_pids"]]


def rank_of(store: Store, run: StoredRun) -> Identity:
    return ranks_of(store, run)[0]


def processes_of(run: StoredRun) -> list[str]:
    """Live processes that carry the run's mark or have its id on their command line."""
    found = {one.pid for one in marked(f"{run.run_id}/")}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(entry) and run.run_id in command(entry):
            found.add(int(entry.name))
    return [f"{pid}: {command(Path('/proc') / str(pid))[:200]}" for pid in sorted(found)]


def alive(entry: Path) -> bool:
    try:
        return "\nState:\tZ" not in (entry / "status").read_text()
    except OSError:
        return False


def command(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def nothing_left(store: Store, run: StoredRun, seconds: float = 5.0) -> None:
    """Assert that within ``seconds`` no process of the run is left, nor anything of its kernel."""
    gone = until(lambda: not processes_of(run), seconds)
    assert gone, (processes_of(run), host_log(store, run))
    connection = Path(store.attempts(run.key)[-1]["connection_file"])
    assert until(lambda: not connection.exists(), seconds)
    # While a process ends, its command line goes before it does.
    assert until(lambda: not is_alive(host_of(store, run)), seconds)
    assert list(connection.parent.parent.glob(f"{connection.stem}-*")) == []
