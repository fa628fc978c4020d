"""``client.datasets``: chat rows that descriptors name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nbtrain.client.dataset_analysis import DatasetAnalysis, RowPreview, loss_rules
from nbtrain.client.dataset_rows import DatasetRow, RowPage
from nbtrain.client.listing import Listing, Unreadable, readable
from nbtrain.client.parts import Part
from nbtrain.errors import Problem, Refused
from nbtrain.plan.fields import counted, describe, plain, span

if TYPE_CHECKING:
    from nbtrain.catalog import BaseModel
    from nbtrain.client.parts import Parts
    from nbtrain.data.datasets import Dataset

__all__ = ["DatasetItem", "Datasets"]

_MOST_ROWS = 100
Bounds = Mapping[str, tuple[Any, int, int | None]]


class DatasetItem:
    """A registered dataset. ``id`` is the SHA-256 of its examples.

    The name is an alias that may move on to another content; the object does not. It passes
    wherever a dataset is named.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.note: str | None = dataset.note
        """What happened when it was registered: that the name meant something else before."""
        self.id: str = dataset.dataset_id
        self.dataset_id: str = dataset.dataset_id
        self.name: str | None = dataset.name
        self.columns: tuple[str, ...] = dataset.columns
        """Keys that rows have besides ``messages``, sorted."""
        self.source: str = dataset.source
        """What it was registered from last."""
        self.facts: dict[str, tuple[int, int]] = dict(dataset.facts)
        """How many rows are of a kind, and the physical line of the first."""

    @property
    def rows(self) -> int:
        """Number of examples."""
        return self._dataset.rows

    @property
    def findings(self) -> list[Any]:
        """What was noted when it was registered, none of which refused it."""
        return self._dataset.findings

    def __len__(self) -> int:
        return self.rows

    def to_row(self) -> dict[str, Any]:
        """The dataset as one row of a table."""
        return {
            "name": self.name,
            "dataset_id": self.id,
            "rows": self.rows,
            "columns": ", ".join(self.columns),
            **{kind: self.facts.get(kind, (0, 0))[0] for kind in ("tools", "images")},
            "findings": len(self.findings),
            "source": self.source,
            "created_at": self._dataset.created_at,
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DatasetItem) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def _line(self) -> str:
        told = [f"{self.rows:,} rows"]
        told += self._dataset.told_facts
        if self.columns:
            told.append(f"columns {', '.join(self.columns)}")
        called = f"{self.name} " if self.name else ""
        return f"<Dataset {called}{self.id[:12]}: {', '.join(told)}>"

    def __repr__(self) -> str:
        lines = [self._line(), *([self.note] if self.note else [])]
        return "\n".join([*lines, *(f"  {finding}" for finding in self.findings)])


