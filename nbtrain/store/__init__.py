"""What is remembered: runs, their rows, checkpoints, workloads and base models.

One writer per run (:class:`RunWriter`, used by its rank) and any number of readers
(:class:`Store`), which poll for rows after the last key they have seen.
"""

from __future__ import annotations

from nbtrain.store.home import (
    home_folder,
    private_folder,
    put_file,
    sync,
    usable_path,
    write_json,
    writing,
)
from nbtrain.store.ids import check_id, new_id, short
from nbtrain.store.names import moved, name_problems, unknown
from nbtrain.store.pulse import Pulse
from nbtrain.store.rows import Row, StoredCheckpoint, StoredRun, trajectory_ref
from nbtrain.store.store import Store, open_store
from nbtrain.store.writer import RunWriter

__all__ = [
    "Pulse",
    "Row",
    "RunWriter",
    "Store",
    "StoredCheckpoint",
    "StoredRun",
    "check_id",
    "home_folder",
    "moved",
    "name_problems",
    "new_id",
    "open_store",
    "private_folder",
    "put_file",
    "short",
    "sync",
    "trajectory_ref",
    "unknown",
    "usable_path",
    "write_json",
    "writing",
]
