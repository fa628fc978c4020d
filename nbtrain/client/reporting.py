"""The report of a run: what it holds, read once, and its way to a file."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.client import report_samples
from nbtrain.client.resolved import ResolvedView
from nbtrain.client.resolved_descriptor import DescriptorView
from nbtrain.client.restated import restate
from nbtrain.plan.fields import show
from nbtrain.report.drawing import Drawing
from nbtrain.report.page import write_page
from nbtrain.report.run_drawings import reward_drawings, supervised_drawings
from nbtrain.report.run_page import CheckpointRow, PlanRow, RunPage, run_page
from nbtrain.report.summary import clock, span

if TYPE_CHECKING:
    from nbtrain.client.records import Checkpoint
    from nbtrain.client.run import Run
    from nbtrain.plan.resolved import ResolvedPlan
    from nbtrain.report.summary import RunSummary
    from nbtrain.store import Row, StoredRun

__all__ = ["checkpoint_rows", "made_by", "page_of", "report", "rounds_of", "step_rows", "versions"]

_EVENTS = 200
_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")


def report(run: Run, path: str | Path) -> Path:
    """Write one self-contained HTML file about ``run`` and return its absolute path.

    During a run it shows what is there. Missing folders are made. An earlier report at ``path``
    is replaced, where it is a link what that leads to; anything else is refused with
    :class:`~nbtrain.errors.Refused`. Raises :class:`~nbtrain.errors.NotWritten`, an ``OSError``,
    where the file cannot be written.
    """
    return write_page(path, run_page(page_of(run)))


def page_of(run: Run) -> RunPage:
    """Everything the report of ``run`` shows."""
    summary = run.glance().refresh()
    row = run._row()
    plan = run.plan
    steps = step_rows(run)
    samples = report_samples.gather(run, row)
    recorded, said = versions(run)
    again = restate(row.plan, plan.workload.workload_id)
    events, left_off = _events(run)
    return RunPage(
        summary=summary,
        as_of=_as_of(row),
        head=_head(row, summary),
        drawings=_drawings(run, steps, summary),
        diagnosis=run.diagnose(),
        checkpoints=checkpoint_rows(run),
        samples=samples.shown,
        samples_said=samples.said,
        progress=samples.progress,
        checks=row.checks,
        plan=plan_rows(plan),
        data=_data(plan),
        environment=recorded,
        environment_said=said,
        hashes=_hashes(run, plan),
        cell=again.cell,
        python=again.python,
        restated_said=again.said,
        events=events,
        events_left_off=left_off,
        made_by=made_by(),
        notes=summary.notes,
    )


def made_by() -> str:
    """Which version wrote a page, and when."""
    import nbtrain

    return f"Written by nbtrain {nbtrain.__version__} on {clock(time.time())}."


def _as_of(row: StoredRun) -> str:
    if row.ended_for_good:
        return f"The run ended on {clock(row.ended_at)}; this is all of it."
    return f"The run goes on: as of {clock(time.time())}."


def _head(row: StoredRun, summary: RunSummary) -> list[tuple[str, str]]:
    begun, ended = row.started_at or row.created_at, row.ended_at
    took = (time.time() if ended is None else ended) - begun
    return [
        ("Run", row.run_id[:12]),
        ("Method", " · ".join(part for part in (row.method, summary.admission) if part)),
        ("Workload", summary.workload),
        ("Base model", row.base_model_slug),
        ("Steps", f"{row.completed_steps:,} of {row.total_steps:,}"),
        ("Updates", f"{row.updates_applied:,}"),
        *_sampled(row),
        ("Created", clock(row.created_at)),
        ("Time", span(took)),
    ]


def _sampled(row: StoredRun) -> list[tuple[str, str]]:
    if row.method == "sft":
        return []
    told = f"{row.attempted_trajectories:,}, {row.graded_trajectories:,} graded"
    return [("Trajectories", told), ("Tokens written", f"{row.output_tokens:,}")]


def step_rows(run: Run) -> list[dict[str, Any]]:
    """The run's steps in order, recorded figures beside the columns, without lists of rows."""
    found = run._store.steps(run._key)
    told = [{**(row["metrics"] or {}), **row, "metrics": None} for row in found]
    return sorted(told, key=lambda row: row["step"])


def rounds_of(run: Run) -> list[dict[str, Any]]:
    """Validation rounds in order: ``step, score, low, high, complete``."""
    table = run.validation
    score = "loss" if run.method == "sft" else "held_out_reward"
    return [
        {
            "step": int(row["step"]),
            "score": _known(row[score]),
            "low": _known(row.get("low")),
            "high": _known(row.get("high")),
            "complete": bool(row["round_completed"]),
        }
        for row in table.sort_values("step").to_dict("records")
    ]


def _known(value: Any) -> float | None:
    return None if value is None or value != value else float(value)


def _drawings(run: Run, steps: Sequence[Row], summary: RunSummary) -> list[Drawing]:
    over = summary.status in ("succeeded", "failed", "cancelled")
    until = summary.completed_steps if over else summary.total_steps
    draw = supervised_drawings if run.method == "sft" else reward_drawings
    return draw(steps, rounds_of(run), until)


