"""What whoever watches a run asks again and again, in one transaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import CursorResult, bindparam, select

from nbtrain.errors import NotFound
from nbtrain.plan.phases import Phase
from nbtrain.store import tables
from nbtrain.store.connect import Database
from nbtrain.store.finder import RUN_COLUMNS
from nbtrain.store.rows import Row, StoredRun

__all__ = ["Pulse", "pulse"]

_FIGURES = ("no_signal_not_trained", "grad_norm", "epoch", "trained_tokens")
_STEP = tables.steps.c

# Built once: to put a statement together and to look it up costs more than to ask it
_RUN = select(*RUN_COLUMNS).where(tables.runs.c.id == bindparam("key"))
_ATTEMPT = (
    select(tables.attempts)
    .where(tables.attempts.c.run == bindparam("key"))
    .order_by(tables.attempts.c.number.desc())
    .limit(1)
)
_STEPS = (
    select(
        *(_STEP.id, _STEP.attempt, _STEP.step, _STEP.created_at, _STEP.settled),
        _STEP.avg_reward,
        *(_STEP.used_reward, _STEP.loss, _STEP.learning_rate, _STEP.used_groups),
        *(_STEP.no_signal_groups, _STEP.filtered_groups, _STEP.too_small_groups),
        *(_STEP.discarded_groups, _STEP.pending_groups),
        *(_STEP.metrics[name].as_float().label(name) for name in _FIGURES),
        _STEP.metrics["nonfinite"].as_json().label("nonfinite"),
    )
    .where(_STEP.run == bindparam("key"), _STEP.id > bindparam("after"))
    .where(_STEP.superseded.is_(False))
    .order_by(_STEP.id)
)
_ROUNDS = (
    select(tables.validation_rounds)
    .where(
        tables.validation_rounds.c.run == bindparam("key"),
        tables.validation_rounds.c.id > bindparam("after"),
        tables.validation_rounds.c.superseded.is_(False),
    )
    .order_by(tables.validation_rounds.c.id)
)


@dataclass(frozen=True, slots=True)
class Pulse:
    """A run, its newest attempt, and the rows after those that are known, oldest first.

    A step has what curves are drawn from: rewards, loss, rate, where its groups went, and of its
    metrics ``no_signal_not_trained``, ``grad_norm``, ``epoch``, ``trained_tokens`` and
    ``nonfinite``, the names of figures that were NaN or infinite. ``attempt`` is ``None`` before
    the first one.
    """

    run: StoredRun
    attempt: Row | None
    steps: list[Row]
    rounds: list[Row]


def pulse(database: Database, run_key: int, steps_after: int, rounds_after: int) -> Pulse:
    """Read it all as of one moment. Raises :class:`NotFound` for a key that no run has."""
    with database.reading() as connection:
        found = connection.execute(_RUN, {"key": run_key}).mappings().first()
        if found is None:
            msg = f"there is no run with the key {run_key}"
            raise NotFound(msg)
        attempt = connection.execute(_ATTEMPT, {"key": run_key}).mappings().first()
        steps = connection.execute(_STEPS, {"key": run_key, "after": steps_after})
        rounds = connection.execute(_ROUNDS, {"key": run_key, "after": rounds_after})
        return Pulse(
            StoredRun(**{**found, "phase": Phase(found["phase"])}),
            None if attempt is None else dict(attempt),
            _dicts(steps),
            _dicts(rounds),
        )


def _dicts(result: CursorResult[Any]) -> list[Row]:
    names = tuple(result.keys())
    return [dict(zip(names, row, strict=True)) for row in result]
