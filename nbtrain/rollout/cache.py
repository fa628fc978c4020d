"""Keys and values of many replies of unequal length, held so that decoding costs little.

Every row's tokens end at one common column, as if padded on the left. So all rows write their
next key and value in the same column (a plain slice, no scatter), the columns that attention
reads are one window as wide as the longest live row, and a row's mask never changes while it
runs. When the end reaches the buffer's edge, the window slides back to the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache

__all__ = ["KvShape", "KvStore", "PrefillCache", "PromptBlock", "ShapeCache", "additive_mask"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's keys and values need, layer by layer.

    ``items`` holds (heads, width) of the keys of layer 0, its values, the keys of layer 1, …
    """

    items: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token over all layers."""
        return sum(heads * width for heads, width in self.items) * self.dtype.itemsize

    def buffers(self, rows: int, columns: int) -> list[Tensor]:
        """One zeroed buffer (items, rows, heads, columns, width) for each distinct item shape.

        Zeroed, since masked columns are read too and must hold finite numbers.
        """
        return [
            torch.zeros(
                len(members), rows, heads, columns, width, dtype=self.dtype, device=self.device
            )
            for (heads, width), members in self._groups().items()
        ]

    def in_order(self, buffers: Sequence[Iterable[Tensor]]) -> list[Tensor]:
        """Slices of the buffers along their first dimension, in the order of ``items``."""
        if len(buffers) == 1:
            return list(buffers[0])
        ordered: list[Tensor] = [torch.empty(0)] * len(self.items)
        for members, slices in zip(self._groups().values(), buffers, strict=True):
            for item, piece in zip(members, slices, strict=True):
                ordered[item] = piece
        return ordered

    def _groups(self) -> dict[tuple[int, int], list[int]]:
        groups: dict[tuple[int, int], list[int]] = {}
        for item, shape in enumerate(self.items):
            groups.setdefault(shape, []).append(item)
        return groups


class _OwnCache(Cache):  # type: ignore[misc]  # transformers is seen as untyped
    """What transformers asks of a cache besides ``update``; masks and positions are given."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this forward pass."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns of the mask that a model would build by itself, and their offset."""
        return self.get_seq_length() + query_length, 0


class ShapeCache(_OwnCache):
    """Learns a model's :class:`KvShape` from one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Remember the shapes and hand the tensors back."""
        self._seen[layer_idx] = key_states, value_states
        return key_states, value_states

    def shape(self) -> KvShape | None:
        """The shape, or ``None`` when not every layer kept plain keys and values."""
        if sorted(self._seen) != list(range(len(self._seen))) or not self._seen:
            return None
        tensors = [tensor for layer in sorted(self._seen) for tensor in self._seen[layer]]
        if any(t.ndim != 4 for t in tensors) or len({(t.dtype, t.device) for t in tensors}) != 1:
            return None
        items = tuple((t.shape[1], t.shape[3]) for t in tensors)
        return KvShape(items, tensors[0].dtype, tensors[0].device)


@dataclass(slots=True)
class PromptBlock:
    """Prompts prefilled together, padded on the left to one width.

    ``buffers`` are shaped as :meth:`KvShape.buffers` with a row for each prompt; ``logits``
    (prompts, vocabulary) are those after each prompt's last token.
    """

    buffers: list[Tensor]
    lengths: Ints
    logits: Tensor

    @property
    def width(self) -> int:
        """Columns of the block."""
        return self.buffers[0].shape[3]

    @property
    def tokens(self) -> int:
        """Tokens the block has room for, padding included."""
        return self.width * len(self.lengths)


class PrefillCache(_OwnCache):
    """Writes the keys and values of whole prompts into buffers of their own."""

    def __init__(self, shape: KvShape, buffers: list[Tensor]) -> None:
        super().__init__()
        self._items = shape.in_order([buffer.unbind(0) for buffer in buffers])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Copy a layer's keys and values; attention reads the given ones."""
        self._items[2 * layer_idx].copy_(key_states)
        self._items[2 * layer_idx + 1].copy_(value_states)
        return key_states, value_states


class _DecodeCache(_OwnCache):
    """Writes one column and reads the window that ends with it."""

    def __init__(self, columns: list[Tensor], windows: list[Tensor]) -> None:
        super().__init__()
        self._columns = columns
        self._windows = windows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's newest keys and values; returns the whole window of both."""
        key, value = 2 * layer_idx, 2 * layer_idx + 1
        self._columns[key].copy_(key_states)
        self._columns[value].copy_(value_states)
        return self._windows[key], self._windows[value]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this forward pass."""
        return int(self._windows[0].shape[2]) - 1


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where attention is allowed and the most negative number elsewhere.

    Additive, since sdpa would turn a boolean mask into one again in every layer and eager
    attention adds whatever it is given; finite, so that a row with nothing allowed stays finite.
    """
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


