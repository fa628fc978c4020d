"""One forward pass as tensors: ids, labels, and what keeps rows apart.

Padding is masked by place, never by id: a row's true length decides, so that an end token which
is also the padding token stays in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nbtrain.training.supervised.rows import TokenizedRows

__all__ = ["IGNORED", "collate", "trained_tokens"]

IGNORED = -100
"""Label of a token that is not trained."""


def collate(
    rows: TokenizedRows, sequences: Sequence[Sequence[int]], *, packed: bool, pad_id: int = 0
) -> dict[str, Tensor]:
    """``sequences`` (rows of each) as one batch (S, L), padded on the right.

    ``labels`` are the ids where a token is trained. Unpacked, ``attention_mask`` marks the true
    tokens where there is any padding. Packed, ``position_ids`` begin anew with every row and with
    every padding token, and there is no mask: that is how models tell packed rows apart.
    """
    read = [[rows.row(row) for row in sequence] for sequence in sequences]
    lengths = [sum(len(ids) for ids, _ in sequence) for sequence in read]
    shape = len(read), max(lengths)
    ids = torch.full(shape, pad_id, dtype=torch.long)
    labels = torch.full(shape, IGNORED, dtype=torch.long)
    positions = torch.zeros(shape, dtype=torch.long)
    for at, sequence in enumerate(read):
        start = 0
        for row_ids, trained in sequence:
            stop = start + len(row_ids)
            values = torch.from_numpy(row_ids.astype("int64"))
            ids[at, start:stop] = values
            marks = torch.from_numpy(trained)
            labels[at, start:stop] = values.masked_fill(~marks, IGNORED)
            positions[at, start:stop] = torch.arange(len(row_ids))
            start = stop
    batch = {"input_ids": ids, "labels": labels}
    if packed:
        batch["position_ids"] = positions
    elif min(lengths) < shape[1]:
        batch["attention_mask"] = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    return batch


def trained_tokens(batch: dict[str, Tensor]) -> int:
    """Tokens of ``batch`` that are in the loss."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())
