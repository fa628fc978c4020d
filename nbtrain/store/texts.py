"""Trajectory texts in compressed blocks.

Several trajectories share a block, since zstd on one text of 2 kB costs nearly twice what it
does on sixteen together, and a group's prompt then stands there once. A block is zstd (level 1)
over UTF-8: one line of JSON, a newline, and all texts one after the other. The line has an entry
per trajectory: ``texts`` with the characters each text reaches from and to, and ``others`` with
whatever is no text; or null for a trajectory without texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import zstandard

from nbtrain.store.values import plain

__all__ = ["pack", "unpack"]

_LEVEL = 1
TOGETHER = 16
"""Trajectories in a block."""

Texts = Mapping[str, Any]


def pack(given: Sequence[Texts | None], nonfinite: list[str]) -> list[tuple[int, bytes]]:
    """Blocks for a step's texts in order: the index of each block's first trajectory, its bytes.

    Names of NaN and infinite numbers are appended to ``nonfinite``. Raises ``TypeError`` naming
    what JSON cannot hold.
    """
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    return [
        (first, compressor.compress(_join(given[first : first + TOGETHER], first, nonfinite)))
        for first in range(0, len(given), TOGETHER)
        if any(given[first : first + TOGETHER])
    ]


def unpack(data: bytes) -> list[dict[str, Any] | None]:
    """The texts of a block, in the order of its trajectories."""
    blob = zstandard.ZstdDecompressor().decompress(data)
    line, _, body = blob.decode("utf-8", "surrogatepass").partition("\n")
    return [
        entry
        and {key: body[start:end] for key, (start, end) in entry["texts"].items()} | entry["others"]
        for entry in json.loads(line)
    ]


def _join(block: Sequence[Texts | None], first: int, nonfinite: list[str]) -> bytes:
    places: dict[str, tuple[int, int]] = {}
    end = 0
    entries: list[Any] = []
    for given in block:
        if given is None:
            entries.append(None)
            continue
        texts, others = {}, {}
        for key, value in given.items():
            if type(value) is not str:
                others[key] = value
                continue
            if value not in places:
                places[value] = end, end + len(value)
                end += len(value)
            texts[key] = places[value]
        entries.append({"texts": texts, "others": others})
    line = _line(entries, first, nonfinite)
    return "".join((line, "\n", *places)).encode("utf-8", "surrogatepass")


def _line(entries: list[Any], first: int, nonfinite: list[str]) -> str:
    try:
        return _encode(entries)
    except (TypeError, ValueError):
        # Something is no plain value; only then is it worth looking at each of them
        for n, entry in enumerate(entries, first):
            if entry is not None:
                name = f"trajectories[{n}].text"
                entry["others"] = plain(entry["others"], name, nonfinite)
        return _encode(entries)


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
