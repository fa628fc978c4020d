"""A prompt that runs once for its whole group, with gradient, however long the replies are.

The prompt's keys and values are computed once, cut from their graph, and lent to one batch of
replies after another. Each batch is back-propagated by itself and leaves its gradient at the cut;
the prompt follows last, with the sum. So only one batch's activations are alive at a time and none
is computed twice, which is why nothing here is checkpointed: shorter batches bound memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from nbtrain.rollout.forward import check_gap
from nbtrain.training.packing import (
    Block,
    Layout,
    Packable,
    Part,
    Unit,
    behind_prefix,
    blocks_of,
    packed_part,
    plain_part,
    plan_rows,
    row_length,
)
from nbtrain.training.scoring import Scorer, Scores, token_scores

__all__ = ["keeps_apart", "plan_units", "scored"]

SHORTEST = 0.6
"""Replies of a batch are at least so long, against its longest: padding stays below a fifth."""


def plan_units(
    items: Sequence[Packable], layout: Layout, device: torch.device, *, packs: bool = True
) -> list[Unit]:
    """All trajectories, each in exactly one part; ``packs`` says if the model understands masks."""
    if not packs:
        return [Unit([plain_part(number, items, device)]) for number in range(len(items))]
    short, units = [], []
    for block in blocks_of(items):
        if row_length(block, items) <= layout.packed_tokens:
            short.append(block)
        elif len(block[1]) == 1:
            units.append(Unit([plain_part(block[1][0], items, device)]))
        else:
            units.append(prefix_unit(block, items, layout, device))
    rows = plan_rows(short, items, layout)
    return [Unit([packed_part(batch, items, device)]) for batch in rows] + units


def prefix_unit(
    block: Block, items: Sequence[Packable], layout: Layout, device: torch.device
) -> Unit:
    """A prompt and its replies in batches of like length."""
    prompt, numbers = block
    opening = [number for number in numbers if items[number].sampled[0] == 0]
    firsts = {number: at for at, number in enumerate(opening)}
    return Unit(
        [behind_prefix(b, firsts, items, device) for b in buckets(numbers, items, layout)],
        prompt=torch.tensor([prompt], device=device),
        first_targets=torch.tensor(
            [items[number].token_ids[0] for number in opening], device=device, dtype=torch.long
        ),
    )


def buckets(numbers: list[int], items: Sequence[Packable], layout: Layout) -> list[list[int]]:
    """Trajectories by length, longest first, in batches that hold little padding."""
    batches: list[list[int]] = []
    longest = 0
    for number in sorted(numbers, key=lambda number: (-items[number].read, number)):
        more = len(batches[-1]) + 1 if batches else 0
        fits = batches and more * longest <= layout.batch_tokens and layout.holds(more)
        if fits and items[number].read >= SHORTEST * longest:
            batches[-1].append(number)
        else:
            batches.append([number])
            longest = items[number].read
    return batches


def scored(
    scorer: Scorer, unit: Unit, *, temperature: float, adapter: bool = True
) -> Iterator[tuple[Part, Tensor, Tensor]]:
    """Each part with its log-probs and entropies, both (T,).

    With gradients on, a part must be back-propagated before the next is asked for, and the
    iterator run to its end: there the prompt is back-propagated.
    """
    if unit.prompt is None:
        for part in unit.parts:
            logits = scorer.logits(part, adapter=adapter)
            yield part, *token_scores(logits, part.targets, temperature)
        return
    prefix = _Prefix(scorer, unit, temperature, adapter)
    for part in unit.parts:
        yield part, *prefix.scores(part)
    prefix.backward()


class _Prefix:
    """The prompt's keys and values and the scores of first tokens, cut from their graph."""

    def __init__(self, scorer: Scorer, unit: Unit, temperature: float, adapter: bool) -> None:
        assert unit.prompt is not None
        assert unit.first_targets is not None
        self._scorer, self._temperature, self._adapter = scorer, temperature, adapter
        cache = DynamicCache()
        targets = unit.first_targets
        last = torch.tensor([unit.prompt.shape[1] - 1], device=unit.prompt.device)
        whole = Part(unit.prompt, None, last, last, last, last, [])
        logits = scorer.logits(whole, cache=cache, use_cache=True, adapter=adapter)
        self._grown = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        if len(targets):
            first, entropy = token_scores(
                logits.expand(len(targets), -1), targets, self._temperature
            )
        else:
            first = entropy = logits.new_zeros(0)
        self._grown.append(first)
        self._entropy = entropy
        self._leaves = [tensor.detach().requires_grad_() for tensor in self._grown]

    def scores(self, part: Part) -> Scores:
        assert part.first is not None
        assert part.order is not None
        rows = len(part.members)
        *pairs, first = self._leaves
        cache = DynamicCache()
        for layer, at in enumerate(range(0, len(pairs), 2)):
            key, value = (tensor.expand(rows, -1, -1, -1) for tensor in pairs[at : at + 2])
            cache.update(key, value, layer)
        parts = [first[part.first]]
        entropies = [self._entropy[part.first]]
        if len(part.scored):
            logits = self._scorer.logits(part, cache=cache, use_cache=True, adapter=self._adapter)
            opening = len(part.first)
            targets = part.targets[part.order.argsort()[opening:]]
            rest, entropy = token_scores(logits, targets, self._temperature)
            parts.append(rest)
            entropies.append(entropy)
        return torch.cat(parts)[part.order], torch.cat(entropies)[part.order]

    def backward(self) -> None:
        """Carry what the parts left at the cut through the prompt."""
        if not torch.is_grad_enabled():
            return
        pairs: list[tuple[Any, Any]] = [
            (grown, leaf.grad)
            for grown, leaf in zip(self._grown, self._leaves, strict=True)
            if grown.requires_grad and leaf.grad is not None
        ]
        if pairs:
            torch.autograd.backward([g for g, _ in pairs], [gradient for _, gradient in pairs])


def keeps_apart(scorer: Scorer, device: torch.device) -> bool:
    """Try whether packed rows and shared prefixes leave this model's scores as they are.

    Finds what no configuration tells: positions taken from elsewhere than ``position_ids``,
    attention biases of the model's own, a cache without keys and values.
    """
    vocabulary = scorer.vocabulary
    step = max(1, vocabulary // 13)
    ids = [place * step % vocabulary for place in range(12)]
    items = [
        Packable((ids[0], ids[1]), (ids[2], ids[3], ids[4])),
        Packable((ids[0], ids[1]), (ids[5], ids[6], ids[7], ids[8])),
        Packable((ids[9], ids[3], ids[10]), (ids[11], ids[4], ids[2])),
    ]
    plain = plan_units(items, Layout(), device, packs=False)
    packed = Layout(row_tokens=64)
    shared = Layout(packed_tokens=0)
    with torch.no_grad():
        own = _logprobs(scorer, plain)
        try:
            for layout in (packed, shared):
                ours = _logprobs(scorer, plan_units(items, layout, device))
                check_gap(ours, own, scorer.model.dtype, "packing")
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False
    return True


def _logprobs(scorer: Scorer, units: Sequence[Unit]) -> Tensor:
    """Every token's log-prob, (1, tokens), in the order of the trajectories' numbers."""
    by_member: dict[int, Tensor] = {}
    for unit in units:
        for part, new, _ in scored(scorer, unit, temperature=1.0):
            pieces = torch.split(new, part.lengths.tolist())
            by_member |= dict(zip(part.members, pieces, strict=True))
    return torch.cat([by_member[number] for number in sorted(by_member)])[None]
