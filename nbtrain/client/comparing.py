"""Comparing two checkpoints: by their recorded validation rounds, else by replies sampled now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

from nbtrain.client.comparison import (
    CheckpointComparison,
    ComparedReply,
    ComparedTask,
    RewardSummary,
)
from nbtrain.client.records import Checkpoint
from nbtrain.client.trying import default_settings, notes_on, sample, told_end, told_settings
from nbtrain.errors import Problem, Refused
from nbtrain.plan.fields import Option, check
from nbtrain.plan.picking import intervals, task_means
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.report.turns import as_turns

if TYPE_CHECKING:
    from nbtrain.client.parts import Parts
    from nbtrain.store import Row, Store, StoredCheckpoint

__all__ = ["CheckpointComparison", "compare_checkpoints", "most_different"]

MOST_TASKS = 256
MOST_EACH = 16
_SETTINGS = ("val_temperature", "val_top_p", "val_top_k", "val_max_output_tokens_per_turn")
_ANSWERS = ("answer", "ground_truth", "reference")
"""Columns that a task's expected answer is looked for in."""


def compare_checkpoints(
    parts: Parts,
    a: Checkpoint | str,
    b: Checkpoint | str,
    *,
    tasks: int = 8,
    n: int = 1,
    told: Callable[[str], None] | None = None,
) -> CheckpointComparison:
    """``a`` and ``b`` (checkpoints, ids or prefixes) on the same tasks, of any two runs of the
    same workload or dataset.

    Where both have a complete validation round with common tasks, those recorded replies are
    shown, the ``tasks`` most different ones, with the mean rewards over all common tasks and the
    interval of their paired difference. Else both are asked now, with ``a``'s settings and equal
    seeds, for ``n`` replies to each of ``tasks`` held-out tasks (training tasks where nothing is
    held out), without rewards. ``told`` as for :func:`nbtrain.client.trying.generate`.

    Raises
    ------
    Refused
        For numbers out of bounds, twice the same checkpoint, and runs of different work.
    NotFound
        When a checkpoint, the workload or the dataset is gone.
    NbtrainError
        When sampling cannot be done.
    """
    tasks, n = _numbers(tasks, n)
    from nbtrain.client.training_parts import Checkpoints

    listing = Checkpoints(parts)
    one, other = listing.get(a), listing.get(b)
    store = parts.store
    sides = (_side(store, one), _side(store, other))
    source = _common_source(*sides)
    found = _recorded(store, *sides, most=tasks) if source[0] == "workload" else None
    if found is not None:
        return found
    return _sampled(parts, *sides, source, count=tasks, n=n, told=told)


@dataclass(frozen=True)
class _Side:
    checkpoint: Checkpoint
    row: StoredCheckpoint
    plan: ResolvedPlan
    title: str


def _side(store: Store, checkpoint: Checkpoint) -> _Side:
    row = store.find_checkpoint(checkpoint.checkpoint_id)
    run = store.run(row.run)
    title = f"step {checkpoint.step_index} of run {run.name or run.short_id}"
    return _Side(checkpoint, row, ResolvedPlan.from_json(run.resolved), title)


def _numbers(tasks: Any, n: Any) -> tuple[int, int]:
    problems = []
    values = []
    for name, value, most in (("tasks", tasks, MOST_TASKS), ("n", n, MOST_EACH)):
        option = Option(name, "integer", "", "sampling", 1, min=1, max=most)
        taken, problem = check(option, value)
        values.append(taken)
        problems += [] if problem is None else [problem]
    if problems:
        raise Refused(problems)
    return values[0], values[1]


# --- what both have in common --------------------------------------------------------------------

_Source = tuple[str, str]


def _sources(plan: ResolvedPlan) -> list[_Source]:
    """Where a plan's tasks come from, what it holds out first."""
    if plan.door == "options" and plan.method != "sft":
        return [("workload", plan.workload.workload_id)]
    refs = [ref for ref in (plan.validation_dataset, plan.dataset) if ref is not None]
    return [("dataset", ref.dataset_id) for ref in refs]


def _common_source(one: _Side, other: _Side) -> _Source:
    if one.checkpoint.checkpoint_id == other.checkpoint.checkpoint_id:
        message = f"both are the checkpoint {one.row.short_id} ({one.title})"
        raise Refused([Problem("b", message, allowed="two different checkpoints")])
    theirs = _sources(other.plan)
    for source in _sources(one.plan):
        if source in theirs:
            return source
    message = (
        f"{one.title} works on {_called(one.plan)}, {other.title} on {_called(other.plan)}: "
        "there are no common tasks to compare them on"
    )
    allowed = "checkpoints of runs of the same workload or dataset"
    raise Refused([Problem("b", message, other.checkpoint.checkpoint_id[:12], allowed)])


