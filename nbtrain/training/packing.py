"""Packing trajectories into rows that share their prompt.

A row holds prompt, reply, reply, …, prompt, reply, …: each reply attends to its own prompt and
itself, positions go on from the prompt, and only positions that predict a reply's token are
scored. The layout is a function of the admitted trajectories alone, in their given order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packable:
    """A trajectory to train on: shared prompt, sampled ids, advantage."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    advantage: float


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What one row holds: (prompt, numbers of the trajectories that follow it), and its length."""

    blocks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    length: int


@dataclass(slots=True)
class Row:
    """A row as tensors: L input tokens, T scored positions, S trajectories.

    ``input_ids`` and ``position_ids`` (1, L); ``mask`` (1, 1, L, L) true where attention is
    allowed; ``scored`` (T,) positions whose logits predict ``targets`` (T,); ``segments`` (T,) in
    [0, S); ``lengths`` (S,); ``members`` are the trajectories' numbers.
    """

    input_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    scored: Tensor
    targets: Tensor
    segments: Tensor
    lengths: Tensor
    members: list[int]


def plan_rows(items: Sequence[Packable], *, row_tokens: int) -> list[RowPlan]:
    """Lay trajectories out in rows of at most ``row_tokens`` tokens where possible.

    Consecutive trajectories with one prompt share it. A trajectory that is longer than the limit
    with its prompt gets a row of its own: nothing is ever cut.
    """
    rows: list[RowPlan] = []
    blocks: list[tuple[tuple[int, ...], list[int]]] = []
    length = 0

    def close() -> None:
        nonlocal blocks, length
        if blocks:
            rows.append(RowPlan(tuple((p, tuple(m)) for p, m in blocks), length))
        blocks, length = [], 0

    for number, item in enumerate(items):
        reply = len(item.token_ids) - 1  # the last token is predicted, never read
        shared = bool(blocks) and blocks[-1][0] == item.prompt_ids
        cost = reply if shared else reply + len(item.prompt_ids)
        if length and length + cost > row_tokens:
            close()
            shared, cost = False, reply + len(item.prompt_ids)
        if shared:
            blocks[-1][1].append(number)
        else:
            blocks.append((item.prompt_ids, [number]))
        length += cost
    close()
    return rows


def build_row(plan: RowPlan, items: Sequence[Packable], device: torch.device) -> Row:
    """The tensors of one planned row."""
    ids: list[int] = []
    positions: list[int] = []
    owner: list[int] = []  # block of each token
    reply: list[int] = []  # reply within the row, -1 for prompt tokens
    scored: list[int] = []
    targets: list[int] = []
    segments: list[int] = []
    members: list[int] = []
    for block, (prompt, numbers) in enumerate(plan.blocks):
        last = len(ids) + len(prompt) - 1
        ids += prompt
        positions += range(len(prompt))
        owner += [block] * len(prompt)
        reply += [-1] * len(prompt)
        for number in numbers:
            sampled = items[number].token_ids
            segment, start = len(members), len(ids)
            members.append(number)
            ids += sampled[:-1]
            positions += range(len(prompt), len(prompt) + len(sampled) - 1)
            owner += [block] * (len(sampled) - 1)
            reply += [segment] * (len(sampled) - 1)
            scored += [last, *range(start, start + len(sampled) - 1)]
            targets += sampled
            segments += [segment] * len(sampled)
    return Row(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        mask=_mask(torch.tensor(owner), torch.tensor(reply))[None, None].to(device),
        scored=torch.tensor(scored, device=device),
        targets=torch.tensor(targets, device=device),
        segments=torch.tensor(segments, device=device),
        lengths=torch.tensor([len(items[n].token_ids) for n in members], device=device),
        members=members,
    )


def _mask(owner: Tensor, reply: Tensor) -> Tensor:
    """(L, L), true where the row's token may attend to the column's."""
    count = len(owner)
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    same_block = owner[:, None] == owner[None, :]
    visible = (reply[None, :] == -1) | (reply[:, None] == reply[None, :])
    return causal & same_block & visible
