"""Why is nothing happening? Rules over a run's figures; see :func:`diagnose`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nbtrain.client.diagnosis.account import RULES as ACCOUNT
from nbtrain.client.diagnosis.endings import RULES as ENDINGS
from nbtrain.client.diagnosis.errors import RULES as ERRORS
from nbtrain.client.diagnosis.facts import Facts, gather
from nbtrain.client.diagnosis.learning import RULES as LEARNING
from nbtrain.client.diagnosis.measured import RULES as MEASURED
from nbtrain.client.diagnosis.naming import as_descriptor
from nbtrain.client.diagnosis.rewards import RULES as REWARDS
from nbtrain.client.diagnosis.signal import RULES as SIGNAL
from nbtrain.client.diagnosis.state import RULES as STATE
from nbtrain.client.diagnosis.supervised import RULES as LOSSES
from nbtrain.client.readings import SFT
from nbtrain.report.findings import Diagnosis, Finding

__all__ = ["RULES", "SUPERVISED", "Diagnosis", "Facts", "Finding", "diagnose", "gather"]

Rule = Callable[[Facts], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    *(*STATE, *MEASURED, *ERRORS, *ENDINGS, *SIGNAL, *REWARDS, *LEARNING, *ACCOUNT),
)
"""Of a run that samples."""

SUPERVISED: tuple[Rule, ...] = (*STATE, *MEASURED, *LOSSES)
"""Of a supervised run."""

_WARM_UP = ("warming up", "too few steps")
_NOTHING_TRAINS = ("too small groups", "skipped updates", "flat reward", "small learning rate")
_FAILURES = ("ending ERROR", *_WARM_UP)

_FOLLOWS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("failed", "waiting", "no step yet", "paused", "learning"), _WARM_UP),
    **dict.fromkeys(("environment errors", "template errors", "ungraded"), _FAILURES),
    "ending TIMEOUT": _WARM_UP,
    "ending ERROR": _WARM_UP,
    "small learning rate": ("flat reward", "flat loss", *_WARM_UP),
    "warming up": ("flat loss",),
    "few trained tokens": ("flat loss",),
    "tiny updates": ("flat reward",),
    "too few steps": ("flat reward",),
    "no tool called": ("duplicates",),
    "not finite": ("flat loss", "loss rises"),
}
"""What needs no word of its own where a rule has spoken, as it follows from that."""

_FOLLOWS_PROBLEM: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("environment errors", "template errors", "ungraded", "ending TIMEOUT", "ending ERROR"),
        (
            *(*_NOTHING_TRAINS, "filtered groups", "tiny updates", "no gradient", "silent term"),
            "no tool called",
        ),
    ),
    **dict.fromkeys(
        ("ending TRUNCATION", "ending LIMIT_REACHED", "ending MAX_TURNS"),
        ("too small groups", "skipped updates"),
    ),
    "no-signal groups": (
        *("skipped updates", "flat reward", "small learning rate", "tiny updates", "no gradient"),
        *("duplicates", *_WARM_UP),
    ),
    "too small groups": ("skipped updates",),
    "train–held-out gap": ("learning",),
    "memorising": ("learning",),
    "no gradient": ("flat loss", "small learning rate"),
}
"""What follows only where the cause is a problem."""


def diagnose(facts: Facts) -> Diagnosis:
    """What the rules find in these facts, the most important first; causes without what follows
    from them.
    """
    rules = SUPERVISED if facts.method == SFT else RULES
    found = _causes([finding for rule in rules for finding in rule(facts)])
    if facts.door == "descriptor":
        found = as_descriptor(found, facts.method)
    return Diagnosis(facts.title, found)


def _causes(found: Sequence[Finding]) -> list[Finding]:
    follows: set[str] = set()
    for cause in found:
        follows.update(_FOLLOWS.get(cause.rule, ()))
        if cause.severity == "problem":
            follows.update(_FOLLOWS_PROBLEM.get(cause.rule, ()))
    return [finding for finding in found if finding.rule not in follows]
