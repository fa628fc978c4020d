"""Which rows share a sequence: best fit, longest first, the same whenever it is asked."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

__all__ = ["pack", "unpacked"]


def unpacked(rows: int) -> list[tuple[int, ...]]:
    """Every row a sequence of its own."""
    return [(row,) for row in range(rows)]


def pack(lengths: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """Rows of each sequence, none longer than ``limit`` tokens.

    Rows are placed longest first, each where the least room stays; in a sequence they stand in
    the order of their positions, and sequences in the order of their first row. Raises
    ``ValueError`` for a row longer than ``limit``.
    """
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # sequences by the room they have left
    rooms: list[int] = []  # the rooms there are, ascending
    for row in sorted(range(len(lengths)), key=lambda row: (-int(lengths[row]), row)):
        length = int(lengths[row])
        if length > limit:
            msg = f"row {row} has {length} tokens, a sequence holds {limit}"
            raise ValueError(msg)
        at = bisect_left(rooms, length)
        if at == len(rooms):
            number, room = len(bins), limit
            bins.append([])
        else:
            room = rooms[at]
            number = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        bins[number].append(row)
        left = room - length
        if left:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(number)
    return sorted(tuple(sorted(rows)) for rows in bins)
