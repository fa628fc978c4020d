"""Why a process of a job ended, in a sentence that a person can act on."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from nbtrain.training.outcome import Outcome

__all__ = ["Exit", "explain", "last_exception", "last_lines", "tail", "verdict"]

_TAIL_BYTES = 64 * 1024
_LINE_CHARS = 400
_LINES = 10
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child process ended.

    ``code`` is its exit code, or minus the signal that killed it. ``peak_bytes`` is the largest
    resident size it had, or that a child it waited for had.
    """

    code: int
    peak_bytes: int | None = None


def verdict(
    exit: Exit, outcome: Outcome | None, *, what: str, log: Path, stopped: bool, cancelled: bool
) -> Outcome:
    """What the run comes to when its rank has exited.

    The rank's own word counts, even when it crashed later, while its interpreter closed down.
    After the host stopped it (``stopped``), whatever it says but "completed" is the host's doing:
    cancelled. ``cancelled`` is whether somebody had asked for that.
    """
    if outcome is not None and (outcome.result != "failed" or not stopped):
        if outcome.result == "failed" and not outcome.failure:
            return Outcome("failed", outcome.ended, explain(exit, what=what, log=log))
        return outcome
    if stopped:
        return Outcome("cancelled", "cancelled; the job did not stop by itself and was stopped")
    if cancelled and exit.code in (0, -signal.SIGTERM):
        return Outcome("cancelled", "cancelled")
    return Outcome("failed", None, explain(exit, what=what, log=log))


def explain(exit: Exit, *, what: str, log: Path) -> str:
    """``what`` ended how, with the last exception or the last lines of its log."""
    sentence = f"{what} {_how(exit)}"
    exception = last_exception(log)
    if exception is not None and exit.code >= 0:
        return f"{sentence}: {exception}\n(the whole log: {log})"
    lines = last_lines(log)
    if not lines:
        return f"{sentence}; its log is empty ({log})"
    shown = "\n".join(f"  {line}" for line in lines)
    return f"{sentence}; last lines of {log}:\n{shown}"


def _how(exit: Exit) -> str:
    if exit.code == 0:
        return "exited with code 0 without saying what came of it"
    if exit.code > 0:
        return f"exited with code {exit.code}"
    try:
        name = signal.Signals(-exit.code).name
    except ValueError:
        name = "unknown"
    text = f"was killed by signal {-exit.code} ({name})"
    if exit.code == -signal.SIGKILL:
        text += ", likely out of memory"
        if exit.peak_bytes is not None:
            text += f"; peak memory {exit.peak_bytes / 2**20:.0f} MiB"
    return text


def last_lines(log: Path, count: int = _LINES) -> list[str]:
    """The last non-empty lines of ``log``, long ones cut, control characters removed."""
    lines = [_ESCAPES.sub("", line).rstrip() for line in tail(log)[0].splitlines()]
    return [_cut(line) for line in lines if line][-count:]


def last_exception(log: Path) -> str | None:
    """The line of the last Python traceback that names the exception; None without one."""
    lines = [_ESCAPES.sub("", line) for line in tail(log)[0].splitlines()]
    starts = [n for n, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts:
        return None
    # What follows the traceback may be indented as deep as its first line (exception groups).
    indent = lines[starts[-1]][: -len(lines[starts[-1]].lstrip()) or None]
    indent = indent if not indent.strip() else ""
    for line in lines[starts[-1] + 1 :]:
        rest = line.removeprefix(indent)
        if rest.strip() and not rest.startswith((" ", "\t")):
            return _cut(rest.rstrip())
    return None


def _cut(line: str) -> str:
    return line if len(line) <= _LINE_CHARS else line[: _LINE_CHARS - 1] + "…"


def tail(log: Path) -> tuple[str, int]:
    """The end of a log, which may be huge and of any encoding: at most 64 KiB in whole lines.

    Also how many bytes before it are left off. Empty for a file that cannot be read.
    """
    try:
        with log.open("rb") as stream:
            size = stream.seek(0, 2)
            # one byte more tells whether what follows it begins a line
            start = max(0, size - _TAIL_BYTES - 1)
            stream.seek(start)
            data = stream.read()
    except OSError:
        return "", 0
    if start:
        data = data.partition(b"\n")[2] or data
    return data.decode("utf-8", "replace"), size - len(data)
