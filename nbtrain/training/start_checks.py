"""Start checks: what needs a tokenizer, a model or a reward process, before the first update.

All of them run, and all that fails is said at once; a failed check leaves no update behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from nbtrain.errors import Problem, Where
from nbtrain.plan.checks import Check
from nbtrain.plan.memory import REFUSE_SHARE, WARN_SHARE, Memory, size
from nbtrain.rollout.types import TaskView
from nbtrain.training.work import Place, row

ROWS_NAMED = 5
"""Rows that a complaint names before it only counts."""
PROMPTS_READ = 32
"""Prompts that are read back from their ids."""


def view_tasks(
    tasks: Sequence[Any],
    render: Callable[[Any], tuple[int, ...]],
    *,
    max_context: int,
    side: str,
    least_reply: int = 1,
    field: str = "tasks",
    place: Place = row,
) -> tuple[list[TaskView], list[Problem]]:
    """Render every task's prompt to ids. Returns the views, and a problem per kind of bad row.

    ``tasks`` have ``task_id``, ``prompt`` and ``columns``; a prompt that leaves no room for a
    reply of ``least_reply`` tokens in ``max_context`` is refused by its ``place``, and so is one
    the template refuses. ``field`` is what the problems name.
    """
    most = max_context - least_reply
    views: list[TaskView] = []
    too_long: list[tuple[Where, int]] = []
    broken: list[tuple[Where, str]] = []
    seen: Counter[str] = Counter()
    for index, task in enumerate(tasks):
        try:
            ids = render(task.prompt)
        except Exception as error:  # templates are programs: anything may come out of one
            broken.append((place(index), f"{type(error).__name__}: {error}"))
            continue
        if len(ids) > most:
            too_long.append((place(index), len(ids)))
            continue
        occurrence = seen[task.task_id]
        seen[task.task_id] += 1
        views.append(TaskView(task.task_id, ids, task.prompt, dict(task.columns), occurrence))
    problems = []
    if too_long:
        shown = ", ".join(f"{_at(at)} ({count} tokens)" for at, count in too_long[:ROWS_NAMED])
        left = "no room for a reply" if least_reply == 1 else f"less than {least_reply} tokens"
        problems.append(
            Problem(
                field=field,
                message=f"{len(too_long)} {side} prompts leave {left}: {_kind(too_long)} {shown}",
                found=max(count for _, count in too_long),
                allowed=f"at most {most} tokens of prompt",
                where=too_long[0][0],
                hint=None if least_reply == 1 else _LIMITS.format(max_context, least_reply),
            )
        )
    if broken:
        shown = ", ".join(_at(at) for at, _ in broken[:ROWS_NAMED])
        problems.append(
            Problem(
                field=field,
                message=(
                    f"the chat template refuses {len(broken)} {side} prompts "
                    f"({_kind(broken)} {shown}): {broken[0][1]}"
                ),
                where=broken[0][0],
                hint=_RAW if field == "tasks" else None,
            )
        )
    return views, problems


_RAW = "give text prompts with raw=True where the model has no chat template"
_LIMITS = (
    "prompts are never cut: maxSeqLength {} must hold the prompt and a reply of "
    "maxCompletionLength {}"
)


def _at(where: Where) -> str:
    return str(where.row if where.line is None else where.line)


def _kind(found: Sequence[tuple[Where, Any]]) -> str:
    return "rows" if found[0][0].line is None else "lines"


def overlap(train: Sequence[TaskView], held_out: Sequence[TaskView]) -> list[Problem]:
    """A problem when a held-out prompt reads, as token ids, like one that trains."""
    trained = {view.prompt_ids: row for row, view in enumerate(train, 1)}
    rows = [
        (n, trained[v.prompt_ids]) for n, v in enumerate(held_out, 1) if v.prompt_ids in trained
    ]
    if not rows:
        return []
    pairs = ", ".join(f"{n} (training row {row})" for n, row in rows[:ROWS_NAMED])
    return [
        Problem(
            field="tasks",
            message=(
                f"{len(rows)} held-out prompts also train, under the model's chat template: "
                f"held-out rows {pairs}"
            ),
            where=Where(row=rows[0][0]),
            hint="write prompts in one form on both sides, text or messages",
        )
    ]


# --- as figures -----------------------------------------------------------------------------------


def adapter_check(model: Any, pattern: str) -> Check:
    """How many modules of ``model`` carry the adapter; ``None`` is a model that took none."""
    modules = model.modules() if model is not None else ()
    matched = sum(hasattr(module, "lora_A") for module in modules)
    said = f"lora_target_modules {pattern!r} matches {matched} modules"
    return Check("adapter_targets", matched, "modules", said, refuse=1, at_least=True)


def prompt_check(views: Sequence[TaskView], problems: Sequence[Problem], most: int) -> Check:
    """The longest prompt, refused ones included, against what a reply leaves it."""
    refused = [p.found for p in problems if isinstance(p.found, int)]
    longest = max([*(len(view.prompt_ids) for view in views), *refused], default=None)
    said = f"the longest prompt has {longest} tokens, {most} leave room for a reply"
    return Check("longest_prompt", longest, "tokens", said, refuse=most)


def read_back_check(views: Sequence[TaskView], decode: Callable[[Sequence[int]], str]) -> Check:
    """How many of the first prompts' last messages cannot be read back from their ids."""
    asked = [(v, text) for v in views[:PROMPTS_READ] if (text := _last_text(v.prompt))]
    lost = sum(_squeezed(text) not in _squeezed(decode(view.prompt_ids)) for view, text in asked)
    said = f"of {len(asked)} prompts the last message of {lost} cannot be read back from its ids"
    return Check("template_round_trip", lost, "prompts", said, warn=0)


def memory_checks(memory: Memory | None, free: int | None) -> list[Check]:
    """What a rank needs with short replies and with the longest, as shares of what is free."""
    if memory is None or not free:
        said = "the model's headers, or the machine, do not tell enough to estimate"
        return [Check("memory", None, "of free", said)]
    least, most = memory.certain, max(memory.certain, memory.peak(free))

    def told(need: int, replies: str) -> str:
        return f"a rank needs {size(need)} with {replies} replies, {size(free)} are free"

    return [
        Check(
            "memory_least",
            round(least / free, 4),
            "of free",
            told(least, "short"),
            refuse=REFUSE_SHARE,
        ),
        Check(
            "memory_longest",
            round(most / free, 4),
            "of free",
            told(most, "the longest"),
            warn=WARN_SHARE,
        ),
    ]


def reward_checks(
    graded: int, size: int, failures: int, seconds: float, *, excused: bool = False
) -> list[Check]:
    """What the trial's rewards answered: ``failures`` counts what was wrong with them.

    That none of the completions was graded refuses the run, unless it is ``excused``.
    """
    said = f"{graded} of {size} completions of the trial were graded, in {seconds:.2f} s"
    return [
        Check(
            "reward_answers",
            graded / size,
            "share of completions",
            said,
            warn=1.0,
            refuse=None if excused else 1 / size,
            at_least=True,
        ),
        Check("reward_failures", failures, "failures", f"{failures} rewards failed", refuse=0),
    ]


def _last_text(prompt: Any) -> str:
    """The text of a prompt's last message, empty where it has none that is plain text."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1].get("content") if prompt else None
    return content if isinstance(content, str) else ""


def _squeezed(text: str) -> str:
    return "".join(text.split())
