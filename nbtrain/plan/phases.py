"""The phases of a run, the coarse status each stands for, and which phase may follow which."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["RESUME_AT", "TERMINAL", "Phase", "Status", "is_paused", "may_follow", "status_of"]


class Phase(StrEnum):
    """The fine state of a run, in the order in which a run passes through it."""

    RESOLVING_DATASET = "RESOLVING_DATASET"
    """The workload's tasks are looked up and checked."""
    AWAITING_BASE_MODEL = "AWAITING_BASE_MODEL"
    """The base model's weights are fetched or converted."""
    DEPLOYING_GRADER = "DEPLOYING_GRADER"
    """A judge is being started."""
    AWAITING_GRADER = "AWAITING_GRADER"
    """The judge does not answer yet."""
    AWAITING_CAPACITY = "AWAITING_CAPACITY"
    """Waiting for a free device."""
    STARTING_JOB = "STARTING_JOB"
    """The job's processes are being started."""
    QUEUED = "QUEUED"
    """The processes exist; start checks run."""
    PREPARING = "PREPARING"
    """Rows are tokenized (supervised runs only)."""
    TRAINING = "TRAINING"
    """Steps are made."""
    PAUSING = "PAUSING"
    """A pause was accepted; what must be saved is being saved."""
    PAUSED = "PAUSED"
    """No process and no device is held; the run can be resumed."""
    RECORDING = "RECORDING"
    """The last checkpoint and the last figures are written."""
    CLEANING_UP = "CLEANING_UP"
    """Processes are stopped and temporary files removed."""
    COMPLETED = "COMPLETED"
    """Ended as planned, or early for the reason in the run's ``ended``."""
    FAILED = "FAILED"
    """Ended for the reason in the run's ``failure``."""
    CANCELLED = "CANCELLED"
    """Stopped on request; checkpoints stay."""


class Status(StrEnum):
    """The coarse state of a run."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL: frozenset[Phase] = frozenset({Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED})
"""Phases that an attempt never leaves."""

RESUME_AT: frozenset[Phase] = frozenset(
    {Phase.AWAITING_BASE_MODEL, Phase.DEPLOYING_GRADER, Phase.AWAITING_CAPACITY}
)
"""Phases at which a new attempt of a paused or failed run comes in again."""

_RUNNING = frozenset({Phase.TRAINING, Phase.PAUSING, Phase.RECORDING, Phase.CLEANING_UP})
_ENDED = {
    Phase.COMPLETED: Status.SUCCEEDED,
    Phase.FAILED: Status.FAILED,
    Phase.CANCELLED: Status.CANCELLED,
}
_ONLY_AFTER = {
    Phase.PAUSING: {Phase.TRAINING},
    Phase.PAUSED: {Phase.PAUSING},
    Phase.RECORDING: {Phase.TRAINING},
    Phase.COMPLETED: {Phase.TRAINING, Phase.RECORDING, Phase.CLEANING_UP},
}
_ORDER = {phase: place for place, phase in enumerate(Phase)}


def status_of(phase: Phase | str) -> Status:
    """The coarse status of a phase; ``PAUSED`` is pending (see :func:`is_paused`).

    Raises ``ValueError`` for a word that is no phase.
    """
    phase = Phase(phase)
    if phase in _ENDED:
        return _ENDED[phase]
    return Status.RUNNING if phase in _RUNNING else Status.PENDING


def is_paused(phase: Phase | str) -> bool:
    """Whether a pending run is waiting to be resumed rather than to begin."""
    return Phase(phase) is Phase.PAUSED


def may_follow(before: Phase | str, after: Phase | str) -> bool:
    """Whether one attempt may move from ``before`` to ``after``.

    Phases are passed in order and may be skipped; every open one but PAUSED may end FAILED or
    CANCELLED. COMPLETED comes from TRAINING, RECORDING and CLEANING_UP, PAUSING and RECORDING
    from TRAINING, PAUSED from PAUSING; PAUSING leads to PAUSED, CLEANING_UP, FAILED and CANCELLED.
    Nothing follows PAUSED but a cancellation (a resume is a new attempt), and nothing follows a
    terminal phase. The rules look at one move, not at the way before it.
    """
    before, after = Phase(before), Phase(after)
    if before in TERMINAL:
        return False
    if before is Phase.PAUSED:
        return after is Phase.CANCELLED
    if after in (Phase.FAILED, Phase.CANCELLED):
        return True
    if after in _ONLY_AFTER:
        return before in _ONLY_AFTER[after]
    return _ORDER[after] > _ORDER[before]
