"""The life of a run: created, moved from phase to phase, attempted, commanded, ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, delete, func, insert, select, update

from nbtrain.errors import PlanRefused, Problem, StoreError
from nbtrain.plan.phases import RESUME_AT, TERMINAL, Phase, may_follow
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.store import tables
from nbtrain.store.ids import check_id, short
from nbtrain.store.reader import Reader
from nbtrain.store.rows import StoredRun
from nbtrain.store.values import RowShape, plain

__all__ = ["Runs"]

_RUN = RowShape(
    tables.runs,
    {
        "phase": Phase.RESOLVING_DATASET.value,
        "attempt": 1,
        "completed_steps": 0,
        "updates_applied": 0,
        "attempted_trajectories": 0,
        "graded_trajectories": 0,
        "output_tokens": 0,
    },
)
_ATTEMPT = RowShape(tables.attempts)
_TRAINING_STATE = ("training_state.safetensors", "state.json")


class Runs(Reader):
    """Creating and steering runs. Everything that several processes may try at once is
    compare-and-set and returns whether it was this one that did it.
    """

    def create_run(
        self,
        run_id: str,
        *,
        plan: Any,
        resolved: ResolvedPlan | Mapping[str, Any],
        name: str | None = None,
        method: str | None = None,
        kind: str = "train",
        description: str | None = None,
        config_name: str | None = None,
    ) -> StoredRun:
        """Record a new run in phase RESOLVING_DATASET with attempt 1 and return it.

        ``plan`` is kept as it was given, ``resolved`` as :meth:`ResolvedPlan.to_json` writes it;
        workload, base model, hash, parent and steps are taken from it, ``name`` and ``method``
        too when they are not stated. Raises ``ValueError`` for a malformed id,
        :class:`StoreError` for one that is taken, and :class:`PlanRefused` when the run is to
        resume a checkpoint that has lost its training state since the plan was made.
        """
        data = resolved.to_json() if isinstance(resolved, ResolvedPlan) else dict(resolved)
        parent = data.get("parent") or {}
        settings = data.get("settings") or {}
        row = _RUN.row(
            {
                "run_id": check_id(run_id),
                "name": name if name is not None else data.get("display_name"),
                "kind": kind,
                "method": method or settings.get("algorithm", {}).get("value"),
                "workload_id": data["workload"]["workload_id"],
                "workload_name": data["workload"].get("name"),
                "base_model_slug": data["base_model"]["slug"],
                "config_hash": data["config_hash"],
                "created_at": time.time(),
                "parent_run_id": parent.get("run_id"),
                "parent_checkpoint_id": parent.get("checkpoint_id"),
                "start_step": data["start_step"],
                "total_steps": data["total_steps"],
                "completed_steps": data["start_step"],
                "description": description,
                "config_name": config_name,
                "plan": plan,
                "resolved": data,
            },
            "",
            [],
        )
        with self.database.writing() as connection:
            taken = select(tables.runs.c.id).where(tables.runs.c.run_id == run_id)
            if connection.execute(taken).first():
                msg = f"the run {short(run_id)} exists already"
                raise StoreError(msg)
            if parent and not settings.get("load_weights_only", {}).get("value"):
                _check_training_state(connection, parent["checkpoint_id"])
            key = connection.execute(insert(tables.runs), row).lastrowid
            connection.execute(insert(tables.attempts), {"run": key, "number": 1})
            _enter(connection, key, 1, Phase.RESOLVING_DATASET, row["created_at"], None)
        return self.run(key)

    def move_phase(
        self,
        run_key: int,
        phase: Phase | str,
        *,
        attempt: int,
        expect: Phase | str | Iterable[Phase | str] | None = None,
        message: str | None = None,
        ended: str | None = None,
        failure: str | None = None,
    ) -> bool:
        """Move the run to ``phase`` if ``attempt`` is its current one and the phase may follow.

        False, and nothing written, when another attempt has begun, when the run has ended, when
        it is not in (one of) ``expect``, or when it is past ``phase`` already
        (:func:`nbtrain.plan.phases.may_follow`). A terminal phase sets ``ended_at`` of run and
        attempt; TRAINING sets ``started_at`` the first time.
        """
        phase = Phase(phase)
        expected = _phases(expect)
        now = time.time()
        with self.database.writing() as connection:
            current = _current_phase(connection, run_key, attempt)
            if current is None or not may_follow(current, phase):
                return False
            if expected is not None and current not in expected:
                return False
            changes: dict[str, Any] = {"phase": phase.value}
            if ended is not None:
                changes["ended"] = _text(ended)
            if failure is not None:
                changes["failure"] = _text(failure)
            if phase is Phase.TRAINING:
                changes["started_at"] = func.coalesce(tables.runs.c.started_at, now)
            if phase in TERMINAL:
                changes["ended_at"] = now
            runs = update(tables.runs).where(tables.runs.c.id == run_key)
            connection.execute(runs.values(**changes))
            if phase in TERMINAL or phase is Phase.PAUSED:
                _end_attempt(connection, run_key, attempt, now)
            _enter(connection, run_key, attempt, phase, now, message)
        return True

    def start_attempt(
        self,
        run_key: int,
        number: int,
        *,
        phase: Phase | str = Phase.AWAITING_BASE_MODEL,
        **columns: Any,
    ) -> bool:
        """Take up attempt ``number`` as its host; whether this caller got it.

        For the current attempt it succeeds once, while no host has taken it up and the run has
        not ended. The next number begins a new attempt of a PAUSED or FAILED run, which comes in
        again at ``phase``. ``columns`` are those of the attempts table (``host_pid``,
        ``host_start_time``, ``boot_id``, ``hostname``, ``connection_file``, ``threads``, …).
        """
        phase = Phase(phase)
        now = time.time()
        given = {"started_at": now, "heartbeat_at": now, **columns}
        row = _ATTEMPT.row({**given, "run": run_key, "number": number}, "attempt.", [])
        with self.database.writing() as connection:
            run = connection.execute(
                select(tables.runs.c.attempt, tables.runs.c.phase).where(
                    tables.runs.c.id == run_key
                )
            ).first()
            if run is None or number not in (run.attempt, run.attempt + 1):
                return False
            if number == run.attempt:
                free = _attempt(run_key, number).where(tables.attempts.c.started_at.is_(None))
                taken = (
                    Phase(run.phase) in TERMINAL
                    or not connection.execute(
                        free.values({name: row[name] for name in given})
                    ).rowcount
                )
                return not taken
            if Phase(run.phase) not in (Phase.PAUSED, Phase.FAILED) or phase not in RESUME_AT:
                return False
            connection.execute(insert(tables.attempts), row)
            again: dict[str, Any] = {"attempt": number, "phase": phase.value}
            again |= dict.fromkeys(("ended_at", "ended", "failure"))
            runs = update(tables.runs).where(tables.runs.c.id == run_key)
            connection.execute(runs.values(**again))
            _enter(connection, run_key, number, phase, now, None)
        return True

    def update_attempt(self, run_key: int, number: int, **columns: Any) -> bool:
        """Set columns of an attempt (``rank_pids``, ``exit_code``, …); whether there is one."""
        values = _ATTEMPT.some(columns, "attempt.", [])
        with self.database.writing() as connection:
            return connection.execute(_attempt(run_key, number).values(values)).rowcount == 1

    def heartbeat(
        self,
        run_key: int,
        attempt: int,
        who: Literal["host", "rank"] = "host",
        *,
        activity: str | None = None,
    ) -> None:
        """Note that the host lives (``heartbeat_at``) or that the rank got on (``progress_at``).

        ``activity`` says what the job does now; an empty text takes back what was said before,
        ``None`` leaves it as it is.
        """
        column = {"host": "heartbeat_at", "rank": "progress_at"}[who]
        given = {} if activity is None else {"activity": activity or None}
        values = _ATTEMPT.some({column: time.time(), **given}, "attempt.", [])
        with self.database.writing() as connection:
            connection.execute(_attempt(run_key, attempt).values(values))

    def request(self, run_key: int, command: str, **args: Any) -> int:
        """Leave a control command for the job and return its id."""
        row = {
            "run": run_key,
            "command": _text(command),
            "args": plain(args, "args", []),
            "created_at": time.time(),
        }
        with self.database.writing() as connection:
            done = connection.execute(insert(tables.commands), row)
            return done.lastrowid

    def handled(self, command_id: int) -> bool:
        """Mark a command as handled; whether it was still open."""
        table = tables.commands
        query = update(table).where(table.c.id == command_id, table.c.handled_at.is_(None))
        with self.database.writing() as connection:
            return connection.execute(query.values(handled_at=time.time())).rowcount == 1

    def pin(self, checkpoint_id: str, *, pinned: bool = True) -> bool:
        """Pin or unpin a checkpoint; whether anything changed."""
        table = tables.checkpoints
        query = update(table).where(
            table.c.checkpoint_id == checkpoint_id, table.c.pinned.is_not(pinned)
        )
        with self.database.writing() as connection:
            return connection.execute(query.values(pinned=pinned)).rowcount == 1

    def drop_training_state(self, checkpoint_id: str) -> str | None:
        """Forget a checkpoint's training state and return the checkpoint's path.

        To be called before the files go, so that a listed training state is always there; their
        size is taken off ``size_bytes`` here. ``None``, and nothing forgotten, when it had none,
        when it is pinned, or when a run that has not ended goes on from it: that run may have
        been created a moment ago.
        """
        table = tables.checkpoints
        here = (
            (table.c.checkpoint_id == checkpoint_id)
            & table.c.training_state.is_(True)
            & table.c.pinned.is_(False)
            & table.c.checkpoint_id.not_in(_REFERENCED)
        )
        with self.database.writing() as connection:
            found = connection.execute(select(table.c.path, table.c.size_bytes).where(here)).first()
            if found is None:
                return None
            left = max(0, (found.size_bytes or 0) - _size(Path(found.path)))
            gone = update(table).where(here).values(training_state=False, size_bytes=left)
            connection.execute(gone)
        return str(found.path)

    def drop_checkpoint(self, checkpoint_id: str) -> str | None:
        """Forget a checkpoint and return its path, for its folder to go.

        ``None``, and nothing forgotten, when it is pinned, or when a run that has not ended goes
        on from it.
        """
        table = tables.checkpoints
        here = (
            (table.c.checkpoint_id == checkpoint_id)
            & table.c.pinned.is_(False)
            & table.c.checkpoint_id.not_in(_REFERENCED)
        )
        with self.database.writing() as connection:
            path = connection.execute(select(table.c.path).where(here)).scalar()
            if path is not None:
                connection.execute(delete(table).where(here))
        return None if path is None else str(path)

    def put_checks(self, run_key: int, checks: Sequence[Mapping[str, Any]]) -> None:
        """Keep what the run's start checks measured."""
        self._set(run_key, checks=[dict(check) for check in checks])

    def put_verdict(self, run_key: int, verdict: Mapping[str, Any]) -> None:
        """Keep what the run's smoke check found."""
        self._set(run_key, verdict=dict(verdict))

    def set_total_steps(self, run_key: int, total_steps: int) -> None:
        """The final global step, where the job knows it better than the plan could."""
        self._set(run_key, total_steps=total_steps)

    def annotate(self, run_key: int, **annotations: str | None) -> None:
        """Change ``description`` and ``config_name``; they are no part of the run's identity."""
        wrong = annotations.keys() - {"description", "config_name"}
        if wrong:
            msg = f"no annotation is called {', '.join(sorted(wrong))}"
            raise ValueError(msg)
        changes = {name: v if v is None else _text(v) for name, v in annotations.items()}
        if changes:
            self._set(run_key, **changes)

    def _set(self, run_key: int, **values: Any) -> None:
        row = {name: plain(v, name, []) if name in _JSON else v for name, v in values.items()}
        with self.database.writing() as connection:
            connection.execute(update(tables.runs).where(tables.runs.c.id == run_key).values(row))

    def referenced_checkpoints(self) -> set[str]:
        """Ids of the checkpoints that runs which have not ended go on from, and of models."""
        with self.database.reading() as connection:
            return set(connection.execute(_REFERENCED).scalars())


