"""Runs side by side: what differs in their plans, and how far each came."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.client.reporting import checkpoint_rows, made_by, rounds_of
from nbtrain.errors import Problem, Refused
from nbtrain.plan.fields import show
from nbtrain.report.checkpoint_table import extreme
from nbtrain.report.compared import (
    Compared,
    Curve,
    as_html,
    as_text,
    comparison_figure,
    comparison_page,
)
from nbtrain.report.figures import png
from nbtrain.report.markup import Markup, facts, joined, paragraphs, section, table
from nbtrain.report.page import write_page
from nbtrain.report.series import finite, first_and_last
from nbtrain.report.summary import movement, number, span

if TYPE_CHECKING:
    import pandas as pd

    from nbtrain.client.run import Run
    from nbtrain.plan.resolved import ResolvedPlan
    from nbtrain.store import StoredRun

__all__ = ["MOST", "RunComparison", "compare_runs"]

MOST = 12
"""Runs that one comparison takes; more lines in one picture cannot be told apart."""
_SELECTION = ("val_num_tasks", "val_trajectories_per_task")  # what chooses the samples of a round


def compare_runs(runs: Sequence[Run]) -> RunComparison:
    """The comparison of 2 to 12 different runs. Raises :class:`Refused` for others."""
    problems = []
    if not 2 <= len(runs) <= MOST:
        message = f"a comparison takes 2 to {MOST} runs, got {len(runs)}"
        problems.append(Problem("runs", message, len(runs), f"2 to {MOST}"))
    twice = sorted({run.title for n, run in enumerate(runs) if run in runs[:n]})
    if twice:
        message = f"{', '.join(twice)} stands there more than once"
        problems.append(Problem("runs", message, twice, hint="Name every run once"))
    if problems:
        raise Refused(problems)
    return RunComparison(list(runs))


class RunComparison:
    """Several runs side by side, as they are whenever it is asked.

    Curves share their axes. Runs that sample and supervised ones have no axis in common: then
    there are tables only.
    """

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs

    def to_frame(self) -> pd.DataFrame:
        """One row per run: where it stands, then a column for each value that differs.

        ``best`` and ``final`` are the held-out reward (of a supervised run the validation loss)
        of the best checkpoint and of the last complete round, with the 95 % interval of the best
        in ``best_low`` and ``best_high`` where it is known. The best is the earliest that ties
        with the highest (``highest``, of a loss ``lowest``, at ``top_step``).
        """
        from nbtrain.client.frames import frame

        differing, _ = _differing([run.plan for run in self.runs])
        rows = [
            {**_standing(run), **{name: values[n] for name, values in differing.items()}}
            for n, run in enumerate(self.runs)
        ]
        return frame(rows)

    def plot(self) -> Any:
        """A matplotlib figure of the curves, the validation rounds beside them.

        Raises :class:`Refused` for runs of which some are supervised and some are not.
        """
        compared = self._compared()
        if compared.measure is None:
            raise Refused([Problem("runs", _APART_SAID, hint="to_frame() has all of them")])
        return comparison_figure(compared)

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML file and return its path; see :meth:`Run.report`."""
        compared = self._compared()
        sections = [
            _section(run, label) for run, label in zip(self.runs, compared.labels, strict=True)
        ]
        return write_page(path, comparison_page(compared, sections, made_by()))

    def __repr__(self) -> str:
        return as_text(self._compared())

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> Mapping[str, Any]:
        compared = self._compared()
        bundle = {"text/plain": as_text(compared)}
        picture = None
        if compared.measure is not None and any(c.steps or c.rounds for c in compared.curves):
            picture = base64.b64encode(png(comparison_figure(compared))).decode("ascii")
            bundle["image/png"] = picture
        return {**bundle, "text/html": as_html(compared, picture)}

    def _compared(self) -> Compared:
        plans = [run.plan for run in self.runs]
        labels = _labels(self.runs)
        methods = {run.method == "sft" for run in self.runs}
        measure = None if len(methods) > 1 else "loss" if True in methods else "reward"
        differing, same = _differing(plans)
        standings = [_standing(run) for run in self.runs]
        return Compared(
            title=f"{len(self.runs)} runs side by side: {', '.join(labels)}",
            labels=labels,
            rows=_told(labels, standings),
            differing={name: [_shown(v) for v in values] for name, values in differing.items()},
            measure=measure,
            curves=[_curve(r, n, measure) for r, n in zip(self.runs, labels, strict=True)]
            if measure
            else [],
            warnings=_warnings(plans, self.runs, measure),
            same=same,
        )


