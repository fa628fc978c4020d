"""When memory runs out in a supervised run: where, what was expected, what to lower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from nbtrain.plan.memory import size
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.plan.supervised_memory import SupervisedMemory
from nbtrain.training.exhausted import told

__all__ = ["Part", "sentence"]

Part = Literal["preparation", "training", "validation", "saving"]


def sentence(
    error: BaseException,
    *,
    part: Part,
    step: int,
    plan: ResolvedPlan,
    expected: SupervisedMemory | None,
    saved: int | None,
    name: Callable[[str], str],
) -> str:
    """A failure for the person who started the run.

    ``name`` gives what a setting is called where the plan was stated, ``saved`` is the step of
    the last checkpoint.
    """
    where = f"in step {step}, in {part}" if part != "preparation" else "in preparation"
    need = None
    if expected is not None:
        need = (
            f"{size(expected.total)} in a rank ({size(expected.weights)} base "
            f"model, {size(expected.adapter)} adapter and optimizer, "
            f"{size(expected.activations)} the longest pass)"
        )
    lower = None if part == "saving" else _lower(plan, name)
    return told(error, where=where, expected=need, lower=lower, saved=saved)


def _lower(plan: ResolvedPlan, name: Callable[[str], str]) -> str:
    """What takes less memory and is not at its least already."""
    ways = []
    sequences = min(plan["micro_batch_per_gpu"], plan["micro_batch_sequences"] or 1 << 30)
    if sequences > 1:
        ways.append(f"{name('micro_batch_sequences')} (now {sequences}; the update stays the same)")
    ways.append(name("max_seq_length"))
    text = " or ".join(ways)
    if not plan["gradient_checkpointing"]:
        text += f", or state {name('gradient_checkpointing')}: true"
    return text
