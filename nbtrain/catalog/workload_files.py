"""Writing the folder of a workload, file by file, each whole or as before."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nbtrain.catalog.rows import PROMPT, Row
from nbtrain.catalog.splitting import Task, split_tasks
from nbtrain.catalog.workloads import VERSION, WorkloadSpec, side_of, told_split
from nbtrain.store import put_file

__all__ = ["write_workload"]


def _line(row: Row) -> bytes:
    # not RFC 8785, in which 3.0 would come back as 3
    return json.dumps(row, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def write_workload(spec: WorkloadSpec, folder: Path) -> dict[str, Any]:
    """Write the workload's folder and return what it says of itself.

    Files that are already there with the same content stay; others are replaced one by one, so
    registering again mends a damaged folder and repacks rewards for a newer Python.
    """
    about = {
        "version": VERSION,
        "workload_id": spec.workload_id,
        "base_model": spec.base_model,
        "raw": spec.raw,
        "held_out": spec.held_out,
        "tasks": len(spec.rows),
        "held_out_tasks": len(spec.held_out_rows),
        "columns": [name for row in spec.rows[:1] for name in row if name != PROMPT],
        "rewards": list(spec.reward_identity),
        "environment": spec.environment_identity,
        "environment_form": spec.environment_form,
        "dataset": asdict(spec.dataset) if spec.dataset else None,
        "grader": spec.grader,
        "splits": _splits(spec) if spec.rows else None,
    }
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if spec.rows:
        _put_tasks(spec, folder)
    # Last: a folder without it was left halfway and is none.
    put_file(folder / "workload.json", json.dumps(about, indent=1).encode())
    return about


def _put_tasks(spec: WorkloadSpec, folder: Path) -> None:
    put_file(folder / "tasks.jsonl", b"".join(_line(row) for row in spec.rows))
    held_out = b"".join(_line(row) for row in spec.held_out_rows)
    put_file(folder / "held_out.jsonl", held_out)
    put_file(folder / "rewards.pkl", spec.rewards)
    if spec.environment is not None:
        put_file(folder / "environment.pkl", spec.environment)


def _splits(spec: WorkloadSpec) -> dict[str, Any]:
    """Both ways to divide the tasks, so that a plan is resolved without reading them."""
    tasks = [Task.from_row(row) for row in spec.rows]
    stated = [Task.from_row(row) for row in spec.held_out_rows]
    return {
        side_of(validation): told_split(
            split_tasks(tasks, stated, spec.held_out, validation=validation)
        )
        for validation in (True, False)
    }
