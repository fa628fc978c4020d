"""Why is nothing happening? Rules over a run's figures; see :func:`diagnose`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nbtrain.client.diagnosis.account import RULES as ACCOUNT
from nbtrain.client.diagnosis.facts import Facts, gather
from nbtrain.client.diagnosis.learning import RULES as LEARNING
from nbtrain.client.diagnosis.rewards import RULES as REWARDS
from nbtrain.client.diagnosis.signal import RULES as SIGNAL
from nbtrain.client.diagnosis.state import RULES as STATE
from nbtrain.report.findings import Diagnosis, Finding

__all__ = ["RULES", "Diagnosis", "Facts", "Finding", "diagnose", "gather"]

Rule = Callable[[Facts], Iterable[Finding]]

RULES: tuple[Rule, ...] = (*STATE, *SIGNAL, *REWARDS, *LEARNING, *ACCOUNT)


def diagnose(facts: Facts) -> Diagnosis:
    """What the rules find in these facts, the most important first."""
    return Diagnosis(facts.title, [found for rule in RULES for found in rule(facts)])
