"""Reading: rows after a key."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Table,
    bindparam,
    func,
    literal_column,
    select,
)

from nbtrain.errors import NotFound
from nbtrain.store import tables
from nbtrain.store.finder import Finder
from nbtrain.store.pulse import Pulse, pulse
from nbtrain.store.rows import Row
from nbtrain.store.texts import unpack

__all__ = ["Reader"]

_CHUNK = 20_000
_FEW_ROUNDS = 200  # whose steps are looked up one by one

_TEXT_BLOCK = (
    select(tables.trajectory_texts)
    .where(tables.trajectory_texts.c.first <= bindparam("key"))
    .order_by(tables.trajectory_texts.c.first.desc())
    .limit(1)
)

# Spelled out: a bound value would not let SQLite use the index of the few unsettled ones
_UNSETTLED = (
    select(tables.steps.c.id)
    .where(
        tables.steps.c.run == bindparam("key"),
        tables.steps.c.settled == literal_column("0"),
        tables.steps.c.superseded.is_(False),
    )
    .order_by(tables.steps.c.id)
    .limit(1)
)


class Reader(Finder):
    """What can be read of a store. A ``run_key`` is :attr:`StoredRun.key`.

    Every method that takes ``after`` returns the rows whose ``id`` is greater, oldest first, so
    that a poller asks for what is new; it asks from before :meth:`unsettled` to see what changed.
    Rows past a restored step are superseded and left out unless ``superseded=True``.
    """

    def steps(
        self,
        run_key: int,
        after: int = 0,
        limit: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        superseded: bool = False,
    ) -> list[Row]:
        """Step rows. A row whose ``settled`` is false may still change.

        ``columns`` narrows the rows; ``step``, ``avg_reward``, ``used_reward`` and ``attempt``
        alone are read from an index, in the order of steps, without touching the metrics.
        """
        return _dicts(self._select(tables.steps, run_key, after, limit, columns, superseded))

    def pulse(self, run_key: int, steps_after: int = 0, rounds_after: int = 0) -> Pulse:
        """The run, its newest attempt and its new steps and rounds, in one cheap transaction."""
        return pulse(self.database, run_key, steps_after, rounds_after)

    def steps_at(self, run_key: int, steps: Iterable[int]) -> list[Row]:
        """The rows of these steps, in their order."""
        wanted = sorted(set(steps))
        rules = [tables.steps.c.step.in_(wanted)]
        found = _dicts(self._select(tables.steps, run_key, 0, None, None, False, rules))
        return sorted(found, key=lambda row: row["step"])

    def unsettled(self, run_key: int) -> int | None:
        """The ``id`` of the first step whose rows may still change: those of the step itself and
        of its groups and trajectories. ``None`` when all are settled.
        """
        with self.database.reading() as connection:
            return connection.execute(_UNSETTLED, {"key": run_key}).scalar()

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
        newest: bool = False,
        columns: Sequence[str] | None = None,
        superseded: bool = False,
    ) -> list[Row]:
        """Group rows, of one step if ``step`` is given.

        ``newest=True`` keeps the last ``limit`` rows instead of the first.
        """
        table = tables.groups
        rules = [] if step is None else [table.c.step == step]
        return _dicts(
            self._select(table, run_key, after, limit, columns, superseded, rules, newest=newest)
        )

    def group_count(self, run_key: int) -> int:
        """How many groups stand in the store for this run, superseded ones left out."""
        table = tables.groups
        query = select(func.count()).where(table.c.run == run_key, table.c.superseded.is_(False))
        with self.database.reading() as connection:
            return connection.execute(query).scalar_one()

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
        return _dicts(
            self._select(table, run_key, after, limit, columns, superseded, rules, newest=newest)
        )

    def held_out(self, run_key: int, steps: Collection[int]) -> list[tuple[Any, ...]]:
        """(attempt, step, task_id, reward, reason) of the samples of the rounds at ``steps``."""
        table = tables.trajectories
        wanted = ("attempt", "step", "task_id", "reward", "reason")
        found: list[tuple[Any, ...]] = []
        if len(steps) > _FEW_ROUNDS:
            for chunk in self.trajectory_chunks(run_key, wanted, split="held_out"):
                found += (row[1:] for row in chunk if row[2] in steps)
            return found
        # By the index of steps. "= 'held_out'", or an order of keys, would lead SQLite to read
        # every round's samples, or every trajectory, for those of a few rounds
        query = select(*(table.c[name] for name in wanted)).where(
            table.c.run == run_key,
            table.c.step.in_(sorted(steps)),
            table.c.split != "train",
            table.c.superseded.is_(False),
        )
        with self.database.reading() as connection:
            return [tuple(row) for row in connection.execute(query)]

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
        table = tables.trajectories
        rules = [] if split is None else [_of_split(split)]
        wanted = ("id", *columns)
        while True:
            _, rows = self._select(table, run_key, after, size, wanted, False, rules)
            if not rows:
                return
            yield rows
            after = rows[-1][0]

    def trajectory_count(self, run_key: int, *, split: str | None = None) -> int:
        """How many trajectories stand in the store for this run, superseded ones left out."""
        table = tables.trajectories
        query = select(func.count()).where(table.c.run == run_key, table.c.superseded.is_(False))
        if split is not None:
            query = query.where(_of_split(split))
        with self.database.reading() as connection:
            return connection.execute(query).scalar_one()

    def cut_count(self, run_key: int, after: int, until: int) -> int:
        """How many training trajectories were cut off before they were graded.

        Looks at keys above ``after`` up to ``until``; superseded ones are left out.
        """
        table = tables.trajectories
        query = select(func.count()).where(
            table.c.run == run_key,
            table.c.id > after,
            table.c.id <= until,
            table.c.status == "aborted",
            table.c.reward.is_(None),
            table.c.superseded.is_(False),
            _of_split("train"),
        )
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
        return _dicts(
            self._select(tables.validation_rounds, run_key, after, None, None, superseded)
        )

    def phases(self, run_key: int, after: int = 0) -> list[Row]:
        """Every phase the run has entered, with time and message."""
        return _dicts(self._select(tables.phases, run_key, after))

    def attempts(self, run_key: int) -> list[Row]:
        """The run's attempts, oldest first."""
        return _dicts(self._select(tables.attempts, run_key))

    def attempt(self, run_key: int, number: int) -> Row:
        """The run's attempt of this number. Raises :class:`NotFound`."""
        for row in self.attempts(run_key):
            if row["number"] == number:
                return row
        msg = f"the run with the key {run_key} has no attempt {number}"
        raise NotFound(msg)

    def commands(self, run_key: int, *, unhandled: bool = True) -> list[Row]:
        """Control commands, oldest first; by default those that nobody has handled yet."""
        table = tables.commands
        rules = [table.c.handled_at.is_(None)] if unhandled else []
        return _dicts(self._select(table, run_key, 0, None, None, True, rules))

    # --- inside ---------------------------------------------------------------------------

    def _select(
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
    ) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Names of the columns, and the rows, oldest first."""
        wanted = [table.c[name] for name in columns] if columns else list(table.c)
        query = select(*wanted).where(table.c.run == run_key, *rules).limit(limit)
        if after:
            query = query.where(table.c.id > after)
        if not superseded:
            query = query.where(table.c.superseded.is_(False))
        query = query.order_by(*_order(table, wanted, after, newest))
        with self.database.reading() as connection:
            result = connection.execute(query)
            rows = [tuple(row) for row in result]
        return tuple(result.keys()), rows[::-1] if newest else rows


def _dicts(found: tuple[tuple[str, ...], list[tuple[Any, ...]]]) -> list[Row]:
    names, rows = found
    return [dict(zip(names, row, strict=True)) for row in rows]


_REWARD_INDEX = {"id", "run", "step", "superseded", "attempt", "avg_reward", "used_reward"}


def _order(
    table: Table, wanted: Sequence[Column[Any]], after: int, newest: bool
) -> list[ColumnElement[Any]]:
    covered = table is tables.steps and {column.name for column in wanted} <= _REWARD_INDEX
    if covered and not after and not newest:
        return [table.c.step]
    return [table.c.id.desc() if newest else table.c.id]


def _of_split(split: str) -> ColumnElement[bool]:
    if split not in ("train", "held_out"):
        msg = f"split is {split!r}; it is 'train' or 'held_out'"
        raise ValueError(msg)
    # Spelled out: a bound value would not let SQLite use the index of the held-out ones
    return tables.trajectories.c.split == literal_column(f"'{split}'")
