"""Rules about what was measured before and after: start checks, the verdict of a smoke check."""

from __future__ import annotations

from collections.abc import Iterator

from nbtrain.client.diagnosis.facts import Facts
from nbtrain.report.findings import Finding
from nbtrain.report.verdict import check_told, headline, sentences, warned


def start_checks(facts: Facts) -> Iterator[Finding]:
    """Start checks that warned or refused, with figure and limit."""
    for check in warned(facts.checks):
        refused = check["verdict"] == "refused"
        yield Finding(
            f"start check {check['name']}",
            "problem" if refused else "hint",
            f"A start check {check['verdict']}: {check_told(check)}.",
            "run.checks has every one of them.",
            weight=0.96 if refused else 0.55,
        )


def smoke(facts: Facts) -> Iterator[Finding]:
    """What a smoke check found."""
    if facts.verdict is None:
        return
    if facts.verdict.get("passed"):
        told = headline(facts.verdict)
        yield Finding("smoke check", "fine", f"The {told}.", weight=0.95)
        return
    yield Finding(
        "smoke check",
        "problem",
        f"The {'; '.join(sentences(facts.verdict))}.",
        "Rows that are learned by heart must come back word for word: look at the worst of them, "
        "at what is trained (client.datasets.preview(…)), and at the tokenizer's template.",
        weight=0.97,
    )


RULES = (start_checks, smoke)
