"""A folder that a person named, filled with files whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nbtrain.errors import Problem, Refused
from nbtrain.store import usable_path, writing

__all__ = ["NewFolder"]


class NewFolder:
    """A folder that is new, or there and empty; links are followed.

    ``path`` is where it is as it was ``given``, absolute; ``problems`` says what speaks against
    it. ``purpose`` (``"an export"``) is for their sentences.
    """

    def __init__(self, given: str | os.PathLike[str], purpose: str) -> None:
        self.path = self._real = Path()
        self.problems: list[Problem] = []
        self._purpose = purpose
        try:
            self.path = usable_path(given, "folder")
        except Refused as refused:
            self.problems = list(refused.problems)
            return
        # A link stays a link: what it leads to is filled, or made
        self._real = Path(os.path.realpath(self.path))
        try:
            unfit = self._unfit()
        except OSError as error:
            unfit = f"cannot be looked into ({error.strerror})"
        if unfit:
            self.problems = [self._problem(unfit)]

    def _problem(self, what: str) -> Problem:
        message = f"{self.path} {what}: {self._purpose} takes a new or an empty folder"
        return Problem("folder", message, str(self.path), hint="State another folder")

    def _unfit(self) -> str | None:
        if self.path.is_dir():
            return "holds something already" if any(self._real.iterdir()) else None
        if self.path.exists():
            return "is a file" if self.path.is_file() else "is no folder"
        above = next(folder for folder in self._real.parents if folder.exists())
        return None if above.is_dir() else f"lies beneath {above}, which is no folder"

    @contextmanager
    def filled(self, last: str) -> Iterator[Path]:
        """A temporary folder; its files are in this one once the block ends, ``last`` after all.

        A folder that was there stays the one it is, with its rights, and may be a mount point or
        somebody's current folder. After an error nothing is left. Raises :class:`Refused` when
        something else got into it meanwhile, :class:`~nbtrain.errors.NotWritten` (an ``OSError``)
        where it cannot be written.
        """
        with writing(self.path), self._half(last) as half:
            yield half

    @contextmanager
    def _half(self, last: str) -> Iterator[Path]:
        there = self._real.is_dir()
        above = self._real if there else self._real.parent
        missing = [folder for folder in (above, *above.parents) if not folder.exists()]
        # Short whatever the folder's name: a file system has a limit for these
        half = above / f".half-{secrets.token_hex(8)}"
        try:
            above.mkdir(parents=True, exist_ok=True)
            half.mkdir()
            yield half
            if there:
                self._move_in(half, last)
            else:
                half.replace(self._real)
        except BaseException:
            shutil.rmtree(half, ignore_errors=True)
            for folder in missing:
                with suppress(OSError):
                    folder.rmdir()
            raise

    def _move_in(self, half: Path, last: str) -> None:
        if any(found != half for found in self._real.iterdir()):
            raise Refused([self._problem("holds something by now")])
        moved: list[Path] = []
        try:
            for file in sorted(half.iterdir(), key=lambda file: file.name == last):
                moved.append(self._real / file.name)
                file.replace(moved[-1])
            half.rmdir()
        except BaseException:
            for path in moved:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            raise
