"""The start checks alone: ``python -m nbtrain.training.check --plan FILE --out FILE --folder DIR``.

Kept import-light on purpose: reward workers are spawned, and a spawned process imports its
parent's main module again before anything else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbtrain.errors import Problem
    from nbtrain.plan.checks import Check
    from nbtrain.plan.resolved import ResolvedPlan
    from nbtrain.store import Store

    Found = tuple[list[Check], list[Problem]]


def main(argv: Sequence[str] | None = None) -> int:
    """Check one plan in this process; there is no run, and the store stays as it is.

    ``--plan`` is a resolved plan as JSON, ``--folder`` takes what the checks write meanwhile. What
    they found goes to ``--out``: ``{"checks": […], "problems": […]}``, whole or not at all. What
    is being done is told on stdout, a JSON object ``{"doing": "…"}`` a line. The exit code is 0
    whether the checks pass or not, and 1, with a sentence on stderr, when they could not be made.
    """
    parser = argparse.ArgumentParser(prog="nbtrain.training.check")
    for name in ("--plan", "--out", "--folder"):
        parser.add_argument(name, required=True, type=Path)
    arguments = parser.parse_args(argv)

    from nbtrain.processes import die_with_parent

    die_with_parent()
    try:
        _check(arguments.plan, arguments.out, arguments.folder)
    except Exception as error:
        _explain(error)
        return 1
    return 0


def _check(plan_file: Path, out: Path, folder: Path) -> None:
    from nbtrain.errors import StartChecksFailed
    from nbtrain.plan.resolved import ResolvedPlan
    from nbtrain.store import open_store

    plan = ResolvedPlan.from_json(json.loads(plan_file.read_text("utf-8")))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    find = _supervised if plan.method == "sft" else _reinforcement
    try:
        with open_store() as store:
            prepare_weights(plan, plan_file, store.home)
            checks, problems = find(store, plan, folder)
    except StartChecksFailed as error:
        checks, problems = [], list(error.problems)
    found = {
        "checks": [check.to_json() for check in checks],
        "problems": [_plain(problem) for problem in problems],
    }
    partial = out.with_name(f"{out.name}.partial")
    partial.write_text(json.dumps(found, allow_nan=False) + "\n", "utf-8")
    os.replace(partial, out)


def prepare_weights(plan: ResolvedPlan, plan_file: Path, home: Path) -> None:
    """Fetch or convert the base model's weights in a process of its own, where they are not here.

    Raises :class:`StartChecksFailed` with what kept it from it.
    """
    import subprocess

    from nbtrain.errors import Problem, StartChecksFailed
    from nbtrain.training.prepare_model import is_ready

    if is_ready(plan, home):
        return
    _tell("preparing the base model's weights")
    command = [sys.executable, "-m", "nbtrain.training.prepare_model", "--plan", str(plan_file)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it was stopped"]
        field = "base_model_slug" if plan.door == "options" else "baseModel"
        raise StartChecksFailed([Problem(field, f"the base model cannot be had: {said[-1]}")])


def _supervised(store: Store, plan: ResolvedPlan, folder: Path) -> Found:
    import shutil
    from contextlib import closing

    from transformers.utils import logging

    from nbtrain.errors import StartChecksFailed
    from nbtrain.training.ranks import join_ranks
    from nbtrain.training.supervised.preparing import Preparation
    from nbtrain.training.supervised.restoring import restore, total_steps
    from nbtrain.training.supervised.smoke import SmokeCheck, without_validation

    logging.disable_progress_bar()
    plan = without_validation(plan)
    ranks, device = join_ranks(folder, 0)
    rows = folder / "rows"
    try:
        ready = Preparation(store, plan, rows, ranks=ranks, device=device, says=_tell).run()
        with closing(ready):
            total = total_steps(plan, ready)
            restore(store, plan, ready, total=total, ranks=plan["gpus"], environment={})
            if plan.smoke is not None and not ready.problems:
                _tell("reading the answers of the smoke check")
                try:
                    SmokeCheck(store, plan, ready, ranks=ranks, device=device)
                except StartChecksFailed as error:
                    ready.problems += error.problems
    finally:
        shutil.rmtree(rows, ignore_errors=True)
    return ready.checks, ready.problems


def _reinforcement(store: Store, plan: ResolvedPlan, folder: Path) -> Found:
    from nbtrain.training.checking import check_only

    return check_only(store, plan, folder, told=_tell)


def _tell(what: str | None, *, now: bool = True) -> None:
    """Say what is done; whatever is said is told at once."""
    if what:
        print(json.dumps({"doing": what}), flush=True)


def _plain(problem: Problem) -> dict[str, Any]:
    """A problem as strict JSON; what JSON cannot hold is told as text."""
    from dataclasses import asdict

    told = asdict(problem)
    try:
        json.dumps(told["found"], allow_nan=False)
    except (TypeError, ValueError):
        told["found"] = str(told["found"])
    return told


def _explain(error: Exception) -> None:
    """The sentence comes last, after where it was raised if nobody meant to raise it."""
    import traceback

    from nbtrain.errors import NbtrainError

    if isinstance(error, NbtrainError):
        said = str(error)
    else:
        traceback.print_exception(error)
        said = f"the start checks could not be made: {type(error).__name__}: {error}"
    print(said, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
