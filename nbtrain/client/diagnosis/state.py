"""Rules about where a run is: not begun, waiting, silent, failed, ended early."""

from __future__ import annotations

from collections.abc import Iterator

from nbtrain.client.diagnosis.facts import Facts
from nbtrain.client.readings import SFT
from nbtrain.plan.fields import counted
from nbtrain.plan.phases import Phase, Status, status_of
from nbtrain.report.findings import Finding
from nbtrain.report.summary import span

_SHORT_WAIT, _LONG_WAIT = 30.0, 600.0  # seconds
_LONGEST = 300  # characters of a failure

_WAITS = {
    Phase.AWAITING_CAPACITY: "Wait, or cancel the run that holds the device.",
    Phase.AWAITING_GRADER: "Look into run.log: the judge does not answer.",
    Phase.AWAITING_BASE_MODEL: "Look into run.log: weights are fetched or converted.",
}


def failed(facts: Facts) -> Iterator[Finding]:
    """The run failed: what it said."""
    if facts.phase == Phase.FAILED:
        told = _first_lines(facts.failure or "without a word")
        yield Finding(
            "failed",
            "problem",
            f"The run failed after {_progress(facts)}: {told}",
            "run.failure holds all of it, run.log what came before.",
            weight=1.0,
        )


def silent(facts: Facts) -> Iterator[Finding]:
    """The job lives and says nothing."""
    if facts.unresponsive and not facts.is_over:
        yield Finding(
            "unresponsive",
            "problem",
            f"The job's processes exist but get on with nothing: {facts.unresponsive}.",
            "Look at run.log; a machine out of memory or a reward that hangs is the usual cause.",
            ("reward_timeout_seconds",),
            weight=0.98,
        )


def waiting(facts: Facts) -> Iterator[Finding]:
    """Training has not begun."""
    if status_of(facts.phase) is not Status.PENDING:
        return
    phase = Phase(facts.phase)
    if phase is Phase.PAUSED:
        yield Finding("paused", "hint", "The run is paused; nothing happens until it is resumed.")
        return
    waited = facts.waited
    if waited < _SHORT_WAIT:
        return
    said = facts.activity or facts.waits_for
    told = f": {said.rstrip('.')}" if said else ""
    yield Finding(
        "waiting",
        "problem" if waited > _LONG_WAIT else "hint",
        f"Training has not begun: {phase.value} for {span(waited)}{told}.",
        _WAITS.get(phase, "run.log shows what the job is doing."),
        weight=0.95,
    )


def first_step(facts: Facts) -> Iterator[Finding]:
    """Training goes on, and no step is complete."""
    waited = facts.waited
    begun = facts.phase == Phase.TRAINING and facts.completed_steps <= facts.start_step
    if begun and waited >= _SHORT_WAIT:
        now = f" Now: {facts.activity.rstrip('.')}." if facts.activity else ""
        when, change, options = _FIRST_UPDATE if facts.method == SFT else _first_batch(facts)
        yield Finding(
            "no step yet",
            "problem" if waited > _LONG_WAIT else "hint",
            f"No step is complete after {span(waited)} of training: a step is recorded when its "
            f"{when}.{now}",
            change,
            options,
            weight=0.9,
        )


_FIRST_UPDATE = (
    "sequences have gone through the model",
    "Lower gradient_accumulation or max_seq_length for a first look.",
    ("gradient_accumulation", "max_seq_length"),
)


def _first_batch(facts: Facts) -> tuple[str, str, tuple[str, ...]]:
    return (
        f"{facts.option('batch_size') or 'wanted'} groups are sampled and graded",
        "Lower batch_size, group_size or the token limits for a first look.",
        ("batch_size", "group_size", "max_output_tokens_per_trajectory"),
    )


def ended_early(facts: Facts) -> Iterator[Finding]:
    """The run ended before its last step, or without an update."""
    if facts.phase != Phase.COMPLETED:
        return
    if facts.updates_applied == 0 and facts.completed_steps > facts.start_step:
        told = f": {_first_lines(facts.ended)}" if facts.ended else ""
        yield Finding(
            "no weight changed",
            "problem",
            f"The run completed without a single update, so no weight changed{told}.",
            "The findings below say what became of its "
            f"{'rows' if facts.method == SFT else 'groups'}.",
            weight=0.99,
        )
    elif facts.ended and facts.verdict is None:
        yield Finding(
            "ended early",
            "hint",
            f"The run ended after {_progress(facts)}: {_first_lines(facts.ended)}",
            "Its last checkpoint can be gone on from: parent_checkpoint_id.",
            weight=0.9,
        )


def _progress(facts: Facts) -> str:
    return f"{facts.completed_steps:,} of {counted(facts.total_steps, 'step')}"


def _first_lines(text: str) -> str:
    told = text.partition("\nTraceback (most recent")[0].strip()
    return told if len(told) <= _LONGEST else f"{told[:_LONGEST]} …"


RULES = (failed, silent, waiting, first_step, ended_early)
