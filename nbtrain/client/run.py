"""A run as an object: its state, its tables, its picture, and what one may ask of it."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.client import tables
from nbtrain.client.later import NotYet
from nbtrain.client.listing import Listing
from nbtrain.client.readings import SmokeVerdict
from nbtrain.client.records import Checkpoint, Progress
from nbtrain.client.resolved import ShownPlan
from nbtrain.client.run_tables import RunTables
from nbtrain.errors import NbtrainError, NotFound, StoreError
from nbtrain.plan.resolved import ResolvedPlan

if TYPE_CHECKING:
    import pandas as pd

    from nbtrain.client.earlier import EarlierRuns
    from nbtrain.client.glance import Glance
    from nbtrain.client.models import ModelItem
    from nbtrain.jobs.liveness import Liveness
    from nbtrain.report.findings import Diagnosis
    from nbtrain.store import Store, StoredRun

__all__ = ["RUN_COLUMNS", "Run", "RunListing"]

RUN_COLUMNS = (
    "run_id",
    "name",
    "status",
    "phase",
    "method",
    "workload",
    "base_model_slug",
    "completed_steps",
    "total_steps",
    "created_at",
    "ended_at",
    "config_hash",
)


_UNREADABLE = (NbtrainError, OSError)
"""Why a run cannot be read: its store is gone, is damaged, or was replaced by another."""


class Run(RunTables, NotYet):
    """One training run, read from the store whenever it is asked; the handle keeps no state.

    Every read first looks whether the run's host still lives, so that a run whose host is gone
    reads FAILED with the reason. Frames are plain pandas and never change by themselves.
    """

    def __init__(self, store: Store, row: StoredRun) -> None:
        self._store = store
        self._key = row.key
        self._method = row.method
        self._glance: Glance | None = None
        self.id: str = row.run_id
        self.name: str | None = row.name
        self.config_hash: str = row.config_hash

    @property
    def run_id(self) -> str:
        """The same as ``id``."""
        return self.id

    @property
    def training_run_id(self) -> str:
        """The same as ``id``."""
        return self.id

    @property
    def title(self) -> str:
        """``run first (1a2b3c4d5e6f)``, for sentences."""
        short = self.id[:12]
        return f"run {self.name} ({short})" if self.name else f"run {short}"

    @property
    def method(self) -> str:
        """``gspo``, ``grpo`` or ``sft``."""
        return self._method

    @property
    def config_name(self) -> str | None:
        """What its descriptor calls the configuration."""
        return self._store.run(self._key).config_name

    @property
    def description(self) -> str | None:
        """What its descriptor says of it."""
        return self._store.run(self._key).description

    # State

    def _look(self) -> tuple[StoredRun, Liveness]:
        """The run's row and whether its job lives.

        A run whose host is gone is ended here, so that it never looks alive.
        """
        from nbtrain.jobs.liveness import liveness, reap

        row = self._store.run(self._key)
        if row.run_id != self.id:
            path = self._store.database.path
            msg = f"another store was put in the place of {path}; it has no {self.title}"
            raise NotFound(msg)
        seen = liveness(self._store, row)
        if seen.state == "gone" and not row.ended_for_good:
            # On a full disk the end cannot be recorded now; what is there can be read all the same
            with suppress(StoreError):
                reap(self._store, row)
            row = self._store.run(self._key)
        return row, seen

    @property
    def phase(self) -> str:
        """The fine state, such as ``TRAINING``."""
        return str(self._row().phase)

    @property
    def status(self) -> str:
        """The coarse state: pending, running, succeeded, failed or cancelled."""
        return str(self._row().status)

    @property
    def is_over(self) -> bool:
        """Whether the run succeeded, failed or was cancelled."""
        return self._row().ended_for_good

    @property
    def failure(self) -> str | None:
        """Why the run failed."""
        return self._row().failure

    @property
    def ended(self) -> str | None:
        """Why the run ended before its last step, where it did."""
        return self._row().ended

    @property
    def unresponsive_since(self) -> float | None:
        """Unix time since which the job has given no sign of life though its host exists."""
        _, seen = self._look()
        return seen.since if seen.state == "unresponsive" else None

    @property
    def progress(self) -> Progress:
        """Steps and trajectories so far, and what the job does now."""
        row, seen = self._look()
        return Progress(
            completed_steps=row.completed_steps,
            total_steps=row.total_steps,
            attempted_trajectories=row.attempted_trajectories,
            graded_trajectories=row.graded_trajectories,
            start_step=row.start_step,
            updates_applied=row.updates_applied,
            saved_step=row.saved_step,
            output_tokens=row.output_tokens,
            activity=None if row.ended_for_good else seen.activity,
        )

    @property
    def plan(self) -> ResolvedPlan:
        """What the run trains under; shown as a dry run shows it."""
        return ShownPlan.from_json(self._store.run(self._key).resolved)

    @property
    def earlier_runs(self) -> EarlierRuns:
        """Runs of the same recipe (equal config hash) that were created before, newest first,
        each with its last complete validation reading.
        """
        from nbtrain.client.earlier import EarlierRuns

        found = [
            Run(self._store, row)
            for row in self._store.runs(config_hash=self.config_hash, texts=False)
            if row.key < self._key
        ]
        return EarlierRuns(found)

    @property
    def verdict(self) -> SmokeVerdict | None:
        """What a smoke check found; ``None`` of another run, and until it is over.

        A mapping with ``passed``, ``score``, ``threshold``, the suspected ``layer``, what is
        ``said`` of it, and the ``worst`` rows. A smoke check that failed is a run that succeeded
        with a verdict that did not pass.
        """
        found = self._store.run(self._key).verdict
        return None if found is None else SmokeVerdict(found)

    @property
    def model(self) -> ModelItem | None:
        """The model that the run registered when it completed; ``None`` where it has none."""
        found = self._store.models(self._key)
        if not found:
            return None
        from nbtrain.client.models import Models
        from nbtrain.client.parts import Parts

        parts = Parts(None, None)
        parts.store = self._store
        return Models(parts).get(found[0]["model_id"])

    @property
    def folder(self) -> Path:
        """The run's folder: logs and checkpoints."""
        return self._store.run_folder(self.id)

    # Picks

    def best(self) -> Checkpoint:
        """The earliest checkpoint that ties with the one of the highest held-out reward.

        Only those with weights and a complete validation round at their step count. One ties when
        the 95 % interval of its paired difference to the top, by bootstrap over the held-out tasks
        that both saw, reaches down to 0: more training has then not shown to help, and the
        earliest is nearest to the base model. ``best.ties_with`` is the top's step, ``None`` when
        it is the top itself. ``run.checkpoints`` shows intervals and ties of all.

        Of a supervised run it is the one with the lowest complete validation loss, the earliest of
        equals. Raises :class:`NotFound` (a ``LookupError``) when no checkpoint has a complete
        round at its step, or when the run validates nothing.
        """
        found = tables.best(self.checkpoint_list())
        if found is None:
            raise NotFound(self._no_best())
        return found

    def _no_best(self) -> str:
        plan = self.plan
        if self._supervised and plan.validation_dataset is None:
            return (
                f"{self.title} has no validation dataset, so that nothing ranks its checkpoints; "
                "run.checkpoints lists them, and the last one is the run's end"
            )
        if plan.door == "descriptor" and not self._supervised:
            return (
                f"{self.title} validates nothing: a reinforcement run of a descriptor never does. "
                "Evaluations of its checkpoints come later; run.checkpoints lists them"
            )
        msg = f"{self.title} has no checkpoint with a complete validation round at its step"
        rounds = tables.held_out_points(self._rows("validation_rounds"))
        if rounds and not any(point.round_completed for point in rounds):
            last = rounds[-1]
            samples = "rows were read" if self._supervised else "held-out samples were graded"
            msg += f": {last.completed_samples} of {last.expected_samples} {samples} "
            msg += f"at step {last.step}"
        return msg

    def diagnose(self) -> Diagnosis:
        """Why is nothing happening? Findings with figures and samples, the most important first.

        Each has a severity (problem, hint, fine), a sentence and a suggestion that names the
        options to change; ``.frame`` is a table of them. Works during a run and after it; about
        120 steps spread over the run and its newest groups and trajectories are looked at.
        """
        from nbtrain.client.diagnosis import diagnose, gather

        return diagnose(gather(self._store, *self._look()))

    # Picture

    def glance(self) -> Glance:
        """The summary behind the repr; it reads only what is new each time."""
        from nbtrain.client.glance import glance_of

        if self._glance is None:
            self._glance = glance_of(self._store, self._key, self._look)
        return self._glance

    def plot(self) -> Any:
        """A matplotlib figure of the reward and the held-out rounds, or of the losses."""
        return self.glance().figure()

    def __repr__(self) -> str:
        try:
            return self.glance().text()
        except _UNREADABLE as error:
            return self._unread(error)

    def _unread(self, error: Exception) -> str:
        """What stands for a run that cannot be read: shown, it never raises."""
        return f"<{self.title} cannot be read: {error}>"

    def _line(self) -> str:
        """The run in one line, for lists."""
        try:
            row = self._row()
        except _UNREADABLE as error:
            return self._unread(error)
        return (
            f"<Run {self.name or '(no name)'} {self.id[:12]}: {row.status}, step "
            f"{row.completed_steps:,} of {row.total_steps:,}, "
            f"{row.workload_name or row.workload_id[:12]}, {row.base_model_slug}>"
        )

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> Mapping[str, Any]:
        try:
            return self.glance().bundle()
        except _UNREADABLE as error:
            return {"text/plain": self._unread(error)}

    def panel(self) -> Any:
        """The live panel of this run, to be displayed in a notebook.

        It is the same one each time, and the one that a ``%%train`` cell shows:
        ``run.panel().selected`` is the checkpoint picked in it, ``None`` before. Raises
        :class:`~nbtrain.errors.NbtrainError` outside of a notebook.
        """
        from nbtrain.client.fronts import panel

        return panel(self)

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML file about the run and return its path.

        It holds curves, groups, checkpoints, samples, the resolved plan with origins, the
        environment, hashes and the cell that reproduces the run. Raises
        :class:`~nbtrain.errors.Refused` where another file is,
        :class:`~nbtrain.errors.NotWritten` (an ``OSError``) where it cannot be written.
        """
        from nbtrain.client.reporting import report

        return report(self, path)

    def export(self, folder: str | Path, format: str = "parquet") -> list[Path]:
        """Write the run's tables into a folder and return the files.

        ``format`` is ``parquet``, ``csv`` or ``xlsx``. Raises as :meth:`report` does.
        """
        from nbtrain.client.exporting import export

        return export(self, folder, format)

    # Control

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until the run is over, at most ``timeout`` seconds, and return it.

        Raises :class:`RunEnded` with the reason when it failed or was cancelled, and
        :class:`WaitedTooLong` (a ``TimeoutError``) when the time is up. An interrupt only stops
        the waiting. A run that succeeded without an update warns that no weight changed.
        """
        from nbtrain.client.waiting import wait

        wait(self, timeout)
        return self

    def cancel(self) -> Run:
        """Ask the run to stop; its checkpoints stay. Returns at once; a run that is over stays."""
        from nbtrain.jobs.control import request_cancel

        row = self._row()
        if not row.ended_for_good:
            request_cancel(self._store, row)
        return self

    # A run is its id in its store: in a copied home the same id is another run to act on

    def to_row(self) -> dict[str, Any]:
        """The run as one row of a table of runs."""
        return _as_row(self._row())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and other._place == self._place

    def __hash__(self) -> int:
        return hash(self._place)

    @property
    def _place(self) -> tuple[str, str, str]:
        return str(self._store.home), self._store.url, self.id

    def __getstate__(self) -> dict[str, Any]:
        """Copied and pickled, a run is where it is stored; what was read of it stays here."""
        return {**vars(self), "_glance": None}

    def __iter__(self) -> Iterator[Any]:
        msg = "a run is no list; its tables are run.rewards, run.groups, run.checkpoints, …"
        raise TypeError(msg)


