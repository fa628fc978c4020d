"""What a report shows of what the model wrote, at a bounded cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbtrain.client.records import verdict_told
from nbtrain.report.run_page import Progressed, SampleShown
from nbtrain.report.summary import number
from nbtrain.store import trajectory_ref

if TYPE_CHECKING:
    from nbtrain.client.run import Run
    from nbtrain.store import Row, StoredRun

__all__ = ["Samples", "gather"]

_NEWEST = 2_000  # training trajectories among which the best and the worst are looked for
_EACH = 3  # of the best and of the worst
_TASKS = 4  # held-out tasks whose answers are followed
_ROUNDS = 3  # first, middle, last (or best)
_COLUMNS = (
    *("id", "step", "task_id", "reward", "verdict", "consumed_step", "error", "status"),
    "policy_version",
)


@dataclass(slots=True)
class Samples:
    """Single samples, answers on the way, and what they were chosen from."""

    shown: list[SampleShown] = field(default_factory=list)
    progress: list[Progressed] = field(default_factory=list)
    said: str = ""


def gather(run: Run, row: StoredRun) -> Samples:
    """Best and worst of the newest trajectories that trained, where none did of the newest
    sampled ones, and held-out tasks over the rounds.
    """
    if run.method == "sft":
        return Samples()
    shown, said = _best_and_worst(run, row)
    return Samples(shown, _progress(run), said)


def _best_and_worst(run: Run, row: StoredRun) -> tuple[list[SampleShown], str]:
    newest = run._store.trajectories(
        run._key, split="train", limit=_NEWEST, newest=True, columns=_COLUMNS
    )
    graded = [each for each in newest if each["reward"] is not None]
    trained = [each for each in graded if each["consumed_step"] is not None]
    graded = trained or graded
    # The newest first among equals: they are what the model does now
    order = sorted(graded, key=lambda each: (-each["reward"], -each["id"]))
    best = _apart(order)
    taken = {each["id"] for each in best}
    worst = _apart(
        each for each in sorted(graded, key=lambda e: (e["reward"], -e["id"]))
        if each["id"] not in taken
    )  # fmt: skip
    failed = [e for e in newest if e["reward"] is None and e["error"] and e["status"] != "aborted"]
    picked = [("best", best), ("worst", worst), ("not graded", failed[-1:])]
    texts = run._store.texts([each["id"] for _, some in picked for each in some])
    shown = [
        _shown(run.id, kind, each, texts.get(each["id"], {}))
        for kind, some in picked
        for each in some
    ]
    if not shown:
        return [], ""
    of = f"{len(trained):,} that trained among the" if trained else "the"
    said = f"Of {of} newest {len(newest):,} training trajectories; the newest among equals."
    return shown, said


def _apart(ordered: Iterable[Row]) -> list[Row]:
    """The first few, each of another task."""
    found: dict[Any, Row] = {}
    for each in ordered:
        found.setdefault(each["task_id"], each)
        if len(found) == _EACH:
            break
    return list(found.values())


def _shown(run_id: str, kind: str, row: Row, texts: Mapping[str, Any]) -> SampleShown:
    return SampleShown(
        title=f"{kind} · step {row['step']:,} · {trajectory_ref(run_id, row)}",
        prompt=texts.get("prompt"),
        completion=texts.get("completion"),
        reward=row["reward"],
        terms=tuple((texts.get("terms") or {}).items()),
        verdict=verdict_told(row),
        error=texts.get("error") or row["error"],
    )


def _progress(run: Run) -> list[Progressed]:
    """Answers to the same held-out tasks at the first, a middle and the best or last round."""
    from nbtrain.errors import NotFound

    rounds = [each["step"] for each in run._store.validation_rounds(run._key)
              if each["round_completed"]]  # fmt: skip
    if not rounds:
        return []
    steps = sorted(rounds)
    try:
        best: int | None = run.best().step_index
    except NotFound:
        best = None
    picked = sorted({steps[0], steps[len(steps) // 2], steps[-1] if best is None else best})
    by_step = {step: _of_round(run, step) for step in picked}
    tasks = _telling(list(by_step.values()))
    keys = [rows[task]["id"] for rows in by_step.values() for task in tasks if task in rows]
    texts = run._store.texts(keys)
    found = []
    for task in tasks:
        answers, prompt = [], None
        for step, rows in by_step.items():
            if task not in rows:
                continue
            told = texts.get(rows[task]["id"], {})
            prompt = prompt or told.get("prompt")
            when = f"step {step:,}" + (" (best)" if step == best else "")
            answers.append((when, told.get("completion"), rows[task]["reward"]))
        if len(answers) > 1 or len(picked) == 1:
            found.append(Progressed(prompt, answers))
    return found


def _of_round(run: Run, step: int) -> dict[str, Row]:
    """A round's first trajectory of each task."""
    rows = run._store.trajectories(run._key, step=step, split="held_out", columns=_COLUMNS)
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(row["task_id"], row)
    return found


def _telling(rounds: Sequence[Mapping[str, Row]]) -> list[str]:
    """Tasks of every round: one that was learned, one that stayed, one that was lost, …"""
    common = [t for t in rounds[0] if all(t in rows for rows in rounds)] if rounds else []
    groups: dict[str, list[str]] = {}
    for task in common:
        before, after = rounds[0][task]["reward"], rounds[-1][task]["reward"]
        change = (after or 0.0) - (before or 0.0)
        kind = "up" if change > 0 else "down" if change < 0 else f"at {number(after)}"
        groups.setdefault(kind, []).append(task)
    order = sorted(groups, key=lambda name: (name != "up", name != "down"))
    picked: list[str] = []
    while len(picked) < min(_TASKS, len(common)):
        picked += [groups[name].pop(0) for name in order if groups[name]]
    return picked[:_TASKS]
