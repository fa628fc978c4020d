"""Laying trajectories out for one forward pass after another, prompts shared where that pays.

Three layouts, chosen by size alone:

- *packed rows*: prompt, reply, reply, …, maybe another group's prompt and replies. Each reply
  attends to its own prompt and itself, positions go on from the prompt. Attention in a row is
  dense, so a row is short; rows of like length stand in one batch.
- *prefix*: a group whose row would be long. Its prompt runs once, its replies run as a batch
  behind the prompt's keys and values (:mod:`nbtrain.training.prefix`).
- *plain*: one trajectory by itself with causal attention and nothing else, which every
  architecture understands.

Only positions that predict a sampled token are scored: tokens of the environment are read. The
layout is a function of the trajectories alone, in their given order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

Prompt = tuple[int, ...]
Block = tuple[Prompt, list[int]]
"""A prompt and the numbers of the trajectories behind it."""


@dataclass(frozen=True, slots=True)
class Packable:
    """A trajectory to train on: its prompt, all ids behind it, the spans that were observed.

    At least one token must have been sampled.
    """

    prompt_ids: Prompt
    token_ids: tuple[int, ...]
    observed: tuple[tuple[int, int], ...] = ()

    @property
    def sampled(self) -> list[int]:
        """Indices into ``token_ids`` of what was sampled."""
        if not self.observed:
            return list(range(len(self.token_ids)))
        seen = {place for start, stop in self.observed for place in range(start, stop)}
        return [place for place in range(len(self.token_ids)) if place not in seen]

    @property
    def read(self) -> int:
        """How many of ``token_ids`` the model must read: those before the last sampled one."""
        return self.sampled[-1] if self.observed else len(self.token_ids) - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes that choose the layout, in tokens.

    ``row_tokens``: groups share a packed row up to this length. ``packed_tokens``: a longer group
    is not packed but shares its prompt as a prefix. ``batch_tokens``: rows of a micro-batch hold
    at most so many, padding included, unless a single row is longer; memory grows with it.
    ``sequences``: trajectories of a micro-batch, ``None`` for as many as fit.

    The defaults by measurement (one thread, CPU seconds of a whole update, packed against prefix):
    SmolLM2-135M in bf16, a prompt of 155 and 8 replies, by length of the packed row: 345 tokens
    2.2 against 2.9; 530: 3.9, 4.3; 813: 6.7, 6.0; 1,774: 18.7, 13.1 (peak 3.7 against 2.6 GB).
    The embedded model in fp32, a prompt of 22, four groups: 210: .10, .18; 400: .18, .23;
    800: .51, .41. Packing pays up to 500 to 700 tokens on both. Eight groups of the embedded
    model as one row of 768 cost 84 ms, as eight rows in a batch 60, in rows of up to 192 as well.
    """

    row_tokens: int = 192
    packed_tokens: int = 640
    batch_tokens: int = 1024
    sequences: int | None = None

    def holds(self, sequences: int) -> bool:
        """Whether a micro-batch may be of so many trajectories."""
        return self.sequences is None or sequences <= self.sequences


DEFAULT = Layout()


