"""Starting a run from a resolved plan, once for each submission."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nbtrain.client.run import Run
from nbtrain.errors import NotFound, PlanRefused, Problem, Refused
from nbtrain.plan.identity import same_plan
from nbtrain.plan.phases import Status
from nbtrain.plan.resolved import ResolvedPlan

if TYPE_CHECKING:
    from nbtrain.store import Store, StoredRun

__all__ = ["find_submission", "start", "started_before", "submitted_as"]

_LONGEST = 200  # characters of a failure


def submitted_as(submission_id: str) -> str:
    """The id of the run that a submission makes."""
    return hashlib.sha256(f"submission:{submission_id}".encode()).hexdigest()


def find_submission(store: Store, plan: ResolvedPlan) -> Run | None:
    """The run that the plan's submission made before; ``None`` without one.

    Raises :class:`PlanRefused` when that run trains under another plan.
    """
    if plan.submission_id is None:
        return None
    run_id = submitted_as(plan.submission_id)
    try:
        row = store.find_run(run_id)
    except NotFound:
        return None
    if same_plan(ResolvedPlan.from_json(row.resolved), plan):
        return Run(store, row)
    message = (
        f"submissionId {plan.submission_id!r} was used before, by {Run(store, row).title}, with "
        "another plan"
    )
    hint = "State another submissionId, or none: then every start is a new run"
    raise PlanRefused([Problem("submissionId", message, plan.submission_id, hint=hint)])


def started_before(plan: ResolvedPlan, run: Run) -> str:
    """That the plan's submission made ``run`` before, how that ended, and how to try again."""
    told = f"submissionId {plan.submission_id!r} was started before: {run.title}"
    if not run.is_over:
        return told
    if run.status == Status.SUCCEEDED:
        return f"{told}, which succeeded"
    why = next(iter((run.failure or "").strip().splitlines()), "")[:_LONGEST]
    how = "was cancelled" if run.status == Status.CANCELLED else f"failed: {why}".rstrip(": .")
    return f"{told}, which {how}; state another submissionId to try again"


def start(store: Store, plan: ResolvedPlan, given: Mapping[str, Any]) -> tuple[Run, bool]:
    """Record and launch a run; with whether it is a new one.

    A submission that was made before gives the run of the first, also to one that came at the
    same moment. Raises :class:`PlanRefused` as :func:`find_submission` does, and when the parent
    has lost its training state since the plan was made.
    """
    if plan.submission_id is None:
        return _start(store, plan, given, None), True
    with _one_at_a_time(store):
        before = find_submission(store, plan)
        if before is not None:
            return before, False
        return _start(store, plan, given, submitted_as(plan.submission_id)), True


def _start(store: Store, plan: ResolvedPlan, given: Mapping[str, Any], run_id: str | None) -> Run:
    from nbtrain.jobs.launch import launch
    from nbtrain.store import new_id, write_json

    run_id = run_id or new_id()
    # First what can fail without leaving a run behind: a full disk, a home that is read-only
    folder = store.run_folder(run_id)
    write_json(folder / "plan.json", given)
    write_json(folder / "resolved.json", plan.to_json())
    try:
        row: StoredRun = store.create_run(
            run_id,
            plan=given,
            resolved=plan,
            kind="smoke" if plan.smoke else "train",
            description=plan.description,
            config_name=plan.config_name,
        )
    except Refused:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    launch(store, row)
    return Run(store, row)


@contextmanager
def _one_at_a_time(store: Store) -> Iterator[None]:
    """Of two equal submissions at the same moment, the second waits until the first is a run."""
    from nbtrain.store.home import private_file

    with private_file(store.home / "submissions.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
