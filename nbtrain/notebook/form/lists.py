"""What can be picked at the top of the form: what is registered, and recent checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbtrain.client.listing import Unreadable

if TYPE_CHECKING:
    from nbtrain.client import Client, Run
    from nbtrain.client.records import Checkpoint

__all__ = ["Lists", "read_lists"]

_RUNS, _CHECKPOINTS = 12, 4
"""How many runs are offered checkpoints of, and how many of each, the last ones and the best."""

Words = tuple[tuple[str, str], ...]
"""Labels with the texts that they stand for."""


@dataclass(frozen=True, slots=True)
class Lists:
    """Labels and texts by field."""

    workload: Words = ()
    dataset: Words = ()
    model: Words = ()
    parent: Words = ()


def read_lists(client: Client) -> Lists:
    """What is registered now."""
    workloads = client.workloads.list()
    datasets = [d for d in client.datasets.list() if not isinstance(d, Unreadable)]
    return Lists(
        workload=_same(w.name or w.id for w in workloads if not isinstance(w, Unreadable)),
        dataset=tuple(
            (f"{d.name or d.id[:12]}: {d.rows:,} rows", d.name or d.id) for d in datasets
        ),
        model=_same(m.slug for m in client.base_models.list()),
        parent=_checkpoints(client),
    )


def _same(names: object) -> Words:
    return tuple((str(name), str(name)) for name in names)  # type: ignore[attr-defined]


def _checkpoints(client: Client) -> Words:
    found: list[tuple[str, str]] = []
    for run in client.training.runs.list(limit=_RUNS):
        saved = [c for c in run.checkpoint_list() if c.has_weights]
        newest = sorted(saved, key=lambda c: c.step_index, reverse=True)[:_CHECKPOINTS]
        scored = [c for c in saved if c.round_completed and _score(c) is not None]
        best = max(scored, key=lambda c: _rank(c), default=None)
        shown = [*newest, *([best] if best is not None and best not in newest else [])]
        found += [(_label(run, c, best=c is best), c.checkpoint_id) for c in shown]
    return tuple(found)


def _score(checkpoint: Checkpoint) -> float | None:
    loss = checkpoint.validation_loss
    return checkpoint.held_out_reward if loss is None else loss


def _rank(checkpoint: Checkpoint) -> float:
    """Higher is better: a loss counts downwards."""
    score = _score(checkpoint) or 0.0
    return score if checkpoint.validation_loss is None else -score


def _label(run: Run, checkpoint: Checkpoint, *, best: bool) -> str:
    parts = [run.name or run.id[:12], f"step {checkpoint.step_index:,}"]
    score = _score(checkpoint)
    if score is not None:
        what = "held-out" if checkpoint.validation_loss is None else "loss"
        parts.append(f"{what} {score:.3f}" + ("" if checkpoint.round_completed else " (partial)"))
    if best:
        parts.append("highest" if checkpoint.validation_loss is None else "lowest")
    return " · ".join([*parts, checkpoint.checkpoint_id[:12]])
