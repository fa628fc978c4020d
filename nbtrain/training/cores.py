"""How many cores a job's process may use, and how ranks share them: no torch, the host asks too."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

__all__ = ["available_cores", "worker_count"]


def available_cores() -> int:
    """Cores this process may use: its affinity, cut by the control group's quota. At least 1."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(cores, _quota(Path("/sys/fs/cgroup/cpu.max"))))


def worker_count(stated: int | None, *, most: int, ranks: int) -> int:
    """How many worker processes one of ``ranks`` ranks starts, at least 1.

    ``stated`` is the number for the whole run; None means as many as there are cores, but at
    most ``most``.
    """
    total = min(available_cores(), most) if stated is None else stated
    return max(1, total // ranks)


def _quota(path: Path) -> int:
    try:
        quota, period = path.read_text().split()
        return sys.maxsize if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return sys.maxsize
