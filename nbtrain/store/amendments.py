"""What a later step changes of earlier ones, and how a resume takes it back.

A group that waited, was used later or went stale changes its row, its trajectories' rows and the
ledger of the step it completed in. What stood there before is kept in ``amendments`` as long as
the run may be resumed from before the change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table, delete, insert, select

from nbtrain.errors import StoreError
from nbtrain.store import tables
from nbtrain.store.rows import Row
from nbtrain.store.values import RowShape, plain

__all__ = ["Amendments", "forget", "take_back"]

_STEP = RowShape(tables.steps)
_IDS = {"steps": "step", "groups": "group_id", "trajectories": "trajectory_id"}
_AMENDABLE = {
    "groups": ("outcome", "reason", "eligible", "consumed_step"),
    "trajectories": (
        *("status", "reason", "used_reward", "eligible", "verdict", "advantage"),
        *("consumed_step", "error"),
    ),
}
_SHAPES = {name: RowShape(getattr(tables, name)) for name in _AMENDABLE}

Changes = Mapping[int, Mapping[str, Any]]


class Amendments:
    """Changes to rows of earlier steps: checked here, written by :meth:`apply`.

    Raises ``TypeError`` naming a column that may not change or a value that does not fit.
    Recorded rewards, tokens and the step of a row never change, so neither do a run's totals.
    """

    def __init__(
        self,
        steps: Changes | None,
        groups: Changes | None,
        trajectories: Changes | None,
        nonfinite: list[str],
    ) -> None:
        self._steps = [(at, *_of_step(changes)) for at, changes in (steps or {}).items()]
        self._rows = [
            (name, _checked(name, changes, nonfinite))
            for name, changes in (("groups", groups), ("trajectories", trajectories))
            if changes
        ]

    def apply(self, connection: Connection, run_key: int, step: int) -> None:
        """Change the rows, and remember under ``step`` what they were.

        Raises :class:`StoreError` naming what stands nowhere.
        """
        before: dict[str, list[Any]] = {}
        if self._steps:
            before["steps"] = self._amend_steps(connection, run_key)
        for name, batches in self._rows:
            wanted = [key for _, keys, _ in batches for key in keys]
            found = _find(connection, name, run_key, wanted)
            # Most rows were alike before: nothing was said of them but that they wait
            alike: dict[tuple[Any, ...], list[int]] = {}
            for known in found.values():
                alike.setdefault(known[2:], []).append(known[1])
            before[name] = list(alike.items())
            for columns, keys, values in batches:
                rows = [(*new, found[key][1]) for key, new in zip(keys, values, strict=True)]
                _update(connection, name, columns, rows)
        if before:
            row = {"run": run_key, "step": step, "before": before}
            connection.execute(_REMEMBER, row)

    def _amend_steps(self, connection: Connection, run_key: int) -> list[Any]:
        table, before = tables.steps, []
        for step, columns, metrics in self._steps:
            here = (table.c.run == run_key) & (table.c.step == step)
            found = connection.execute(
                select(table.c.id, table.c.metrics, *(table.c[name] for name in columns)).where(
                    here, table.c.superseded.is_(False)
                )
            ).first()
            if found is None:
                msg = f"step {step} cannot be amended: it was not committed"
                raise StoreError(msg)
            changed, old = dict(columns), found.metrics or {}
            if metrics:
                changed["metrics"] = _merged(old, metrics)
            was = {name: getattr(found, name) for name in columns}
            known = {name: old[name] for name in (*metrics, "nonfinite") if name in old}
            before.append([found.id, was, known, [name for name in metrics if name not in old]])
            connection.execute(table.update().where(table.c.id == found.id).values(changed))
        return before


def take_back(connection: Connection, run_key: int, step: int) -> None:
    """Undo what steps after ``step`` changed of those up to it."""
    table = tables.amendments
    late = (table.c.run == run_key) & (table.c.step > step)
    query = select(table.c.before).where(late).order_by(table.c.id.desc())
    for (before,) in connection.execute(query).all():
        for name, rows in before.items():
            if name == "steps":
                _restore_steps(connection, rows)
            else:
                back = [(*was, key) for was, keys in rows for key in keys]
                _update(connection, name, _AMENDABLE[name], back)
    connection.execute(delete(table).where(late))


def forget(connection: Connection, run_key: int, step: int) -> None:
    """Let go of what steps up to ``step`` changed: nothing will be resumed from before it."""
    table = tables.amendments
    connection.execute(delete(table).where(table.c.run == run_key, table.c.step <= step))


def _of_step(changes: Mapping[str, Any]) -> tuple[Row, Row]:
    columns, metrics = split_step(changes)
    nonfinite: list[str] = []
    row = _STEP.some(columns, "", nonfinite)
    found = plain(metrics, "", nonfinite)
    return row, found | ({"nonfinite": nonfinite} if nonfinite else {})


def split_step(step: Mapping[str, Any]) -> tuple[Row, Row]:
    """Columns of the steps table, and everything else as metrics."""
    columns = {name: value for name, value in step.items() if name in tables.steps.c}
    metrics = dict(columns.pop("metrics", None) or {})
    metrics |= {name: value for name, value in step.items() if name not in tables.steps.c}
    return columns, metrics


Batch = tuple[tuple[str, ...], list[int], list[tuple[Any, ...]]]
"""Columns, the ids of the rows, and their new values."""


def _checked(name: str, changes: Changes, nonfinite: list[str]) -> list[Batch]:
    """The changes of one table, those of the same columns together."""
    allowed = _AMENDABLE[name]
    batches: dict[tuple[str, ...], tuple[list[int], list[Mapping[str, Any]]]] = {}
    for key, change in changes.items():
        keys, rows = batches.setdefault(tuple(change), ([], []))
        keys.append(key)
        rows.append(change)
    checked = []
    for columns, (keys, rows) in batches.items():
        for column in columns:
            if column not in allowed:
                msg = (
                    f"amend_{name}[{keys[0]}].{column} may not change; "
                    f"these may: {', '.join(allowed)}"
                )
                raise TypeError(msg)
        if columns:
            values = _SHAPES[name].changes(columns, rows, f"amend_{name}", keys, nonfinite)
            checked.append((columns, keys, list(zip(*values, strict=True))))
    return checked


def _find(
    connection: Connection, name: str, run_key: int, wanted: Sequence[int]
) -> dict[int, tuple[Any, ...]]:
    """By id: the id, the row's key and what it holds of the columns that may change.

    An attempt that repeats steps gives ids out again; only what is not superseded counts.
    """
    query = _FIND[name]
    rows = connection.exec_driver_sql(query, (json.dumps(wanted), run_key)).all()
    found = {row[0]: tuple(row) for row in rows}  # plain tuples: a Row hashes slowly
    unknown = [key for key in wanted if key not in found]
    if unknown:
        some = ", ".join(map(str, unknown[:5])) + (", …" if len(unknown) > 5 else "")
        msg = f"{len(unknown)} {name} cannot be amended, as none was committed as {some}"
        raise StoreError(msg)
    return found


def _finding(name: str) -> str:
    key = _IDS[name]
    columns = ", ".join(f"t.{column}" for column in _AMENDABLE[name])
    # Spelled out: a bound value would not let SQLite use the partial index
    only = " AND t.split = 'train'" if name == "trajectories" else ""
    return (
        f"SELECT t.{key}, t.id, {columns} FROM json_each(?) j CROSS JOIN {name} t "
        f"WHERE t.run = ? AND t.{key} = j.value AND t.superseded = 0{only} ORDER BY t.id"
    )


_FIND = {name: _finding(name) for name in _AMENDABLE}
_REMEMBER = insert(tables.amendments)


def _update(
    connection: Connection, name: str, columns: Iterable[str], rows: list[tuple[Any, ...]]
) -> None:
    """Set columns of rows by key; as with inserts, every value passed the boundary already."""
    if rows:
        sets = ", ".join(f"{column} = ?" for column in columns)
        connection.exec_driver_sql(f"UPDATE {name} SET {sets} WHERE id = ?", rows)


def _restore_steps(connection: Connection, rows: Iterable[Any]) -> None:
    table: Table = tables.steps
    for key, columns, known, new in rows:
        here = table.c.id == key
        metrics = connection.execute(select(table.c.metrics).where(here)).scalar() or {}
        gone = {"nonfinite", *new} - set(known)
        kept = {name: value for name, value in metrics.items() if name not in gone}
        values = {**columns, "metrics": kept | known}
        connection.execute(table.update().where(here).values(values))


def _merged(before: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    lost = [*before.get("nonfinite", ()), *changes.get("nonfinite", ())]
    return {**before, **changes, **({"nonfinite": lost} if lost else {})}
