"""What a live view shows of a run beside its curves, as plain JSON; pure but for the reading.

The shapes are those of ``labextension/src/protocol.ts``. Every text is text: whoever shows it
never takes it for markup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.client import tables
from nbtrain.client.logs import read_logs
from nbtrain.client.picking import in_order
from nbtrain.client.readings import SFT
from nbtrain.client.records import verdict_told
from nbtrain.plan.schedule import learning_rate, schedule_of
from nbtrain.report import summary as told
from nbtrain.report.checkpoint_table import mark
from nbtrain.report.turns import as_turns
from nbtrain.store import trajectory_ref

if TYPE_CHECKING:
    from nbtrain.client.followed import Followed
    from nbtrain.client.records import Checkpoint
    from nbtrain.client.run import Run
    from nbtrain.plan.resolved import ResolvedPlan
    from nbtrain.report.findings import Finding
    from nbtrain.report.summary import RunSummary
    from nbtrain.store import Row

__all__ = [
    *("about", "checkpoint_rows", "eta", "findings", "head", "log_state", "log_tail", "newest"),
    *("progress", "schedule", "trajectories"),
]

_SHOWN = 3  # best and worst trajectories each
_LONGEST_TEXT = 2000  # characters of a prompt or a completion
_LOG_LINES, _LOG_CHARS = 200, 16_000
_POINTS = 200  # of the schedule
_RECENT = 20  # steps that the pace is taken from

_TRAJECTORY = (
    *("id", "step", "reward", "verdict", "reason", "turns", "output_tokens"),
    *("group_id", "sample", "task_id", "consumed_step"),
)


def head(run: Run, summary: RunSummary, *, over: bool) -> dict[str, Any]:
    """Name, state and subject of the run."""
    notes = [summary.annotation] if summary.annotation else []
    return {
        "run_id": run.id,
        "name": run.name,
        "title": run.title,
        "status": summary.status,
        "headline": told.headline(summary),
        "subject": summary.subject,
        "activity": summary.activity,
        "message": told.message(summary),
        "doubtful": summary.doubtful,
        "over": over,
        "notes": [*notes, *summary.notes],
    }


def progress(summary: RunSummary, times: Sequence[float], now: float) -> dict[str, Any]:
    """How far the run is; ``times`` are those of its newest steps, the newest first."""
    begun = summary.started_at or summary.created_at
    end = summary.ended_at or now
    left = 0 if summary.ended_at else summary.total_steps - summary.completed_steps
    return {
        "start": summary.start_step,
        "completed": summary.completed_steps,
        "total": summary.total_steps,
        "eta_seconds": eta(times, left, now),
        "elapsed_seconds": None if begun is None else max(0.0, round(end - begun, 1)),
        "counts": told.amounts(summary),
        "movement": told.movement(summary),
    }


def newest(steps: dict[int, Row]) -> list[Row]:
    """The steps that tell the pace, the newest first."""
    return list(islice(reversed(steps.values()), _RECENT))


def eta(times: Sequence[float], left: int, now: float) -> float | None:
    """Seconds until ``left`` more steps are made at the pace of the recent ones.

    ``times`` (unix seconds) are those of the recent steps, the newest first. The time that the
    step under way has taken counts; ``None`` before the third step, and when none is left.
    """
    if left <= 0 or len(times) < 3:
        return None
    pace = (times[0] - times[-1]) / (len(times) - 1)
    if pace <= 0 or not math.isfinite(pace):
        return None
    under_way = min(pace, max(0.0, now - times[0]))
    return round(left * pace - under_way, 1)


def about(run: Run, plan: ResolvedPlan) -> dict[str, Any]:
    """Method, and what ranks the checkpoints."""
    supervised = run.method == SFT
    return {
        "method": run.method,
        "supervised": supervised,
        "score": "validation loss" if supervised else "held-out reward",
        "higher_is_better": not supervised,
        "unranked": _unranked(plan, supervised=supervised),
    }


def _unranked(plan: ResolvedPlan, *, supervised: bool) -> str | None:
    if supervised:
        whole = plan.validation_dataset is not None
        return None if whole else "no validation dataset: nothing ranks the checkpoints"
    if plan.door == "descriptor":
        return (
            "a reinforcement run of a descriptor validates nothing: nothing ranks its checkpoints"
        )
    if not plan.options.get("val_interval_steps"):
        return "val_interval_steps is 0, no validation: nothing ranks the checkpoints"
    return None


def schedule(plan: ResolvedPlan) -> dict[str, Any]:
    """The learning rate over the whole run, at most :data:`_POINTS` points with every corner."""
    settings = schedule_of(plan.options, plan.total_steps)
    first, last = plan.start_step + 1, plan.total_steps
    if last < first:
        return {"steps": [], "rates": []}
    corners = {settings["warmup"], settings["warmup"] + settings["hold"]}
    apart = max(1, math.ceil((last - first) / (_POINTS - 4)))
    steps = sorted({first, last, *range(first, last + 1, apart), *corners & {*range(first, last)}})
    return {"steps": steps, "rates": [learning_rate(step, **settings) for step in steps]}


def checkpoint_rows(found: Sequence[Checkpoint]) -> list[dict[str, Any]]:
    """One row per checkpoint: complete rounds by rank, the best first, then the others by step."""
    best = tables.best(found)
    top = best and best.ties_with  # the step of the highest, where it is not the best
    ranks = 0
    rows = []
    for checkpoint in in_order(list(found), best):
        reward, loss = checkpoint.held_out_reward, checkpoint.validation_loss
        score = _finite(reward if loss is None else loss)
        ranked = tables.cost(checkpoint) is not None
        ranks += ranked
        standing = mark(
            best=False,
            tie=checkpoint.ties_with,
            highest=ranked and checkpoint.step_index == top,
            loss=loss is not None,
        )
        rows.append(
            {
                "id": checkpoint.checkpoint_id,
                "step": checkpoint.step_index,
                "score": score,
                "low": _finite(checkpoint.held_out_low),
                "high": _finite(checkpoint.held_out_high),
                "complete": None if score is None else checkpoint.round_completed,
                "rank": ranks if ranked else None,
                "best": checkpoint is best,
                "tie": standing or None,
                "holds": checkpoint.kind,
                "can_resume": checkpoint.has_weights and checkpoint.has_training_state,
                "has_weights": checkpoint.has_weights,
            }
        )
    return rows


def findings(found: Sequence[Finding]) -> list[dict[str, Any]]:
    """What a diagnosis says."""
    return [
        {
            "severity": finding.severity,
            "sentence": finding.sentence,
            "suggestion": finding.suggestion or None,
        }
        for finding in found
    ]


def trajectories(followed: Followed) -> dict[str, Any]:
    """The best and the worst of the newest settled step, with texts and reward terms.

    Those of each half are of different tasks, as far as there are enough.
    """
    settled = (row["step"] for row in reversed(followed.steps.values()) if row["settled"])
    step = next(settled, None)
    if step is None or followed.row.method == SFT:
        return {"step": None, "best": [], "worst": []}
    store = followed.store
    rows = store.trajectories(followed.run_key, step=step, split="train", columns=_TRAJECTORY)
    graded = sorted(
        (row for row in rows if _finite(row["reward"]) is not None),
        key=lambda row: (-row["reward"], row["id"]),
    )
    ungraded = [row for row in rows if _finite(row["reward"]) is None]
    half = (len(graded) + 1) // 2
    best = _of_many_tasks(graded[:half])
    worst = _of_many_tasks([*reversed(graded[half:]), *ungraded])
    texts = store.texts([row["id"] for row in (*best, *worst)])

    def show(row: Row) -> dict[str, Any]:
        return _trajectory(followed.row.run_id, row, texts.get(row["id"]) or {})

    return {"step": step, "best": [*map(show, best)], "worst": [*map(show, worst)]}


def _of_many_tasks(rows: Sequence[Row]) -> list[Row]:
    """The first :data:`_SHOWN`, those of a task that is there already only where others lack."""
    seen: set[Any] = set()
    first: list[int] = []
    again: list[int] = []
    for at, row in enumerate(rows):
        task = row["group_id"] if row["task_id"] is None else row["task_id"]
        (again if task in seen else first).append(at)
        seen.add(task)
    return [rows[at] for at in sorted([*first, *again][:_SHOWN])]


def _trajectory(run_id: str, row: Row, text: Mapping[str, Any]) -> dict[str, Any]:
    terms = text.get("terms") or {}
    return {
        "id": trajectory_ref(run_id, row),
        "step": row["step"],
        "reward": _finite(row["reward"]),
        "terms": [{"name": str(name), "score": _finite(score)} for name, score in terms.items()],
        "verdict": _cut(verdict_told(row)),
        "reason": row["reason"] or "",
        "turns": row["turns"] or 1,
        "tokens": row["output_tokens"] or 0,
        "prompt": _cut(tables.last_message(text.get("prompt"))),
        "completion": _cut(as_turns(text.get("completion"))),
    }


def log_state(folder: Path) -> tuple[Any, ...]:
    """What changes with every line that is written to a log in the folder."""
    state = []
    for path in sorted(folder.glob("*.log")):
        try:
            seen = path.stat()
        except OSError:
            continue
        state.append((path.name, seen.st_size, seen.st_mtime_ns))
    return tuple(state)


def log_tail(folder: Path) -> str:
    """The last lines of the logs, at most :data:`_LOG_LINES` and :data:`_LOG_CHARS`."""
    lines = read_logs(folder).shown.split("\n")
    kept: list[str] = []
    size = 0
    for line in reversed(lines[-_LOG_LINES:]):
        size += len(line) + 1
        if size > _LOG_CHARS:
            break
        kept.append(line)
    return _clean("\n".join(reversed(kept)))


def _finite(value: Any) -> float | None:
    number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if number else None


def _cut(text: Any) -> str:
    """As text, its end left off where it is long, which is said."""
    whole = "" if text is None else str(text)
    more = len(whole) - _LONGEST_TEXT
    return _clean(whole if more <= 0 else f"{whole[:_LONGEST_TEXT]} … ({more:,} characters more)")


def _clean(text: str) -> str:
    """Halves of surrogate pairs, which a tokenizer may leave, cannot be sent."""
    return text.encode("utf-8", "replace").decode()
