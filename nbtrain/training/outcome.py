"""How an attempt ended, handed from the rank to its host through a file in the run's folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Outcome:
    """``ended`` says why a completed run stopped early, ``failure`` why one failed."""

    result: Literal["completed", "failed", "cancelled"]
    ended: str | None = None
    failure: str | None = None

    def write(self, path: Path) -> None:
        """Write atomically: a reader sees the whole file or none."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)) + "\n", "utf-8")
        os.replace(partial, path)


def outcome_path(run_folder: Path, attempt: int) -> Path:
    """Where attempt ``attempt`` leaves its outcome."""
    return run_folder / "attempts" / str(attempt) / "outcome.json"


def read_outcome(run_folder: Path, attempt: int) -> Outcome | None:
    """The attempt's outcome, ``None`` when it left none or half of one."""
    try:
        return Outcome(**json.loads(outcome_path(run_folder, attempt).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
