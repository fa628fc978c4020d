"""Start checks: what needs a tokenizer, a model or a reward process, before the first update.

All of them run, and all that fails is said at once; a failed check leaves no update behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from nbtrain.errors import Problem, Where
from nbtrain.rollout.types import TaskView

ROWS_NAMED = 5
"""Rows that a complaint names before it only counts."""


def view_tasks(
    tasks: Sequence[Any], render: Callable[[Any], tuple[int, ...]], *, max_context: int, side: str
) -> tuple[list[TaskView], list[Problem]]:
    """Render every task's prompt to ids. Returns the views, and a problem per kind of bad row.

    ``tasks`` have ``task_id``, ``prompt`` and ``columns``; a prompt that leaves no room for a
    single sampled token in ``max_context`` is refused by row, and so is one the template refuses.
    """
    views: list[TaskView] = []
    too_long: list[tuple[int, int]] = []
    broken: list[tuple[int, str]] = []
    seen: Counter[str] = Counter()
    for number, task in enumerate(tasks, 1):
        try:
            ids = render(task.prompt)
        except Exception as error:  # templates are programs: anything may come out of one
            broken.append((number, f"{type(error).__name__}: {error}"))
            continue
        if len(ids) >= max_context:
            too_long.append((number, len(ids)))
            continue
        occurrence = seen[task.task_id]
        seen[task.task_id] += 1
        views.append(TaskView(task.task_id, ids, task.prompt, dict(task.columns), occurrence))
    problems = []
    if too_long:
        rows = ", ".join(f"{row} ({count} tokens)" for row, count in too_long[:ROWS_NAMED])
        problems.append(
            Problem(
                field="tasks",
                message=f"{len(too_long)} {side} prompts leave no room for a reply: rows {rows}",
                found=too_long[0][1],
                allowed=f"at most {max_context - 1} tokens of prompt",
                where=Where(row=too_long[0][0]),
            )
        )
    if broken:
        rows = ", ".join(str(row) for row, _ in broken[:ROWS_NAMED])
        problems.append(
            Problem(
                field="tasks",
                message=(
                    f"the chat template refuses {len(broken)} {side} prompts (rows {rows}): "
                    f"{broken[0][1]}"
                ),
                where=Where(row=broken[0][0]),
                hint="give text prompts with raw=True where the model has no chat template",
            )
        )
    return views, problems


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
