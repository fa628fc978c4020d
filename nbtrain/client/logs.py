"""A job's logs as one text that shows itself readably."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["LogText", "read_logs"]

_PROGRESS = re.compile(r"\d+%\|.*\|")  # as tqdm draws it
_FUTURE = re.compile(r"[\\/]transformers[\\/].*: FutureWarning: ")


class LogText(str):
    """The logs as they are; shown in a notebook without progress bars and without warnings that
    transformers raises about its own future.
    """

    __slots__ = ()

    @property
    def shown(self) -> str:
        """What a notebook shows."""
        lines = []
        quoted = False  # whether the source line of a dropped warning may follow
        for line in self.split("\n"):
            text = line.rstrip("\r").rpartition("\r")[2]
            if _FUTURE.search(text):
                quoted = True
                continue
            dropped = _PROGRESS.search(text) or (quoted and text.startswith("  "))
            quoted = False
            if not dropped:
                lines.append(text)
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.shown)


def read_logs(folder: Path) -> LogText:
    """The ends of all logs in ``folder``, each behind a line that names its file."""
    parts = [_tail(path) for path in sorted(folder.glob("*.log"))] if folder.is_dir() else []
    return LogText("\n".join(part for part in parts if part))


def _tail(path: Path) -> str:
    from nbtrain.jobs.exits import tail

    text, left_off = tail(path)
    if left_off:
        return f"== {path.name}: the first {left_off:,} bytes are left off ==\n{text}"
    return f"== {path.name} ==\n{text}" if text else ""
