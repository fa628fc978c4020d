"""Rules about groups: what never reaches the batch, and what teaches nothing there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from nbtrain.client.diagnosis.facts import Facts, figure, the_last
from nbtrain.plan.fields import counted
from nbtrain.report.findings import Finding
from nbtrain.store import Row

_MANY_TIED, _SOME_TIED = 0.75, 0.4
_EPOCHS = 10

_CLEAR = 2 / 3  # of the groups without signal: what most of them are
_NAMED_FROM = 3  # groups without signal from which a task is named; of many tasks, also twice
_FEW_TASKS = 10  # the usual
_COLD = 0.3  # temperature
_FEW_REPLIES = 8


def no_signal(facts: Facts) -> Iterator[Finding]:
    """Groups whose rewards are all identical, why, and the tasks that cause most of them."""
    completed = facts.total("completed_groups")
    tied = facts.total("no_signal_groups")
    if not completed or tied < _SOME_TIED * completed:
        return
    passed, lost = facts.total("all_success_groups"), facts.total("all_failed_groups")
    between = max(0.0, tied - passed - lost)
    groups = _recent_ties(facts)
    sentence = (
        f"{tied:,.0f} of the {counted(completed, 'group')} of "
        f"{the_last(len(facts.recent), 'step')} {'has' if tied == 1 else 'have'} identical rewards "
        f"and {'teaches' if tied == 1 else 'teach'} nothing"
    )
    if facts.unit_scale:
        sentence += (
            f": {passed:,.0f} all succeeded, {lost:,.0f} all failed, {between:,.0f} tied in between"
        )
        why, change, options = "", *_against_ties(facts, passed, lost, between)
    else:
        why, change, options = "", *_ALIKE
    found = _cause(facts, facts.unit_scale and _is_most(passed, tied))
    if found is not None:
        why, change, options = found
    many = tied >= _MANY_TIED * completed and not facts.is_learned
    yield Finding(
        "no-signal groups",
        "problem" if many else "hint",
        f"{sentence}.{why}{_tasks(groups)}",
        change,
        options,
        groups=tuple(g["group_id"] for g in groups[-5:]),
        weight=0.8 * tied / completed,
    )


def _is_most(part: float, tied: float) -> bool:
    return part >= _CLEAR * tied


_Change = tuple[str, tuple[str, ...]]
_ALIKE: _Change = (
    "The reward takes too few values, or the replies are all alike: raise temperature or "
    "group_size, or let the reward tell replies apart.",
    ("temperature", "group_size"),
)


def _against_ties(facts: Facts, passed: float, lost: float, between: float) -> _Change:
    """What to do about ties of rewards between 0 and 1; one cause needs a clear majority."""
    tied = passed + lost + between
    if _is_most(passed, tied):
        if facts.is_learned:
            return "The tasks are learned: add harder ones to go on.", ()
        return "The tasks are too easy: add harder ones.", ()
    if _is_most(lost, tied):
        easier, options = _easier(facts)
        return (
            f"Where all fail, the tasks are too hard for the model: raise group_size, {easier}.",
            ("group_size", *options),
        )
    if between >= max(passed, lost):
        return _ALIKE
    told = "Some tasks are too easy, some too hard: raise temperature or group_size."
    return told, ("temperature", "group_size")


def _easier(facts: Facts) -> _Change:
    """What makes tasks easier to earn something in; an adapter only where there is none yet."""
    way = "give partial credit in the reward (a term for the format, say), or begin with easier"
    if facts.door == "options" or facts.warm:
        return f"{way} tasks", ()
    also = "tasks or from a registered adapter (warmStartModelId)"
    return f"{way} {also}", ("warmStartModelId",)


def _cause(facts: Facts, right: bool) -> tuple[str, str, tuple[str, ...]] | None:
    """What makes the rewards identical where it can be seen, and what to do about it.

    Replies that are all alike, for which a low temperature is enough of a reason, or a reward
    that is the same for all. ``right`` says that most groups earn all there is to earn.
    """
    same, told = repeated(facts), len(facts.texts)
    temperature = facts.option("temperature")
    if temperature is not None and temperature < _COLD:
        return (
            f" At temperature {temperature:g} the replies to a task are nearly all alike.",
            "Raise temperature: equal replies earn equal rewards.",
            ("temperature",),
        )
    if right:
        return None
    if told >= _FEW_REPLIES and len(same) >= 0.5 * told:
        return (
            f" {len(same):,} of the last {told:,} replies are word for word those of another one "
            "in their group.",
            "Raise temperature: equal replies earn equal rewards.",
            ("temperature",),
        )
    rewards = [t["reward"] for t in facts.trajectories if t["reward"] is not None]
    if len(rewards) >= _FEW_REPLIES and min(rewards) == max(rewards) == 0:
        easier, options = _easier(facts)
        return (
            f" Not one of the last {counted(len(rewards), 'reply')} earned anything.",
            "Read a few of run.texts(). Where replies look right, the reward asks for something "
            "that they do not have, their form say: try it by hand. Where they are wrong, the "
            f"tasks are too hard: {easier}.",
            ("reward", *options),
        )
    if len(rewards) >= _FEW_REPLIES and min(rewards) == max(rewards):
        differ = ", though most of them differ" if told >= _FEW_REPLIES else ""
        return (
            f" Every one of the last {counted(len(rewards), 'reply')} earned {rewards[0]:g}"
            f"{differ}.",
            "The reward tells no reply from another: try it by hand on a few of run.texts().",
            (),
        )
    return None


def repeated(facts: Facts, longer_than: int = 0) -> list[tuple[int, str, str]]:
    """The replies of the last step that stand more than once in their group."""
    seen: Counter[tuple[int, str]] = Counter((group, text) for group, _, text in facts.texts)
    return [t for t in facts.texts if len(t[2]) >= longer_than and seen[t[0], t[2]] > 1]


def _tasks(groups: Sequence[Row]) -> str:
    """Which tasks the groups without signal are of; named where they come again and again."""
    by_task = Counter((g["task_id"], g["task_index"]) for g in groups if g["task_id"])
    if not by_task:
        return ""
    usual = by_task.total() / len(by_task)
    least = _NAMED_FROM if len(by_task) <= _FEW_TASKS else max(_NAMED_FROM, 2 * usual)
    often = [(task, n) for task, n in by_task.most_common(3) if n >= least]
    if not often:
        return f" They are spread over {counted(len(by_task), 'task')}."
    named = ", ".join(
        f"{task[:12]}{'' if index is None else f' (task_index {index})'} {n}×"
        for (task, index), n in often
    )
    if len(by_task) == 1:
        return f" All of them come from the task {named}."
    return f" They come from {counted(len(by_task), 'task')}, most often {named}."


def _recent_ties(facts: Facts) -> list[Row]:
    first = facts.recent[0]["step"] if facts.recent else 0
    return [g for g in facts.groups if g["step"] >= first and g["outcome"] == "no_signal"]


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
        f"{len(lost)} of {the_last(len(facts.recent), 'update')} were skipped, {times} of them "
        f"because: {reason.rstrip('.')}.",
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
                f"{lost:,.0f} of {the_last(int(completed), 'group')} {what}.",
                change,
                options,
                weight=0.7 * lost / completed,
            )


def stale(facts: Facts) -> Iterator[Finding]:
    """Work that went stale: trajectories cancelled, and groups discarded for them."""
    if not facts.option("max_staleness"):
        return
    attempted = facts.total("attempted_trajectories")
    lost = facts.total("stale_trajectories")
    first = facts.recent[0]["step"] if facts.recent else 0
    groups = [g for g in facts.groups if g["step"] >= first]
    discarded = [g for g in groups if _went_stale(g)]
    shares = (
        lost / attempted if attempted else 0.0,
        len(discarded) / len(groups) if groups else 0.0,
    )
    share = max(shares)
    if share < 0.2:
        return
    yield Finding(
        "staleness",
        "problem" if share >= 0.5 else "hint",
        f"{share:.0%} of what was sampled lately went stale: {lost:,.0f} of "
        f"{counted(attempted, 'trajectory')} began more than max_staleness "
        f"({facts.option('max_staleness')}) updates ago, and {counted(len(discarded), 'group')} "
        f"{'was' if len(discarded) == 1 else 'were'} discarded for that.",
        f"Lower max_concurrent_trajectories (now {facts.option('max_concurrent_trajectories')}), "
        "or raise max_staleness.",
        ("max_concurrent_trajectories", "max_staleness"),
        tuple(t["ref"] for t in facts.trajectories if t["reason"] == "STALE")[-5:],
        tuple(g["group_id"] for g in discarded)[-5:],
        weight=0.7 * share,
    )


def _went_stale(group: Row) -> bool:
    return group["outcome"] == "discarded" and "stale" in (group["reason"] or "")


def batch_timeout(facts: Facts) -> Iterator[Finding]:
    """Collections that time ran out on."""
    ended = [(s, str(figure(s, "collection_ended") or "")) for s in facts.recent]
    late = [(step, why) for step, why in ended if why.startswith("batch_timeout_seconds")]
    if not late or len(late) < 0.1 * len(ended):
        return
    yield Finding(
        "batch timeout",
        "problem" if len(late) >= 0.5 * len(ended) else "hint",
        f"In {len(late)} of {the_last(len(ended), 'step')} the batch was not full in time; in the "
        f"latest of them {late[-1][1].rstrip('.')}.",
        "Raise batch_timeout_seconds or lower batch_size; the seconds_… columns of run.metrics "
        "say what takes the time.",
        ("batch_timeout_seconds", "batch_size"),
        steps=tuple(step["step"] for step, _ in late[-5:]),
        weight=0.8 * len(late) / len(ended),
    )


def few_tasks(facts: Facts) -> Iterator[Finding]:
    """The same tasks over and over."""
    epochs = max((g["epoch"] or 0 for g in facts.groups), default=0)
    if epochs > _EPOCHS:
        yield Finding(
            "few tasks",
            "hint",
            f"The {counted(facts.train_tasks, 'training task')} "
            f"{'has' if facts.train_tasks == 1 else 'have'} been gone through {epochs} times; the "
            "model may learn by heart.",
            "Add tasks to the workload, or stop earlier: lower num_steps.",
            ("num_steps",),
            weight=0.3,
        )


RULES = (no_signal, skipped, too_small, stale, batch_timeout, few_tasks)
