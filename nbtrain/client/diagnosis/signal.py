"""Rules about groups and endings: what never reaches the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from nbtrain.client.diagnosis.facts import Facts, figure
from nbtrain.report.findings import Finding
from nbtrain.store import Row

_MANY_TIED, _SOME_TIED = 0.75, 0.4
_MANY_CUT, _SOME_CUT = 0.3, 0.1
_EPOCHS = 10

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


def no_signal(facts: Facts) -> Iterator[Finding]:
    """Groups whose rewards are all identical, and the tasks that cause most of them."""
    completed = facts.total("completed_groups")
    tied = facts.total("no_signal_groups")
    if not completed or tied < _SOME_TIED * completed:
        return
    passed, lost = facts.total("all_success_groups"), facts.total("all_failed_groups")
    between = max(0.0, tied - passed - lost)
    groups = _recent_ties(facts)
    sentence = (
        f"{tied:,.0f} of the {completed:,.0f} groups of the last {len(facts.recent)} steps have "
        f"identical rewards and teach nothing: {passed:,.0f} all succeeded, {lost:,.0f} all failed"
        f", {between:,.0f} tied in between."
    )
    by_task = Counter(g["task_index"] for g in groups if g["task_index"] is not None)
    if by_task:
        worst = ", ".join(f"{task} ({n}×)" for task, n in by_task.most_common(3))
        sentence += f" Most of them come from {len(by_task):,} tasks, above all tasks {worst}."
    yield Finding(
        "no-signal groups",
        "problem" if tied >= _MANY_TIED * completed else "hint",
        sentence,
        *_against_ties(passed, lost, between),
        groups=tuple(g["group_id"] for g in groups[-5:]),
        weight=0.8 * tied / completed,
    )


def _against_ties(passed: float, lost: float, between: float) -> tuple[str, tuple[str, ...]]:
    if passed >= max(lost, between):
        return "The tasks are too easy by now: add harder ones.", ()
    if lost >= between:
        return (
            "The tasks are too hard for the model: raise group_size, give partial credit in the "
            "reward, or begin with easier tasks.",
            ("group_size",),
        )
    return (
        "The reward takes too few values, or the replies are all alike: raise temperature or "
        "group_size, or let the reward tell replies apart.",
        ("temperature", "group_size"),
    )


def _recent_ties(facts: Facts) -> list[Row]:
    first = facts.recent[0]["step"] if facts.recent else 0
    return [g for g in facts.groups if g["step"] >= first and g["outcome"] == "no_signal"]


def endings(facts: Facts) -> Iterator[Finding]:
    """Endings that are not admitted, each with its option and its limit."""
    counts: Counter[str] = Counter()
    for step in facts.recent:
        counts.update(figure(step, "termination_reasons") or {})
    total = sum(counts.values())
    for reason, option in _ADMITTED_BY.items():
        share = counts[reason] / total if total else 0.0
        if share < _SOME_CUT:
            continue
        admitted = bool(facts.option(option))
        limit = _LIMIT.get(reason)
        told = f" ({limit} is {facts.option(limit)})" if limit and facts.option(limit) else ""
        what = f"{share:.0%} of the last trajectories {_ENDED[reason]}{told}"
        severity = "problem" if share >= _MANY_CUT and not admitted else "hint"
        change = f"Raise {limit}" if limit else "Repair what fails"
        if admitted:
            sentence = f"{what}; they train with reward 0."
            suggestion = f"{change}, or set {option} to false to leave them out."
        else:
            sentence = f"{what} and are left out of training."
            suggestion = f"{change}, or set {option} to true to train on them with reward 0."
        yield Finding(
            f"ending {reason}",
            "problem" if severity == "problem" else "hint",
            sentence,
            suggestion,
            (*((limit,) if limit else ()), option),
            tuple(t["ref"] for t in facts.trajectories if t["reason"] == reason)[-5:],
            weight=0.75 * share,
        )


def skipped(facts: Facts) -> Iterator[Finding]:
    """Updates that were skipped, and why."""
    lost = [step for step in facts.recent if step.get("update_applied") is False]
    share = len(lost) / len(facts.recent) if facts.recent else 0.0
    if share < 0.1 or len(lost) < 2:
        return
    reasons = Counter(step.get("skip_reason") or "no reason given" for step in lost)
    reason, times = reasons.most_common(1)[0]
    yield Finding(
        "skipped updates",
        "problem" if share >= 0.5 else "hint",
        f"{len(lost)} of the last {len(facts.recent)} updates were skipped, {times} of them "
        f"because: {reason}.",
        "A skipped update still moves the learning rate on; the findings about groups say what "
        "was missing.",
        steps=tuple(step["step"] for step in lost[-5:]),
        weight=0.85 * share,
    )


def too_small(facts: Facts) -> Iterator[Finding]:
    """Groups with too few eligible trajectories, or filtered for all failing or passing."""
    completed = facts.total("completed_groups")
    for name, what, change, options in (
        (
            "too_small_groups",
            "have fewer eligible trajectories than min_trajectories_per_group "
            f"({facts.option('min_trajectories_per_group')})",
            "Lower min_trajectories_per_group, or see why trajectories are not eligible.",
            ("min_trajectories_per_group",),
        ),
        (
            "filtered_groups",
            "were left out because all of their trajectories failed, or all passed",
            "train_on_all_fail and train_on_all_pass admit them: their rewards differ.",
            ("train_on_all_fail", "train_on_all_pass"),
        ),
    ):
        lost = facts.total(name)
        if completed and lost >= 0.3 * completed:
            yield Finding(
                name.replace("_", " "),
                "problem" if lost >= 0.6 * completed else "hint",
                f"{lost:,.0f} of the last {completed:,.0f} groups {what}.",
                change,
                options,
                weight=0.7 * lost / completed,
            )


def stale(facts: Facts) -> Iterator[Finding]:
    """Work that went stale: groups discarded and trajectories cancelled."""
    completed, cancelled = facts.total("completed_groups"), facts.total("cancelled_groups")
    discarded = facts.total("discarded_groups")
    groups = completed + cancelled
    share = (discarded + cancelled) / groups if groups else 0.0
    attempted = facts.total("attempted_trajectories")
    lost = facts.total("stale_trajectories")
    if attempted:
        share = max(share, lost / attempted)
    if share < 0.2:
        return
    yield Finding(
        "staleness",
        "problem" if share >= 0.5 else "hint",
        f"{share:.0%} of what was sampled lately went stale: {discarded:,.0f} groups discarded, "
        f"{cancelled:,.0f} cancelled, {lost:,.0f} trajectories more than max_staleness "
        f"({facts.option('max_staleness')}) updates old.",
        f"Lower max_concurrent_trajectories (now {facts.option('max_concurrent_trajectories')}), "
        "or raise max_staleness.",
        ("max_concurrent_trajectories", "max_staleness"),
        tuple(t["ref"] for t in facts.trajectories if t["reason"] == "STALE")[-5:],
        weight=0.7 * share,
    )


def few_tasks(facts: Facts) -> Iterator[Finding]:
    """The same tasks over and over."""
    epochs = max((g["epoch"] or 0 for g in facts.groups), default=0)
    if epochs > _EPOCHS:
        yield Finding(
            "few tasks",
            "hint",
            f"The {facts.train_tasks:,} training tasks have been gone through {epochs} times; the "
            "model may learn them by heart.",
            "Add tasks to the workload, or stop earlier: lower num_steps.",
            ("num_steps",),
            weight=0.3,
        )


RULES = (no_signal, endings, skipped, too_small, stale, few_tasks)
