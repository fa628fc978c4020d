"""What ranks and their host leave for each other in an attempt's folder.

How each rank ended, and the file by which the ranks of one attempt meet.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank ended, and with it the attempt.

    ``ended`` says why a completed run stopped early, ``failure`` why one failed; ``lost_rank``
    that it failed only because another rank had gone.
    """

    result: Literal["completed", "failed", "cancelled"]
    ended: str | None = None
    failure: str | None = None
    lost_rank: bool = False

    def write(self, path: Path) -> None:
        """Write atomically: a reader sees the whole file or none."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)) + "\n", "utf-8")
        os.replace(partial, path)


def attempt_folder(run_folder: Path, attempt: int) -> Path:
    """What belongs to one attempt only."""
    return run_folder / "attempts" / str(attempt)


def outcome_path(run_folder: Path, attempt: int, rank: int = 0) -> Path:
    """Where a rank leaves its outcome. Rank 0's is the attempt's."""
    name = "outcome.json" if rank == 0 else f"outcome-{rank}.json"
    return attempt_folder(run_folder, attempt) / name


def meeting_path(run_folder: Path, attempt: int) -> Path:
    """The file by which the ranks of one attempt find each other."""
    return attempt_folder(run_folder, attempt) / "meeting"


def read_outcome(run_folder: Path, attempt: int, rank: int = 0) -> Outcome | None:
    """A rank's outcome, ``None`` when it left none or half of one."""
    try:
        return Outcome(**json.loads(outcome_path(run_folder, attempt, rank).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
