"""What ``list`` methods return: iterable, with a length, ``.items`` and ``.to_frame()``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from nbtrain.errors import NotFound

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Listing", "Pages", "Unreadable", "readable", "row_of"]

_PAGE = 1000
_SHOWN = 20


T = TypeVar("T")


def row_of(item: Any) -> dict[str, Any]:
    """A record as one row of a table: what it says itself, else its fields."""
    return dict(item.to_row()) if hasattr(item, "to_row") else dataclasses.asdict(item)


def _line_of(item: Any) -> str:
    """A record in one line: a run's repr is its whole summary."""
    line = getattr(item, "_line", None)
    return line() if callable(line) else repr(item)


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """A registered thing that this version cannot read: its name and id are all there is of it."""

    kind: str
    id: str
    name: str | None
    why: str

    def to_row(self) -> dict[str, Any]:
        """One row of a table, in which its kind's other columns stay empty."""
        return {"name": self.name, f"{self.kind}_id": self.id, "note": self.note}

    @property
    def note(self) -> str:
        """What is wrong and what to do about it."""
        return f"unreadable: {self.why}; register it again"

    def __repr__(self) -> str:
        called = f"{self.name} " if self.name else ""
        return f"<{self.kind.capitalize()} {called}{self.id[:12]}: {self.note}>"


def readable(kind: str, ident: str, name: str | None, read: Callable[[], T]) -> T | Unreadable:
    """What ``read`` gives; where that fails, what stands for it in a list of the others."""
    try:
        return read()
    except (NotFound, AttributeError, KeyError, TypeError, ValueError) as error:
        other = "another version" in str(error)
        why = "written by another version" if other else "gone or damaged"
        return Unreadable(kind, ident, name, why)


class Listing(Generic[T]):
    """A finished list of records; ``items`` is the plain list.

    ``columns`` names columns that the frame has in any case, also that of an empty list.
    """

    def __init__(self, items: list[T], columns: Sequence[str] = ()) -> None:
        self.items = items
        self._columns = columns

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self.items[index]

    def to_frame(self) -> pd.DataFrame:
        """One row per record."""
        from nbtrain.client.frames import frame

        rows = [row_of(item) for item in self.items]
        return frame(rows, dict.fromkeys([*(n for row in rows for n in row), *self._columns]))

    def __repr__(self) -> str:
        shown = "\n".join(f"  {_line_of(item)}" for item in self.items[:_SHOWN])
        left = len(self.items) - _SHOWN
        more = f"\n  … {left} more" if left > 0 else ""
        return f"{len(self.items)} items\n{shown}{more}" if self.items else "0 items"

    def _repr_html_(self) -> str:
        from nbtrain.report.listed import listed_html

        rows = self._shown_rows(self.items[:_SHOWN])
        names = dict.fromkeys([*(name for row in rows for name in row), *self._columns])
        return listed_html(list(names), rows, len(self.items))

    def _shown_rows(self, items: list[T]) -> list[dict[str, Any]]:
        """The rows that a notebook shows."""
        return [row_of(item) for item in items]


class Pages(Generic[T]):
    """A long list read page by page while it is iterated; never held as a whole by itself.

    ``read(after, limit)`` returns up to ``limit`` records that come after the cursor ``after``
    and the cursor to go on from; an empty page ends the list. ``limit`` bounds the whole list.
    """

    def __init__(
        self,
        read: Callable[[int, int], tuple[list[T], int]],
        count: Callable[[], int],
        *,
        limit: int | None = None,
    ) -> None:
        self._read = read
        self._count = count
        self._limit = limit

    def __iter__(self) -> Iterator[T]:
        cursor, left = 0, math.inf if self._limit is None else self._limit
        while left > 0:
            page, cursor = self._read(cursor, int(min(_PAGE, left)))
            if not page:
                return
            yield from page
            left -= len(page)

    def __len__(self) -> int:
        found = self._count()
        return found if self._limit is None else max(0, min(found, self._limit))

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        """The record at a position, or a list of those of a slice; what lies before is read."""
        if isinstance(index, slice):
            start, stop, stride = index.indices(len(self))
            if stride < 0:
                return list(self)[index]
            return list(islice(self, start, stop, stride))
        at = index + len(self) if index < 0 else index
        for item in islice(self, at, at + 1) if at >= 0 else ():
            return item
        msg = f"there is no item {index}; there are {len(self):,}"
        raise IndexError(msg)

    @property
    def items(self) -> list[T]:
        """All records at once, as a list."""
        return list(self)

    def to_frame(self) -> pd.DataFrame:
        """One row per record, texts left out."""
        from nbtrain.client.frames import frame

        return frame([row_of(item) for item in self])

    def __repr__(self) -> str:
        return f"{len(self):,} items, read page by page"
