"""The start checks of a plan alone: in a process of their own, without a run."""

from __future__ import annotations

import contextlib
import fcntl
import html
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.client import readings
from nbtrain.errors import NbtrainError, Problem, Where
from nbtrain.plan.checks import Check
from nbtrain.plan.fields import show
from nbtrain.processes import process_identity, stop_tree

if TYPE_CHECKING:
    import pandas as pd

    from nbtrain.plan.resolved import ResolvedPlan
    from nbtrain.store import Store

__all__ = ["CheckReport", "CheckingFailed", "run_checks"]

COMMAND = (sys.executable, "-X", "utf8", "-P", "-m", "nbtrain.training.check")
_GRACE_SECONDS = 2.0
_PREFIX, _LOCK = "check-", "lock"
_BEGINS_SECONDS = 60.0  # a folder without a lock is older than that only after a kill
_CELL = "text-align:left;padding:1px 10px 1px 0"
_COLOURS = {"warned": "#9a6700", "refused": "#b00020"}


class CheckingFailed(NbtrainError, RuntimeError):
    """The process that checks ended without a result; the message holds the end of its log."""


@dataclass(frozen=True)
class CheckReport:
    """What the start checks measured, and what is wrong; no run was started.

    ``ok`` is whether a run of the plan would train: no problem, and no check beyond its limit.
    """

    checks: tuple[Check, ...]
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is refused."""
        return not self.problems and all(c.verdict != "refused" for c in self.checks)

    def to_frame(self) -> pd.DataFrame:
        """One row per check."""
        return readings.checks(check.to_json() for check in self.checks)

    def _title(self) -> str:
        refused = sum(check.verdict == "refused" for check in self.checks)
        bad = max(refused, len(self.problems))
        warned = sum(check.verdict == "warned" for check in self.checks)
        if bad:
            told = f"a run of this plan would be refused: {bad} problem{'s' if bad > 1 else ''}"
        else:
            told = "a run of this plan would train"
        count = len(self.checks)
        told += f"; {count} start check{'s' if count != 1 else ''}"
        return told + (f", {warned} warned" if warned else "")

    def __repr__(self) -> str:
        rows = [_row(check) for check in self.checks]
        widths = [max((len(row[n]) for row in rows), default=0) for n in range(3)]
        lines = [self._title()]
        for row in rows:
            cells = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
            lines.append("  " + "  ".join([*cells, row[3]]).rstrip())
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])

    def _repr_html_(self) -> str:
        names = ("check", "verdict", "measured", "")
        head = "".join(f'<th style="{_CELL}">{name}</th>' for name in names)
        body = []
        for check in self.checks:
            colour = _COLOURS.get(check.verdict)
            style = f"{_CELL};color:{colour}" if colour else _CELL
            cells = "".join(f'<td style="{style}">{html.escape(t)}</td>' for t in _row(check))
            body.append(f"<tr>{cells}</tr>")
        wrong = "".join(f"<li>{html.escape(str(problem))}</li>" for problem in self.problems)
        return (
            '<div style="font-family:sans-serif;font-size:13px">'
            f"<div>{html.escape(self._title())}</div>"
            '<table style="border-collapse:collapse;font-size:inherit;color:inherit">'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
            + (f"<ul>{wrong}</ul>" if wrong else "")
            + "</div>"
        )


def _row(check: Check) -> tuple[str, str, str, str]:
    measured = "–"
    if check.measured is not None:
        number = float(f"{check.measured:.4g}")
        measured = show(int(number) if number.is_integer() and abs(number) < 1e15 else number)
        measured = f"{measured} {check.unit}".strip()
    side = "at least" if check.at_least else "at most"
    limit = check.refuse if check.verdict == "refused" else check.warn
    if check.verdict != "passed" and limit is not None:
        measured += f" (allowed: {side} {limit:g})"
    return check.name, check.verdict, measured, check.said


def run_checks(
    store: Store, plan: ResolvedPlan, told: Callable[[str], None] = lambda _: None
) -> CheckReport:
    """Run the start checks of ``plan`` in a process of their own and return what they say.

    ``told`` gets each sentence on what is being done. An interrupt ends the process and
    everything it started. Raises :class:`CheckingFailed` when it ends without a result.
    """
    from nbtrain.store import private_folder, write_json
    from nbtrain.store.home import private_file

    _sweep(private_folder(store.home / "checks"))
    with (
        tempfile.TemporaryDirectory(dir=store.home / "checks", prefix=_PREFIX) as name,
        (Path(name) / _LOCK).open("wb") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = Path(name)
        write_json(folder / "plan.json", plan.to_json())
        log = private_file(folder / "check.log")
        with log.open("wb") as errors:
            process = _start(store, plan, folder, errors)
        try:
            for line in process.stdout or ():
                if doing := _doing(line):
                    told(doing)
            process.wait()
        finally:
            _stop(process, folder.name)
        return _read(folder / "checks.json", log, process.returncode)


def _sweep(checks: Path) -> None:
    """Remove what checks left behind that were killed; a living one holds its folder's lock."""
    for folder in checks.glob(f"{_PREFIX}*"):
        try:
            with (folder / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:  # one that begins just now, or was killed while it did
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > _BEGINS_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


def _doing(line: str) -> str | None:
    """What a line of the process says; libraries write other lines."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return str(found["doing"]) if isinstance(found, dict) and "doing" in found else None


def _start(store: Store, plan: ResolvedPlan, folder: Path, errors: Any) -> subprocess.Popen[str]:
    from nbtrain.jobs import environment as env

    argv = [*COMMAND, "--plan", str(folder / "plan.json"), "--out", str(folder / "checks.json")]
    url = None if store.database.path == store.home / "nbtrain.db" else store.url
    stated, cores = os.environ.get("OMP_NUM_THREADS"), env.available_cores()
    return subprocess.Popen(
        [*argv, "--folder", str(folder / "work")],
        env=env.rank_environment(
            env.host_environment(os.environ, home=store.home, url=url),
            mark=folder.name,
            threads=env.rank_threads(plan.to_json(), stated=stated, cores=cores),
            gpu=env.has_gpu(),
        ),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )


def _stop(process: subprocess.Popen[str], mark: str) -> None:
    """Nothing of it may be left, also when the waiting was interrupted."""
    who = process_identity(process.pid)
    roots = [] if who is None else [who]
    stop_tree(roots, grace=_GRACE_SECONDS, mark=mark, on_poll=lambda: _reap(process))
    with contextlib.suppress(OSError):
        if process.stdout is not None:
            process.stdout.close()
    process.wait()


def _reap(process: subprocess.Popen[str]) -> None:
    process.poll()


def _read(path: Path, log: Path, code: int) -> CheckReport:
    try:
        data = json.loads(path.read_text("utf-8"))
        checks = tuple(Check.from_json(each) for each in data["checks"])
        problems = tuple(_problem(each) for each in data.get("problems", ()))
    except (OSError, ValueError, KeyError, TypeError):
        end = log.read_text("utf-8", "replace").strip()[-2000:]
        msg = f"the start checks ended without a result (exit code {code})"
        raise CheckingFailed(f"{msg}:\n{end}" if end else msg) from None
    return CheckReport(checks, problems)


def _problem(data: dict[str, Any]) -> Problem:
    where = data.get("where")
    return Problem(**{**data, "where": None if where is None else Where(**where)})