@dataclass(slots=True)
class Part:
    """A micro-batch as tensors: R rows of L input tokens, T scored tokens of S trajectories.

    ``input_ids`` (R, L); ``position_ids`` (R, L), ``None`` where they are plain; ``owner`` and
    ``reply`` (R, L) say which block and which reply a token of a packed row belongs to (-1: the
    prompt's), ``None`` elsewhere; ``prefix`` counts the tokens of a shared prefix. ``scored`` are
    flat positions in [0, R L) whose logits predict targets: all (T,) of them, or, behind a
    prefix, those that are not predicted by its last token. ``first`` and ``order`` are then
    positions among the unit's first tokens, and how [first, scored] makes up the T tokens.
    ``targets`` (T,); ``segments`` (T,) in [0, S); ``lengths`` (S,) sampled tokens;
    ``members`` are the trajectories' numbers.
    """

    input_ids: Tensor
    position_ids: Tensor | None
    scored: Tensor
    targets: Tensor
    segments: Tensor
    lengths: Tensor
    members: list[int]
    owner: Tensor | None = None
    reply: Tensor | None = None
    prefix: int = 0
    first: Tensor | None = None
    order: Tensor | None = None

    def allowed(self) -> Tensor | None:
        """True where a row's token may attend to a column's; ``None`` for causal attention.

        (R, 1, L, L) in packed rows, (1, 1, L, prefix + L) behind a prefix.
        """
        length = self.input_ids.shape[1]
        if self.prefix:
            columns = torch.arange(self.prefix + length, device=self.input_ids.device)
            rows = torch.arange(length, device=self.input_ids.device)
            return (columns[None, :] <= rows[:, None] + self.prefix)[None, None]
        if self.owner is None or self.reply is None:
            return None
        causal = torch.ones(length, length, dtype=torch.bool, device=self.owner.device).tril()
        same = self.owner[:, :, None] == self.owner[:, None, :]
        mine = self.reply[:, :, None] == self.reply[:, None, :]
        visible = (self.reply[:, None, :] == -1) | mine
        return (causal & same & visible)[:, None]


@dataclass(slots=True)
class Unit:
    """Micro-batches that share a ``prompt`` run before them, or one that stands by itself.

    ``first_targets`` (F,) are the tokens that the prompt's last token predicts.
    """

    parts: list[Part]
    prompt: Tensor | None = None
    first_targets: Tensor | None = None


@dataclass(slots=True)
class _Row:
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    reply: list[int] = field(default_factory=list)


def blocks_of(items: Sequence[Packable]) -> list[Block]:
    """Neighbours with one prompt, together."""
    return [
        (prompt, list(numbers))
        for prompt, numbers in groupby(range(len(items)), lambda n: items[n].prompt_ids)
    ]


def row_length(block: Block, items: Sequence[Packable]) -> int:
    """Tokens of a block as a packed row."""
    prompt, numbers = block
    return len(prompt) + sum(items[number].read for number in numbers)


def plan_rows(
    blocks: Sequence[Block], items: Sequence[Packable], layout: Layout
) -> list[list[list[Block]]]:
    """Micro-batches of packed rows of whole blocks; neighbours share a row while it is short.

    A block of more sequences than a micro-batch may have is dealt out to several.
    """
    rows: list[tuple[int, list[Block]]] = []
    for block in dealt(blocks, layout.sequences):
        length = row_length(block, items)
        fits = rows and layout.holds(_sequences([[*rows[-1][1], block]]))
        if fits and rows[-1][0] + length <= layout.row_tokens:
            rows[-1] = rows[-1][0] + length, [*rows[-1][1], block]
        else:
            rows.append((length, [block]))
    rows.sort(key=lambda row: -row[0])  # stable: equal lengths keep their order
    batches: list[list[list[Block]]] = []
    longest = 0
    for length, row in rows:
        room = batches and layout.holds(_sequences([*batches[-1], row]))
        if room and (len(batches[-1]) + 1) * longest <= layout.batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
            longest = length
    return batches


def dealt(blocks: Sequence[Block], most: int | None) -> list[Block]:
    """The same trajectories in blocks of at most ``most``, each behind its prompt."""
    if most is None:
        return list(blocks)
    return [
        (prompt, numbers[at : at + most])
        for prompt, numbers in blocks
        for at in range(0, len(numbers), most)
    ]


def _sequences(rows: Sequence[Sequence[Block]]) -> int:
    return sum(len(numbers) for row in rows for _, numbers in row)