_REFERENCED = (
    select(tables.runs.c.parent_checkpoint_id)
    .where(
        tables.runs.c.parent_checkpoint_id.is_not(None),
        tables.runs.c.phase.not_in(sorted(TERMINAL)),
    )
    .union(select(tables.models.c.checkpoint_id))
)
_JSON = ("checks", "verdict")


def _check_training_state(connection: Connection, checkpoint_id: str) -> None:
    table = tables.checkpoints
    query = select(table.c.training_state).where(table.c.checkpoint_id == checkpoint_id)
    if connection.execute(query).scalar() is False:
        message = (
            f"parent_checkpoint_id: checkpoint {short(checkpoint_id)} has lost its training state "
            "since the plan was made"
        )
        hint = (
            "Take a newer checkpoint, or start from its weights with fresh training state: "
            "load_weights_only: true"
        )
        raise PlanRefused([Problem("parent_checkpoint_id", message, checkpoint_id, hint=hint)])


def _size(folder: Path) -> int:
    """Bytes of the files that hold a checkpoint's training state; what is missing counts 0."""
    total = 0
    for name in _TRAINING_STATE:
        with contextlib.suppress(OSError):
            total += (folder / name).stat().st_size
    return total


def _phases(expect: Phase | str | Iterable[Phase | str] | None) -> frozenset[Phase] | None:
    if expect is None:
        return None
    if isinstance(expect, str):
        return frozenset({Phase(expect)})
    return frozenset(Phase(item) for item in expect)


def _current_phase(connection: Connection, run_key: int, attempt: int) -> Phase | None:
    table = tables.runs
    query = select(table.c.phase).where(table.c.id == run_key, table.c.attempt == attempt)
    found = connection.execute(query).scalar()
    return None if found is None else Phase(found)


def _enter(
    connection: Connection, run_key: int, attempt: int, phase: Phase, at: float, message: str | None
) -> None:
    row = {"run": run_key, "attempt": attempt, "phase": phase.value, "at": at}
    text = None if message is None else _text(message)
    connection.execute(insert(tables.phases), row | {"message": text})


def _attempt(run_key: int, number: int) -> Any:
    table = tables.attempts
    return update(table).where(table.c.run == run_key, table.c.number == number)


def _end_attempt(connection: Connection, run_key: int, attempt: int, at: float) -> None:
    ended = func.coalesce(tables.attempts.c.ended_at, at)
    connection.execute(_attempt(run_key, attempt).values(ended_at=ended))


def _text(value: str) -> str:
    return str(value).encode("utf-8", "replace").decode("utf-8")
