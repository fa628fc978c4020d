"""Workloads, datasets, bundles, models, base models and the names that point at them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

from sqlalchemy import Column, Table, insert, select, update

from nbtrain.errors import AmbiguousReference
from nbtrain.store import tables
from nbtrain.store.ids import check_id, is_prefix, is_valid, short
from nbtrain.store.reader import Reader
from nbtrain.store.rows import Row
from nbtrain.store.values import RowShape

__all__ = ["Entries"]

Content = Literal["workload", "dataset", "bundle"]
_CONTENTS: dict[Content, tuple[Table, Column[Any]]] = {
    "workload": (tables.workloads, tables.workloads.c.workload_id),
    "dataset": (tables.datasets, tables.datasets.c.dataset_id),
    "bundle": (tables.bundles, tables.bundles.c.bundle_id),
}
_MODEL = RowShape(tables.models)
_BASE_MODEL = RowShape(tables.base_models)


class Entries(Reader):
    """The registered things. Lookups return ``None`` where nothing is found: what to say then is
    the catalog's business, which also knows the built-in entries.
    """

    def put_content(
        self, kind: Content, ident: str, *, spec: Mapping[str, Any], path: str, name: str | None
    ) -> Row:
        """Record a thing that is known by its content hash, and move ``name`` to it.

        Twice is the same: what is there stays as it is.
        """
        table, key = _CONTENTS[kind]
        values = {key.name: check_id(ident), "created_at": time.time(), "spec": spec, "path": path}
        row = RowShape(table).row(values, f"{kind}.", [])
        query = select(table).where(key == ident)
        with self.database.writing() as connection:
            if not connection.execute(query).first():
                connection.execute(insert(table), row)
            if name is not None:
                _point(connection, kind, name, ident)
        return self._rows(query)[0]

    def content(self, kind: Content, ref: str) -> Row | None:
        """What a name, an id or an unambiguous id prefix of 4 digits means."""
        return self._find(kind, *_CONTENTS[kind], ref)

    def contents(self, kind: Content) -> list[Row]:
        """Every thing of a kind, newest first."""
        table, _ = _CONTENTS[kind]
        return self._rows(select(table).order_by(table.c.id.desc()))

    def put_workload(
        self, workload_id: str, *, spec: Mapping[str, Any], path: str, name: str | None = None
    ) -> Row:
        """Record a workload by its content hash, and move ``name`` to it. Twice is the same."""
        return self.put_content("workload", workload_id, spec=spec, path=path, name=name)

    def workload(self, ref: str) -> Row | None:
        """The workload that a name, an id or an unambiguous id prefix of 4 digits means."""
        return self.content("workload", ref)

    def workloads(self) -> list[Row]:
        """Every workload, newest first."""
        return self.contents("workload")

    def put_model(self, model_id: str, *, name: str | None = None, **values: Any) -> Row:
        """Record an adapter as a model; ``values`` are the columns of its row.

        The same id twice is the same model; ``name`` moves to it.
        """
        table = tables.models
        row = _MODEL.row(
            {**values, "model_id": check_id(model_id), "created_at": time.time()}, "model.", []
        )
        query = select(table).where(table.c.model_id == model_id)
        with self.database.writing() as connection:
            if not connection.execute(query).first():
                connection.execute(insert(table), row)
            if name is not None:
                _point(connection, "model", name, model_id)
        return self._rows(query)[0]

    def model(self, ref: str) -> Row | None:
        """The model that a name, an id or an unambiguous id prefix of 4 digits means."""
        return self._find("model", tables.models, tables.models.c.model_id, ref)

    def models(self, run_key: int | None = None) -> list[Row]:
        """Registered models, newest first; of one run where ``run_key`` is stated."""
        query = select(tables.models).order_by(tables.models.c.id.desc())
        if run_key is not None:
            query = query.where(tables.models.c.run == run_key)
        return self._rows(query)

    def _find(self, kind: str, table: Table, key: Column[Any], ref: str) -> Row | None:
        target = self.alias(kind, ref) or ref
        if not is_prefix(target):
            return None
        query = select(table).where(key >= target, key < target + "g").limit(2)
        found = self._rows(query)
        if len(found) > 1:
            several = ", ".join(short(row[key.name]) for row in found)
            msg = f"{ref!r} fits several {kind}s: {several}; give more digits"
            raise AmbiguousReference(msg)
        return found[0] if found else None

    def alias(self, kind: str, name: str) -> str | None:
        """What a name points at now; nothing where it is no valid text, which no table can hold."""
        if not is_valid(name):
            return None
        table = tables.aliases
        query = select(table.c.target).where(table.c.kind == kind, table.c.name == name)
        with self.database.reading() as connection:
            return connection.execute(query).scalar()

    def aliases(self, kind: str) -> dict[str, str]:
        """Names and their targets, the name moved last first."""
        table = tables.aliases
        query = select(table.c.name, table.c.target).where(table.c.kind == kind)
        with self.database.reading() as connection:
            rows = connection.execute(query.order_by(table.c.moved_at.desc(), table.c.id.desc()))
            return {row.name: row.target for row in rows}

    def move_alias(self, kind: str, name: str, target: str) -> str | None:
        """Point a name at something else; what it pointed at before."""
        with self.database.writing() as connection:
            return _point(connection, kind, name, target)

    def put_base_model(
        self, slug: str, *, kind: str, location: str, fingerprint: str, spec: Mapping[str, Any]
    ) -> Row:
        """Record a base model, or what its slug means from now on."""
        row = _BASE_MODEL.row(
            {
                "slug": slug,
                "kind": kind,
                "location": location,
                "fingerprint": fingerprint,
                "spec": spec,
                "created_at": time.time(),
            },
            "base_model.",
            [],
        )
        table = tables.base_models
        with self.database.writing() as connection:
            changed = connection.execute(update(table).where(table.c.slug == slug).values(row))
            if not changed.rowcount:
                connection.execute(insert(table), row)
        return self._rows(select(table).where(table.c.slug == slug))[0]

    def base_model(self, slug: str) -> Row | None:
        """The base model with this slug."""
        if not is_valid(slug):
            return None
        table = tables.base_models
        found = self._rows(select(table).where(table.c.slug == slug))
        return found[0] if found else None

    def base_models(self) -> list[Row]:
        """Every recorded base model by slug."""
        return self._rows(select(tables.base_models).order_by(tables.base_models.c.slug))

    def _rows(self, query: Any) -> list[Row]:
        with self.database.reading() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]


def _point(connection: Any, kind: str, name: str, target: str) -> str | None:
    table = tables.aliases
    here = (table.c.kind == kind) & (table.c.name == name)
    before: str | None = connection.execute(select(table.c.target).where(here)).scalar()
    moved = {"target": target, "moved_at": time.time()}
    if before is None:
        connection.execute(insert(table), {"kind": kind, "name": name, **moved})
    else:
        connection.execute(update(table).where(here).values(moved))
    return before
