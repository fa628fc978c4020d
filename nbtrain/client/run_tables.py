"""The tables of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.client import readings, tables
from nbtrain.client.whole import whole_numbers
from nbtrain.errors import NotFound

if TYPE_CHECKING:
    import pandas as pd

    from nbtrain.client.picking import CheckpointListing
    from nbtrain.jobs.liveness import Liveness
    from nbtrain.store import Row, Store, StoredRun

__all__ = ["RunTables"]


class RunTables(ABC):
    """What a run recorded, as frames: plain pandas that never change by themselves.

    Which columns ``metrics`` and ``validation`` have depends on the method: a supervised run has
    losses, another rewards. What a method has nothing of is refused with a sentence.
    """

    _store: Store
    _key: int
    _method: str
    id: str

    @property
    @abstractmethod
    def title(self) -> str:
        """Name and short id, for sentences."""

    @property
    @abstractmethod
    def folder(self) -> Path:
        """The run's folder."""

    @abstractmethod
    def _look(self) -> tuple[StoredRun, Liveness]:
        """The run's row and whether its job lives."""

    def _row(self) -> StoredRun:
        return self._look()[0]

    @property
    def _supervised(self) -> bool:
        return self._method == readings.SFT

    def _rows(self, what: str, **how: Any) -> list[Row]:
        """Rows of the run by the store's word for them, after a look at the run."""
        self._row()
        rows: list[Row] = getattr(self._store, what)(self._key, **how)
        return rows

    def _sampled(self, what: str) -> None:
        """Refuse what only a run that samples has."""
        if self._supervised:
            msg = (
                f"{self.title} has no {what}: it is supervised and samples nothing. Its tables "
                "are run.losses, run.metrics, run.validation and run.checkpoints"
            )
            raise NotFound(msg)

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per step with every recorded figure.

        The step's ledger comes first: ``completed_groups`` = used + ``no_signal_not_trained`` +
        filtered + too small + discarded + pending, and ``attempted_trajectories`` = correct +
        partial + incorrect + error + incomplete. A row may change until ``settled``. Of a
        supervised run: losses, rate, gradient norm, epoch, tokens, rows and seconds by part.
        """
        rows = self._rows("steps")
        return readings.metrics(rows) if self._supervised else tables.metrics(rows)

    @property
    def losses(self) -> pd.DataFrame:
        """``step, loss, learning_rate, grad_norm, epoch, trained_tokens, seconds`` of each step.

        The loss of a supervised run is the mean over its trained tokens; that of a reinforcement
        run says little by itself (it is 0 where every ratio is 1), and its ``epoch`` and
        ``trained_tokens`` are empty. ``seconds`` are those of all parts together.
        """
        return readings.losses(self._rows("steps"))

    @property
    def rewards(self) -> pd.DataFrame:
        """``step, avg_reward, used_reward``: means over all graded and over used trajectories."""
        self._sampled("rewards")
        return tables.rewards(self._rows("rewards"))

    @property
    def groups(self) -> pd.DataFrame:
        """One row per step: where its groups went, and whether the update was applied."""
        self._sampled("groups")
        return tables.groups(self._rows("steps", columns=tables.GROUP_COLUMNS))

    def sampled_groups(self, step: int | None = None) -> pd.DataFrame:
        """One row per group, the newest 20,000 or all that completed in ``step``.

        ``outcome`` is its place in the ledger and ``reason`` why; ``budget`` is its limit of
        output tokens where tasks are sampled under several (density-aware training).
        ``attrs["left_off"]`` counts the others. Raises :class:`~nbtrain.errors.Refused` for a
        step that is no whole number from 0 on.
        """
        self._sampled("groups")
        (step,) = whole_numbers(step=step)
        limit = tables.NEWEST if step is None else None
        rows = self._rows("groups", step=step, limit=limit, newest=step is None)
        total = self._store.group_count(self._key) if len(rows) == limit else len(rows)
        return tables.sampled_groups(rows, left_off=total - len(rows))

    @property
    def validation(self) -> pd.DataFrame:
        """One row per validation round; compare only those with ``round_completed``.

        ``low`` and ``high`` are the 95 % interval of a complete round's reward, by bootstrap over
        its tasks; empty with fewer than two. Two rounds of a run saw the same tasks, so that they
        may differ for sure though their intervals overlap: ``run.checkpoints`` says what ties.
        Of a supervised run: ``loss`` (the mean over trained tokens) and its ``perplexity``,
        ``trained_tokens``, and the rows read as ``completed_samples`` and ``expected_samples``;
        no interval, since its rounds keep no reading per row.
        """
        rows = self._rows("validation_rounds")
        if self._supervised:
            return readings.validation(rows)
        return tables.validation(rows, self._store)

    @property
    def checks(self) -> pd.DataFrame:
        """One row per start check: ``name, measured, unit, warn, refuse, verdict, said``.

        ``warn`` and ``refuse`` are the limits from which it warned or refused; empty before they
        were made, and in a run that makes none.
        """
        return readings.checks(self._row().checks)

    @property
    def trajectories(self) -> pd.DataFrame:
        """The newest 20,000 trajectories without texts; ``attrs["left_off"]`` counts the others.

        ``reason`` is how the trajectory ended, ``reward`` what it was graded, ``verdict`` why it
        was or was not trained on; ``used_reward``, ``advantage`` and ``consumed_step`` are empty
        where it was not. ``policy_version`` is that of its first sampled token. A row may change
        until its ``step`` is settled.
        """
        self._sampled("trajectories")
        self._row()
        rows = self._store.trajectories(self._key, limit=tables.NEWEST, newest=True)
        total = self._store.trajectory_count(self._key)
        return tables.trajectories(rows, self.id, left_off=max(0, total - len(rows)))

    def texts(
        self, step: int | None = None, split: str = "train", limit: int | None = 100
    ) -> pd.DataFrame:
        """What the model was asked and wrote, and what it got: one row per trajectory of a step.

        ``step`` is the newest that has trajectories unless stated, ``split`` ``train`` or
        ``held_out``; at most ``limit`` rows (``None``: all), ``attrs["left_off"]`` counts the
        others. ``prompt`` is the last message of the task's prompt, ``completion`` what followed,
        with roles where it took several turns, ``terms`` each reward term's unweighted score;
        ``verdict`` also names the step that trained on it.
        Raises ``ValueError`` for another split, and for a step or a limit that is no whole number
        from 0 on.
        """
        self._sampled("texts")
        step, limit = whole_numbers(step=step, limit=limit)
        self._row()
        find = self._store.trajectories
        if step is None:
            newest = find(self._key, split=split, limit=1, newest=True, columns=("step",))
            step = newest[0]["step"] if newest else 0
        rows = find(self._key, step=step, split=split)
        shown = rows[:limit]
        found = self._store.texts([row["id"] for row in shown])
        return tables.texts(shown, found, self.id, left_off=len(rows) - len(shown))

    @property
    def checkpoints(self) -> pd.DataFrame:
        """One row per committed checkpoint with its held-out reward or validation loss.

        ``low`` and ``high`` are the reward's 95 % interval; ``tie`` is the step of the checkpoint
        with the highest reward, where the paired difference to it may be nothing.
        """
        score = "validation_loss" if self._supervised else "held_out_reward"
        return tables.checkpoints(self.checkpoint_list().items, score)

    @property
    def events(self) -> pd.DataFrame:
        """One row per phase the run entered: ``at, attempt, phase, message``."""
        return tables.events(self._rows("phases"))

    @property
    def log(self) -> str:
        """The ends of the job's logs, one after the other: at most 64 KiB of each file.

        A line before each names the file and says how much of it is left off. A notebook shows
        it line by line, without progress bars.
        """
        from nbtrain.client.logs import read_logs

        return read_logs(self.folder / "logs")

    def checkpoint_list(self) -> CheckpointListing:
        """The committed checkpoints as objects, by step, shown with their ranks."""
        from nbtrain.client.picking import CheckpointListing

        rows = self._rows("validation_rounds")
        saved = self._store.checkpoints(self._key)
        rounds = tables.held_out_points(rows, self._store, {row.step for row in saved})
        return CheckpointListing(tables.checkpoint_records(saved, rounds, self._store))
