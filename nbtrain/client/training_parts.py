"""``client.training.runs``, ``.rewards`` and ``.checkpoints``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from nbtrain.client import tables
from nbtrain.client.listing import Listing
from nbtrain.client.parts import Part
from nbtrain.client.records import Checkpoint, HeldOutPoint, Progress, RewardPoint, StepSummary
from nbtrain.client.run import RUN_COLUMNS, Run, RunListing
from nbtrain.client.whole import whole_numbers
from nbtrain.errors import NotFound, Refused
from nbtrain.plan.descriptor.table import FIELDS
from nbtrain.plan.fields import check, describe

if TYPE_CHECKING:
    from nbtrain.client.comparing import CheckpointComparison
    from nbtrain.client.parts import Parts
    from nbtrain.client.side_by_side import RunComparison

__all__ = ["Checkpoints", "Rewards", "RunRef", "Runs"]

RunRef = Run | str

_NOTES = {
    name: replace(FIELDS[key].option, name=name)
    for name, key in (("description", "description"), ("config_name", "configName"))
}
"""What may be noted about a run, as a descriptor's table has it."""


class Runs(Part):
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
        """Runs, newest first, at most ``limit``.

        Raises :class:`Refused` for a limit that is no whole number from 0 on.
        """
        (limit,) = whole_numbers(limit=limit)
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

    def compare(self, *runs: RunRef) -> RunComparison:
        """2 to 12 runs side by side: what differs in their plans, and how far each came.

        ``.to_frame()`` is the table, ``.plot()`` the curves, ``.report(path)`` a page of both.
        Raises :class:`Refused` for fewer, for more, and for a run that is named twice.
        """
        from nbtrain.client.side_by_side import compare_runs

        return compare_runs([self.get(run) for run in runs])

    def progress(self, training_run_id: RunRef) -> Progress:
        """Steps and trajectories so far."""
        return self.get(training_run_id).progress

    def list_step_summaries(self, training_run_id: RunRef) -> Listing[StepSummary]:
        """The ledger of every step. Raises :class:`NotFound` for a supervised run, without one."""
        run = self.get(training_run_id)
        run._sampled("step summaries")
        return Listing(tables.step_summaries(run._rows("steps")), StepSummary.columns())

    def annotate(self, training_run_id: RunRef, **annotations: str | None) -> Run:
        """Change ``description`` and ``config_name``, the notes about a run; ``None`` clears one.

        What is not stated stays. They are no part of what the run is, and bound as in a
        descriptor: a description of 1 to 4,000 characters, a name of one line. Raises
        :class:`Refused` for anything else, ``TypeError`` for another name.
        """
        unknown = annotations.keys() - _NOTES.keys()
        if unknown:
            msg = f"annotate() takes {' and '.join(_NOTES)}, not {', '.join(sorted(unknown))}"
            raise TypeError(msg)
        checked = [check(_NOTES[name], value) for name, value in annotations.items()]
        problems = [problem for _, problem in checked if problem is not None]
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


class Rewards(Part):
    """``client.training.rewards``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def list_history(self, training_run_id: RunRef) -> Listing[RewardPoint]:
        """The mean reward of every step. Raises :class:`NotFound` for a supervised run."""
        run = self._parts.run(training_run_id)
        run._sampled("rewards")
        rows = run._rows("rewards")
        points = [RewardPoint(r["step"], r["avg_reward"], r["used_reward"]) for r in rows]
        return Listing(points, RewardPoint.columns())

    def list_held_out_rewards(self, training_run_id: RunRef) -> Listing[HeldOutPoint]:
        """Every validation round; compare only those with ``round_completed``.

        ``low`` and ``high`` are the 95 % interval of its reward; see ``Run.validation``.
        """
        rows = self._parts.run(training_run_id)._rows("validation_rounds")
        return Listing(tables.held_out_points(rows, self._parts.store), HeldOutPoint.columns())


class Checkpoints(Part):
    """``client.training.checkpoints``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def list(self, training_run_id: RunRef) -> Listing[Checkpoint]:
        """The committed checkpoints of a run, by step, shown with their ranks."""
        return self._parts.run(training_run_id).checkpoint_list()

    def get(self, checkpoint_id: Checkpoint | str) -> Checkpoint:
        """The checkpoint that an id or a prefix means.

        Raises :class:`NotFound`, and :class:`AmbiguousReference` for a prefix of several.
        """
        ref: object = checkpoint_id
        if isinstance(ref, Checkpoint):
            ref = ref.checkpoint_id
        if not isinstance(ref, str):
            given = describe(ref)
            msg = f"a checkpoint is named by a Checkpoint, an id or a prefix, not by {given}"
            raise NotFound(msg)
        row = self._parts.store.find_checkpoint(ref)
        found = self._parts.run(row.run_id).checkpoint_list()
        return next(c for c in found if c.checkpoint_id == row.checkpoint_id)

    def compare(
        self,
        a: Checkpoint | str,
        b: Checkpoint | str,
        tasks: int = 8,
        n: int = 1,
        *,
        told: Callable[[str], None] | None = None,
    ) -> CheckpointComparison:
        """Two checkpoints on the same tasks, side by side.

        Where both have a complete validation round, its recorded replies and rewards; else ``n``
        fresh replies to ``tasks`` tasks, without rewards. See
        :func:`nbtrain.client.comparing.compare_checkpoints`.
        """
        from nbtrain.client.comparing import compare_checkpoints

        return compare_checkpoints(self._parts, a, b, tasks=tasks, n=n, told=told)
