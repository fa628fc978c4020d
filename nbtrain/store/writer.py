"""The one writer of a run's rows: the rank of its current attempt."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table, func, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from nbtrain.errors import StoreError
from nbtrain.plan.phases import TERMINAL
from nbtrain.store import tables
from nbtrain.store.ids import check_id
from nbtrain.store.rows import Row
from nbtrain.store.runs import Runs
from nbtrain.store.values import RowShape, pack_text, plain

__all__ = ["RunWriter"]

_STEP = RowShape(tables.steps, {"settled": True})
_GROUP = RowShape(tables.groups)
_TRAJECTORY = RowShape(tables.trajectories)
_ROUND = RowShape(tables.validation_rounds)
_CHECKPOINT = RowShape(tables.checkpoints, {"pinned": False})
_SUPERSEDABLE = (
    tables.steps,
    tables.groups,
    tables.trajectories,
    tables.validation_rounds,
    tables.checkpoints,
)


class RunWriter:
    """Writes what an attempt has done, each call one transaction: whole or not at all.

    After a :class:`StoreError` (disk full, locked, …) the same call may be made again. Every call
    is refused with :class:`StoreError` once another attempt has begun or the run has ended, so
    that a forgotten process cannot write into a run that has gone on without it.
    """

    def __init__(self, store: Runs, run_key: int, attempt: int) -> None:
        self._store = store
        self._database = store.database
        self.run_key = run_key
        self.attempt = attempt

    def commit_step(
        self,
        step: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]] = (),
        trajectories: Sequence[Mapping[str, Any]] = (),
        *,
        amend: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> int:
        """Commit a step with its groups and trajectories and return the step row's key.

        ``step`` needs ``step`` (the global step, 1-based); keys that are no columns go into
        ``metrics``. Groups and trajectories take run, attempt and step from here, and a
        trajectory may carry ``text``: ``{"prompt", "completion", "terms", "error"}``. Values that
        were NaN or infinite are stored as null and named in ``metrics["nonfinite"]``. ``amend``
        changes columns or metrics of earlier steps of this attempt by step. The run's totals
        move in the same transaction.

        Raises ``TypeError`` naming the key of a value that fits no column, and
        :class:`StoreError` when this step of this attempt stands already.
        """
        nonfinite: list[str] = []
        number = int(step["step"])
        group_rows = self._place(_GROUP, groups, "groups", number, nonfinite)
        rows, texts = self._trajectories(trajectories, number, "train", nonfinite)
        step_row = self._step_row(step, number, nonfinite)
        amended = {at: _amendment(changes) for at, changes in (amend or {}).items()}
        trained = [row for row in rows if row["split"] == "train"]
        totals = {
            "completed_steps": number,
            "updates_applied": tables.runs.c.updates_applied + bool(step_row["update_applied"]),
            "attempted_trajectories": tables.runs.c.attempted_trajectories + len(trained),
            "graded_trajectories": tables.runs.c.graded_trajectories
            + sum(row["reward"] is not None for row in trained),
            "output_tokens": tables.runs.c.output_tokens
            + sum(row["output_tokens"] or 0 for row in trained),
        }
        try:
            with self._database.writing() as connection:
                self._own(connection, totals)
                done = connection.execute(insert(tables.steps), step_row)
                if group_rows:
                    connection.execute(insert(tables.groups), group_rows)
                _insert_trajectories(connection, rows, texts)
                for at, (columns, metrics) in amended.items():
                    self._amend(connection, at, columns, metrics)
        except IntegrityError as error:
            msg = f"step {number} of attempt {self.attempt} is committed already"
            raise StoreError(msg) from error
        return done.lastrowid

    def commit_validation(
        self, row: Mapping[str, Any], trajectories: Sequence[Mapping[str, Any]] = ()
    ) -> int:
        """Commit a validation round with its trajectories (split ``held_out``); the row's key.

        ``row`` needs ``step`` (0 for the starting policy) and ``round_completed``.
        """
        nonfinite: list[str] = []
        number = int(row["step"])
        (round_row,) = self._place(
            _ROUND, [{"created_at": time.time(), **row}], "round", number, nonfinite
        )
        rows, texts = self._trajectories(trajectories, number, "held_out", nonfinite)
        try:
            with self._database.writing() as connection:
                self._own(connection)
                done = connection.execute(insert(tables.validation_rounds), round_row)
                _insert_trajectories(connection, rows, texts)
        except IntegrityError as error:
            msg = f"the validation round at step {number} is committed already"
            raise StoreError(msg) from error
        return done.lastrowid

    def commit_checkpoint(self, row: Mapping[str, Any]) -> int:
        """Commit a checkpoint whose folder is complete and in place; the row's key.

        ``row`` needs ``checkpoint_id``, ``step``, ``weights``, ``training_state`` and ``path``.
        """
        check_id(row["checkpoint_id"])
        number = int(row["step"])
        (full,) = self._place(
            _CHECKPOINT, [{"created_at": time.time(), **row}], "checkpoint", number, []
        )
        try:
            with self._database.writing() as connection:
                self._own(connection, {"saved_step": number})
                done = connection.execute(insert(tables.checkpoints), full)
        except IntegrityError as error:
            msg = f"the checkpoint {row['checkpoint_id'][:12]} is committed already"
            raise StoreError(msg) from error
        return done.lastrowid

    def supersede_after(self, step: int) -> int:
        """Mark what earlier attempts wrote past the restored ``step``; how many step rows it hid.

        The rows stay, hidden by default, and the run's totals go back to what is shown.
        """
        older = {"run": self.run_key, "attempt": self.attempt, "step": step}
        with self._database.writing() as connection:
            lost = self._lost(connection, older)
            self._own(connection, {**lost, "completed_steps": step, "saved_step": step})
            hidden = [
                connection.execute(
                    update(table).where(*_past(table, older)).values(superseded=True)
                ).rowcount
                for table in _SUPERSEDABLE
            ]
        return hidden[0]

    def unhandled_commands(self) -> list[Row]:
        """Commands nobody has handled yet, oldest first."""
        return self._store.commands(self.run_key)

    def handled(self, command_id: int) -> bool:
        """Mark a command as handled; whether it was still open."""
        return self._store.handled(command_id)

    # --- inside ---------------------------------------------------------------------------

    def _place(
        self,
        shape: RowShape,
        given: Sequence[Mapping[str, Any]],
        where: str,
        step: int,
        nonfinite: list[str],
    ) -> list[Row]:
        place = {"run": self.run_key, "attempt": self.attempt, "step": step}
        rows = shape.rows(given, where, nonfinite)
        for row in rows:
            row.update(place)
        return rows

    def _trajectories(
        self, given: Sequence[Mapping[str, Any]], step: int, split: str, nonfinite: list[str]
    ) -> tuple[list[Row], list[tuple[int, bytes]]]:
        bare = [{key: item[key] for key in item if key != "text"} for item in given]
        rows = self._place(_TRAJECTORY, bare, "trajectories", step, nonfinite)
        for row in rows:
            row["split"] = row["split"] or split
        texts = [
            (n, pack_text(item["text"], f"trajectories[{n}].text", nonfinite))
            for n, item in enumerate(given)
            if item.get("text") is not None
        ]
        return rows, texts

    def _step_row(self, step: Mapping[str, Any], number: int, nonfinite: list[str]) -> Row:
        columns, metrics = _split(step)
        (row,) = self._place(
            _STEP, [{"created_at": time.time(), **columns}], "step", number, nonfinite
        )
        found = plain(metrics, "", nonfinite)
        # The names a reader knows: "loss" and "kl", not the path by which they came here
        names = [name.removeprefix("step[0].") for name in nonfinite]
        row["metrics"] = found | ({"nonfinite": names} if names else {})
        return row

    def _own(self, connection: Connection, changes: Mapping[str, Any] | None = None) -> None:
        """Check that the run is still this attempt's, and move its totals."""
        table = tables.runs
        query = select(table.c.attempt, table.c.phase).where(table.c.id == self.run_key)
        found = connection.execute(query).first()
        if found is None or found.attempt != self.attempt or found.phase in TERMINAL:
            state = "is gone" if found is None else f"is {found.phase}, attempt {found.attempt}"
            msg = f"attempt {self.attempt} may write no more: its run {state}"
            raise StoreError(msg)
        if changes:
            connection.execute(update(table).where(table.c.id == self.run_key).values(**changes))

    def _amend(
        self, connection: Connection, step: int, columns: Row, metrics: Mapping[str, Any]
    ) -> None:
        table = tables.steps
        here = (
            (table.c.run == self.run_key)
            & (table.c.attempt == self.attempt)
            & (table.c.step == step)
        )
        before = connection.execute(select(table.c.metrics).where(here)).first()
        if before is None:
            msg = f"step {step} of attempt {self.attempt} cannot be amended: it was not committed"
            raise StoreError(msg)
        values = columns | ({"metrics": (before.metrics or {}) | dict(metrics)} if metrics else {})
        connection.execute(update(table).where(here).values(values))

    def _lost(self, connection: Connection, older: Mapping[str, int]) -> dict[str, Any]:
        """The run's totals without what is about to be superseded."""
        table = tables.trajectories
        counts = connection.execute(
            select(
                func.count(),
                func.count(table.c.reward),
                func.coalesce(func.sum(table.c.output_tokens), 0),
            ).where(*_past(table, older), table.c.split == "train")
        ).one()
        steps = tables.steps
        updates = connection.execute(
            select(func.count()).where(*_past(steps, older), steps.c.update_applied.is_(True))
        ).scalar_one()
        runs = tables.runs.c
        return {
            "attempted_trajectories": runs.attempted_trajectories - counts[0],
            "graded_trajectories": runs.graded_trajectories - counts[1],
            "output_tokens": runs.output_tokens - counts[2],
            "updates_applied": runs.updates_applied - updates,
        }


