"""Why a process of a job ended, in a sentence that a person can act on."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbtrain.training.outcome import Outcome

__all__ = [
    "Exit",
    "RankEnd",
    "explain",
    "first_cause",
    "last_exception",
    "last_lines",
    "leader",
    "tail",
    "verdict",
]

_TAIL_BYTES = 64 * 1024
_LINE_CHARS = 400
_LINES = 10
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child process ended.

    ``code`` is its exit code, or minus the signal that killed it. ``peak_bytes`` is the largest
    resident size it had, or that a child it waited for had; ``free_bytes`` what the system could
    still give when it was last seen alive.
    """

    code: int
    peak_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank of a job ended.

    ``outcome`` is its own word. ``by_host`` is whether it still ran when the host began to stop
    the job, so that what became of it says nothing about the cause.
    """

    rank: int
    exit: Exit
    outcome: Outcome | None
    log: Path
    by_host: bool = False

    @property
    def failed(self) -> bool:
        """Whether it did not come to a good end, by its own word or for lack of one."""
        return self.outcome is None or self.outcome.result == "failed"

    @property
    def lost_rank(self) -> bool:
        """Whether it failed only because another rank had gone."""
        return self.outcome is not None and self.outcome.lost_rank


def first_cause(ends: Sequence[RankEnd]) -> RankEnd:
    """The rank to blame; ``ends`` are in the order in which the ranks ended.

    The first that failed by itself: not stopped by the host, not for want of another rank.
    Without any, rank 0.
    """
    failed = [end for end in ends if end.failed and not end.by_host]
    own = [end for end in failed if not end.lost_rank]
    return next(iter([*own, *failed]), leader(ends))


def leader(ends: Sequence[RankEnd]) -> RankEnd:
    """Rank 0, whose word is the job's."""
    return next(end for end in ends if end.rank == 0)


def verdict(ends: Sequence[RankEnd], *, stopped: str | None, cancelled: bool) -> Outcome:
    """What the run comes to when all its ranks have exited, given in the order of their ends.

    Rank 0's own word counts, even when it crashed later, while its interpreter closed down, or
    when another one did. After the host stopped the job for a cancel (``stopped``, in words),
    whatever it says but "completed" is the host's doing: cancelled. ``cancelled`` is whether
    somebody had asked for that.
    """
    said = leader(ends).outcome
    if said is not None and said.result != "failed":
        return said
    if stopped:
        return Outcome("cancelled", stopped)
    cause = first_cause(ends)
    if cancelled and cause.outcome is None and cause.exit.code in (0, -signal.SIGTERM):
        return Outcome("cancelled", "cancelled")
    return Outcome("failed", None, _blame(cause, len(ends)))


def _blame(end: RankEnd, ranks: int) -> str:
    what = "the rank" if ranks == 1 else f"rank {end.rank} of {ranks}"
    if end.outcome is None or not end.outcome.failure:
        return explain(end.exit, what=what, log=end.log)
    return end.outcome.failure if ranks == 1 else f"{what}: {end.outcome.failure}"


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
        text += "; if nobody did it, the system ran out of memory"
        known = ((exit.peak_bytes, "peak {} MiB"), (exit.free_bytes, "{} MiB free"))
        told = [words.format(size // 2**20) for size, words in known if size is not None]
        text += f": {', '.join(told)}" if told else ""
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
