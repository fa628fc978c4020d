"""What completion offers at a place of a cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nbtrain.notebook.completion_bodies import in_body
from nbtrain.notebook.completion_lines import of_cell, of_line, on_a_line, unquoted
from nbtrain.notebook.completion_place import body_place, cell_head, line_place, statement
from nbtrain.notebook.completion_world import LONGEST, MOST, Offer, World
from nbtrain.notebook.line import split

if TYPE_CHECKING:
    from nbtrain.client.known import Known

__all__ = ["LONGEST", "MOST", "Offer", "offers"]

_NOTHING: tuple[str, list[Offer]] = ("", [])


def offers(
    text: str, row: int, column: int, *, known: Callable[[], Known], names: Mapping[str, object]
) -> tuple[str, list[Offer]] | None:
    """What is typed at the cursor and what could stand there, best first, at most :data:`MOST`.

    ``row`` and ``column`` count from 0 in ``text``, a whole cell. ``None`` where the cursor is not
    in a cell or on a line of theirs.
    """
    lines = text.split("\n")
    head, line = cell_head(lines), lines[row]
    cell = head is not None
    if head is not None and row > head:
        below = lines[head + 1 :]
        flags = _stated(lines[head][len("%%train") :])
        place = body_place(below, row - head - 1, column)
        if place is None:
            return _NOTHING
        world = World(known, names, place.typed.lstrip("'\""))
        return in_body(place, below, flags, line[column:], world)
    begin = statement(line, cell)
    if begin is None or column <= begin:
        return None
    at = line_place(line[begin:column])
    if at is None:
        return _NOTHING
    world = World(known, names, unquoted(at.typed))
    words = of_cell(at, world) if cell else of_line(at, world)
    return at.typed, on_a_line(at.typed, words, line[column:])


def _stated(line: str) -> dict[str, str]:
    """The flags that a cell's line has, with their values."""
    found: dict[str, str] = {}
    words, _ = split(line)
    for number, word in enumerate(words):
        if word.flag is not None and word.value:
            found[word.flag] = word.text
        elif word.flag is not None:
            found[word.flag] = next((w.text for w in words[number + 1 :][:1] if not w.flag), "")
    return found