def checkpoint_rows(run: Run) -> list[CheckpointRow]:
    """The checkpoints as picking ranks them."""
    from nbtrain.client.picking import ranked, standings

    found = ranked(run)
    return [_checkpoint(*each) for each in zip(found, standings(found)[1], strict=True)]


def _checkpoint(found: Checkpoint, said: str) -> CheckpointRow:
    score = found.held_out_reward if found.validation_loss is None else found.validation_loss
    return CheckpointRow(
        found.checkpoint_id, found.step_index, score, found.held_out_low, found.held_out_high,
        found.round_completed, said, found.kind, found.reason,
    )  # fmt: skip


def plan_rows(plan: ResolvedPlan) -> list[PlanRow]:
    """Every value of the plan with its origin, in groups."""
    if plan.config is not None:
        return [
            PlanRow(path.rpartition(".")[0], path.rpartition(".")[2], _value(value), origin,
                    usual=origin == "default")
            for path, value, origin, _ in DescriptorView(plan)._fields()
        ]  # fmt: skip
    from nbtrain.plan.options import OPTIONS

    telling = {name for name, *_ in ResolvedView(plan)._telling()}
    return [
        PlanRow(OPTIONS[s.name].group if s.name in OPTIONS else "", s.name, show(s.value), s.origin,
                s.note or "", usual=s.name not in telling)
        for s in plan.settings.values()
    ]  # fmt: skip


def _value(value: Any) -> str:
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return show(value)


def _data(plan: ResolvedPlan) -> list[tuple[str, str]]:
    data, held = plan.dataset, plan.validation_dataset
    told = [
        ("Workload", plan.workload.name or ""),
        ("Trains on", f"{plan.workload.train_tasks:,} {'rows' if data else 'tasks'}"),
        ("Held out", f"{plan.workload.held_out_tasks:,}"),
        ("Split", plan.workload.split),
    ]
    if data is not None:
        told.append(("Dataset", f"{data.name or data.dataset_id[:12]}, {data.rows:,} rows"))
    if held is not None:
        name = held.name or held.dataset_id[:12]
        told.append(("Validation dataset", f"{name}, {held.rows:,} rows"))
    if plan.parent is not None:
        parent = plan.parent
        told.append(("Goes on from", f"step {parent.step:,} of run {parent.run_id[:12]}"))
    return told


def versions(run: Run) -> tuple[list[tuple[str, str]], str]:
    """Machine and versions that the run's newest training state recorded, and where that stands.

    A run keeps them with its training state alone; without one, those of this process are told.
    """
    held = [c for c in run.checkpoint_list() if c.has_training_state]
    for checkpoint in reversed(held):
        path = run.folder / "checkpoints" / Path(checkpoint.path).name / "state.json"
        found = _environment(path)
        if found:
            said = f"As recorded with the training state of step {checkpoint.step_index:,}."
            return [(name, show(value)) for name, value in found.items()], said
    from importlib import metadata

    import nbtrain

    here = [("nbtrain", nbtrain.__version__), ("python", platform.python_version())]
    for name in _PACKAGES:
        try:
            here.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    here.append(("platform", platform.platform()))
    said = (
        "The run recorded no versions: it kept no training state. These are of where the report "
        "was written, not necessarily of the job."
    )
    return here, said


def _environment(path: Path) -> Mapping[str, Any]:
    try:
        state = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    found = state.get("environment") if isinstance(state, dict) else None
    return found if isinstance(found, dict) else {}


def _hashes(run: Run, plan: ResolvedPlan) -> list[tuple[str, str]]:
    told = [
        ("Run", run.id),
        ("Config", plan.config_hash),
        ("Base model's weights", plan.base_model.fingerprint),
        ("Workload", plan.workload.workload_id),
        ("Training tasks", plan.workload.train_digest),
    ]
    if plan.dataset is not None:
        told.append(("Dataset", plan.dataset.dataset_id))
    if plan.validation_dataset is not None:
        told.append(("Validation dataset", plan.validation_dataset.dataset_id))
    if plan.parent is not None:
        told.append(("Parent checkpoint", plan.parent.checkpoint_id))
    told += _reward_hashes(run, plan)
    models = run._store.models(run._key)
    return told + [("Adapter's weights", model["weights_digest"]) for model in models]


def _reward_hashes(run: Run, plan: ResolvedPlan) -> list[tuple[str, str]]:
    if plan.reward is not None:
        return [("Reward", json.dumps(plan.reward, ensure_ascii=False, sort_keys=True))]
    found = run._store.workload(plan.workload.workload_id)
    spec = (found or {}).get("spec") or {}
    stated = spec.get("rewards")
    return [("Reward", json.dumps(stated, ensure_ascii=False))] if stated else []


def _events(run: Run) -> tuple[list[tuple[str, str, str, str]], int]:
    rows = run._store.phases(run._key)
    shown = [
        (clock(row["at"]), str(row["attempt"]), row["phase"], row["message"] or "")
        for row in rows[-_EVENTS:]
    ]
    return shown, len(rows) - len(shown)
