"""The start checks of a supervised run: each a number, and what it means.

They need no trainer, so that they can run alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor

from nbtrain.errors import Problem, Where
from nbtrain.plan.checks import Check
from nbtrain.plan.memory import REFUSE_SHARE, WARN_SHARE, size
from nbtrain.plan.supervised_memory import SupervisedMemory
from nbtrain.training.adapted import AdaptedModel
from nbtrain.training.supervised.collate import collate
from nbtrain.training.supervised.rows import TokenizedRows
from nbtrain.training.supervised.scores import RowScores
from nbtrain.training.supervised.tokenizing import Tokenized

__all__ = [
    "adapter_targets",
    "memory_check",
    "packing_check",
    "problems_of",
    "row_checks",
    "row_losses",
]

PACKING_WARN, PACKING_REFUSE = 0.005, 0.025
PACKING_SAMPLE = 8
"""Packed sequences that are compared with their rows alone."""
_LEAST_LOSS = 1e-2
"""A row's loss below this is compared with this."""


def row_checks(found: Tokenized, *, name: str = "") -> list[Check]:
    """What tokenizing measured; ``name`` tells a second dataset's checks from the first's."""
    prefix = f"{name}." if name else ""
    ended = found.ended / found.rows if found.rows else None
    return [
        Check(
            f"{prefix}trained_tokens",
            found.least_trained,
            "tokens",
            f"{found.trained_tokens:,} of {found.tokens:,} tokens in {found.rows:,} rows are "
            f"trained, at least {found.least_trained or 0:,} in every row"
            + (f"; {found.cut:,} rows were cut" if found.cut else ""),
            refuse=1,
            at_least=True,
        ),
        Check(
            f"{prefix}end_token",
            ended,
            "share of rows",
            f"the trained part of {found.ended:,} of {found.rows:,} rows ends on a token that "
            "ends a reply",
            warn=1.0,
            at_least=True,
        ),
        Check(
            f"{prefix}template_round_trip",
            found.differing if found.tried else None,
            "rows",
            f"{found.differing:,} of {found.tried:,} rows tried have other ids than the "
            "tokenizer's template gives"
            if found.tried
            else "not tried: every row is refused",
            refuse=0,
        ),
    ]


def adapter_targets(adapted: AdaptedModel, pattern: str) -> Check:
    """How many modules the adapter covers."""
    names = [
        name for name, module in adapted.model.named_modules() if isinstance(module, LoraLayer)
    ]
    weights = sum(parameter.numel() for parameter in adapted.trainable.values())
    shown = ", ".join(name.removeprefix("base_model.model.") for name in islice(names, 3))
    return Check(
        "adapter_targets",
        len(names),
        "modules",
        f"{pattern!r} covers {len(names):,} modules ({shown}, …), {weights:,} weights",
        refuse=1,
        at_least=True,
    )


def memory_check(needed: SupervisedMemory | None, free: int) -> Check:
    """What the longest pass needs as a share of what is ``free``, before the model is loaded."""
    if needed is None or not free:
        said = "the model's dimensions are not known"
        return Check("memory", None, "share of free memory", said)
    return Check(
        "memory",
        needed.total / free,
        "share of free memory",
        f"about {size(needed.total)} are needed ({size(needed.weights)} base model, "
        f"{size(needed.adapter)} adapter and optimizer, {size(needed.activations)} the longest "
        f"pass), {size(free)} are free",
        warn=WARN_SHARE,
        refuse=REFUSE_SHARE,
    )


def row_losses(
    scores: RowScores, rows: TokenizedRows, sequences: Sequence[Sequence[int]], *, packed: bool
) -> dict[int, float]:
    """Mean loss over the trained tokens of each row, all ``sequences`` in one pass."""
    batch = {n: t.to(_device(scores)) for n, t in collate(rows, sequences, packed=packed).items()}
    log_probs, _ = scores.measured(batch)
    order = [row for sequence in sequences for row in sequence]
    counts = [int(rows.row(row)[1].sum()) for row in order]
    parts: list[Tensor] = list(torch.split(log_probs, counts))
    return {row: -float(part.mean()) for row, part in zip(order, parts, strict=True)}


def packing_check(
    scores: RowScores, rows: TokenizedRows, sequences: Sequence[Sequence[int]], per_pass: int
) -> Check:
    """How far a row's loss moves when it is packed, at most, against the row alone.

    On sequences as the run will pack them, on the real model and attention.
    """
    shared = [sequence for sequence in sequences if len(sequence) > 1]
    if not shared:
        return Check("packing", None, "relative change of a row's loss", "no two rows fit together")
    step = max(1, len(shared) // PACKING_SAMPLE)
    sample = shared[::step][:PACKING_SAMPLE]
    packed: dict[int, float] = {}
    for at in range(0, len(sample), per_pass):
        packed |= row_losses(scores, rows, sample[at : at + per_pass], packed=True)
    gaps = []
    for row, loss in packed.items():
        alone = row_losses(scores, rows, [(row,)], packed=False)[row]
        gaps.append(abs(loss - alone) / max(abs(alone), _LEAST_LOSS))
    worst = max(gaps) if all(gap == gap for gap in gaps) else float("nan")
    return Check(
        "packing",
        worst,
        "relative change of a row's loss",
        f"packed, the loss of {len(gaps)} rows in {len(sample)} sequences moves by up to "
        f"{worst:.2%} against each row alone",
        warn=PACKING_WARN,
        refuse=PACKING_REFUSE,
    )


def problems_of(checks: Sequence[Check], fields: dict[str, str]) -> list[Problem]:
    """A problem for every check that refuses; ``fields`` names what each would change."""
    return [
        Problem(
            fields.get(check.name, check.name),
            f"{check.name}: {check.said}",
            check.measured,
            f"{'at least' if check.at_least else 'at most'} {check.refuse:g} {check.unit}",
            where=Where(source="validation dataset") if check.name.startswith("val") else None,
        )
        for check in checks
        if check.verdict == "refused" and check.refuse is not None
    ]


def _device(scores: RowScores) -> torch.device:
    device: torch.device = next(scores.model.parameters()).device
    return device