def _called(plan: ResolvedPlan) -> str:
    kind, ident = _sources(plan)[-1]
    name = plan.workload.name if kind == "workload" else plan.dataset and plan.dataset.name
    return f"{kind} {name} ({ident[:12]})" if name else f"{kind} {ident[:12]}"


# --- recorded rounds -----------------------------------------------------------------------------


def most_different(scores: Mapping[str, tuple[float, float]], count: int) -> list[str]:
    """At most ``count`` task ids: the most improved and the most worsened in turn, then those
    that do not differ. ``scores`` hold the rewards before and after.
    """
    change = {task: after - before for task, (before, after) in scores.items()}
    better = sorted((t for t in change if change[t] > 0), key=lambda t: (-change[t], t))
    worse = sorted((t for t in change if change[t] < 0), key=lambda t: (change[t], t))
    same = sorted(t for t in change if change[t] == 0)
    turns = chain.from_iterable(zip_longest(better, worse))
    return [*(task for task in turns if task is not None), *same][:count]


def _recorded(store: Store, one: _Side, other: _Side, *, most: int) -> CheckpointComparison | None:
    """The comparison by the rounds at both steps; ``None`` where they cannot serve."""
    if not (one.checkpoint.round_completed and other.checkpoint.round_completed):
        return None
    rounds = [_round(store, side) for side in (one, other)]
    means = [_means(rows) for rows in rounds]
    common = sorted(means[0].keys() & means[1].keys())
    if not common:
        return None
    scores = {task: (means[0][task], means[1][task]) for task in common}
    shown = most_different(scores, most)
    tasks = _recorded_tasks(store, rounds, scores, shown)
    (interval,) = intervals([[after - before for before, after in scores.values()]])
    averages = [sum(pair[place] for pair in scores.values()) / len(scores) for place in (0, 1)]
    summary = RewardSummary(len(scores), averages[0], averages[1], interval)
    notes = ["The replies are those of the validation rounds.", _told_choice(scores, shown)]
    if len(means[0]) != len(common) or len(means[1]) != len(common):
        counts = f"{len(means[0]):,} and {len(means[1]):,}"
        notes.append(f"The rounds graded {counts} tasks, of which {len(common):,} are the same.")
    differing = [name for name in _SETTINGS if one.plan[name] != other.plan[name]]
    if differing:
        told = (f"{name} {one.plan[name]} and {other.plan[name]}" for name in differing)
        notes.append(f"The rounds were sampled differently: {', '.join(told)}.")
    return CheckpointComparison(
        one.checkpoint, other.checkpoint, True, tasks, notes, summary, scores
    )


def _round(store: Store, side: _Side) -> list[Row]:
    step = side.checkpoint.step_index
    columns = ("id", "task_id", "sample", "reward", "reason", "output_tokens")
    return store.trajectories(side.row.run, step=step, split="held_out", columns=columns)


def _means(rows: Sequence[Row]) -> dict[str, float]:
    return task_means((row["task_id"], row["reward"], row["reason"]) for row in rows)


def _recorded_tasks(
    store: Store,
    rounds: Sequence[Sequence[Row]],
    scores: Mapping[str, tuple[float, float]],
    shown: Sequence[str],
) -> list[ComparedTask]:
    wanted = [[row for row in rows if row["task_id"] in shown] for rows in rounds]
    texts = store.texts(row["id"] for rows in wanted for row in rows)
    tasks = []
    for task in shown:
        mine = [[row for row in rows if row["task_id"] == task] for rows in wanted]
        left, right = ([_recorded_reply(row, texts.get(row["id"], {})) for row in r] for r in mine)
        prompt = next((texts[r["id"]]["prompt"] for r in chain(*mine) if r["id"] in texts), "")
        before, after = scores[task]
        tasks.append(ComparedTask(task, prompt, left, right, None, before, after))
    return tasks


def _recorded_reply(row: Row, text: Mapping[str, Any]) -> ComparedReply:
    reward: float | None = row["reward"]
    graded = "ungraded" if reward is None else f"reward {reward:.3f}"
    told = f"{graded}, {row['reason']}, {row['output_tokens'] or 0:,} tokens"
    return ComparedReply(text.get("completion", ""), told, reward)


def _told_choice(scores: Mapping[str, tuple[float, float]], shown: Sequence[str]) -> str:
    better, worse = (
        sum(sign * (scores[task][1] - scores[task][0]) > 0 for task in scores) for sign in (1, -1)
    )
    same = len(scores) - better - worse
    text = f"{better:,} tasks improved, {worse:,} worsened, {same:,} earned the same"
    if len(shown) == len(scores):
        return f"{text}; all are shown, the most improved and most worsened in turn."
    return (
        f"{text}. Shown are {len(shown):,}, chosen as the most improved and the most worsened in "
        "turn."
    )


