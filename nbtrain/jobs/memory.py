"""Memory that this machine, or the control group of this process, can still give."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

__all__ = ["available_bytes"]


def available_bytes() -> int:
    """Bytes that could be taken now without anything being killed for it."""
    return min(psutil.virtual_memory().available, within_quota(Path("/sys/fs/cgroup")))


def within_quota(group: Path) -> int:
    """What the control group still allows; files that the system merely caches are given up."""
    try:
        most = (group / "memory.max").read_text().strip()
        if most == "max":
            return sys.maxsize
        held = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(most) - held + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return sys.maxsize