def _past(table: Table, older: Mapping[str, int]) -> list[Any]:
    return [
        table.c.run == older["run"],
        table.c.attempt < older["attempt"],
        table.c.step > older["step"],
        table.c.superseded.is_(False),
    ]


def _split(step: Mapping[str, Any]) -> tuple[Row, Row]:
    """Columns of the steps table, and everything else as metrics."""
    columns = {name: value for name, value in step.items() if name in tables.steps.c}
    metrics = dict(columns.pop("metrics", None) or {})
    metrics |= {name: value for name, value in step.items() if name not in tables.steps.c}
    return columns, metrics


def _amendment(changes: Mapping[str, Any]) -> tuple[Row, Row]:
    columns, metrics = _split(changes)
    nonfinite: list[str] = []
    row = _STEP.row(columns, "", nonfinite)
    found = plain(metrics, "", nonfinite)
    return {name: row[name] for name in columns}, found


def _insert_trajectories(
    connection: Connection, rows: list[Row], texts: Sequence[tuple[int, bytes]]
) -> None:
    if not rows:
        return
    # The keys are given out here, under the write lock: asking for each one back is slower than
    # writing it
    last = connection.execute(
        text("SELECT seq FROM sqlite_sequence WHERE name = 'trajectories'")
    ).scalar()
    first = (last or 0) + 1
    connection.execute(
        insert(tables.trajectories), [{"id": first + n, **row} for n, row in enumerate(rows)]
    )
    if texts:
        connection.execute(
            insert(tables.trajectory_texts),
            [{"trajectory": first + n, "data": data} for n, data in texts],
        )
