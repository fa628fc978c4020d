"""Reading: references to runs and checkpoints, and rows after a key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Select,
    Table,
    Text,
    bindparam,
    func,
    literal_column,
    select,
    type_coerce,
)

from nbtrain.errors import AmbiguousReference, NotFound
from nbtrain.plan.phases import TERMINAL, Phase
from nbtrain.store import tables
from nbtrain.store.connect import Database
from nbtrain.store.ids import MIN_PREFIX, is_prefix, short
from nbtrain.store.rows import Row, StoredCheckpoint, StoredRun
from nbtrain.store.texts import unpack

__all__ = ["Reader"]

_T = TypeVar("_T")

_CHUNK = 20_000

_RUN_JSON = {"plan": "plan_text", "resolved": "resolved_text"}
_RUN_COLUMNS: list[ColumnElement[Any]] = [
    tables.runs.c.id.label("key"),
    *(
        # The JSON stays text until somebody asks for it
        type_coerce(column, Text).label(_RUN_JSON[column.name])
        if column.name in _RUN_JSON
        else column
        for column in tables.runs.c
        if column.name != "id"
    ),
]
_TEXT_BLOCK = (
    select(tables.trajectory_texts)
    .where(tables.trajectory_texts.c.first <= bindparam("key"))
    .order_by(tables.trajectory_texts.c.first.desc())
    .limit(1)
)
_CHECKPOINT_COLUMNS: list[ColumnElement[Any]] = [
    tables.checkpoints.c.id.label("key"),
    *(column for column in tables.checkpoints.c if column.name != "id"),
    tables.runs.c.run_id,
]


class Reader:
    """What can be read of a store. A ``run_key`` is :attr:`StoredRun.key`.

    Every method that takes ``after`` returns the rows whose ``id`` is greater, oldest first, so
    that a poller asks for what is new. Rows past a restored step are superseded and left out
    unless ``superseded=True``.
    """

    database: Database

    # --- runs and checkpoints -------------------------------------------------------------

    def run(self, run_key: int) -> StoredRun:
        """The run with this key, as it stands now. Raises :class:`NotFound`."""
        found = self._runs(select(*_RUN_COLUMNS).where(tables.runs.c.id == run_key))
        if not found:
            msg = f"there is no run with the key {run_key}"
            raise NotFound(msg)
        return found[0]

    def runs(
        self,
        limit: int | None = None,
        *,
        name: str | None = None,
        parent_run_id: str | None = None,
        open_only: bool = False,
    ) -> list[StoredRun]:
        """Runs, newest first; of one name, of one parent, or only those that have not ended."""
        query = select(*_RUN_COLUMNS).order_by(tables.runs.c.id.desc()).limit(limit)
        if name is not None:
            query = query.where(tables.runs.c.name == name)
        if parent_run_id is not None:
            query = query.where(tables.runs.c.parent_run_id == parent_run_id)
        if open_only:
            query = query.where(tables.runs.c.phase.not_in(sorted(TERMINAL)))
        return self._runs(query)

    def find_run(self, ref: str) -> StoredRun:
        """The run that ``ref`` means: its id, else the newest of that name, else an id prefix.

        A prefix has at least 4 digits. Raises :class:`NotFound`, naming what is near, and
        :class:`AmbiguousReference`, naming the candidates.
        """
        query = select(*_RUN_COLUMNS).order_by(tables.runs.c.id.desc())
        for rule in (tables.runs.c.run_id == ref, tables.runs.c.name == ref):
            found = self._runs(query.where(rule).limit(1))
            if found:
                return found[0]
        if is_prefix(ref):
            found = self._runs(query.where(_begins(tables.runs.c.run_id, ref)).limit(6))
            if found:
                return _only(found, ref, [run.run_id for run in found], "runs")
        raise NotFound(self._no_run(ref))

    def find_checkpoint(self, ref: str) -> StoredCheckpoint:
        """The committed checkpoint with this id or unambiguous prefix of at least 4 digits.

        Raises :class:`NotFound` and :class:`AmbiguousReference` as :meth:`find_run` does.
        """
        query = select(*_CHECKPOINT_COLUMNS).join(tables.runs)
        column = tables.checkpoints.c.checkpoint_id
        if is_prefix(ref):
            with self.database.reading() as connection:
                rows = connection.execute(query.where(_begins(column, ref)).limit(6)).mappings()
                found = [StoredCheckpoint(**row) for row in rows]
            if found:
                return _only(found, ref, [item.checkpoint_id for item in found], "checkpoints")
        with self.database.reading() as connection:
            newest = connection.execute(select(column).order_by(tables.checkpoints.c.id.desc()))
            known = [short(item) for item in newest.scalars().fetchmany(5)]
        raise NotFound(_nothing("checkpoint", ref, known, []))

    # --- rows after a key -----------------------------------------------------------------

    def steps(
        self,
        run_key: int,
        after: int = 0,
        limit: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        superseded: bool = False,
    ) -> list[Row]:
        """Step rows. A row whose ``settled`` is false may still change: a poller goes on asking
        from before the first such row.

        ``columns`` narrows the rows; ``step``, ``avg_reward``, ``used_reward`` and ``attempt``
        alone are read from an index, in the order of steps, without touching the metrics.
        """
        return self._after(tables.steps, run_key, after, limit, columns, superseded)

    def rewards(self, run_key: int, after: int = 0) -> list[Row]:
        """The reward history in the order of steps: id, attempt, step, avg_reward, used_reward."""
        columns = ("id", "attempt", "step", "avg_reward", "used_reward")
        return self.steps(run_key, after, columns=columns)

    def groups(
        self,
        run_key: int,
        after: int = 0,
        limit: int | None = None,
        *,
        step: int | None = None,
        columns: Sequence[str] | None = None,
        superseded: bool = False,
    ) -> list[Row]:
        """Group rows, of one step if ``step`` is given."""
        rules = [] if step is None else [tables.groups.c.step == step]
        return self._after(tables.groups, run_key, after, limit, columns, superseded, rules)

    def trajectories(
        self,
        run_key: int,
        after: int = 0,
        *,
        step: int | None = None,
        split: str | None = None,
        limit: int | None = None,
        newest: bool = False,
        columns: Sequence[str] | None = None,
        superseded: bool = False,
    ) -> list[Row]:
        """Trajectory rows without texts (see :meth:`texts`), oldest first.

        ``newest=True`` keeps the last ``limit`` rows instead of the first.
        """
        table = tables.trajectories
        rules = [] if step is None else [table.c.step == step]
        if split is not None:
            rules.append(_of_split(split))
        return self._after(table, run_key, after, limit, columns, superseded, rules, newest=newest)

    def trajectory_chunks(
        self,
        run_key: int,
        columns: Sequence[str],
        *,
        after: int = 0,
        split: str | None = None,
        size: int = _CHUNK,
    ) -> Iterator[list[tuple[Any, ...]]]:
        """A few columns of all trajectories as lists of at most ``size`` tuples.

        Each chunk is a transaction of its own, so that a reader of a million rows holds up
        nobody. The first column of every tuple is the row's ``id``.
        """
        wanted = ("id", *columns)
        while True:
            rows = self.trajectories(run_key, after, split=split, limit=size, columns=wanted)
            if not rows:
                return
            yield [tuple(row[name] for name in wanted) for row in rows]
            after = rows[-1]["id"]

    def trajectory_count(self, run_key: int, *, split: str | None = None) -> int:
        """How many trajectories stand in the store for this run, superseded ones left out."""
        table = tables.trajectories
        query = select(func.count()).where(table.c.run == run_key, table.c.superseded.is_(False))
        if split is not None:
            query = query.where(_of_split(split))
        with self.database.reading() as connection:
            return connection.execute(query).scalar_one()

    def texts(self, trajectory_keys: Iterable[int]) -> dict[int, Row]:
        """Texts by trajectory ``id``: ``prompt``, ``completion``, ``terms``, ``error``.

        Trajectories without texts are left out.
        """
        found: dict[int, Row] = {}
        first, block = 0, list[Row | None]()
        with self.database.reading() as connection:
            for key in sorted(set(trajectory_keys)):
                if not first <= key < first + len(block):
                    row = connection.execute(_TEXT_BLOCK, {"key": key}).first()
                    first, block = (row.first, unpack(row.data)) if row else (0, [])
                place = key - first
                if place < len(block) and (texts := block[place]) is not None:
                    found[key] = texts
        return found

    def validation_rounds(
        self, run_key: int, after: int = 0, *, superseded: bool = False
    ) -> list[Row]:
        """Validation rounds."""
        return self._after(tables.validation_rounds, run_key, after, None, None, superseded)

    def checkpoints(
        self, run_key: int, after: int = 0, *, superseded: bool = False
    ) -> list[StoredCheckpoint]:
        """Committed checkpoints in the order in which they were committed."""
        table = tables.checkpoints
        query = (
            select(*_CHECKPOINT_COLUMNS)
            .join(tables.runs)
            .where(table.c.run == run_key, table.c.id > after)
            .order_by(table.c.id)
        )
        if not superseded:
            query = query.where(table.c.superseded.is_(False))
        with self.database.reading() as connection:
            return [StoredCheckpoint(**row) for row in connection.execute(query).mappings()]

    def phases(self, run_key: int, after: int = 0) -> list[Row]:
        """Every phase the run has entered, with time and message."""
        return self._after(tables.phases, run_key, after)

    def attempts(self, run_key: int) -> list[Row]:
        """The run's attempts, oldest first."""
        return self._after(tables.attempts, run_key)

    def commands(self, run_key: int, *, unhandled: bool = True) -> list[Row]:
        """Control commands, oldest first; by default those that nobody has handled yet."""
        table = tables.commands
        rules = [table.c.handled_at.is_(None)] if unhandled else []
        return self._after(table, run_key, rules=rules)

    # --- inside ---------------------------------------------------------------------------

    def _after(
        self,
        table: Table,
        run_key: int,
        after: int = 0,
        limit: int | None = None,
        columns: Sequence[str] | None = None,
        superseded: bool = True,
        rules: Sequence[ColumnElement[bool]] = (),
        *,
        newest: bool = False,
    ) -> list[Row]:
        wanted = [table.c[name] for name in columns] if columns else list(table.c)
        query = select(*wanted).where(table.c.run == run_key, *rules).limit(limit)
        if after:
            query = query.where(table.c.id > after)
        if not superseded and "superseded" in table.c:
            query = query.where(table.c.superseded.is_(False))
        query = query.order_by(*_order(table, wanted, after, newest))
        with self.database.reading() as connection:
            result = connection.execute(query)
            names = tuple(result.keys())
            rows = [dict(zip(names, row, strict=True)) for row in result]
        return rows[::-1] if newest else rows

    def _runs(self, query: Select[Any]) -> list[StoredRun]:
        with self.database.reading() as connection:
            rows = connection.execute(query).mappings()
            return [StoredRun(**{**row, "phase": Phase(row["phase"])}) for row in rows]

    def _no_run(self, ref: str) -> str:
        newest = select(tables.runs.c.name, tables.runs.c.run_id)
        with self.database.reading() as connection:
            query = newest.order_by(tables.runs.c.id.desc()).limit(200)
            rows = connection.execute(query).all()
        names = list(dict.fromkeys(name or short(run_id) for name, run_id in rows))
        return _nothing("run", ref, names[:5], difflib.get_close_matches(ref, names, 1))


