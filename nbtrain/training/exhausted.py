"""When memory runs out: which part of a step it was, what was expected, what to lower."""

from __future__ import annotations

import errno
from typing import Literal

import torch

from nbtrain.errors import first_line
from nbtrain.plan.memory import Memory, size

__all__ = ["Part", "is_exhausted", "sentence", "told"]

Part = Literal["start-up", "sampling", "loss", "validation", "saving"]

_LOWER = {
    "options": {
        "sampling": "max_concurrent_trajectories, max_output_tokens_per_turn or group_size",
        "loss": "max_output_tokens_per_turn, max_output_tokens_per_trajectory or lora_rank",
        "validation": "val_max_concurrent_trajectories or val_max_output_tokens_per_turn",
    },
    "descriptor": {
        "sampling": "rlHyperparams.maxCompletionLength, rlHyperparams.groupSize or "
        "rlHyperparams.promptsPerStep",
        "loss": "execution.microBatchSequences, rlHyperparams.maxCompletionLength or lora.rank",
    },
}
"""Under the names of the plan's own form."""


def is_exhausted(error: BaseException) -> bool:
    """Whether ``error`` says that a device or the machine has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # torch's words, and those of libraries that read the files of weights
    words = ("DefaultCPUAllocator", "Cannot allocate memory", "os error 12")
    return any(word in str(error) for word in words)


def sentence(
    error: BaseException,
    *,
    part: Part,
    step: int,
    expected: Memory | None,
    saved: int | None,
    door: str = "options",
) -> str:
    """A failure for the person who started the run; ``saved`` is the last checkpoint's step.

    ``door`` is how the plan was stated: what to lower is named as it is there.
    """
    need = None
    if expected is not None:
        need = (
            f"{size(expected.peak())} in a rank "
            f"({size(expected.weights)} base model, {size(expected.adapter)} adapter, "
            f"{size(expected.loss)} loss of the longest reply, {size(expected.kv)} keys and values)"
        )
    where = "in start-up" if part == "start-up" else f"in step {step}, in {part}"
    return told(error, where=where, expected=need, lower=_LOWER[door].get(part), saved=saved)


def told(
    error: BaseException, *, where: str, expected: str | None, lower: str | None, saved: int | None
) -> str:
    """The sentence of its parts: what was ``expected`` to be needed, and what to ``lower``."""
    parts = [f"out of memory {where}: {first_line(error)}"]
    if expected is not None:
        parts.append(f"expected were about {expected}")
    if lower is not None:
        parts.append(f"lower {lower}")
    parts.append(
        "no checkpoint was saved"
        if saved is None
        else f"the checkpoint of step {saved} is there to go on from"
    )
    return "; ".join(parts)
