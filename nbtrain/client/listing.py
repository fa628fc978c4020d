"""What ``list`` methods return: iterable, with a length, ``.items`` and ``.to_frame()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import pandas as pd

_PAGE = 1000


class Record(Protocol):
    """Something a listing holds: it can tell itself as one row of a table."""

    def to_row(self) -> Mapping[str, Any]:
        """The record by column."""
        ...


T = TypeVar("T", bound=Record)


class Listing(Generic[T]):
    """A finished list of records; ``items`` is the plain list."""

    def __init__(self, items: list[T]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> T:
        return self.items[index]

    def to_frame(self) -> pd.DataFrame:
        """One row per record."""
        from nbtrain.client.frames import frame

        return frame([dict(item.to_row()) for item in self.items])

    def __repr__(self) -> str:
        shown = "\n".join(f"  {item!r}" for item in self.items[:20])
        more = f"\n  … {len(self.items) - 20} more" if len(self.items) > 20 else ""
        return f"{len(self.items)} items\n{shown}{more}" if self.items else "0 items"


class Pages(Generic[T]):
    """A long list read page by page while it is iterated; never held as a whole by itself.

    ``read(after, limit)`` returns up to ``limit`` records that come after the cursor ``after``
    and the cursor to go on from; an empty page ends the list.
    """

    def __init__(
        self, read: Callable[[int, int], tuple[list[T], int]], count: Callable[[], int]
    ) -> None:
        self._read = read
        self._count = count

    def __iter__(self) -> Iterator[T]:
        cursor = 0
        while True:
            page, cursor = self._read(cursor, _PAGE)
            if not page:
                return
            yield from page

    def __len__(self) -> int:
        return self._count()

    @property
    def items(self) -> list[T]:
        """All records at once, as a list."""
        return list(self)

    def to_frame(self) -> pd.DataFrame:
        """One row per record, texts left out."""
        from nbtrain.client.frames import frame

        return frame([dict(item.to_row()) for item in self])

    def __repr__(self) -> str:
        return f"{len(self):,} items, read page by page"
