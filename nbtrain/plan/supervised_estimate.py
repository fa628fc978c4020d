"""What can be known of a supervised run before anything is spent: updates, tokens and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from nbtrain.plan.fields import counted, show
from nbtrain.plan.memory import WARN_SHARE, size
from nbtrain.plan.preflight import about, duration
from nbtrain.plan.registry import BaseModelInfo
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.plan.supervised_memory import SupervisedMemory, memory_of
from nbtrain.plan.told import Told

__all__ = ["SupervisedEstimate", "UpdateRate", "UpdateRates", "estimate_supervised", "sequences_of"]

_UNKNOWN = "no earlier supervised run of this model here"


@dataclass(frozen=True, slots=True)
class UpdateRate:
    """What an earlier run took: seconds of an update in all, with its share of validation and
    saving, and the tokens it read, of which it trained some.
    """

    seconds: float
    tokens: float
    trained_tokens: float


@dataclass(frozen=True, slots=True)
class UpdateRates:
    """Rates of earlier runs of the base model on this machine, newest first, at least one.

    With ``alike`` they had this dataset and these updates; else only seconds per token carry
    over, and how many tokens there will be is unknown.
    """

    rates: tuple[UpdateRate, ...]
    alike: bool = True

    @property
    def mean(self) -> UpdateRate:
        """Their mean, each run counting half as much as the next newer one."""
        weights = [0.5**age for age in range(len(self.rates))]
        figures = zip(*((r.seconds, r.tokens, r.trained_tokens) for r in self.rates), strict=True)
        return UpdateRate(
            *(
                sum(w * f for w, f in zip(weights, one, strict=True)) / sum(weights)
                for one in figures
            )
        )

    @property
    def told(self) -> str:
        """Where the figures come from, in words."""
        runs = "1 earlier run" if len(self.rates) == 1 else f"{len(self.rates)} earlier runs"
        return f"from {runs} of this " + ("dataset" if self.alike else "model with other rows")


@dataclass(frozen=True, repr=False)
class SupervisedEstimate(Told):
    """What a supervised run will take, as figures and as sentences.

    ``max_tokens`` is a bound: every row as long as ``max_seq_length``. What is expected goes by
    earlier runs on the same rows, and is ``None`` without any; so are the seconds of a token.
    ``memory`` (bytes of one rank, rows of that length) is ``None`` where the model's headers tell
    too little.
    """

    updates: int
    sequences_per_update: int
    rows: int
    epochs: float
    validation_rows: int
    validation_frequency_steps: int
    ranks: int
    max_tokens: int
    expected_tokens: int | None
    expected_trained_tokens: int | None
    seconds: float | None
    seconds_per_token: float | None
    measured: UpdateRates | None
    memory: SupervisedMemory | None = None
    free_bytes: int | None = None
    at_most: bool = False
    smoke: bool = False
    ends_early: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def figures(self) -> dict[str, Any]:
        """Every figure by name, as JSON."""
        return asdict(self)

    @property
    def line(self) -> str:
        """All of it in one line."""
        parts = [self._of_updates]
        if self.smoke:
            parts = [f"{self._of_updates} on {show(self.rows)} rows, until they are learned"]
        if self.expected_tokens is not None:
            parts.append(f"about {show(about(self.expected_tokens))} tokens")
        if self.seconds is not None:
            parts.append(f"{'at most ' if self.smoke else ''}about {duration(self.seconds)}")
        known = f" ({self.measured.told})" if self.measured and self.seconds is not None else ""
        return "expected: " + ", ".join(parts) + known

    @property
    def _of_updates(self) -> str:
        most = "up to " if self.smoke else "at most " if self.at_most else ""
        return f"{most}{show(self.updates)} updates of {show(self.sequences_per_update)} sequences"

    def sentences(self) -> list[str]:
        """What is known, a sentence each."""
        rows = counted(self.rows, "row")
        if self.smoke:
            told = [f"{self._of_updates} on {rows}; ends when they are learned"]
        else:
            told = [f"{self._of_updates}: {self.epochs:.3g} times {rows}", self._of_validation()]
        told += [
            self._of_tokens(),
            self._of_memory(),
            self._of_time(),
        ]
        return [*told, *self.ends_early, *(f"hint: {warning}" for warning in self.warnings)]

    def _of_validation(self) -> str:
        if not self.validation_rows:
            return "no validation dataset: nothing will tell learning from memorising"
        every = self.validation_frequency_steps
        steps = "update" if every == 1 else f"{show(every)} updates"
        return f"validation on {show(self.validation_rows)} rows every {steps}"

    def _of_tokens(self) -> str:
        most = f"at most {show(about(self.max_tokens))} tokens"
        if self.expected_tokens is None or self.expected_trained_tokens is None:
            return f"{most}; how many is unknown until the rows are tokenised"
        return (
            f"about {show(about(self.expected_tokens))} tokens, "
            f"{show(about(self.expected_trained_tokens))} of them trained; {most}"
        )

    def _of_memory(self) -> str:
        memory, each = self.memory, " in each rank" if self.ranks > 1 else ""
        if memory is None:
            return "memory unknown: the model's headers do not tell its dimensions"
        free = "" if self.free_bytes is None else f", {size(self.free_bytes)} free now"
        return (
            f"at most about {size(memory.total)} of memory{each} ({size(memory.weights)} base "
            f"model, {size(memory.adapter)} adapter and optimizer, {size(memory.activations)} "
            f"activations and logits of a pass of the longest rows allowed){free}"
        )

    def _of_time(self) -> str:
        if self.measured is None or self.seconds_per_token is None:
            return f"time unknown until the first step: {_UNKNOWN}"
        if self.seconds is None:
            each = f"{self.seconds_per_token * 1000:.3g} s a thousand tokens"
            return f"time unknown until the first step; {each}, {self.measured.told}"
        most = "at most " if self.smoke else ""
        return f"{most}about {duration(self.seconds)}, {self.measured.told} on this machine"


def sequences_of(plan: ResolvedPlan) -> int:
    """Sequences of one update."""
    return int(plan["micro_batch_per_gpu"] * plan["gradient_accumulation"])


def estimate_supervised(
    plan: ResolvedPlan,
    model: BaseModelInfo | None = None,
    *,
    measured: UpdateRates | None = None,
    free_bytes: int | None = None,
) -> SupervisedEstimate:
    """What the supervised ``plan`` will take. Packed, rows share sequences: there are fewer.

    ``free_bytes`` is what one rank could use before the ``model`` is loaded.
    """
    updates, each = plan.total_steps - plan.start_step, sequences_of(plan)
    rows = plan.workload.train_tasks
    smoke = plan.smoke is not None
    rate = measured.mean if measured else None
    alike = rate if measured and measured.alike else None
    passes = updates * each / rows if rows else 0.0
    longest = plan["max_seq_length"]
    memory = None if model is None else memory_of(plan, model, longest=longest)
    return SupervisedEstimate(
        updates=updates,
        sequences_per_update=each,
        rows=rows,
        epochs=min(passes, float(plan["epochs"])),
        validation_rows=plan.validation_dataset.rows if plan.validation_dataset else 0,
        validation_frequency_steps=plan["validation_frequency_steps"],
        ranks=plan.options.get("gpus") or 1,
        max_tokens=updates * each * plan["max_seq_length"],
        expected_tokens=None if alike is None else round(updates * alike.tokens),
        expected_trained_tokens=None if alike is None else round(updates * alike.trained_tokens),
        seconds=None if alike is None else updates * alike.seconds,
        seconds_per_token=rate.seconds / rate.tokens if rate and rate.tokens else None,
        measured=measured,
        memory=memory,
        free_bytes=free_bytes,
        warnings=tuple(_tight(plan, memory, free_bytes)),
        at_most=bool(plan.options.get("packing")),
        smoke=smoke,
    )


def _tight(plan: ResolvedPlan, memory: SupervisedMemory | None, free: int | None) -> Iterator[str]:
    """That rows of the longest length allowed may not fit."""
    if memory is None or free is None or memory.total <= WARN_SHARE * free:
        return
    longest, passes = plan.called("max_seq_length"), plan.called("micro_batch_sequences")
    told = (
        f"memory: with rows of {longest} a rank needs about {size(memory.total)} of the "
        f"{size(free)} that are free; lower {longest} or {passes}"
    )
    recompute = f", or state {plan.called('gradient_checkpointing')}: true"
    yield told if plan["gradient_checkpointing"] else told + recompute
