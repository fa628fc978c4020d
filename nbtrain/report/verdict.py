"""Start checks and the verdict of a smoke check, in sentences, from plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["check_told", "checks_told", "headline", "sentences", "warned"]

_ROWS = 3  # worst rows that are told; the verdict has a few more


def headline(verdict: Mapping[str, Any]) -> str:
    """``smoke check passed: score 0.992, needed 0.980``."""
    told = f"smoke check {'passed' if verdict.get('passed') else 'failed'}"
    score, threshold = verdict.get("score"), verdict.get("threshold")
    if score is None:
        return told
    told += f": score {score:.3f}"
    return told if threshold is None else f"{told}, needed {threshold:.3f}"


def sentences(verdict: Mapping[str, Any]) -> list[str]:
    """What a smoke check found: the score, the suspected layer, the rows it reproduces worst."""
    told = [headline(verdict)]
    if verdict.get("passed"):
        return told
    layer, said = verdict.get("layer"), verdict.get("said")
    if layer:
        told.append(f"suspected: {layer}" + (f" ({said})" if said else ""))
    return told + [f"worst: {_row(row)}" for row in (verdict.get("worst") or ())[:_ROWS]]


def _row(row: Mapping[str, Any]) -> str:
    """``line 7 (0.310): after 3 tokens " yes" should come, and " no" came``."""
    line, score = row.get("line"), row.get("score")
    told = f"row {row.get('row')}" if line is None else f"line {line}"
    if score is not None:
        told += f" ({score:.3f})"
    apart = row.get("first_difference")
    if not apart:
        return told
    expected, got = (_quoted(apart.get(name)) for name in ("expected", "got"))
    return f"{told}: after {apart.get('token')} tokens {expected} should come, and {got} came"


def _quoted(text: Any) -> str:
    return json.dumps(str(text), ensure_ascii=False) if text else "nothing"


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
