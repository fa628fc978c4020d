"""A step's groups and trajectories: made ready outside the transaction, inserted within it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table, insert, text

from nbtrain.store import tables, texts
from nbtrain.store.values import RowShape

__all__ = ["GroupBatch", "TrajectoryBatch"]

_GROUP = RowShape(tables.groups)
_TRAJECTORY = RowShape(tables.trajectories)


class GroupBatch:
    """Groups that completed in one step."""

    def __init__(
        self,
        given: Sequence[Mapping[str, Any]],
        place: Mapping[str, Any],
        nonfinite: list[str],
    ) -> None:
        self._columns = _GROUP.columns(given, place, nonfinite)

    def insert(self, connection: Connection) -> None:
        """Write the rows."""
        _insert_columns(connection, tables.groups, self._columns)


class TrajectoryBatch:
    """Trajectories of one step or validation round, with their texts."""

    def __init__(
        self,
        given: Sequence[Mapping[str, Any]],
        place: Mapping[str, Any],
        split: str,
        nonfinite: list[str],
    ) -> None:
        shared = {**place, "split": split}
        self._columns = _TRAJECTORY.columns(given, shared, nonfinite, aside="text")
        self._blocks = texts.pack([item.get("text") for item in given], nonfinite)
        self._count = len(given)

    @property
    def attempted(self) -> int:
        """Number of trajectories."""
        return self._count

    @property
    def graded(self) -> int:
        """Number of those with a reward."""
        return self._count - self._columns["reward"].count(None)

    @property
    def output_tokens(self) -> int:
        """Tokens sampled in all of them."""
        return sum(tokens or 0 for tokens in self._columns["output_tokens"])

    def insert(self, connection: Connection) -> None:
        """Write rows and texts."""
        if not self._count:
            return
        # The keys are given out here, under the write lock that the transaction holds from its
        # begin: asking the database for each is slower than writing it
        last: int | None = connection.execute(_LAST_KEY).scalar()
        first = (last or 0) + 1
        keys = range(first, first + self._count)
        _insert_columns(connection, tables.trajectories, {"id": keys, **self._columns})
        if self._blocks:
            rows = [{"first": first + n, "data": data} for n, data in self._blocks]
            connection.execute(_TEXTS, rows)


def _insert_columns(
    connection: Connection, table: Table, columns: Mapping[str, Sequence[Any]]
) -> None:
    """Insert rows given by column.

    The statement goes to the driver as it is: every value has passed the boundary already, and
    looking at each again costs more than writing it.
    """
    rows = list(zip(*columns.values(), strict=True))
    if rows:
        marks = ", ".join("?" * len(columns))
        statement = f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({marks})"
        connection.exec_driver_sql(statement, rows)


_LAST_KEY = text("SELECT seq FROM sqlite_sequence WHERE name = 'trajectories'")
_TEXTS = insert(tables.trajectory_texts)
