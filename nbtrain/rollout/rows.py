"""The table of running replies: what was sampled so far, kept in arrays, one row a reply.

All bookkeeping of a decode step is a handful of array operations over the live rows, since
Python work per row would cost as much as the forward pass of a small model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nbtrain.rollout.sampling import UNIFORMS_PER_BLOCK, uniforms
from nbtrain.rollout.types import Finish, Sample, SampleRequest

__all__ = ["RowTable", "close_gaps"]

Ints = npt.NDArray[np.int64]
Settings = tuple[float, float, int]

_PER_ROW = ("count", "_limit", "_reserve", "_uniform")
_PER_TOKEN = ("_ids", "_logprobs", "_versions")


def close_gaps(rows: int, dead: Sequence[int]) -> tuple[list[int], list[int]]:
    """How ``rows`` rows become dense when ``dead`` ones leave: fill ``holes`` from ``movers``.

    As few rows move as possible: live rows behind the new end go into the holes before it.
    """
    left = rows - len(dead)
    gone = set(dead)
    holes = [row for row in sorted(gone) if row < left]
    movers = [row for row in range(left, rows) if row not in gone]
    return holes, movers


class RowTable:
    """Replies being sampled, in rows 0 to ``len - 1`` without gaps."""

    def __init__(self) -> None:
        self.requests: list[SampleRequest] = []
        self.settings: list[Settings] = []
        """Temperature, top-p and top-k of each row."""
        self.count: Ints = np.zeros(0, np.int64)
        """Tokens sampled so far."""
        self._limit: Ints = np.zeros(0, np.int64)
        self._reserve: Ints = np.zeros(0, np.int64)
        self._uniform = np.zeros((0, UNIFORMS_PER_BLOCK))
        self._ids = np.zeros((0, 64), np.int64)
        self._logprobs = np.zeros((0, 64), np.float32)
        self._versions = np.zeros((0, 64), np.int64)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def longest(self) -> int:
        """The most tokens, prompt included, that any row can come to."""
        return int(self._reserve[: len(self)].max(initial=0))

    def append(
        self, requests: Sequence[SampleRequest], limits: Sequence[int], reserves: Sequence[int]
    ) -> None:
        """Add rows behind the live ones; each ends after its limit of tokens.

        ``reserves`` are the tokens, prompt included, that they can come to.
        """
        first = len(self)
        self.requests.extend(requests)
        self.settings.extend((r.temperature, r.top_p, r.top_k) for r in requests)
        self._grow(len(self), self._ids.shape[1])
        rows = slice(first, len(self))
        self.count[rows] = 0
        self._limit[rows] = limits
        self._reserve[rows] = reserves
        for row, request in enumerate(requests, first):
            self._uniform[row] = uniforms(request.stream, 0)

    def next_uniforms(self) -> npt.NDArray[np.float64]:
        """The uniform that decides each row's next token."""
        place = self.count[: len(self)] % UNIFORMS_PER_BLOCK
        return self._uniform[np.arange(len(self)), place]

    def record(
        self,
        ids: Ints,
        logprobs: npt.NDArray[np.floating],
        version: int,
        is_end: npt.NDArray[np.bool_],
    ) -> list[tuple[int, Finish]]:
        """Write each row's new token; ``is_end`` marks the end ids. Returns the finished rows."""
        rows = len(self)
        count = self.count[:rows]
        if count.max() >= self._ids.shape[1]:
            self._grow(rows, 2 * self._ids.shape[1])
            count = self.count[:rows]
        at = np.arange(rows), count.copy()
        self._ids[at] = ids
        self._logprobs[at] = logprobs
        self._versions[at] = version
        count += 1
        for row in np.flatnonzero(count % UNIFORMS_PER_BLOCK == 0).tolist():
            block = int(count[row]) // UNIFORMS_PER_BLOCK
            self._uniform[row] = uniforms(self.requests[row].stream, block)
        stopped = is_end[ids]
        finished = np.flatnonzero(stopped | (count >= self._limit[:rows])).tolist()
        return [(row, Finish.STOP if stopped[row] else Finish.LENGTH) for row in finished]

    def sample(self, row: int, finish: Finish) -> Sample:
        """What a row has sampled so far."""
        count = int(self.count[row])
        return Sample(
            request_id=self.requests[row].request_id,
            token_ids=self._ids[row, :count].tolist(),
            logprobs=self._logprobs[row, :count].tolist(),
            versions=self._versions[row, :count].tolist(),
            finish=finish,
        )

    def drop(self, holes: Sequence[int], movers: Sequence[int], left: int) -> None:
        """Keep ``left`` rows, after moving rows as :func:`close_gaps` says."""
        if holes:
            for name in _PER_ROW + _PER_TOKEN:
                array = getattr(self, name)
                array[holes] = array[movers]
        for hole, mover in zip(holes, movers, strict=True):
            self.requests[hole] = self.requests[mover]
            self.settings[hole] = self.settings[mover]
        del self.requests[left:]
        del self.settings[left:]

    def _grow(self, rows: int, width: int) -> None:
        """Make room for ``rows`` rows of ``width`` tokens, keeping what is there."""
        have = len(self.count)
        if rows <= have and width <= self._ids.shape[1]:
            return
        rows = have if rows <= have else rows + rows // 2
        for name in _PER_ROW + _PER_TOKEN:
            old = getattr(self, name)
            shape = (rows, width) if name in _PER_TOKEN else (rows, *old.shape[1:])
            new = np.zeros(shape, old.dtype)
            new[tuple(slice(size) for size in old.shape)] = old
            setattr(self, name, new)