class RunListing(Listing[Run]):
    """A list of runs; as a frame they are read together."""

    def to_frame(self) -> pd.DataFrame:
        """One row per run, as it is now."""
        from nbtrain.client.frames import frame

        return frame(_read_together(self.items)) if self.items else super().to_frame()

    def _shown_rows(self, items: list[Run]) -> list[dict[str, Any]]:
        """Without what a glance at a list does not need."""
        return [
            {
                "name": row["name"],
                "run": row["run_id"],
                "status": row["status"],
                "method": row["method"],
                "workload": row["workload"],
                "base model": row["base_model_slug"],
                "steps": f"{row['completed_steps']:,} of {row['total_steps']:,}",
                "created_at": row["created_at"],
            }
            for row in _read_together(items)
        ]

    def _repr_html_(self) -> str:
        from nbtrain.report.listed import listed_html

        try:
            rows = self._shown_rows(self.items[:20])
        except _UNREADABLE:
            return f"<pre>{html.escape(repr(self))}</pre>"
        return listed_html(list(rows[0]) if rows else [], rows, len(self.items), "run")


def _read_together(runs: list[Run]) -> list[dict[str, Any]]:
    """The rows of some runs; only one that goes on is asked whether its job still lives."""
    if not runs:
        return []
    since = min(run._key for run in runs)
    seen = {row.key: row for row in runs[0]._store.runs(since=since, texts=False)}
    return [
        _as_row(seen[run._key]) if seen[run._key].ended_for_good else run.to_row() for run in runs
    ]


def _as_row(row: StoredRun) -> dict[str, Any]:
    told = {
        "status": str(row.status),
        "phase": str(row.phase),
        "workload": row.workload_name or row.workload_id[:12],
    }
    return {name: told.get(name) or getattr(row, name) for name in RUN_COLUMNS}
