"""What is particular to a supervised run at a glance: its losses, rate and epoch, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from nbtrain.report.series import finite, first_and_last

__all__ = ["Supervised", "Validated", "loss_told", "lowest", "movement"]


@dataclass(frozen=True, slots=True)
class Validated:
    """One validation round: loss by trained token, its perplexity, whether all of it was read."""

    step: int
    loss: float | None
    perplexity: float | None
    complete: bool


@dataclass(slots=True)
class Supervised:
    """The figures of a supervised run.

    ``losses`` and ``rates`` are (step, value) of every step; ``epoch`` is how far the last step
    came, of ``epochs``. ``validates`` is false where a validation dataset is missed.
    """

    losses: list[tuple[int, float | None]] = field(default_factory=list)
    rates: list[tuple[int, float | None]] = field(default_factory=list)
    rounds: list[Validated] = field(default_factory=list)
    epoch: float | None = None
    epochs: int | None = None
    trained_tokens: int | None = None
    validates: bool = True


def lowest(rounds: Sequence[Validated]) -> Validated | None:
    """The complete round of the lowest loss, the earliest on ties."""
    whole = [r for r in rounds if r.complete and r.loss is not None and math.isfinite(r.loss)]
    return min(whole, key=lambda r: (r.loss or 0.0, r.step), default=None)


def movement(run: Supervised) -> list[str]:
    """How training and validation loss moved, the rate and the epoch, one line each."""
    return [line for line in (_training(run), _validation(run), _pace(run)) if line]


def loss_told(run: Supervised) -> str:
    """The last losses in one line: ``loss 1.204, validation loss 1.310 (perplexity 3.71)``."""
    parts = []
    last = run.losses[-1][1] if run.losses else None
    if run.losses:
        parts.append(f"loss {'not finite' if last is None else f'{last:.3f}'}")
    whole = [r for r in run.rounds if r.complete and r.loss is not None]
    if whole:
        parts.append(f"validation {_read(whole[-1])}")
    return ", ".join(parts)


def _training(run: Supervised) -> str:
    points = finite(run.losses)
    moved = first_and_last(points)
    if moved is None:
        return f"loss {points[0][1]:.3f}" if points else ""
    first, last, each = moved
    steps = "step" if each == 1 else f"{each} steps"
    return f"loss {first:.3f} → {last:.3f} (first and last {steps})"


def _validation(run: Supervised) -> str:
    if not run.validates:
        return "no validation dataset: nothing tells learning from memorising"
    whole = [r for r in run.rounds if r.complete and r.loss is not None]
    best = lowest(run.rounds)
    if not whole or best is None:
        return ""
    first, last = whole[0], whole[-1]
    told = f"validation {_read(first)} at step {first.step:,}"
    if last is not first:
        told += f" → {_read(last, named=False)} at step {last.step:,}"
    if best.step not in (first.step, last.step):
        told += f", lowest {_read(best, named=False)} at step {best.step:,}"
    return told


def _read(reading: Validated, *, named: bool = True) -> str:
    told = f"{'loss ' if named else ''}{reading.loss:.3f}"
    if reading.perplexity is None:
        return told
    # Of a loss that diverges it has a hundred digits
    return f"{told} ({'perplexity ' if named else ''}{reading.perplexity:.4g})"


def _pace(run: Supervised) -> str:
    parts = []
    rate = run.rates[-1][1] if run.rates else None
    if rate is not None:
        parts.append(f"learning rate {rate:.3g}")
    if run.epoch is not None:
        parts.append(f"epoch {run.epoch:.2f}" + (f" of {run.epochs}" if run.epochs else ""))
    if run.trained_tokens is not None:
        parts.append(f"{run.trained_tokens:,} trained tokens in the last step")
    return " · ".join(parts)