_APART_SAID = (
    "some of these runs are supervised and some are not: losses and rewards have no axis in "
    "common, so there are tables only"
)


def _labels(runs: Sequence[Run]) -> list[str]:
    """Names, with the id where a name stands there twice or is missing."""
    names = [run.name for run in runs]
    return [
        run.name if run.name and names.count(run.name) == 1
        else f"{run.name} {run.id[:6]}" if run.name else run.id[:12]
        for run in runs
    ]  # fmt: skip


_MISSING = object()


def _differing(plans: Sequence[ResolvedPlan]) -> tuple[dict[str, list[Any]], int]:
    """The values that are not the same in all plans, and how many are; ``None`` for missing.

    What only runs of one kind have is left out where both kinds stand side by side.
    """
    told = [_values(plan) for plan in plans]
    names = dict.fromkeys(name for values in told for name in values)
    if len({plan.method == "sft" for plan in plans}) > 1:
        names = {name: None for name in names if all(name in values for values in told)}
    differing, same = {}, 0
    for name in names:
        found = [values.get(name, _MISSING) for values in told]
        if all(value == found[0] for value in found):
            same += 1
        else:
            differing[name] = [None if value is _MISSING else value for value in found]
    hashes = [plan.config_hash for plan in plans]
    if not differing and len(set(hashes)) > 1:
        differing["config_hash"] = [found[:12] for found in hashes]
    return differing, same


def _values(plan: ResolvedPlan) -> dict[str, Any]:
    """What a plan states beside its options, then these by the names of where they were stated."""
    told: dict[str, Any] = {
        "method": plan.method,
        "workload": _named(plan.workload.name, plan.workload.workload_id),
        "base_model": plan.base_model.slug,
        "starts_from": _start(plan),
    }
    if plan.method != "sft":
        told["admission"] = plan.admission
    for name in ("dataset", "validation_dataset"):
        ref = getattr(plan, name)
        if ref is not None:
            told[name] = _named(ref.name, ref.dataset_id)
    for name in ("reward", "grader"):
        if (stated := getattr(plan, name)) is not None:
            told[name] = stated
    if plan.smoke is not None:
        told["smoke"] = asdict(plan.smoke)
    # Whatever the door, options of a method have the same names here
    return told | {name: value for name, value in plan.options.items() if name != "algorithm"}


def _start(plan: ResolvedPlan) -> str | None:
    """The weights that it begins with; ``None`` for a new adapter."""
    if (parent := plan.parent) is not None:
        where = f"step {parent.step} of run {parent.run_id[:12]}"
        return f"checkpoint {parent.checkpoint_id[:12]} ({where})"
    return None if plan.warm_start is None else f"model {plan.warm_start.model_id[:12]}"


def _named(name: str | None, ident: str) -> str:
    return f"{name} ({ident[:12]})" if name else ident[:12]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return json.dumps(value, ensure_ascii=False)
    return "–" if value is None else show(value)


def _warnings(plans: Sequence[ResolvedPlan], runs: Sequence[Run], measure: str | None) -> list[str]:
    """What keeps the figures from being compared, a sentence each."""
    if measure is None:
        return [f"{_APART_SAID[0].upper()}{_APART_SAID[1:]}."]
    told = []
    if measure == "loss":
        held = {plan.validation_dataset and plan.validation_dataset.dataset_id for plan in plans}
        if len(held) > 1:
            told.append("The validation datasets differ: validation losses are not comparable.")
        if len({plan.base_model.fingerprint for plan in plans}) > 1:
            told.append("The base models differ: with other tokens a loss is on another scale.")
        return told
    if len({plan.workload.workload_id for plan in plans}) > 1:
        told.append(
            "The workloads differ, and with them tasks and rewards: neither rewards nor held-out "
            "rewards are comparable."
        )
    elif len({plan.workload.train_digest for plan in plans}) > 1 or any(
        len({plan.options.get(name) for plan in plans}) > 1 for name in _SELECTION
    ):
        told.append("The held-out tasks differ: held-out rewards are not those of the same tasks.")
    return told


