"""Everything that a run recorded as files: Parquet, CSV or an Excel workbook."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.client.export_tables import TABLES, Exported, tables_of
from nbtrain.client.new_folder import NewFolder
from nbtrain.errors import Problem, Refused
from nbtrain.report.writers import FORMATS, Written, writer_for

if TYPE_CHECKING:
    from nbtrain.client.run import Run

__all__ = ["FORMATS", "TABLES", "export"]

_MANIFEST = "manifest.json"
_NOTES = {
    "parquet": ("Chat messages, reward terms and other nested values are JSON in text columns.",),
    "csv": (
        "UTF-8, times in UTC, empty for nothing. Nested values are JSON.",
        "A text that begins with = + - @, a tab or a carriage return has an apostrophe before it, "
        "so that no spreadsheet takes what a model wrote for a formula; pandas reads it along.",
    ),
    "xlsx": (
        "One workbook, a sheet for each table; times are UTC. Nested values are JSON.",
        "Every text is stored as text, whatever it begins with, never as a formula.",
    ),
}


def export(run: Run, folder: str | Path, format: str = "parquet") -> list[Path]:
    """Write the run's tables into ``folder`` and return the files, the manifest last.

    ``format`` is ``parquet`` or ``csv`` (a file for each table) or ``xlsx`` (one workbook).
    ``manifest.json`` tells what each column means, the hashes of run and files, and what a format
    could not hold. Trajectories come with their texts and are read and written in pieces, so that
    a long run needs no more memory than a short one.

    The folder is made, or filled where it is there and empty; links are followed.
    :class:`~nbtrain.errors.Refused` for one that holds anything, and for another format. The
    files are there whole or not at all, also where the disk is full
    (:class:`~nbtrain.errors.NotWritten`, an ``OSError``).
    """
    place = NewFolder(folder, "an export")
    _check(place, format)
    with place.filled(_MANIFEST) as half:
        written = _write(run, half, format)
        _describe(run, half, format, written)
    names = dict.fromkeys([*(each.path.name for _, each in written), _MANIFEST])
    return [place.path / name for name in names]


def _check(place: NewFolder, form: str) -> None:
    problems = []
    if form not in FORMATS:
        message = f"format {form!r} is none that tables are exported in"
        problems.append(Problem("format", message, form, ", ".join(FORMATS)))
    problems += place.problems
    if problems:
        raise Refused(problems)


def _write(run: Run, folder: Path, form: str) -> list[tuple[Exported, Written]]:
    with writer_for(form, folder) as writer:
        return [
            (table, writer.write(table.name, table.columns, table.pieces))
            for table in tables_of(run)
        ]


def _describe(
    run: Run, folder: Path, form: str, written: Sequence[tuple[Exported, Written]]
) -> None:
    import nbtrain

    row = run._row()
    told = {
        "written_by": f"nbtrain {nbtrain.__version__}",
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run": {
            "run_id": run.id, "name": run.name, "method": run.method, "status": str(row.status),
            "completed_steps": row.completed_steps, "is_over": row.ended_for_good,
            "config_hash": run.config_hash, "workload_id": row.workload_id,
            "base_model_slug": row.base_model_slug,
            "base_model_fingerprint": run.plan.base_model.fingerprint,
        },
        "format": form,
        "notes": list(_NOTES[form]),
        "tables": {table.name: _table(table, each) for table, each in written},
        "files": {path.name: _digest(path) for path in sorted(folder.iterdir())},
    }  # fmt: skip
    text = json.dumps(told, ensure_ascii=False, indent=1)
    (folder / _MANIFEST).write_text(text + "\n", "utf-8", errors="replace")


def _table(table: Exported, written: Written) -> dict[str, Any]:
    return {
        "file": written.path.name,
        "rows": written.rows,
        "holds": table.holds,
        **({"left_out": written.said} if written.said else {}),
        "columns": {c.name: {"kind": c.kind, "meaning": c.meaning} for c in table.columns},
    }


def _digest(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
    return {"sha256": digest.hexdigest(), "bytes": path.stat().st_size}


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block
