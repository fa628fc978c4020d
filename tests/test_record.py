"""Recording through a store that is locked, or a disk that is full, for a while."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from nbtrain.errors import StoreError
from nbtrain.training.record import insist


def locked() -> StoreError:
    error = StoreError("the store was locked by another process for 20 s")
    error.__cause__ = OperationalError("INSERT", {}, sqlite3.OperationalError("database is locked"))
    return error


@pytest.mark.parametrize(
    "passing", [locked(), OSError(errno.ENOSPC, "No space left on device")], ids=["locked", "full"]
)
def test_what_may_pass_is_tried_again(passing: Exception) -> None:
    tries: list[int] = []

    def action() -> str:
        tries.append(1)
        if len(tries) < 2:
            raise passing
        return "done"

    assert insist(action) == "done"
    assert len(tries) == 2


def test_a_refusal_is_not_tried_again() -> None:
    tries: list[int] = []

    def action() -> None:
        tries.append(1)
        msg = "attempt 1 may write no more: its run is CANCELLED"
        raise StoreError(msg)

    with pytest.raises(StoreError, match="no more"):
        insist(action)
    assert len(tries) == 1


def test_patience_ends() -> None:
    def action() -> None:
        raise locked()

    with pytest.raises(StoreError, match="locked"):
        insist(action, patience=0.0)


def test_a_real_lock_is_waited_for(home: Path) -> None:
    """Another process's write lock: the heartbeat-sized write goes through once it is released."""
    from nbtrain.store import open_store

    with open_store() as store:
        blocker = sqlite3.connect(home / "nbtrain.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        blocker.execute("COMMIT")
        insist(lambda: store.move_alias("workload", "n", "a" * 64))
        assert store.alias("workload", "n") == "a" * 64
        blocker.close()
