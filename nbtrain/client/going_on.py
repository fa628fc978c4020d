"""Going on from a checkpoint for so many steps more, whatever its run was stated by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtrain.client.readings import SFT
from nbtrain.plan.descriptor.sizing import updates

if TYPE_CHECKING:
    from nbtrain.client.records import Checkpoint
    from nbtrain.client.run import Run
    from nbtrain.plan.resolved import ResolvedPlan

__all__ = ["go_on"]


def go_on(
    run: Run, checkpoint: Checkpoint, steps: int, *, name: str | None, weights_only: bool
) -> Run:
    """Start a run that makes ``steps`` more than the checkpoint has, all else as its run had it.

    Raises :class:`PlanRefused` with every problem, and then nothing was started.
    """
    from nbtrain.client.fronts import client_of

    before = 0 if weights_only else checkpoint.step_index
    return client_of(run).training.create(
        options=_more(run.plan, before, steps),
        parent_checkpoint_id=checkpoint.checkpoint_id,
        display_name=name,
        load_weights_only=weights_only or None,
    )


def _more(plan: ResolvedPlan, before: int, steps: int) -> dict[str, Any]:
    """What states the steps: options count those to come, the others all from the beginning."""
    if plan.method == SFT:
        return {"max_steps": before + steps, "epochs": _epochs(plan, before + steps)}
    if plan.door == "descriptor":
        return {"rlHyperparams": {"maxSteps": before + steps}}
    return {"num_steps": steps}


def _epochs(plan: ResolvedPlan, total: int) -> int:
    """The fewest epochs that hold so many updates, at least those of the run."""
    options = plan.options
    sequences = options["micro_batch_per_gpu"] * options["gradient_accumulation"] * options["gpus"]
    epochs = int(options["epochs"])
    rows = plan.workload.train_tasks
    while updates(rows, epochs=epochs, sequences=sequences, max_steps=0) < total:
        epochs += 1
    return epochs
