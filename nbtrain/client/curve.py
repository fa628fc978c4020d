"""The losses of a supervised run as its summary shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbtrain.client.readings import SFT
from nbtrain.report.supervised import Supervised, Validated

if TYPE_CHECKING:
    from nbtrain.client.records import HeldOutPoint
    from nbtrain.plan.resolved import ResolvedPlan

__all__ = ["loss_curve"]


def loss_curve(
    plan: ResolvedPlan, steps: Sequence[Mapping[str, Any]], rounds: Sequence[HeldOutPoint]
) -> Supervised | None:
    """The figures of all steps and rounds; ``None`` of a run that is not supervised."""
    if plan.method != SFT:
        return None
    last = steps[-1] if steps else {}
    tokens = last.get("trained_tokens")
    return Supervised(
        losses=[(step["step"], step["loss"]) for step in steps],
        rates=[(step["step"], step["learning_rate"]) for step in steps],
        rounds=[
            Validated(p.step, p.validation_loss, p.perplexity, p.round_completed) for p in rounds
        ],
        epoch=last.get("epoch"),
        epochs=None if plan.smoke else plan.options.get("epochs"),
        trained_tokens=None if tokens is None else int(tokens),
        validates=plan.validation_dataset is not None or plan.smoke is not None,
    )
