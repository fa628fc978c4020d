"""The one writer of a run's rows: the rank of its current attempt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, bindparam, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from nbtrain.errors import StoreError
from nbtrain.plan.phases import TERMINAL
from nbtrain.store import tables
from nbtrain.store.amendments import Amendments, forget, split_step, take_back
from nbtrain.store.batches import GroupBatch, TrajectoryBatch
from nbtrain.store.ids import check_id, short
from nbtrain.store.rows import Row
from nbtrain.store.runs import Runs
from nbtrain.store.values import RowShape, plain

__all__ = ["RunWriter"]

_STEP = RowShape(tables.steps, {"settled": True})
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
        amend_groups: Mapping[int, Mapping[str, Any]] | None = None,
        amend_trajectories: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> int:
        """Commit a step with its groups and trajectories and return the step row's key.

        ``step`` needs ``step`` (the global step, 1-based); keys that are no columns go into
        ``metrics``. Groups and trajectories take run, attempt and step from here, and a
        trajectory may carry ``text``: ``{"prompt", "completion", "terms", "error"}``; a
        completion of several turns is a list of messages. Values that were NaN or infinite are
        stored as null and named in ``metrics["nonfinite"]``. The run's totals move in the same
        transaction.

        What this step changes of earlier ones is written in it too: ``amend`` columns or metrics
        of steps by step, ``amend_groups`` of groups by ``group_id`` (``outcome``, ``reason``,
        ``eligible``, ``consumed_step``), ``amend_trajectories`` of training trajectories by
        ``trajectory_id`` (``status``, ``reason``, ``used_reward``, ``eligible``, ``verdict``,
        ``advantage``, ``consumed_step``, ``error``). Rows of earlier attempts that are not
        superseded can be amended as well: a group may wait across a resume.

        Raises ``TypeError`` naming the key of a value that fits no column or of one that may not
        change, and :class:`StoreError` when this step of this attempt stands already or when
        something to be amended stands nowhere.
        """
        nonfinite: list[str] = []
        columns, metrics = split_step(step)
        row = self._row(_STEP, columns, "", nonfinite)
        row["metrics"] = plain(metrics, "", nonfinite)
        place = {"run": self.run_key, "attempt": self.attempt, "step": row["step"]}
        done = GroupBatch(groups, place, nonfinite)
        sampled = TrajectoryBatch(trajectories, place, "train", nonfinite)
        amended = Amendments(amend, amend_groups, amend_trajectories, nonfinite)
        if nonfinite:
            row["metrics"]["nonfinite"] = nonfinite
        with self._committing(f"step {row['step']} of attempt {self.attempt}") as connection:
            self._own(connection)
            connection.execute(_ADD, {"key": self.run_key, **_totals(row, sampled)})
            key = connection.execute(_NEW_STEP, row).lastrowid
            done.insert(connection)
            sampled.insert(connection)
            amended.apply(connection, self.run_key, row["step"])
        return key

    def commit_closing(
        self,
        step: int,
        trajectories: Sequence[Mapping[str, Any]] = (),
        *,
        amend: Mapping[int, Mapping[str, Any]] | None = None,
        amend_groups: Mapping[int, Mapping[str, Any]] | None = None,
        amend_trajectories: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """Commit what the run's end left of ``step``, its last: what was cut off and what changed.

        Arguments and errors are those of :meth:`commit_step`.
        """
        nonfinite: list[str] = []
        place = {"run": self.run_key, "attempt": self.attempt, "step": step}
        sampled = TrajectoryBatch(trajectories, place, "train", nonfinite)
        amended = Amendments(amend, amend_groups, amend_trajectories, nonfinite)
        totals = _totals({"step": step, "update_applied": False}, sampled)
        with self._committing(f"the end of attempt {self.attempt}") as connection:
            self._own(connection)
            connection.execute(_ADD, {"key": self.run_key, **totals})
            sampled.insert(connection)
            # As what comes after the step: a resume from its checkpoint takes it back
            amended.apply(connection, self.run_key, step + 1)

    def commit_validation(
        self, row: Mapping[str, Any], trajectories: Sequence[Mapping[str, Any]] = ()
    ) -> int:
        """Commit a validation round with its trajectories (split ``held_out``); the row's key.

        ``row`` needs ``step`` (0 for the starting policy) and ``round_completed``. Of a supervised
        run it has ``loss``, ``perplexity`` and ``trained_tokens`` instead of a held-out reward.
        Raises as :meth:`commit_step` does.
        """
        full = self._row(_ROUND, row, "validation.", [])
        place = {"run": self.run_key, "attempt": self.attempt, "step": full["step"]}
        sampled = TrajectoryBatch(trajectories, place, "held_out", [])
        with self._committing(f"the validation round at step {full['step']}") as connection:
            self._own(connection)
            key = connection.execute(insert(tables.validation_rounds), full).lastrowid
            sampled.insert(connection)
        return key

    def commit_checkpoint(self, row: Mapping[str, Any]) -> int:
        """Commit a checkpoint whose folder is complete and in place; the row's key.

        ``row`` needs ``checkpoint_id``, ``step``, ``weights``, ``training_state`` and ``path``.
        The run's ``saved_step`` moves to it. Raises as :meth:`commit_step` does.
        """
        full = self._row(_CHECKPOINT, row, "checkpoint.", [])
        what = f"the checkpoint {short(check_id(full['checkpoint_id']))}"
        with self._committing(what) as connection:
            self._own(connection)
            if full["training_state"]:
                # The last two can be gone back to; from before them nothing is resumed
                forget(connection, self.run_key, _saved_before(connection, self.run_key))
            self._set(connection, saved_step=full["step"])
            return connection.execute(insert(tables.checkpoints), full).lastrowid

    def supersede_after(self, step: int) -> int:
        """Mark what earlier attempts wrote past the restored ``step``; how many step rows it hid.

        The rows stay, hidden by default, and the run's totals go back to what is shown, as does
        what those steps had amended of the ones up to ``step``. To be called before this
        attempt's first step: :class:`StoreError` otherwise.
        """
        steps = tables.steps.c
        own = (steps.run == self.run_key) & (steps.attempt == self.attempt)
        with self._database.writing() as connection:
            self._own(connection)
            if connection.execute(select(steps.id).where(own).limit(1)).first():
                msg = f"attempt {self.attempt} has steps already; it cannot go back to step {step}"
                raise StoreError(msg)
            take_back(connection, self.run_key, step)
            lost = _lost(connection, self.run_key, step)
            self._set(connection, completed_steps=step, saved_step=step, **lost)
            hidden = [
                connection.execute(
                    update(table).where(*_past(table, self.run_key, step)).values(superseded=True)
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

    def _row(
        self, shape: RowShape, given: Mapping[str, Any], where: str, nonfinite: list[str]
    ) -> Row:
        place = {"run": self.run_key, "attempt": self.attempt}
        return shape.row({"created_at": time.time(), **given, **place}, where, nonfinite)

    @contextmanager
    def _committing(self, what: str) -> Iterator[Connection]:
        try:
            with self._database.writing() as connection:
                yield connection
        except IntegrityError as error:
            msg = f"{what} is committed already"
            raise StoreError(msg) from error

    def _own(self, connection: Connection) -> None:
        """Check that the run is still this attempt's."""
        found = connection.execute(_STATE, {"key": self.run_key}).first()
        if found is None or found.attempt != self.attempt or found.phase in TERMINAL:
            state = "is gone" if found is None else f"is {found.phase}, attempt {found.attempt}"
            msg = f"attempt {self.attempt} may write no more: its run {state}"
            raise StoreError(msg)

    def _set(self, connection: Connection, **values: Any) -> None:
        runs = update(tables.runs).where(tables.runs.c.id == self.run_key)
        connection.execute(runs.values(**values))