class Datasets(Part):
    """``client.datasets``. A dataset is named by an item, a name, an id or a prefix."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._same: tuple[str, Mapping[int, tuple[int, ...]]] = ("", {})

    def register(self, name: str, source: object) -> DatasetItem:
        """Keep the rows of ``source`` and let ``name`` mean them.

        ``source`` is the path of a JSONL file, a DataFrame, or a list of dicts; every row has
        ``messages``, and other columns as it likes. The same rows twice are one dataset. Raises
        :class:`Refused` with every finding that stops it, by physical line; then nothing is
        registered.
        """
        return DatasetItem(self._parts.datasets.register(name, source))

    def get(self, ref: object) -> DatasetItem:
        """The dataset that a name, an id or a prefix means.

        Raises :class:`NotFound`, and :class:`AmbiguousReference` for a prefix of several.
        """
        return DatasetItem(self._parts.registry.dataset(ref))

    def list(self) -> Listing[DatasetItem | Unreadable]:
        """Every dataset, newest first.

        One that cannot be read, as its files are damaged, stands there with a note.
        """
        ids = [row["dataset_id"] for row in self._parts.store.contents("dataset")]
        names = {id_: name for name, id_ in reversed(self._parts.store.aliases("dataset").items())}
        columns = ("name", "dataset_id", "rows", "columns")
        return Listing(
            [readable("dataset", id_, names.get(id_), partial(self.get, id_)) for id_ in ids],
            columns,
        )

    def rows(
        self,
        ref: object,
        offset: int = 0,
        limit: int = 25,
        *,
        search: str | None = None,
        model: object = None,
        loss: object = None,
    ) -> RowPage:
        """A page of rows from position ``offset`` on, at most 100 of them.

        ``search`` narrows to rows in which these words follow one another in one message,
        whatever the case, and ``offset`` then skips so many of those. With a base ``model`` each
        row has its tokens, and the text that trains under ``loss`` is marked. Raises
        :class:`Refused` for numbers out of bounds, and for a ``loss`` that is none or stands
        without a model.
        """
        dataset = self.get(ref)._dataset
        problems = _page_problems(offset, limit, search)
        problems += _loss_problems(loss, dataset, model)
        if problems:
            raise Refused(problems)
        if search is None:
            places = list(range(offset, min(offset + limit, dataset.rows)))
            found = dict(zip(places, dataset.page(offset, limit), strict=True))
        else:
            places = dataset.search(search, offset, limit)
            found = {place: dataset.page(place, 1)[0] for place in places}
        same = self._duplicates(dataset)
        seen = {} if model is None else self._seen(dataset, places, model, loss)
        rows = [
            DatasetRow(
                place,
                dataset.line_of(place),
                row,
                tuple(other for other in same.get(place, ()) if other != place),
                **seen.get(place, {}),
            )
            for place, row in found.items()
        ]
        return RowPage(rows, _title(dataset, rows, search))

    def _duplicates(self, dataset: Dataset) -> Mapping[int, tuple[int, ...]]:
        """Kept for the dataset that was paged last: finding them reads every row."""
        if self._same[0] != dataset.dataset_id:
            self._same = dataset.dataset_id, dataset.duplicates
        return self._same[1]

    def _seen(
        self, dataset: Dataset, places: Sequence[int], model: object, loss: object
    ) -> dict[int, dict[str, Any]]:
        """What a model reads of these rows; the side process is asked once where they adjoin."""
        rules, side = loss_rules(loss, dataset.columns), self._parts.side
        base = self._base_model(model)
        if places and places[-1] - places[0] == len(places) - 1:
            told = side.rows(dataset, base, rules, places[0], len(places))
        else:
            told = [row for place in places for row in side.rows(dataset, base, rules, place, 1)]
        return {
            row["row"]: {
                "tokens": row["tokens"],
                "trained_tokens": row["trained"],
                "marked": row["text"],
                "refused": "; ".join(row["refused"]) or None,
            }
            for row in told
        }

    def analyze(
        self,
        ref: object,
        model: object,
        *,
        max_length: int = 2048,
        loss: object = None,
        told: Callable[[int], None] | None = None,
    ) -> DatasetAnalysis:
        """Lengths in tokens under a base model's own template, and rows that cannot be trained on.

        ``max_length`` is what rows are compared with; ``loss`` is a mapping of a descriptor's
        ``loss`` group (``{"assistantTurns": "all"}``), by default its defaults. ``told`` is called
        with the number of rows done. It reads every row: minutes for 100,000. Raises
        :class:`Refused` for what is no loss or length.
        """
        _check_numbers({"max_length": (max_length, 1, None)})
        dataset, base = self.get(ref)._dataset, self._base_model(model)
        rules = loss_rules(loss, dataset.columns)
        found = self._parts.side.analyze(dataset, base, rules, max_length, told)
        return DatasetAnalysis(found, dataset.name or dataset.dataset_id[:12], base.slug)

    def preview(
        self, ref: object, row: int = 0, model: object = None, *, loss: object = None
    ) -> RowPreview:
        """One row, counted from 0, as a base model reads it, with what trains coloured.

        Raises :class:`Refused` naming the line of a row that cannot be trained on, for a row that
        there is not, and for a ``loss`` that is none.
        """
        if model is None:
            message = "model is missing: the base model by whose template the row is read"
            raise Refused([Problem("model", message)])
        dataset, base = self.get(ref)._dataset, self._base_model(model)
        rules = loss_rules(loss, dataset.columns)
        _check_numbers({"row": (row, 0, dataset.rows - 1)})
        return RowPreview(**self._parts.side.preview(dataset, base, rules, row))

    def _base_model(self, model: object) -> BaseModel:
        return self._parts.registry.base_model(model)

    def name(self, name: str, ref: object) -> DatasetItem:
        """Let ``name`` mean this dataset from now on; runs keep what they were started on.

        Raises :class:`NotFound`, and :class:`Refused` for what cannot be a name.
        """
        return DatasetItem(self._parts.datasets.move(name, self.get(ref)._dataset))


def _page_problems(offset: object, limit: object, search: object) -> list[Problem]:
    problems = _number_problems({"offset": (offset, 0, None), "limit": (limit, 1, _MOST_ROWS)})
    if search is not None and not (isinstance(search, str) and search.strip()):
        message = f"search is {describe(search)}"
        problems.append(Problem("search", message, plain(search), "a word, or several"))
    return problems


def _loss_problems(loss: object, dataset: Dataset, model: object) -> list[Problem]:
    """What is wrong with a stated loss; without a model nothing can be marked under it."""
    if loss is None:
        return []
    try:
        loss_rules(loss, dataset.columns)
    except Refused as refused:
        return list(refused.problems)
    if model is not None:
        return []
    message = "loss tells what trains of a row as a model reads it, and no model is stated"
    return [Problem("loss", message, hint="State a base model as model, or leave loss out")]


def _check_numbers(bounds: Bounds) -> None:
    problems = _number_problems(bounds)
    if problems:
        raise Refused(problems)


def _number_problems(bounds: Bounds) -> list[Problem]:
    """What is no whole number within its bounds: by name the value, the least and the most."""
    problems = []
    for name, (value, low, high) in bounds.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not low <= value <= (value if high is None else high):
            message = f"{name} is {describe(value)}"
            problems.append(Problem(name, message, plain(value), span(low, high)))
    return problems


def _title(dataset: Dataset, rows: list[DatasetRow], search: str | None) -> str:
    name = dataset.name or dataset.dataset_id[:12]
    if search is not None:
        return f"{counted(len(rows), 'row')} of {name} with {search!r}"
    if not rows:
        return f"no rows of {name} there; it has {dataset.rows:,}"
    return f"rows {rows[0].index:,} to {rows[-1].index:,} of {dataset.rows:,} of {name}"
