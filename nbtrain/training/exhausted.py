"""When memory runs out: which part of a step it was, what was expected, what to lower."""

from __future__ import annotations

from typing import Literal

import torch

from nbtrain.plan.memory import Memory, size

__all__ = ["Part", "is_exhausted", "sentence"]

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
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


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
    lower = _LOWER[door]
    told = [f"out of memory in step {step}, in {part}: {str(error).splitlines()[0]}"]
    if expected is not None:
        told.append(
            f"expected were about {size(expected.peak())} in a rank "
            f"({size(expected.weights)} base model, {size(expected.adapter)} adapter, "
            f"{size(expected.loss)} loss of the longest reply, {size(expected.kv)} keys and values)"
        )
    if part in lower:
        told.append(f"lower {lower[part]}")
    told.append(
        "no checkpoint was saved"
        if saved is None
        else f"the checkpoint of step {saved} is there to go on from"
    )
    return "; ".join(told)