# --- replies sampled now -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asking:
    """A task as the process takes it, and as it is shown."""

    request: dict[str, Any]
    prompt: Any
    task_id: str | None = None
    reference: str | None = None


def _sampled(
    parts: Parts,
    one: _Side,
    other: _Side,
    source: _Source,
    *,
    count: int,
    n: int,
    told: Callable[[str], None] | None,
) -> CheckpointComparison:
    if source[0] == "workload":
        asking, notes = _of_workload(parts, source[1], one.plan, other.plan, count)
    else:
        asking, notes = _of_dataset(parts, source[1], one.plan, other.plan, count)
    prefix = "val_" if one.plan.options.get("val_enabled") else ""
    asked = default_settings(one.plan, n=n, seed=one.plan["seed"], prefix=prefix)
    replies = []
    for side in (one, other):
        requests = [one.request for one in asking]
        found = sample(parts.store, side.row, side.plan, requests, asked, told)
        replies.append(
            [
                [ComparedReply(r["text"], told_end(r["ended"], r["tokens"])) for r in each]
                for each in found["replies"]
            ]
        )
    tasks = [
        ComparedTask(task.task_id, task.prompt, left, right, task.reference)
        for task, left, right in zip(asking, *replies, strict=True)
    ]
    used = told_settings({"n": n, "seed": asked.seed, **found["settings"]})
    head = "The replies were sampled now and are not graded"
    notes = [f"{head}: {used}.", *notes_on(one.plan, greedy=one.plan.method == "sft", n=n), *notes]
    return CheckpointComparison(
        one.checkpoint, other.checkpoint, False, tasks, [*notes, *_losses(one, other)]
    )


def _of_workload(
    parts: Parts, ident: str, one: ResolvedPlan, other: ResolvedPlan, count: int
) -> tuple[list[_Asking], list[str]]:
    from nbtrain.training.validation import select

    workload = parts.catalog.workload(ident)
    split = workload.split(validation=bool(one["val_enabled"] and other["val_enabled"]))
    held_out = bool(split.held_out_tasks)
    chosen = select(split.held_out_tasks or split.train_tasks, count)
    notes = [] if held_out else ["Nothing is held out: these are tasks that were trained on."]
    if workload.environment_path is not None:
        notes.append("The workload has an environment: only first replies are sampled.")
    asking = []
    for task in chosen:
        text = isinstance(task.prompt, str)
        request = {"text": task.prompt} if text else {"messages": task.prompt}
        known = (task.columns[name] for name in _ANSWERS if task.columns.get(name) is not None)
        answer = next((str(value) for value in known if isinstance(value, str | int | float)), None)
        asking.append(_Asking(request, task.prompt, task.task_id, answer))
    return asking, notes


def _of_dataset(
    parts: Parts, ident: str, one: ResolvedPlan, other: ResolvedPlan, count: int
) -> tuple[list[_Asking], list[str]]:
    """Rows spread evenly over the dataset, each up to its last answer: the expected one."""
    dataset = parts.datasets.get(ident)
    count = min(count, dataset.rows)
    asking = []
    for place in (number * dataset.rows // count for number in range(count)):
        (row,) = dataset.page(place, 1)
        asking.append(_of_row(row))
    trained = {plan.dataset.dataset_id for plan in (one, other) if plan.dataset is not None}
    notes = [f"The tasks are {count:,} of {dataset.rows:,} rows, spread evenly."]
    if ident in trained:
        notes.append("These rows were trained on.")
    return asking, notes


def _of_row(row: Mapping[str, Any]) -> _Asking:
    from nbtrain.data.tasks import prompt_and_answer

    messages = list(row["messages"])
    last = max((n for n, m in enumerate(messages) if m["role"] == "assistant"), default=None)
    reference = None
    if last is not None:
        messages = messages[: last + 1]
        reference = as_turns(messages[-1:])
    prompt, _ = prompt_and_answer({**row, "messages": messages})
    request: dict[str, Any] = {"messages": prompt}
    if row.get("tools"):
        request["tools"] = row["tools"]
    return _Asking(request, prompt, None, None if reference is None else str(reference))


def _losses(one: _Side, other: _Side) -> list[str]:
    """The recorded validation losses where both are complete and over the same rows."""
    both = (one, other)
    losses = [side.checkpoint.validation_loss for side in both if side.checkpoint.round_completed]
    same = one.plan.validation_dataset == other.plan.validation_dataset
    if len(losses) < 2 or None in losses or not same:
        return []
    told = " and ".join(f"{loss:.4f}" for loss in losses)
    return [f"Their validation losses, of complete rounds over all rows, are {told}."]
