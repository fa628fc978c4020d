"""The tables of a supervised run: its losses and its validation; start checks of any run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbtrain.client.frames import frame
from nbtrain.report.verdict import sentences

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CHECK_COLUMNS", "LOSS_COLUMNS", "SFT", "VALIDATION_COLUMNS", "SmokeVerdict"]

SFT = "sft"
"""The method of a supervised run."""

LOSS_COLUMNS = (
    *("step", "loss", "learning_rate", "grad_norm", "epoch", "trained_tokens", "seconds"),
)
VALIDATION_COLUMNS = (
    *("step", "loss", "perplexity", "trained_tokens", "round_completed", "completed_samples"),
    *("expected_samples", "seconds", "created_at"),
)
CHECK_COLUMNS = ("name", "measured", "unit", "warn", "refuse", "verdict", "said")
_STEP_COLUMNS = (
    *("step", "created_at", "loss", "learning_rate", "update_applied", "skip_reason", "attempt"),
)


def metrics(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per step, every recorded figure a column."""
    flat = [
        {**(row.get("metrics") or {}), **{n: row.get(n) for n in _STEP_COLUMNS}} for row in rows
    ]
    names = dict.fromkeys(_STEP_COLUMNS)
    for row in flat:
        names.update(dict.fromkeys(row))
    return frame(flat, names)


def losses(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """``step, loss, learning_rate, grad_norm, epoch, trained_tokens, seconds``, a row per step."""
    told = []
    for row in rows:
        found = row.get("metrics") or {}
        spent = [v for name, v in found.items() if name.startswith("seconds_") and v is not None]
        told.append({**found, **row, "seconds": sum(spent) if spent else None})
    table = frame(told, LOSS_COLUMNS)
    for name in ("epoch", "trained_tokens"):
        if table[name].dtype == object:
            table[name] = table[name].astype("float64")
    return table


def validation(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per validation round of a supervised run."""
    return frame(list(rows), VALIDATION_COLUMNS)


def checks(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per start check, in the order in which they were made; it shows whole sentences."""
    from nbtrain.client.wide import WideFrame

    return WideFrame(frame(list(rows), CHECK_COLUMNS))


class SmokeVerdict(dict[str, Any]):
    """What a smoke check found, a mapping as the job wrote it; it shows itself in sentences."""

    @property
    def passed(self) -> bool:
        """Whether the slice was learned by heart as a working run does."""
        return bool(self.get("passed"))

    def __repr__(self) -> str:
        return "\n".join(sentences(self))