def packed_part(
    batch: Sequence[Sequence[Block]], items: Sequence[Packable], device: torch.device
) -> Part:
    """The tensors of a micro-batch of packed rows."""
    rows: list[_Row] = []
    spots: list[tuple[int, list[int]]] = []  # row and scored places of each member
    members: list[int] = []
    for number, blocks in enumerate(batch):
        row = _Row()
        for owner, (prompt, numbers) in enumerate(blocks):
            last = len(row.ids) + len(prompt) - 1
            _extend(row, prompt, 0, owner, -1)
            for member in numbers:
                item, start = items[member], len(row.ids)
                _extend(row, item.token_ids[: item.read], len(prompt), owner, len(members))
                places = [last if at == 0 else start + at - 1 for at in item.sampled]
                spots.append((number, places))
                members.append(member)
        rows.append(row)
    width = max(len(row.ids) for row in rows)
    return _part(
        items,
        members,
        device,
        scored=[number * width + place for number, places in spots for place in places],
        input_ids=_padded([row.ids for row in rows], width, 0, device),
        position_ids=_padded([row.positions for row in rows], width, 0, device),
        owner=_padded([row.owner for row in rows], width, -1, device),
        reply=_padded([row.reply for row in rows], width, -1, device),
    )


def plain_part(member: int, items: Sequence[Packable], device: torch.device) -> Part:
    """One trajectory as an ordinary causal row."""
    item = items[member]
    ids = [*item.prompt_ids, *item.token_ids[: item.read]]
    return _part(
        items,
        [member],
        device,
        scored=[len(item.prompt_ids) + at - 1 for at in item.sampled],
        input_ids=torch.tensor([ids], device=device),
        position_ids=None,
    )


def behind_prefix(
    members: list[int], firsts: dict[int, int], items: Sequence[Packable], device: torch.device
) -> Part:
    """Replies to one prompt as a batch padded on the right, run behind the prompt's cache.

    ``firsts`` gives the position among the unit's first tokens of each trajectory that has one.
    """
    prefix = len(items[members[0]].prompt_ids)
    width = max(max(items[member].read for member in members), 1)
    scored: list[int] = []
    order: list[int] = []
    heads = [firsts[member] for member in members if member in firsts]
    opened = 0
    for row, member in enumerate(members):
        for at in items[member].sampled:
            if at == 0:
                order.append(opened)
                opened += 1
            else:
                order.append(len(heads) + len(scored))
                scored.append(row * width + at - 1)
    part = _part(
        items,
        members,
        device,
        scored=scored,
        input_ids=_padded(
            [list(items[m].token_ids[: items[m].read]) for m in members], width, 0, device
        ),
        position_ids=torch.arange(prefix, prefix + width, device=device).expand(len(members), -1),
    )
    part.prefix = prefix
    part.first = torch.tensor(heads, device=device, dtype=torch.long)
    part.order = torch.tensor(order, device=device)
    return part


def _part(
    items: Sequence[Packable],
    members: list[int],
    device: torch.device,
    *,
    scored: list[int],
    input_ids: Tensor,
    position_ids: Tensor | None,
    owner: Tensor | None = None,
    reply: Tensor | None = None,
) -> Part:
    sampled = [items[member].sampled for member in members]
    lengths = torch.tensor([len(places) for places in sampled], device=device)
    targets = [
        items[member].token_ids[at]
        for member, places in zip(members, sampled, strict=True)
        for at in places
    ]
    return Part(
        input_ids=input_ids,
        position_ids=position_ids,
        scored=torch.tensor(scored, device=device, dtype=torch.long),
        targets=torch.tensor(targets, device=device),
        segments=torch.arange(len(members), device=device).repeat_interleave(lengths),
        lengths=lengths,
        members=members,
        owner=owner,
        reply=reply,
    )


def _extend(row: _Row, ids: Sequence[int], position: int, owner: int, reply: int) -> None:
    row.ids += ids
    row.positions += range(position, position + len(ids))
    row.owner += [owner] * len(ids)
    row.reply += [reply] * len(ids)


def _padded(rows: list[list[int]], width: int, filler: int, device: torch.device) -> Tensor:
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows], device=device)