class KvStore:
    """The rows' buffers: grown on demand, rows dense, columns ending at ``end``.

    Growing holds the old and the new buffers for a moment.
    """

    SLACK = 32
    """Spare columns beyond the longest row: the window slides at most once in so many steps."""

    def __init__(self, shape: KvShape) -> None:
        self._shape = shape
        self._buffers = shape.buffers(0, 0)
        self._mask = self._empty_mask(0, 0)
        self.lengths: Ints = np.zeros(0, np.int64)
        """Tokens held by each live row."""
        self._end = 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values allocated."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def tokens(self) -> int:
        """Tokens that memory is allocated for."""
        return self._mask.shape[0] * self._mask.shape[3]

    @property
    def window(self) -> int:
        """Tokens of the longest live row."""
        return int(self.lengths.max(initial=0))

    def decode_cache(self, max_rows: int, max_columns: int) -> tuple[Cache, Tensor, Ints]:
        """A cache that takes one more token of every live row, its mask, and the positions.

        The mask is (rows, 1, 1, window), the positions (rows, 1). At most ``max_rows`` rows and
        ``max_columns`` columns are allocated when the buffers have to grow for it.
        """
        self._make_room(len(self.lengths), 1, 0, max_rows, max_columns)
        rows, first, end = len(self.lengths), self._end - self.window, self._end
        live = [buffer[:, :rows] for buffer in self._buffers]
        columns = [buffer[:, :, :, end : end + 1].unbind(0) for buffer in live]
        windows = [buffer[:, :, :, first : end + 1].unbind(0) for buffer in live]
        cache = _DecodeCache(self._shape.in_order(columns), self._shape.in_order(windows))
        positions = self.lengths[:, None].copy()
        self.lengths += 1
        self._end += 1
        mask = self._mask[:rows, :, :, first : end + 1]
        if mask.device.type != "cpu":
            # Attention kernels on GPUs want the mask's first element aligned.
            mask = mask.contiguous()
        return cache, mask, positions

    def append(
        self, block: PromptBlock, index: Sequence[int], max_rows: int, max_columns: int
    ) -> None:
        """Add a row for each prompt of the block that ``index`` names, behind the live rows."""
        first, rows = len(self.lengths), len(self.lengths) + len(index)
        lengths = block.lengths[list(index)]
        width = int(lengths.max())
        self._make_room(rows, 0, width, max_rows, max_columns)
        chosen = torch.tensor(index, device=self._shape.device)
        columns = slice(self._end - width, self._end)
        for mine, theirs in zip(self._buffers, block.buffers, strict=True):
            prompts = theirs[:, :, :, block.width - width :]
            mine[:, first:rows, :, columns] = prompts.index_select(1, chosen)
        self.lengths = np.concatenate((self.lengths, lengths))
        self._lay_mask(first, rows)

    def drop(self, holes: Sequence[int], movers: Sequence[int], left: int) -> None:
        """Keep ``left`` rows, after moving the rows ``movers`` into ``holes``."""
        columns = slice(self._end - self.window, self._end)
        for buffer in self._buffers:
            live = buffer[:, :, :, columns]
            for hole, mover in zip(holes, movers, strict=True):
                live[:, hole].copy_(live[:, mover])
        if holes:
            self.lengths[holes] = self.lengths[movers]
            self._mask[holes] = self._mask[movers]
        self.lengths = self.lengths[:left]

    def _make_room(
        self, rows: int, columns: int, width: int, max_rows: int, max_columns: int
    ) -> None:
        """Have ``rows`` rows, ``columns`` columns behind the end and ``width`` before it."""
        have_rows, have_columns = self._mask.shape[0], self._mask.shape[3]
        window = max(self.window, width)
        enough = rows <= have_rows and window + columns <= have_columns
        if enough and self._end + columns <= have_columns and self._end >= width:
            return
        spare = have_columns - window - columns
        if enough and (spare >= self.SLACK or self._end < width):
            self._move(self._buffers, window)
            return
        room = window + columns + self.SLACK
        fresh_columns = max(window + columns, min(max_columns, max(room + room // 2, 256)))
        fresh = self._shape.buffers(min(max_rows, max(rows, rows + rows // 2)), fresh_columns)
        self._move(fresh, window)

    def _move(self, target: list[Tensor], end: int) -> None:
        """Lay the live window into ``target`` so that it ends at column ``end``."""
        live, window = len(self.lengths), self.window
        for old, new in zip(self._buffers, target, strict=True):
            source = old[:, :live, :, self._end - window : self._end]
            # Within one buffer the two places may overlap.
            source = source.clone() if old is new else source
            new[:, :live, :, end - window : end] = source
        if target is not self._buffers:
            self._buffers = target
            self._mask = self._empty_mask(target[0].shape[1], target[0].shape[3])
        self._end = end
        self._lay_mask(0, live)

    def _lay_mask(self, first: int, last: int) -> None:
        starts = torch.from_numpy(self._end - self.lengths[first:last]).to(self._shape.device)
        places = torch.arange(self._mask.shape[3], device=self._shape.device)
        allowed = places >= starts[:, None, None, None]
        self._mask[first:last] = additive_mask(allowed, self._shape.dtype)

    def _empty_mask(self, rows: int, columns: int) -> Tensor:
        return torch.zeros(rows, 1, 1, columns, dtype=self._shape.dtype, device=self._shape.device)
