"""``client.training.runs``, ``.rewards`` and ``.checkpoints``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbtrain.client import tables
from nbtrain.client.listing import Listing
from nbtrain.client.records import Checkpoint, HeldOutPoint, Progress, RewardPoint, StepSummary
from nbtrain.client.run import RUN_COLUMNS, Run, RunListing
from nbtrain.errors import Problem, Refused
from nbtrain.plan.fields import describe, plain

if TYPE_CHECKING:
    from nbtrain.client.parts import Parts

__all__ = ["Checkpoints", "Rewards", "RunRef", "Runs"]

RunRef = Run | str


class Runs:
    """``client.training.runs``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def get(self, run: RunRef) -> Run:
        """The run a name (its newest run), an id or a prefix means.

        Raises :class:`NotFound`, and :class:`AmbiguousReference` for a prefix of several.
        """
        return self._parts.run(run)

    def retrieve(self, training_run_id: RunRef) -> Run:
        """The same as :meth:`get`."""
        return self.get(training_run_id)

    def list(self, limit: int | None = None) -> Listing[Run]:
        """Runs, newest first."""
        store = self._parts.store
        runs = [Run(store, row) for row in store.runs(limit, texts=False)]
        return RunListing(runs, RUN_COLUMNS)

    def still_running(self, name: str | None, *, besides: Run | None = None) -> Listing[Run]:
        """Runs of this name that are not over, newest first; none for ``None``."""
        store = self._parts.store
        rows = store.runs(name=name, open_only=True) if name else []
        found = [Run(store, row) for row in rows]
        open_ones = [run for run in found if run != besides and not run.is_over]
        return Listing(open_ones, RUN_COLUMNS)

    def progress(self, training_run_id: RunRef) -> Progress:
        """Steps and trajectories so far."""
        return self.get(training_run_id).progress

    def list_step_summaries(self, training_run_id: RunRef) -> Listing[StepSummary]:
        """The ledger of every step."""
        run = self.get(training_run_id)
        return Listing(tables.step_summaries(run._rows("steps")), StepSummary.columns())

    def annotate(self, training_run_id: RunRef, **annotations: str | None) -> Run:
        """Change ``description`` and ``config_name``, the notes about a run; ``None`` clears one.

        What is not stated stays. They are no part of what the run is. Raises :class:`Refused`
        for anything but text, ``TypeError`` for another name.
        """
        unknown = annotations.keys() - {"description", "config_name"}
        if unknown:
            msg = f"annotate() takes description and config_name, not {', '.join(sorted(unknown))}"
            raise TypeError(msg)
        problems = [
            Problem(name, f"{name} needs text, found {describe(value)}", plain(value))
            for name, value in annotations.items()
            if value is not None and not (isinstance(value, str) and value.strip())
        ]
        if problems:
            raise Refused(problems)
        run = self.get(training_run_id)
        self._parts.store.annotate(run._key, **annotations)
        return run

    def cancel(self, training_run_id: RunRef) -> Run:
        """Ask the run to stop; its checkpoints stay."""
        return self.get(training_run_id).cancel()

    def wait(self, training_run_id: RunRef, timeout: float | None = None) -> Run:
        """Wait for the end; see :meth:`Run.wait`."""
        return self.get(training_run_id).wait(timeout)


class Rewards:
    """``client.training.rewards``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def list_history(self, training_run_id: RunRef) -> Listing[RewardPoint]:
        """The mean reward of every step."""
        rows = self._parts.run(training_run_id)._rows("rewards")
        points = [RewardPoint(r["step"], r["avg_reward"], r["used_reward"]) for r in rows]
        return Listing(points, RewardPoint.columns())

    def list_held_out_rewards(self, training_run_id: RunRef) -> Listing[HeldOutPoint]:
        """Every validation round; compare only those with ``round_completed``."""
        rows = self._parts.run(training_run_id)._rows("validation_rounds")
        return Listing(tables.held_out_points(rows), HeldOutPoint.columns())


class Checkpoints:
    """``client.training.checkpoints``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def list(self, training_run_id: RunRef) -> Listing[Checkpoint]:
        """The committed checkpoints of a run, by step."""
        found = self._parts.run(training_run_id).checkpoint_list()
        return Listing(found, Checkpoint.columns())

    def get(self, checkpoint_id: Checkpoint | str) -> Checkpoint:
        """The checkpoint that an id or a prefix means.

        Raises :class:`NotFound`, and :class:`AmbiguousReference` for a prefix of several.
        """
        if isinstance(checkpoint_id, Checkpoint):
            checkpoint_id = checkpoint_id.checkpoint_id
        row = self._parts.store.find_checkpoint(checkpoint_id)
        found = self._parts.run(row.run_id).checkpoint_list()
        return next(c for c in found if c.checkpoint_id == row.checkpoint_id)
