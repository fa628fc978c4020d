"""Earlier runs of a recipe: how far each came, and what its validation read last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtrain.client.listing import Listing
from nbtrain.client.run import Run

if TYPE_CHECKING:
    import pandas as pd

    from nbtrain.client.client import Client
    from nbtrain.client.resolved import ResolvedView

__all__ = ["EarlierRuns", "trained_before"]

_COLUMNS = (
    *("run_id", "name", "status", "completed_steps", "total_steps", "validation_step"),
    *("validation_loss", "perplexity", "held_out_reward", "created_at"),
)


class EarlierRuns(Listing[Run]):
    """Runs of one recipe, newest first; as a frame with their last complete validation round.

    A supervised run reads a loss with its perplexity, any other a held-out reward; both are
    missing where nothing was validated.
    """

    def __init__(self, runs: list[Run]) -> None:
        super().__init__(runs, _COLUMNS)

    def to_frame(self) -> pd.DataFrame:
        """One row per run, as it is now."""
        from nbtrain.client.frames import frame

        return frame([_row(run) for run in self.items], _COLUMNS)

    def __repr__(self) -> str:
        if not self.items:
            return "no earlier run of this recipe"
        count = len(self.items)
        lines = [f"{count} earlier run{'s' if count > 1 else ''} of this recipe"]
        lines += [f"  {_told(_row(run))}" for run in self.items[:20]]
        return "\n".join([*lines, f"  … {count - 20} more"] if count > 20 else lines)


def trained_before(client: Client, view: ResolvedView) -> EarlierRuns:
    """Runs of the recipe of a plan that is not started yet, newest first."""
    store = client._parts.store
    rows = store.runs(config_hash=view.config_hash, texts=False)
    return EarlierRuns([Run(store, row) for row in rows])


def _row(run: Run) -> dict[str, Any]:
    rounds = [each for each in run._rows("validation_rounds") if each["round_completed"]]
    last = max(rounds, key=lambda each: each["step"], default={})
    return {
        **{name: value for name, value in run.to_row().items() if name in _COLUMNS},
        "validation_step": last.get("step"),
        "validation_loss": last.get("loss"),
        "perplexity": last.get("perplexity"),
        "held_out_reward": last.get("held_out_reward"),
    }


def _told(row: dict[str, Any]) -> str:
    name = row["name"] or "(no name)"
    text = (
        f"{name} {row['run_id'][:12]}: {row['status']}, step {row['completed_steps']:,} of "
        f"{row['total_steps']:,}"
    )
    if row["validation_loss"] is not None:
        text += f", validation loss {row['validation_loss']:.4g}"
        if row["perplexity"] is not None:
            text += f" (perplexity {row['perplexity']:.4g})"
        return f"{text} at step {row['validation_step']:,}"
    if row["held_out_reward"] is not None:
        text += f", held-out reward {row['held_out_reward']:.3f} at step {row['validation_step']:,}"
    return text
