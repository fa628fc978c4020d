"""How the sequences of one supervised update are split into passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbtrain.plan.registry import BaseModelInfo

SEQUENCES = 8
"""Sequences of an update, unless both halves are stated."""
PASS_TOKENS = 4096
"""Tokens that a pass of the default size fits, one sequence at least."""
QUALIFIED_TOKENS = 65_536
"""Tokens of a pass that base models are qualified at.

Logits alone cost a pass tokens x vocabulary x about 10 bytes: with a vocabulary of 150,000 that
is 98 GB here, more than a device has. What fits below is told by the estimate and measured.
"""


def largest_pass(max_seq_length: int) -> int:
    """Sequences of a pass where nothing is stated.

    The most whose tokens fit :data:`PASS_TOKENS` and that divide :data:`SEQUENCES`, since an
    update is never rounded; at least 1.
    """
    fitting = (n for n in range(SEQUENCES, 1, -1) if SEQUENCES % n == 0)
    return next((n for n in fitting if n * max_seq_length <= PASS_TOKENS), 1)


def micro_batch(values: Mapping[str, Any], _: BaseModelInfo | None) -> int:
    """The default of ``training.microBatchPerGpu``."""
    passes = values.get("training.gradientAccumulation")
    if passes is None:
        return largest_pass(values["maxSeqLength"])
    return max(1, SEQUENCES // int(passes))


def accumulation(values: Mapping[str, Any], _: BaseModelInfo | None) -> int:
    """The default of ``training.gradientAccumulation``."""
    return max(1, SEQUENCES // int(values["training.microBatchPerGpu"]))


def qualified_tokens(model: BaseModelInfo) -> int:
    """Tokens that a pass over ``model`` may have; one sequence of its whole context always may."""
    return max(QUALIFIED_TOKENS, model.max_context)


def updates(rows: int, *, epochs: int, sequences: int, max_steps: int) -> int:
    """Updates of a run over ``rows``; a ``max_steps`` of 0 is no cap."""
    whole = epochs * -(-rows // sequences)
    return min(whole, max_steps) if max_steps else whole
