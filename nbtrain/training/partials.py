"""Checkpoint folders that a killed writer left half-written. Imports no torch: hosts use it too."""

from __future__ import annotations

import shutil
from pathlib import Path

PREFIX, SUFFIX = ".step-", ".partial"


def partial_name(step: int) -> str:
    """The name under which the checkpoint of ``step`` is written."""
    return f"{PREFIX}{step:06d}{SUFFIX}"


def clear_partial(folder: Path) -> None:
    """Remove what no writer is at work on any more."""
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        shutil.rmtree(path, ignore_errors=True)
