"""Finding runs and checkpoints: by key, name, id, or the beginning of an id."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Select,
    Text,
    func,
    null,
    select,
    type_coerce,
    union_all,
)

from nbtrain.errors import AmbiguousReference, NotFound
from nbtrain.plan.naming import is_id_shaped
from nbtrain.plan.phases import TERMINAL, Phase
from nbtrain.store import tables
from nbtrain.store.connect import Database
from nbtrain.store.ids import MIN_PREFIX, is_prefix, is_valid, short
from nbtrain.store.rows import StoredCheckpoint, StoredRun

__all__ = ["RUN_COLUMNS", "Finder"]

_T = TypeVar("_T")

_LAST = "\U0010ffff"
"""Comes after every character of a name."""

_RUN_JSON = {
    "plan": "plan_text",
    "resolved": "resolved_text",
    "checks": "checks_text",
    "verdict": "verdict_text",
}
RUN_COLUMNS: list[ColumnElement[Any]] = [
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
_BRIEF_COLUMNS: list[ColumnElement[Any]] = [
    null().label(column.name) if column.name in _RUN_JSON.values() else column
    for column in RUN_COLUMNS
]
_CHECKPOINT_COLUMNS: list[ColumnElement[Any]] = [
    tables.checkpoints.c.id.label("key"),
    *(column for column in tables.checkpoints.c if column.name != "id"),
    tables.runs.c.run_id,
]


class Finder:
    """Runs and checkpoints as records."""

    database: Database

    def run(self, run_key: int) -> StoredRun:
        """The run with this key, as it stands now. Raises :class:`NotFound`."""
        found = self._runs(select(*RUN_COLUMNS).where(tables.runs.c.id == run_key))
        if not found:
            msg = f"there is no run with the key {run_key}"
            if self.database.presence.replaced:
                path = self.database.path
                msg = f"another store was put in the place of {path}; it has no such run"
            raise NotFound(msg)
        return found[0]

    def runs(
        self,
        limit: int | None = None,
        *,
        name: str | None = None,
        parent_run_id: str | None = None,
        config_hash: str | None = None,
        since: int | None = None,
        open_only: bool = False,
        texts: bool = True,
    ) -> list[StoredRun]:
        """Runs, newest first; of one name, parent or recipe, from the key ``since`` on, or only
        those that have not ended. Without ``texts`` the plans, most of a row, are left out.
        """
        query = (
            select(*(RUN_COLUMNS if texts else _BRIEF_COLUMNS))
            .order_by(tables.runs.c.id.desc())
            .limit(limit)
        )
        if name is not None:
            query = query.where(tables.runs.c.name == name)
        if parent_run_id is not None:
            query = query.where(tables.runs.c.parent_run_id == parent_run_id)
        if config_hash is not None:
            query = query.where(tables.runs.c.config_hash == config_hash)
        if since is not None:
            query = query.where(tables.runs.c.id >= since)
        if open_only:
            query = query.where(tables.runs.c.phase.not_in(sorted(TERMINAL)))
        return self._runs(query)

    def find_run(self, ref: str) -> StoredRun:
        """The run that ``ref`` means: its id, else the newest of that name, else an id prefix.

        A prefix has at least 4 digits; one of 12 or more, as ids are shown, comes before a name.
        Raises :class:`NotFound`, naming what is near, and
        :class:`AmbiguousReference`, naming the candidates.
        """
        query = select(*RUN_COLUMNS).order_by(tables.runs.c.id.desc())
        wanted = [query.where(tables.runs.c.name == ref).limit(1)] if is_valid(ref) else []
        if is_prefix(ref):
            begins = query.where(_begins(tables.runs.c.run_id, ref)).limit(6)
            wanted.insert(0 if is_id_shaped(ref) else 1, begins)
        for one in wanted:
            found = self._runs(one)
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
            newest = select(column).order_by(tables.checkpoints.c.id.desc()).limit(5)
            known = [short(item) for item in connection.execute(newest).scalars()]
        raise NotFound(_nothing("checkpoint", ref, known, []))

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

    def newest_of_each_name(self, begins: str = "", limit: int = 100) -> list[StoredRun]:
        """The newest run of each name that begins so, and nameless runs whose ids do.

        Newest first; the plans are left out.
        """
        if not is_valid(begins):
            return []
        runs = tables.runs.c
        named = select(func.max(runs.id)).where(runs.name.is_not(None)).group_by(runs.name)
        nameless = select(runs.id).where(runs.name.is_(None))
        if begins:
            named = named.where(runs.name >= begins, runs.name < begins + _LAST)
            nameless = nameless.where(_begins(runs.run_id, begins))
        wanted = union_all(named, nameless).subquery()
        newest = select(*_BRIEF_COLUMNS).where(runs.id.in_(select(wanted.c[0])))
        return self._runs(newest.order_by(runs.id.desc()).limit(limit))

    def runs_with_checkpoints(self, begins: str = "", limit: int = 10) -> list[StoredRun]:
        """The newest runs that have a checkpoint whose id begins so; the plans are left out."""
        if not is_valid(begins):
            return []
        saved = tables.checkpoints.c
        having = select(saved.run).where(saved.superseded.is_(False))
        if begins:
            having = having.where(_begins(saved.checkpoint_id, begins))
        query = select(*_BRIEF_COLUMNS).where(tables.runs.c.id.in_(having))
        return self._runs(query.order_by(tables.runs.c.id.desc()).limit(limit))

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
