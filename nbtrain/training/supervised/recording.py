"""Where a supervised run's results go."""

from __future__ import annotations

from typing import Any

from nbtrain.rollout.ledger import Changes
from nbtrain.training.record import StoreRecorder, insist
from nbtrain.training.supervised.trainer import UpdateDone

__all__ = ["SupervisedRecorder", "step_row"]


def step_row(done: UpdateDone, between: dict[str, float]) -> dict[str, Any]:
    """An update as a step's row. ``between`` are the seconds of saving and validation before."""
    return {
        "step": done.step,
        "loss": done.loss,
        "learning_rate": done.learning_rate,
        "update_applied": True,
        "metrics": {
            "policy_version": done.step - 1,
            "grad_norm": done.grad_norm,
            "epoch": done.epoch,
            "trained_tokens": done.trained_tokens,
            "tokens": done.tokens,
            "sequences": done.sequences,
            "row_ids": done.rows,
            "seconds_loss": done.seconds,
            **{f"seconds_{part}": seconds for part, seconds in between.items()},
        },
    }


class SupervisedRecorder(StoreRecorder):
    """Commits steps, validation rounds and checkpoints; the best has the lowest loss."""

    def update(self, done: UpdateDone, between: dict[str, float]) -> None:
        """Commit an update."""
        self.step(step_row(done, between), [], [], Changes())

    def validation(
        self, row: dict[str, Any], trajectories: list[dict[str, Any]] | None = None
    ) -> None:
        """Commit a validation round; it has no trajectories."""
        insist(lambda: self._writer.commit_validation(row, trajectories or []))
        if row["round_completed"]:
            # No reading per row is recorded: only equal losses tie
            self._held_out[row["step"]] = -row["loss"], {}