def _past(table: Table, run_key: int, step: int) -> list[ColumnElement[bool]]:
    return [table.c.run == run_key, table.c.step > step, table.c.superseded.is_(False)]


def _saved_before(connection: Connection, run_key: int) -> int:
    """The step of the newest training state but one, counting that about to be committed."""
    table = tables.checkpoints
    query = select(func.max(table.c.step)).where(
        table.c.run == run_key, table.c.training_state.is_(True), table.c.superseded.is_(False)
    )
    return connection.execute(query).scalar() or 0


def _lost(connection: Connection, run_key: int, step: int) -> dict[str, Any]:
    """The run's totals without what is about to be superseded."""
    table, steps, runs = tables.trajectories, tables.steps, tables.runs.c
    counts = connection.execute(
        select(
            func.count(),
            func.count(table.c.reward),
            func.coalesce(func.sum(table.c.output_tokens), 0),
        ).where(*_past(table, run_key, step), table.c.split == "train")
    ).one()
    applied = [*_past(steps, run_key, step), steps.c.update_applied.is_(True)]
    updates = connection.execute(select(func.count()).where(*applied)).scalar_one()
    return {
        "attempted_trajectories": runs.attempted_trajectories - counts[0],
        "graded_trajectories": runs.graded_trajectories - counts[1],
        "output_tokens": runs.output_tokens - counts[2],
        "updates_applied": runs.updates_applied - updates,
    }


def _totals(row: Row, sampled: TrajectoryBatch) -> dict[str, int]:
    return {
        "step": row["step"],
        "updates": int(bool(row["update_applied"])),
        "attempted": sampled.attempted,
        "graded": sampled.graded,
        "tokens": sampled.output_tokens,
    }


# Built once: a step's fixed cost is mostly that of building statements
_NEW_STEP = insert(tables.steps)
_STATE = select(tables.runs.c.attempt, tables.runs.c.phase).where(
    tables.runs.c.id == bindparam("key")
)
_ADD = (
    update(tables.runs)
    .where(tables.runs.c.id == bindparam("key"))
    .values(
        completed_steps=bindparam("step"),
        updates_applied=tables.runs.c.updates_applied + bindparam("updates"),
        attempted_trajectories=tables.runs.c.attempted_trajectories + bindparam("attempted"),
        graded_trajectories=tables.runs.c.graded_trajectories + bindparam("graded"),
        output_tokens=tables.runs.c.output_tokens + bindparam("tokens"),
    )
)
