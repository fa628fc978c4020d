"""The tables of an export: their columns, and their rows in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbtrain.client import tables
from nbtrain.client.column_meanings import meaning_of
from nbtrain.client.resolved import ResolvedView
from nbtrain.client.resolved_descriptor import DescriptorView
from nbtrain.report.writers import Column, kind_of
from nbtrain.store import trajectory_ref

if TYPE_CHECKING:
    import pandas as pd

    from nbtrain.client.run import Run

__all__ = ["TABLES", "Exported", "tables_of"]

_PIECE = 1_000  # trajectories with their texts, or groups, that are held at a time
_TIMES = frozenset(("created_at", "at"))
_INTEGERS = frozenset((
    *("step", "group_id", "sample", "turns", "prompt_tokens", "output_tokens", "policy_version"),
    *("consumed_step", "attempt", "task_index", "epoch", "budget", "size"),
))  # fmt: skip
_NUMBERS = frozenset(("reward", "used_reward", "advantage", "seconds", "reward_mean", "reward_std"))

TABLES = {
    "metrics": "every recorded figure, a row for each step",
    "rewards": "the mean reward of each step",
    "losses": "the loss of each step",
    "groups": "where the groups of each step went",
    "sampled_groups": "every group",
    "validation": "every validation round",
    "trajectories": "every trajectory with its texts",
    "checkpoints": "every committed checkpoint",
    "events": "every phase that the run entered",
    "checks": "what the start checks measured",
    "plan": "the resolved plan, a row for each value",
}
"""What each table holds."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A table: its name, its columns and its rows in pieces, which can be read once."""

    name: str
    columns: list[Column]
    pieces: Iterable[Sequence[Mapping[str, Any]]]

    @property
    def holds(self) -> str:
        """What the table holds."""
        return TABLES[self.name]


def tables_of(run: Run) -> Iterator[Exported]:
    """Every table that a run of its method has, one after the other."""
    yield _framed("metrics", run.metrics)
    if run.method == "sft":
        yield _framed("losses", run.losses)
    else:
        yield _framed("rewards", run.rewards)
        yield _framed("groups", run.groups)
        yield Exported("sampled_groups", _columns(tables.SAMPLED_GROUP_COLUMNS), _groups(run))
    yield _framed("validation", run.validation)
    if run.method != "sft":
        names = (*tables.TRAJECTORY_COLUMNS, "prompt", "completion", "terms", "traceback")
        yield Exported("trajectories", _columns(names), _trajectories(run))
    yield _framed("checkpoints", run.checkpoints)
    yield _framed("events", run.events)
    yield _framed("checks", run.checks)
    plan = run.plan
    view = DescriptorView if plan.method == "sft" or plan.config is not None else ResolvedView
    table = view(plan).to_frame()
    # One column for numbers, texts and lists: each as JSON, so that it reads back as what it was
    table["value"] = [json.dumps(value, ensure_ascii=False) for value in table["value"]]
    yield _framed("plan", table)


def _columns(names: Iterable[str]) -> list[Column]:
    return [Column(name, _stated_kind(name), meaning_of(name)) for name in names]


def _stated_kind(name: str) -> Any:
    if name in _INTEGERS:
        return "integer"
    if name in _NUMBERS:
        return "number"
    return "json" if name == "terms" else "text"


def _framed(name: str, table: pd.DataFrame) -> Exported:
    """A table that a run's frame holds as a whole."""
    rows = [dict(zip(table.columns, values, strict=True)) for values in _records(table)]
    columns = [
        Column(
            each,
            "time" if each in _TIMES else kind_of(row[each] for row in rows),
            meaning_of(each),
        )
        for each in map(str, table.columns)
    ]
    return Exported(name, columns, [rows])


def _records(table: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    """The rows as plain Python values: ``None`` for nothing, times as seconds since 1970."""
    import pandas as pd
    from pandas.api.types import is_datetime64_any_dtype

    columns = []
    for name in table.columns:
        series = table[name]
        if is_datetime64_any_dtype(series):
            columns.append([None if v is pd.NaT else v.timestamp() for v in series])
        else:
            values = series.tolist()
            columns.append([None if v is pd.NA or v is pd.NaT or v != v else v for v in values])
    return zip(*columns, strict=True)


def _groups(run: Run) -> Iterator[Sequence[Mapping[str, Any]]]:
    after = 0
    while rows := run._store.groups(run._key, after, _PIECE):
        after = rows[-1]["id"]
        yield rows


def _trajectories(run: Run) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Every trajectory with its texts, a piece at a time, each read in transactions of its own."""
    after = 0
    while rows := run._store.trajectories(run._key, after, limit=_PIECE):
        after = rows[-1]["id"]
        texts = run._store.texts(row["id"] for row in rows)
        for row in rows:
            found = texts.get(row["id"], {})
            row["trajectory_id"] = trajectory_ref(run.id, row)
            row["prompt"] = _as_text(found.get("prompt"))
            row["completion"] = _as_text(found.get("completion"))
            row["terms"] = found.get("terms")
            row["traceback"] = found.get("error")
        yield rows


def _as_text(text: Any) -> str | None:
    """A text as it is; chat messages as JSON."""
    if text is None or isinstance(text, str):
        return text
    return json.dumps(text, ensure_ascii=False)