_REWARD_INDEX = {"id", "run", "step", "superseded", "attempt", "avg_reward", "used_reward"}


def _order(
    table: Table, wanted: Sequence[Column[Any]], after: int, newest: bool
) -> list[ColumnElement[Any]]:
    covered = table is tables.steps and {column.name for column in wanted} <= _REWARD_INDEX
    if covered and not after and not newest:
        return [table.c.step, table.c.id]
    return [table.c.id.desc() if newest else table.c.id]


def _of_split(split: str) -> ColumnElement[bool]:
    if split not in ("train", "held_out"):
        msg = f"split is {split!r}; it is 'train' or 'held_out'"
        raise ValueError(msg)
    # Spelled out: a bound value would not let SQLite use the index of the held-out ones
    return tables.trajectories.c.split == literal_column(f"'{split}'")


def _begins(column: Column[Any], prefix: str) -> ColumnElement[bool]:
    # A range, which the unique index answers; "g" comes after every hex digit
    return (column >= prefix) & (column < prefix + "g")


def _only(found: Sequence[_T], ref: str, ids: Sequence[str], things: str) -> _T:
    if len(found) == 1:
        return found[0]
    several = ", ".join(item[: max(12, len(ref) + 4)] for item in ids[:5])
    more = ", …" if len(ids) > 5 else ""
    msg = f"{ref!r} fits several {things}: {several}{more}; give more digits"
    raise AmbiguousReference(msg)


def _nothing(thing: str, ref: str, known: Sequence[str], near: Sequence[str]) -> str:
    msg = f"no {thing} has the name or id {ref!r}" if thing == "run" else f"no {thing} {ref!r}"
    if near:
        return f"{msg}; did you mean {near[0]!r}?"
    if ref and len(ref) < MIN_PREFIX and all(digit in "0123456789abcdef" for digit in ref):
        msg += f" (a prefix of an id has at least {MIN_PREFIX} digits)"
    return f"{msg}; the newest are {', '.join(known)}" if known else f"{msg}; there is none yet"
