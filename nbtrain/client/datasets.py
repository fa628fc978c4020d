"""``client.datasets``: chat rows that descriptors name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtrain.client.listing import Listing

if TYPE_CHECKING:
    from nbtrain.client.parts import Parts
    from nbtrain.data.datasets import Dataset

__all__ = ["DatasetItem", "Datasets"]

_MOST_ROWS = 100


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
        told += [f"{count:,} {kind}" for kind, (count, _) in self.facts.items()]
        if self.columns:
            told.append(f"columns {', '.join(self.columns)}")
        return f"<Dataset {self.name or ''} {self.id[:12]}: {', '.join(told)}>"

    def __repr__(self) -> str:
        lines = [self._line(), *([self.note] if self.note else [])]
        return "\n".join([*lines, *(f"  {finding}" for finding in self.findings)])


class Datasets:
    """``client.datasets``. A dataset is named by an item, a name, an id or a prefix."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

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

    def list(self) -> Listing[DatasetItem]:
        """Every dataset, newest first."""
        columns = ("name", "dataset_id", "rows", "columns")
        return Listing([DatasetItem(found) for found in self._parts.datasets.list()], columns)

    def name(self, name: str, ref: object) -> DatasetItem:
        """Let ``name`` mean this dataset from now on; runs keep what they were started on.

        Raises :class:`NotFound`, and :class:`Refused` for what cannot be a name.
        """
        return DatasetItem(self._parts.datasets.move(name, self.get(ref)._dataset))
