"""Rules about failures: environments and rewards that break, and grades that never come."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from nbtrain.client.diagnosis.facts import OVER, Facts
from nbtrain.plan.fields import counted
from nbtrain.report.findings import Finding
from nbtrain.store import Row

__all__ = ["RULES", "alike"]

_LONGEST = 120  # characters of an error
_WORDS = 8  # of an error that make it of a kind
_FEW, _MANY = 0.02, 0.2
_MANY_LATE = 0.1  # share of trajectories out of time from which missing grades are put down to that

_LATE = "did not answer within"
_WHO = re.compile(r"(?:reward|environment) '[^']*'")
_VARIES = re.compile(
    r"'[^']*'?|\"[^\"]*\"?"  # quoted
    r"|\b(?=[0-9a-f-]*\d)[0-9a-f]{6,}[0-9a-f-]*\b"  # ids
    r"|\b0x[0-9a-f]+\b|\d+(?:\.\d+)?",
    re.IGNORECASE,
)

_Source = Literal["environment", "template", "reward"]


def alike(error: str | None) -> str:
    """What errors of one kind have in common: who failed, and the first words, without the
    numbers, quotations and ids that differ from one to the next.
    """
    line = _first_line(error)
    who = _WHO.match(line)
    head = who[0] if who else ""
    rest = _VARIES.sub("…", line[len(head) :])
    return f"{head} {' '.join(rest.split()[:_WORDS])}".strip()


def _first_line(error: str | None) -> str:
    return next(iter((error or "").strip().splitlines()), "no grade came")


def _source(error: str | None) -> _Source:
    line = _first_line(error)
    late = _LATE in line and not line.startswith("reward")  # named by class and method
    if late or line.startswith(("environment ", "the environment")):
        return "environment"
    return "template" if line.startswith("the chat template refuses") else "reward"


def _commonest(rows: Sequence[Row]) -> tuple[str, list[Row]]:
    """The commonest kind of error in words, and the trajectories that have it."""
    kinds = Counter(alike(row["error"]) for row in rows)
    kind, times = kinds.most_common(1)[0]
    those = [row for row in rows if alike(row["error"]) == kind]
    texts = Counter(_first_line(row["error"])[:_LONGEST] for row in those)
    say = ("says" if times == 1 else "say") + ("" if len(texts) == 1 else " the like of")
    return f"{times:,} of them {say}: {texts.most_common(1)[0][0]}", those


def _where(facts: Facts, those: Sequence[Row]) -> str:
    """Where to read on: the traceback of one of these trajectories, where one has any."""
    for row in those:
        if row["ref"] in facts.tracebacks:
            return f": client.trajectories.list(…) has the .traceback of {row['ref']}"
    return ""


def _samples(those: Sequence[Row], rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((those[0]["ref"], *(t["ref"] for t in rows[-4:]))))


def _failed(facts: Facts, source: _Source) -> tuple[int, list[Row]]:
    """How many of the last trajectories came to an end, and those that this source failed."""
    ended = [t for t in facts.trajectories if t["reason"] not in OVER]
    return len(ended), [
        t for t in ended if t["reason"] == "ERROR" and _source(t["error"]) == source
    ]


def environment(facts: Facts) -> Iterator[Finding]:
    """Environments that raise, hang in reset or die, and what templates cannot say."""
    told: dict[_Source, tuple[str, str]] = {
        "environment": ("the environment failed", "Repair the environment"),
        "template": (
            "the model's chat template has no way to say what the environment said",
            "Change what the environment says, or take a model whose template can say it",
        ),
    }
    for source, (what, change) in told.items():
        ended, lost = _failed(facts, source)
        share = len(lost) / ended if ended else 0.0
        if share < _FEW:
            continue
        errors, those = _commonest(lost)
        yield Finding(
            f"{source} errors",
            "problem" if share >= _MANY else "hint",
            f"In {len(lost):,} of the last {counted(ended, 'trajectory')} {what}; {errors}",
            f"{change}{_where(facts, those)}.",
            trajectories=_samples(those, lost),
            weight=0.6 + 0.39 * share,
        )


def ungraded(facts: Facts) -> Iterator[Finding]:
    """Trajectories that ended by themselves and have no grade, and the error behind most."""
    finished = [
        t
        for t in facts.trajectories
        if t["reason"] == "ENV_DONE" or (t["reason"] == "ERROR" and _source(t["error"]) == "reward")
    ]
    lost = [t for t in finished if t["reward"] is None]
    share = len(lost) / len(finished) if finished else 0.0
    if share < _FEW:
        return
    ended = [t for t in facts.trajectories if t["reason"] not in OVER]
    late = sum(t["reason"] == "TIMEOUT" for t in ended) >= _MANY_LATE * len(ended)
    errors, those = _commonest(lost)
    many = share >= _MANY and not late
    yield Finding(
        "ungraded",
        "problem" if many else "hint",
        f"{len(lost):,} of the last {counted(len(finished), 'finished trajectory')} "
        f"{'has' if len(lost) == 1 else 'have'} no grade; {errors}",
        "Trajectories run out of time, which can cost others of their group the grade: see to "
        "that first."
        if late
        else f"Repair the reward{_where(facts, those)}.",
        () if late or "within" not in errors else ("reward_timeout_seconds",),
        _samples(those, lost),
        weight=(0.3 if late else 0.5) + 0.45 * share,
    )


RULES = (environment, ungraded)
