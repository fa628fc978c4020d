"""A registered dataset: what is known of it, and its rows as they are asked for."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from nbtrain.data.conversations import message_texts
from nbtrain.data.findings import Finding
from nbtrain.data.folders import (
    ABOUT,
    EVERY,
    IMAGES,
    PLACES,
    ROWS,
    line_at,
    lines_name,
    read_numbers,
)
from nbtrain.data.images import identity_of
from nbtrain.data.rows import Row
from nbtrain.errors import NotFound

__all__ = ["VERSION", "Dataset", "load_dataset"]

VERSION = 1


class Dataset:
    """A registered dataset. Rows are counted from 0 and read from its folder when asked for.

    ``spec`` is what its folder says of it. ``note`` is what happened when it was registered or
    its name moved: that the name meant something else before.
    """

    def __init__(
        self, folder: Path, spec: Mapping[str, Any], name: str | None, note: str | None = None
    ) -> None:
        self.folder = folder
        self.spec = spec
        self.name = name
        self.note = note

    @property
    def dataset_id(self) -> str:
        """SHA-256 of its examples, 64 hex digits; of its images too, where rows name some."""
        return str(self.spec["dataset_id"])

    @property
    def rows(self) -> int:
        """Number of examples."""
        return int(self.spec["rows"])

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys that rows have besides ``messages``, sorted."""
        return tuple(self.spec["columns"])

    @property
    def facts(self) -> Mapping[str, tuple[int, int]]:
        """How many rows are of a kind, and the physical line of the first: ``images``,
        ``unanswered`` (the last message is not the assistant's), ``tools``, and
        ``answers_without_json`` (the last message is the assistant's, and no JSON object or list
        stands in its text; datasets registered by earlier versions do not tell). Only what occurs.
        """
        return {name: (count, line) for name, (count, line) in self.spec["facts"].items()}

    @property
    def told_facts(self) -> list[str]:
        """The facts in words. That no answer at all holds JSON is usual, and not told."""
        return [
            f"{count:,} {name.replace('_', ' ').replace('json', 'JSON')}"
            for name, (count, _) in self.facts.items()
            if name != "answers_without_json" or count + self._unanswered < self.rows
        ]

    @property
    def _unanswered(self) -> int:
        return self.facts.get("unanswered", (0, 0))[0]

    @property
    def findings(self) -> list[Finding]:
        """What was noted when it was registered."""
        return [Finding.from_json(found) for found in self.spec["findings"]]

    @property
    def source(self) -> str:
        """What it was registered from last: a path, or ``a DataFrame``, ``a list``."""
        return str(self.spec["source"])

    @property
    def created_at(self) -> float:
        """When it was registered last, in seconds since 1970."""
        return float(self.spec["created_at"])

    @cached_property
    def images(self) -> dict[str, dict[str, Any] | None]:
        """Relative paths of the images that rows name, each with ``sha256`` and ``bytes``;
        ``None`` for one that was not there.
        """
        if not self.spec["images"]:
            return {}
        try:
            found: dict[str, dict[str, Any] | None] = json.loads(
                (self.folder / IMAGES).read_text("utf-8")
            )
        except (OSError, ValueError) as error:
            raise self._damaged() from error
        return found

    def open_rows(self, start: int = 0) -> Iterator[Row]:
        """Rows from ``start`` on, one at a time, with values as ``json.loads`` gives them.

        Raises ``NotFound`` when the files are gone, cut short or damaged.
        """
        self._check()
        return self._rows(start)

    def _rows(self, start: int) -> Iterator[Row]:
        count = self.rows - start
        try:
            with (self.folder / ROWS).open("rb") as file:
                if 0 < start < self.rows:
                    file.seek(self._places[start // EVERY])
                    for _ in range(start % EVERY):
                        file.readline()
                for line in islice(file, max(0, count)):
                    row: Row = json.loads(line)
                    yield row
                    count -= 1
        except (OSError, ValueError, IndexError) as error:
            raise self._damaged() from error
        if count > 0:
            raise self._damaged()

    def page(self, offset: int = 0, limit: int = 25) -> list[Row]:
        """At most ``limit`` rows from ``offset`` on."""
        return list(islice(self.open_rows(max(0, offset)), max(0, limit)))

    def search(self, words: str, offset: int = 0, limit: int | None = None) -> list[int]:
        """Positions of the rows in which ``words`` follow one another in one message, whatever
        the case; at most ``limit`` of them, after the first ``offset``.
        """
        fits = _search(words)
        found = (
            place
            for place, row in enumerate(self.open_rows())
            if any(fits(text) for text in message_texts(row))
        )
        return list(islice(found, offset, None if limit is None else offset + limit))

    @cached_property
    def duplicates(self) -> dict[int, tuple[int, ...]]:
        """For every row whose messages stand in other rows too: the positions of all of them."""
        seen: dict[bytes, int | list[int]] = {}
        for place, row in enumerate(self.open_rows()):
            text = json.dumps(row["messages"], sort_keys=True)
            key = hashlib.blake2b(text.encode(), digest_size=16).digest()
            before = seen.setdefault(key, place)
            if isinstance(before, list):
                before.append(place)
            elif before != place:
                seen[key] = [before, place]
        groups = [tuple(places) for places in seen.values() if isinstance(places, list)]
        return {place: group for group in groups for place in group}

    def line_of(self, index: int) -> int:
        """Physical line of a row in the file it was registered from last; ``index + 1`` where
        that was no file.
        """
        if not 0 <= index < self.rows:
            msg = f"there is no row {index}: the dataset has {self.rows:,}, counted from 0"
            raise IndexError(msg)
        return line_at(self._breaks, index)

    def verify(self) -> Dataset:
        """Read everything, compare it with the id, and return itself: about a second per GB.

        A job does so before it reads rows. Raises ``NotFound`` where a file is gone or is not
        what was registered.
        """
        self._check()
        try:
            with (self.folder / ROWS).open("rb") as file:
                digest = hashlib.file_digest(file, hashlib.sha256)
            lines = self.spec["lines"]
            same = lines is None or lines == lines_name((self.folder / lines).read_bytes())
        except OSError as error:
            raise self._damaged() from error
        digest.update(identity_of(self.images))
        if not same or digest.hexdigest() != self.dataset_id:
            msg = f"the file of {self._called()} in {self.folder} is not what was registered; "
            raise NotFound(msg + "register it again")
        return self

    def _called(self) -> str:
        return f"the dataset {self.name or self.dataset_id[:12]}"

    def _check(self) -> None:
        try:
            size = (self.folder / ROWS).stat().st_size
        except OSError as error:
            raise self._damaged() from error
        if size != self.spec["bytes"]:
            raise self._damaged()

    @cached_property
    def _places(self) -> array[int]:
        return read_numbers(self.folder / PLACES)

    @cached_property
    def _breaks(self) -> array[int]:
        name = self.spec["lines"]
        try:
            return array("Q") if name is None else read_numbers(self.folder / name)
        except (OSError, ValueError) as error:
            raise self._damaged() from error

    def _damaged(self) -> NotFound:
        return _gone(self.folder)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dataset) and other.dataset_id == self.dataset_id

    def __hash__(self) -> int:
        return hash(self.dataset_id)

    def __repr__(self) -> str:
        facts = "".join(f", {told}" for told in self.told_facts)
        called = f"{self.name} " if self.name else ""
        text = f"<Dataset {called}{self.dataset_id[:12]}: {self.rows:,} rows{facts}>"
        return "\n".join([text, *([self.note] if self.note else []), *map(str, self.findings)])


def load_dataset(folder: Path, name: str | None = None, note: str | None = None) -> Dataset:
    """The dataset in ``folder``. Raises ``NotFound`` when its files are gone or damaged."""
    try:
        spec = json.loads((folder / ABOUT).read_text("utf-8"))
        version = spec["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _gone(folder) from error
    if version != VERSION:
        msg = f"the dataset in {folder} was written by another version of nbtrain ({version}, not "
        raise NotFound(msg + f"{VERSION}); register it again")
    found = Dataset(folder, spec, name, note)
    found._check()
    return found


def _gone(folder: Path) -> NotFound:
    return NotFound(f"the dataset's folder {folder} is gone or damaged; register it again")


def _search(words: str) -> Callable[[str], bool]:
    wanted = words.casefold().split()
    if not wanted:
        msg = "search needs a word"
        raise ValueError(msg)
    text = r"\W+".join(map(re.escape, wanted))
    # Scripts without spaces have no word ends to look for.
    before = r"(?<![^\W_])" if wanted[0][0].isascii() and wanted[0][0].isalnum() else ""
    after = r"(?![^\W_])" if wanted[-1][-1].isascii() and wanted[-1][-1].isalnum() else ""
    pattern = re.compile(before + text + after)

    def fits(message: str) -> bool:
        folded = message.casefold()
        # Most messages lack a word, which is far quicker to see than that none follow.
        return all(word in folded for word in wanted) and pattern.search(folded) is not None

    return fits
