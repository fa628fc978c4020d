"""Start checks and the verdict of a smoke check, in sentences, from plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["check_told", "checks_told", "headline", "sentences", "warned"]

_ROWS = 5  # worst rows that are named


def headline(verdict: Mapping[str, Any]) -> str:
    """``smoke check passed: score 0.992, needed 0.980``."""
    told = f"smoke check {'passed' if verdict.get('passed') else 'failed'}"
    score, threshold = verdict.get("score"), verdict.get("threshold")
    if score is None:
        return told
    told += f": score {score:.3f}"
    return told if threshold is None else f"{told}, needed {threshold:.3f}"


def sentences(verdict: Mapping[str, Any]) -> list[str]:
    """What a smoke check found: the score, what is suspected, the rows it reproduces worst."""
    told = [headline(verdict)]
    if verdict.get("passed"):
        return told
    suspected = verdict.get("suspected")
    if suspected:
        told.append(f"suspected: {suspected}")
    if verdict.get("said"):
        told.append(str(verdict["said"]))
    worst = verdict.get("worst") or ()
    if worst:
        told.append(f"worst rows: {', '.join(map(_row, worst[:_ROWS]))}")
    return told


def _row(row: Any) -> str:
    if not isinstance(row, Mapping):
        return f"line {row}"
    place = row.get("line")
    named = f"row {row.get('row')}" if place is None else f"line {place}"
    score = row.get("score")
    return named if score is None else f"{named} ({score:.3f})"


def warned(checks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The checks that did more than pass."""
    return [check for check in checks if check["verdict"] != "passed"]


def checks_told(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many start checks passed, and each other one with its figure and its limit."""
    if not checks:
        return []
    others = warned(checks)
    passed = len(checks) - len(others)
    told = [f"start checks: {passed} of {len(checks)} passed"]
    return told + [f"{check['verdict']}: {check_told(check)}" for check in others]


def check_told(check: Mapping[str, Any]) -> str:
    """``loss of packed rows 0.008 nats (warns from 0.005): …``."""
    value, unit = check.get("measured"), check.get("unit") or ""
    told = f"{check['name']} {'not finite' if value is None else f'{value:.4g}'} {unit}".rstrip()
    refused = check["verdict"] == "refused"
    limit = check.get("refuse") if refused else check.get("warn")
    if limit is not None:
        side = "below" if check.get("at_least") else "above"
        told += f" ({'refuses' if refused else 'warns'} {side} {limit:.4g})"
    return f"{told}: {check['said']}" if check.get("said") else told
