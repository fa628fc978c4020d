"""What a model reads of a dataset: lengths, what is trained, and one row to look at."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbtrain.errors import Problem, Refused
from nbtrain.plan.fields import check, describe, plain

if TYPE_CHECKING:
    import pandas as pd

    from nbtrain.data.analysis import Analysis
    from nbtrain.data.masks import LossRules

__all__ = ["DatasetAnalysis", "RowPreview", "loss_rules"]

_FIGURES = ("median", "p90", "p99", "max", "total")
_CELL = "text-align:right;padding:1px 10px 1px 0"
_FIELDS = {
    "assistantTurns": "assistant_turns",
    "trainOnToolCalls": "tool_calls",
    "trainOnToolResults": "tool_results",
    "explicitLossMaskColumn": "mask_column",
}


def loss_rules(loss: object, columns: Collection[str]) -> LossRules:
    """The rules of a mapping such as a descriptor's ``loss`` group; ``None`` is its defaults.

    Names are the descriptor's, or those of the flat form. Raises :class:`Refused` with every
    problem, a mask column that is none of the dataset's ``columns`` among them.
    """
    from nbtrain.data.masks import LossRules
    from nbtrain.plan.descriptor.table import FIELDS

    if loss is None:
        return LossRules()
    if isinstance(loss, LossRules):
        _check_mask(loss.mask_column, columns)
        return loss
    if not isinstance(loss, Mapping):
        message = f"loss needs a mapping, found {describe(loss)}"
        raise Refused([Problem("loss", message, plain(loss), ", ".join(_FIELDS))])
    known = {name: FIELDS[f"config.loss.{name}"] for name in _FIELDS}
    known |= {field.setting: field for field in known.values() if field.setting}
    problems, values = [], {}
    for name, value in loss.items():
        field = known.get(str(name))
        if field is None:
            told = f"loss has no field {name}"
            problems.append(Problem(f"loss.{name}", told, plain(value), ", ".join(_FIELDS)))
            continue
        if _FIELDS[field.key] in values:
            told = f"loss states {field.key} and {field.setting}, which are one field"
            problems.append(Problem(f"loss.{field.key}", told, plain(value), "one of them"))
            continue
        values[_FIELDS[field.key]], problem = check(field.option, value)
        problems += [problem] if problem else []
    if problems:
        raise Refused(problems)
    rules = LossRules(**values)
    _check_mask(rules.mask_column, columns)
    return rules


def _check_mask(column: str | None, columns: Collection[str]) -> None:
    if column is None or column in columns:
        return
    message = f"loss.explicitLossMaskColumn: the dataset has no column {column!r}"
    allowed = ", ".join(columns) or "none: its rows have messages alone"
    raise Refused([Problem("loss.explicitLossMaskColumn", message, column, allowed)])


@dataclass(frozen=True)
class RowPreview:
    """One row as a model reads it. ``row`` counts from 0, ``line`` is its physical line.

    ``text`` has what is trained between ``[[`` and ``]]``; a notebook shows it coloured.
    """

    row: int
    line: int
    tokens: int
    trained: int
    text: str
    html: str

    def __repr__(self) -> str:
        return (
            f"row {self.row:,} (line {self.line:,}): {self.tokens:,} tokens, {self.trained:,} "
            f"trained\n{self.text}"
        )

    def _repr_html_(self) -> str:
        head = f"row {self.row:,} (line {self.line:,})"
        return f'<div style="font-family:sans-serif;font-size:13px">{head}</div>{self.html}'


class DatasetAnalysis:
    """A dataset under one model's template; its attributes are the analysis's.

    ``rows``, ``refused``, ``tokens`` and ``trained`` (each with ``median``, ``p90``, ``p99``,
    ``max`` and ``total``), ``max_length``, ``over``, ``over_lines``, ``findings``, and the digests
    ``tokenizer`` and ``template``.
    """

    def __init__(self, analysis: Analysis, dataset: str, model: str) -> None:
        self._analysis = analysis
        self.dataset = dataset
        self.model = model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._analysis, name)

    def to_frame(self) -> pd.DataFrame:
        """Tokens and trained tokens of a row: ``figure, median, p90, p99, max, total``."""
        from nbtrain.client.frames import frame

        return frame(self._figures(), ("figure", *_FIGURES))

    def _figures(self) -> list[dict[str, Any]]:
        found = (("tokens", self._analysis.tokens), ("trained tokens", self._analysis.trained))
        return [
            {"figure": name, **{figure: getattr(lengths, figure) for figure in _FIGURES}}
            for name, lengths in found
        ]

    def _title(self) -> str:
        return f"{self.dataset} under {self.model}"

    def __repr__(self) -> str:
        return f"{self._title()}: {self._analysis}"

    def _repr_html_(self) -> str:
        first, *rest = str(self._analysis).split("\n")
        told = [line for line in rest if ": median" not in line]
        head = "".join(f'<th style="{_CELL}">{name}</th>' for name in ("", *_FIGURES))
        body = "".join(
            f'<tr><td style="{_CELL}">{row["figure"]}</td>'
            + "".join(f'<td style="{_CELL}">{row[name]:,}</td>' for name in _FIGURES)
            + "</tr>"
            for row in self._figures()
        )
        return (
            '<div style="font-family:sans-serif;font-size:13px">'
            f"<div>{html.escape(f'{self._title()}: {first}')}</div>"
            '<table style="border-collapse:collapse;font-size:inherit;color:inherit">'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            + "".join(f"<div>{html.escape(line)}</div>" for line in told)
            + "</div>"
        )
