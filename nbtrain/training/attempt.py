"""One rank's part in one attempt of a run: its lock, its outcome, its exit code."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from nbtrain.errors import NbtrainError
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.store import Store, StoredRun, open_store
from nbtrain.training.control import Cancelled, Terminated
from nbtrain.training.lock import sole_writer
from nbtrain.training.outcome import Outcome, outcome_path
from nbtrain.training.ranks import LostRankError
from nbtrain.training.record import insist

if TYPE_CHECKING:
    from nbtrain.training.job import Job
    from nbtrain.training.supervised.job import SupervisedJob

__all__ = ["run_attempt"]

log = logging.getLogger("nbtrain.training")


def run_attempt(run_id: str, attempt: int) -> int:
    """Train, and leave an outcome for the host whatever happens. Returns the exit code.

    Every rank leaves its own outcome; only rank 0 holds the lock of the run's folder.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    rank = int(os.environ.get("RANK", "0"))
    store = open_store()
    run = store.find_run(run_id)
    folder = store.run_folder(run.run_id)
    try:
        with sole_writer(folder) if rank == 0 else nullcontext():
            ending = _job(store, run, attempt).run()
        if ending.failure is not None:
            outcome = Outcome("failed", failure=ending.failure)
        else:
            outcome = Outcome("completed", ended=ending.ended)
    except Cancelled as stop:
        outcome = Outcome("cancelled", ended=str(stop))
    except Terminated as stop:
        outcome = Outcome("failed", failure=str(stop))
    except Exception as error:
        outcome = _failed(error)
    why = outcome.failure or outcome.ended
    log.info("attempt %d %s%s", attempt, outcome.result, f": {why}" if why else "")
    insist(lambda: outcome.write(outcome_path(folder, attempt, rank)))
    return 1 if outcome.result == "failed" else 0


def _job(store: Store, run: StoredRun, attempt: int) -> Job | SupervisedJob:
    """Each method's own, imported when it is needed: TRL takes seconds to load."""
    if ResolvedPlan.from_json(run.resolved).method == "sft":
        from nbtrain.training.supervised.job import SupervisedJob

        return SupervisedJob(store, run, attempt)
    from nbtrain.training.job import Job

    return Job(store, run, attempt)


def _failed(error: Exception) -> Outcome:
    with suppress(OSError):  # the log may be on the disk that is full
        traceback.print_exc()
    return Outcome("failed", failure=_sentence(error), lost_rank=isinstance(error, LostRankError))


def _sentence(error: Exception) -> str:
    """The first line of a failure, for the person who started the run."""
    if isinstance(error, NbtrainError):
        return str(error)
    if "os error 28" in str(error) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
        return f"the disk is full: {error}"
    return f"{type(error).__name__}: {error}"
