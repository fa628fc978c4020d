"""Rules about how trajectories end, in training and in validation, and about tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from nbtrain.client.diagnosis.errors import alike
from nbtrain.client.diagnosis.facts import LEARNED, OVER, Facts, figure, mean
from nbtrain.report.findings import Finding
from nbtrain.store import Row

_MANY_CUT, _SOME_CUT = 0.3, 0.1
_MOST = 0.5
_ENOUGH = 8  # trajectories
_HARDLY = 0.02  # share of replies that call a tool
_ERROR = 120  # characters of an error

_ADMITTED_BY = {
    "TRUNCATION": "train_on_truncation",
    "LIMIT_REACHED": "train_on_truncation",
    "MAX_TURNS": "train_on_truncation",
    "TIMEOUT": "train_on_timeout",
    "ERROR": "train_on_error",
}
_LIMIT = {
    "TRUNCATION": "max_output_tokens_per_turn",
    "LIMIT_REACHED": "max_output_tokens_per_trajectory",
    "MAX_TURNS": "max_turns_per_trajectory",
    "TIMEOUT": "trajectory_timeout_seconds",
}
_ENDED = {
    "TRUNCATION": "were cut at the token limit of a reply, or by a full context",
    "LIMIT_REACHED": "reached the trajectory's token limit",
    "MAX_TURNS": "reached the turn limit",
    "TIMEOUT": "ran out of time",
    "ERROR": "ended in an error",
}


def _shares(facts: Facts) -> dict[str, float]:
    """Share of each ending among the last trajectories that were not cut off with their group."""
    counts: Counter[str] = Counter()
    for step in facts.recent:
        counts.update(figure(step, "termination_reasons") or {})
    total = sum(n for reason, n in counts.items() if reason not in OVER)
    return {reason: n / total for reason, n in counts.items() if reason not in OVER}


def endings(facts: Facts) -> Iterator[Finding]:
    """Endings that are not admitted, each with its option and its limit."""
    shares = _shares(facts)
    for reason, option in _ADMITTED_BY.items():
        share = shares.get(reason, 0.0)
        if share < _SOME_CUT:
            continue
        admitted = bool(facts.option(option))
        limit = _LIMIT.get(reason)
        those = [t for t in facts.trajectories if t["reason"] == reason]
        what = f"{share:.0%} of the last trajectories {_ENDED[reason]}{_set_to(facts, limit)}"
        change = f"Raise {limit}" if limit else "Repair what fails"
        if facts.admission == "as_graded":
            option, sentence = "", f"{what}; they train with what they were graded{_said(those)}."
            suggestion = f"{change}."
        elif admitted:
            sentence = f"{what}; they train with reward 0{_said(those)}."
            suggestion = f"{change}, or set {option} to false to leave them out."
        else:
            sentence = f"{what} and are left out of training{_said(those)}."
            suggestion = f"{change}, or set {option} to true to train on them with reward 0."
        yield Finding(
            f"ending {reason}",
            "problem" if share >= _MANY_CUT and not admitted else "hint",
            sentence,
            suggestion,
            tuple(name for name in (limit, option) if name),
            tuple(t["ref"] for t in those)[-5:],
            weight=0.75 * share + (0.24 if reason == "TIMEOUT" else 0.0),
        )


def _set_to(facts: Facts, limit: str | None) -> str:
    return f" ({limit} is {facts.option(limit)})" if limit and facts.option(limit) else ""


def _said(rows: Sequence[Row]) -> str:
    """What took the time, or failed, where most of these trajectories say the same."""
    told = [row["error"] for row in rows if row["error"]]
    kinds = Counter(map(alike, told))
    if not told or kinds.most_common(1)[0][1] < _MOST * len(rows):
        return ""
    kind = kinds.most_common(1)[0][0]
    said = next(error for error in told if alike(error) == kind).splitlines()[0]
    return f"; most say: {said[:_ERROR].rstrip('.')}"


def held_out(facts: Facts) -> Iterator[Finding]:
    """Limits that cut most of a validation round short."""
    counts = Counter(t["reason"] for t in facts.held_out if t["reason"] not in OVER)
    total = counts.total()
    trained = _shares(facts)
    for reason, limit in _LIMIT.items():
        share = counts[reason] / total if total else 0.0
        own = f"val_{limit}"
        same = facts.option(own) == facts.option(limit)
        if share < _MOST or (same and trained.get(reason, 0.0) >= _SOME_CUT):
            continue
        yield Finding(
            f"held-out {reason}",
            "problem",
            f"{share:.0%} of the {total:,} held-out trajectories of step "
            f"{facts.held_out[-1]['step']:,} {_ENDED[reason]}{_set_to(facts, own)}, so that "
            "held-out reward says little.",
            f"Raise {own}.",
            (own,),
            tuple(t["ref"] for t in facts.held_out if t["reason"] == reason)[-5:],
            weight=0.6 * share,
        )


def no_tool(facts: Facts) -> Iterator[Finding]:
    """The model is offered tools and calls none."""
    spoke = [t for t in facts.trajectories if t["reason"] in ("ENV_DONE", "MAX_TURNS")]
    if not facts.tools or len(spoke) < _ENOUGH:
        return
    called = sum((t["turns"] or 1) > 1 for t in spoke)
    reward = mean([t["reward"] for t in spoke if t["reward"] is not None])
    solved = facts.unit_scale and reward is not None and reward >= LEARNED
    if called > _HARDLY * len(spoke) or solved:
        return
    names = ", ".join(facts.tools)
    offered = f"the tool {names} is" if len(facts.tools) == 1 else f"the tools {names} are"
    who = f"No reply of the last {len(spoke):,} trajectories called a tool"
    if called:
        who = f"Only {called:,} of the last {len(spoke):,} trajectories called a tool"
    yield Finding(
        "no tool called",
        "problem",
        f"{who}, though {offered} offered.",
        "Read a few replies (run.texts()): say in the prompt when and how to call, or take a model "
        "that was trained to call tools.",
        trajectories=tuple(t["ref"] for t in spoke[-5:]),
        weight=0.82,
    )


RULES = (endings, held_out, no_tool)
