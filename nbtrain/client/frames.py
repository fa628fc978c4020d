"""DataFrames from rows: missing numbers are NaN, times are UTC timestamps, columns keep order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["frame"]

# Numbers that may be missing. Stated once, so that a column that happens to hold only None is
# still a float column and plots, sorts and compares like its full self.
_FLOATS = frozenset(
    (
        "avg_reward",
        "used_reward",
        "loss",
        "learning_rate",
        "held_out_reward",
        "low",
        "high",
        "reward",
        "advantage",
        "reward_mean",
        "reward_std",
        "seconds",
        "grad_norm",
        "validation_loss",
        "perplexity",
        "measured",
        "warn",
        "refuse",
    )
)
_COUNTS = frozenset(("tie",))  # whole numbers that may be missing
_HALVES = re.compile("[\ud800-\udfff]")
_TIMES = frozenset(("created_at", "started_at", "ended_at", "at"))


def frame(
    rows: Sequence[Mapping[str, Any]],
    columns: Iterable[str] | None = None,
    *,
    left_off: int = 0,
) -> pd.DataFrame:
    """A frame with one row per mapping; ``columns`` fixes names and order, also of an empty one.

    ``left_off`` is how many rows exist that the frame does not hold; it lands in
    ``attrs["left_off"]``. Half a character, which a model or a log may leave in a text and
    pandas cannot hold, is shown as U+FFFD.
    """
    import pandas as pd

    names = list(columns) if columns is not None else _names(rows)
    shown = {_whole(name): _column(name, rows) for name in names}
    table = pd.DataFrame(shown, columns=pd.Index(list(shown)))
    table.attrs["left_off"] = left_off
    return table


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return list(names)


def _column(name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    import pandas as pd

    values = [row.get(name) for row in rows]
    if name in _FLOATS:
        return pd.Series(values, dtype="float64")
    if name in _COUNTS:
        return pd.Series(values, dtype="Int64")
    if name in _TIMES:
        times = pd.to_datetime(pd.Series(values, dtype="float64"), unit="s", utc=True)
        return times.dt.as_unit("ms")
    try:
        return pd.Series(values, dtype=None if values else "object")
    except UnicodeEncodeError:
        return pd.Series([_whole(v) if isinstance(v, str) else v for v in values])


def _whole(text: str) -> str:
    return _HALVES.sub("\N{REPLACEMENT CHARACTER}", text)