def _standing(run: Run) -> dict[str, Any]:
    """Where a run stands, in figures."""
    row = run._row()
    curve = _steps(run)
    moved = first_and_last(curve)
    rounds = [each for each in rounds_of(run) if each["complete"] and each["score"] is not None]
    saved = checkpoint_rows(run)
    best = next((c for c in saved if c.said.startswith("best")), None)
    top = next((c for c in saved if c.said == extreme(loss=run.method == "sft")), best)
    return {
        "run_id": run.id,
        "name": run.name,
        "status": str(row.status),
        "method": row.method,
        "steps": row.completed_steps,
        "total_steps": row.total_steps,
        "updates": row.updates_applied,
        "tokens": row.output_tokens if run.method != "sft" else _trained(run),
        "seconds": _took(row),
        "first": moved[0] if moved else None,
        "last": moved[1] if moved else (curve[-1][1] if curve else None),
        "final": rounds[-1]["score"] if rounds else None,
        extreme(loss=run.method == "sft"): top.score if top else None,
        "best": best.score if best else None,
        "best_low": best.low if best else None,
        "best_high": best.high if best else None,
        "best_step": best.step if best else None,
        "top_step": top.step if top else None,
    }


def _took(row: StoredRun) -> float | None:
    begun = row.started_at
    return None if begun is None else (row.ended_at or time.time()) - begun


def _trained(run: Run) -> int:
    rows = run._store.steps(run._key, columns=("metrics",))
    return sum((row["metrics"] or {}).get("trained_tokens") or 0 for row in rows)


def _told(labels: Sequence[str], standings: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The same in words, every row with the columns of all."""
    rows = [_in_words(label, one) for label, one in zip(labels, standings, strict=True)]
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name, "–") for name in names} for row in rows]


def _in_words(label: str, standing: Mapping[str, Any]) -> dict[str, str]:
    supervised = standing["method"] == "sft"
    top = standing[extreme(loss=supervised)]
    low, high, at = (standing[name] for name in ("best_low", "best_high", "best_step"))
    return {
        "run": label,
        "status": standing["status"],
        "method": standing["method"],
        "steps": f"{standing['steps']:,}",
        "updates": f"{standing['updates']:,}",
        _TOKENS[supervised]: f"{standing['tokens']:,}",
        "time": span(standing["seconds"]),
        _CURVE[supervised]: (f"{number(standing['first'])} → {number(standing['last'])}"),
        _SCORE[supervised]: number(standing["final"]),
        _TOP[supervised]: "–" if top is None else f"{number(top)} at step {standing['top_step']:,}",
        _BEST[supervised]: number(standing["best"]),
        "95% interval": "–" if low is None else f"{number(low)} to {number(high)}",
        "at step": "–" if at is None else f"{at:,}",
    }


_TOKENS = ("output tokens", "trained tokens")
_CURVE = ("reward", "loss")
_SCORE = ("final held-out", "final validation loss")
_TOP = ("highest held-out", "lowest validation loss")
_BEST = ("best held-out", "best validation loss")


def _steps(run: Run) -> list[tuple[float, float]]:
    if run.method == "sft":
        rows = run._store.steps(run._key, columns=("step", "loss"))
        return sorted(finite((row["step"], row["loss"]) for row in rows))
    return finite((row["step"], row["avg_reward"]) for row in run._store.rewards(run._key))


def _curve(run: Run, label: str, measure: str) -> Curve:
    whole = [each for each in rounds_of(run) if each["complete"] and each["score"] is not None]
    bounded = [each for each in whole if each["low"] is not None and each["high"] is not None]
    return Curve(
        label,
        _steps(run),
        finite((each["step"], each["score"]) for each in whole),
        finite((each["step"], each["low"]) for each in bounded),
        finite((each["step"], each["high"]) for each in bounded),
    )


def _section(run: Run, label: str) -> tuple[str, str, Markup]:
    """What a comparison's page says of one run by itself."""
    summary = run.glance().refresh()
    rows = [
        (f"{row.step:,}", number(row.score), row.said, row.checkpoint_id[:12])
        for row in checkpoint_rows(run)[:5]
    ]
    hashes = [("Run", run.id), ("Config", run.config_hash)]
    inner = joined((
        paragraphs([summary.subject], "muted"),
        paragraphs(movement(summary)),
        table(("step", "score", "rank", "checkpoint"), rows, numbers=(0, 1),
              caption=f"Checkpoints of {label}, at most 5"),
        facts(hashes),
    ))  # fmt: skip
    ident = f"run-{run.id[:12]}"
    return ident, label, section(ident, f"Run {label}", inner)
