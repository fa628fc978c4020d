"""What killed processes of a job leave half-done. Imports no torch: hosts use it too."""

from __future__ import annotations

import shutil
from pathlib import Path

from nbtrain.training.outcome import attempt_folder, meeting_path

PREFIX, SUFFIX = ".step-", ".partial"
ROWS, TRAINER = "rows", "trainer"
"""Folders of one attempt: tokenized rows, and what TRL's trainer wants to write."""
POLICIES = "policies"
"""The run's folder through which adapters go to an engine."""


def partial_name(step: int) -> str:
    """The name under which the checkpoint of ``step`` is written."""
    return f"{PREFIX}{step:06d}{SUFFIX}"


def clear_partial(folder: Path) -> None:
    """Remove what no writer is at work on any more."""
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        shutil.rmtree(path, ignore_errors=True)


def clear_scratch(run_folder: Path, attempt: int) -> None:
    """Remove the folders that one attempt needs while it lives."""
    for name in (ROWS, TRAINER):
        shutil.rmtree(attempt_folder(run_folder, attempt) / name, ignore_errors=True)


def clear_attempt(run_folder: Path, attempt: int) -> None:
    """Remove what one attempt, which has ended, left of its own."""
    clear_scratch(run_folder, attempt)
    meeting_path(run_folder, attempt).unlink(missing_ok=True)


def clear_left_overs(run_folder: Path, attempt: int) -> None:
    """Remove all that the last attempt left half-done; none of the run's may be at work."""
    clear_attempt(run_folder, attempt)
    clear_partial(run_folder / "checkpoints")
    shutil.rmtree(run_folder / POLICIES, ignore_errors=True)
