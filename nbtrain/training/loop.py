"""The loop of a reinforcement run: collect, update, validate, record, save.

Several ranks run it side by side, each on its own trajectories; what it decides, it decides on
figures of all of them, and rank 0 alone records.

All that a run carries from step to step is in one :meth:`Loop.state_dict`: two loops with equal
states do the same from there on, bit for bit on one machine, thread count and version.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nbtrain.errors import NbtrainError
from nbtrain.plan.memory import Memory
from nbtrain.plan.schedule import learning_rate
from nbtrain.rollout.admission import GroupOutcome
from nbtrain.rollout.collector import Batch, Collector
from nbtrain.rollout.ledger import (
    RUN_ENDED,
    Changes,
    Ledger,
    cancelled_rows,
    group_row,
    said,
    trajectory_rows,
)
from nbtrain.rollout.ranks import Alone, Ranks
from nbtrain.rollout.types import TaskView
from nbtrain.training.cadence import checkpoint_due, validation_due
from nbtrain.training.control import Cancelled
from nbtrain.training.exhausted import Part, is_exhausted, sentence
from nbtrain.training.history import AdapterHistory
from nbtrain.training.policy import Policy
from nbtrain.training.update import Updater, UpdateReport
from nbtrain.training.validation import Validator

log = logging.getLogger("nbtrain.training")

BARREN_STEPS = 5
"""Steps in a row that may end without one eligible group before the run ends."""

IDLE_SHARE = 0.2
"""Share of a collection in which sampling may stand still before the step says why."""
IDLE_SECONDS = 0.2
"""Less than this a step is nothing to speak of."""

_HISTORY, _REFERENCE = "history/", "reference/"
"""Where kept adapters stand among the optimizer's tensors: of older policies, of the KL."""

NOT_FINITE_STEPS = 3
"""Updates in a row whose loss or gradient may be not finite before the run fails."""


class Recorder(Protocol):
    """Where a loop's results go. Each call returns when its rows are committed."""

    def step(
        self,
        row: dict[str, Any],
        groups: list[dict[str, Any]],
        trajectories: list[dict[str, Any]],
        changes: Changes,
    ) -> None:
        """A step with what completed in it, and what it changes of earlier ones."""
        ...

    def closing(self, step: int, trajectories: list[dict[str, Any]], changes: Changes) -> None:
        """What the run's end left of its last step."""
        ...

    def validation(self, row: dict[str, Any], trajectories: list[dict[str, Any]]) -> None:
        """A validation round."""
        ...

    def checkpoint(self, step: int, reason: str, state: LoopState) -> None:
        """Save a checkpoint of ``state``."""
        ...


@dataclass(frozen=True, slots=True)
class LoopState:
    """Everything a run goes on from: plain JSON, adapter tensors and optimizer tensors."""

    plain: dict[str, Any]
    adapter: dict[str, Tensor]
    optimizer: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Schedule and cadence, in global steps; ``door`` is how the plan was stated."""

    start_step: int
    total_steps: int
    learning_rate: float
    lr_warmup_steps: int
    lr_hold_steps: int
    lr_min_ratio: float
    val_enabled: bool
    val_interval: int
    checkpoint_interval: int | None
    val_final_seconds: float = math.inf
    door: str = "options"

    def rate(self, step: int) -> float:
        """The learning rate of global step ``step``."""
        return learning_rate(
            step,
            learning_rate=self.learning_rate,
            warmup=self.lr_warmup_steps,
            hold=self.lr_hold_steps,
            total_steps=self.total_steps,
            min_ratio=self.lr_min_ratio,
        )


@dataclass(frozen=True, slots=True)
class Ending:
    """How a loop ended: ``failure`` is set when the run failed, ``ended`` when it stopped early."""

    ended: str | None = None
    failure: str | None = None


class Loop:
    """Runs global steps ``start_step + 1`` to ``total_steps``.

    ``recorder`` is that of rank 0; other ranks have none. ``memory`` is what the plan was expected
    to need, told when there is not enough.
    """

    def __init__(
        self,
        settings: LoopSettings,
        *,
        policy: Policy,
        updater: Updater,
        collector: Collector,
        validator: Validator | None,
        recorder: Recorder | None,
        tasks: list[TaskView],
        ranks: Ranks | None = None,
        environment: dict[str, Any] | None = None,
        memory: Memory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.policy = policy
        self._updater = updater
        self._ranks = ranks or Alone()
        self._ledger = Ledger()
        self._collector = collector
        self._validator = validator
        self._recorder = recorder
        self._prompts = {task.task_id: task.prompt for task in tasks}
        self._environment = environment or {}
        self._memory = memory
        self._clock = clock
        self.step = settings.start_step
        self.version = 0
        self.updates = 0
        self.barren = 0
        self.not_finite = 0
        self._between = {"validation": 0.0, "saving": 0.0}
        self._last_step = ""
        self._only_ties = False
        self._grading_failed: str | None = None
        self._budget: str | None = None
        self._part: Part = "start-up"
        self._saved: int | None = None

    def state_dict(self) -> LoopState:
        """The loop between two steps."""
        plain = {
            "step": self.step,
            "policy_version": self.version,
            "updates_applied": self.updates,
            "barren_steps": self.barren,
            "not_finite_steps": self.not_finite,
            "collector": self._collector.state_dict(),
            "rng": self._ranks.gather(
                {"torch": _bytes(torch.get_rng_state()), "python": _python_rng()}
            ),
            "schedule": {"learning_rate": self.settings.rate(max(self.step, 1))},
            "environment": self._environment,
        }
        optimizer = self._updater.optimizer_state()
        for place, kept in self._kept_adapters():
            optimizer |= {f"{place}{name}": tensor for name, tensor in kept.state().items()}
        return LoopState(plain, self.policy.adapter_state(), optimizer)

    def load_state_dict(self, state: LoopState) -> None:
        """Go on where ``state`` was taken. Raises ``ValueError`` when it does not fit."""
        self.policy.load_adapter_state(state.adapter)
        parts = _apart(state.optimizer)
        self._updater.load_optimizer_state(parts[""])
        if parts[_REFERENCE]:  # a KL reference of its own stays with the run
            self._updater.refer_to(parts[_REFERENCE])
        if self._updater.history is not None:
            self._updater.history.load(parts[_HISTORY])
        self._collector.load_state_dict(state.plain["collector"])
        self.step = state.plain["step"]
        self.version = state.plain["policy_version"]
        self.updates = state.plain["updates_applied"]
        self.barren = state.plain["barren_steps"]
        self.not_finite = state.plain["not_finite_steps"]
        rng = state.plain["rng"][self._ranks.rank]
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(rng["torch"])), dtype=torch.uint8))
        version, internal, gauss = rng["python"]
        random.setstate((version, tuple(internal), gauss))
        self._collector.new_policy(self.version)

    def _kept_adapters(self) -> list[tuple[str, AdapterHistory]]:
        """Adapters beside the trained one, and where they stand among the optimizer's tensors."""
        kept = [(_HISTORY, self._updater.history), (_REFERENCE, self._updater.reference)]
        return [(place, adapters) for place, adapters in kept if adapters is not None]

    def load_weights(self, adapter: dict[str, Tensor]) -> None:
        """Start from these weights with everything else fresh. ``ValueError`` when they misfit."""
        self.policy.load_adapter_state(adapter)
        self._collector.new_policy(self.version)

    def activity(self) -> str:
        """What it does now, in a sentence; safe to ask at any moment."""
        if self._part == "sampling":
            return f"step {self.step + 1}: {self._collector.activity()}"
        if self._part == "loss":
            return f"step {self.step + 1}: the update"
        if self._part == "validation":
            return f"validation of the policy of step {self.step}"
        return f"saving the checkpoint of step {self.step}"

    def run(self) -> Ending:
        """Train to the final step, or to where nothing is left to learn or to spend.

        Raises :class:`~nbtrain.errors.NbtrainError` with what to lower when memory runs out.
        """
        try:
            ending = self._run()
        except Cancelled:
            if self._ranks.size == 1:  # the others would have to take part
                self._close()
            raise
        except (RuntimeError, MemoryError) as error:
            if not is_exhausted(error):
                raise
            step = self.step + (self._part in ("sampling", "loss"))
            raise NbtrainError(
                sentence(
                    error,
                    part=self._part,
                    step=step,
                    expected=self._memory,
                    saved=self._saved,
                    door=self.settings.door,
                )
            ) from error
        self._close()
        return ending

    def _run(self) -> Ending:
        if self._validation_due():
            self._validate()
        if self._checkpoint_due():
            self._save("start")
        while self.step < self.settings.total_steps:
            budget = self._collector.exhausted()
            if budget is None:
                self.advance()
                budget = self._budget
            if (ending := self._ending(budget)) is not None:
                return ending
            if self._validation_due():
                self._validate()
            if self._checkpoint_due():
                last = self.step == self.settings.total_steps
                self._save("final" if last else "interval")
        if self.updates == 0:
            return Ending(ended=f"no weight changed: no step had a gradient. {self._last_step}")
        return Ending()

    def _ending(self, budget: str | None) -> Ending | None:
        """Whether the run ends here, before its final step."""
        if self.not_finite >= NOT_FINITE_STEPS:
            reason = f"the loss or gradient was not finite in {self.not_finite} steps in a row"
            return Ending(failure=reason)
        several = min(BARREN_STEPS, self.settings.total_steps - self.settings.start_step)
        # As graded a step without a grade is one of several; else it took a pass over the tasks
        if self._grading_failed is not None and (not self.barren or self.barren >= several):
            self._save("interval")  # what was learned is there to go on from
            steps = (
                f"{self.barren} steps up to {self.step}" if self.barren > 1 else f"step {self.step}"
            )
            return Ending(failure=f"{steps} taught nothing: {self._grading_failed}")
        if self.barren >= BARREN_STEPS:
            return self._nothing_left()
        if budget is not None:
            self._save("final")
            return Ending(ended=f"{budget} after step {self.step}")
        return None

    def advance(self) -> UpdateReport:
        """Run one step and record it."""
        step = self.step + 1
        rate = self.settings.rate(step)
        sampled_by = self.version
        self._part = "sampling"
        batch = self._collector.collect(step)
        if batch.cut_short:
            log.info("step %d: %s", step, batch.cut_short)
        began = self._clock()
        self._part = "loss"
        mine = [judged for judged in batch.used if judged.owner == self._ranks.rank]
        report = self._updater.update(mine, rate, version=self.version)
        seconds = {
            "sampling": batch.spent.sampling,
            "grading": batch.spent.grading,
            "environment": batch.spent.environment,
            "waiting": max(0.0, batch.seconds - batch.spent.sampling - batch.spent.idle),
            "loss": self._clock() - began,
            **self._between,  # since the step before
        }
        self._between = dict.fromkeys(self._between, 0.0)
        self.step = step
        if report.applied:
            self.updates += 1
            self.version += 1
            self._collector.new_policy(self.version)
            self._collector.expire(batch)
        self.barren = self.barren + 1 if batch.barren else 0
        self.not_finite = 0 if report.finite else self.not_finite + 1
        self._only_ties = all(j.outcome is GroupOutcome.NO_SIGNAL for j in batch.groups)
        self._budget = batch.ended
        self._record(batch, report, rate, sampled_by, seconds)
        self._grading_failed = batch.cut_short if batch.grading_failed else None
        return report

    def _record(
        self,
        batch: Batch,
        report: UpdateReport,
        rate: float,
        sampled_by: int,
        seconds: dict[str, float],
    ) -> None:
        started, in_flight = self._collector.totals()
        row = self._ledger.step(batch, started=started, in_flight=in_flight)
        metrics = row["metrics"] | report.metrics
        metrics.pop("loss", None)
        metrics["policy_version"] = sampled_by
        metrics |= {f"seconds_{part}": value for part, value in seconds.items()}
        metrics |= _idleness(batch)
        row |= {
            "loss": report.loss,
            "learning_rate": rate,
            "update_applied": report.applied,
            "skip_reason": report.skipped and _why(report.skipped, batch.cut_short),
            "metrics": metrics,
        }
        self._last_step = said(row)
        changes = self._ledger.changes(batch.changed)
        self._collector.recorded()
        if self._recorder is None:
            return
        groups = [group_row(judged) for judged in batch.groups]
        trajectories = [
            line
            for judged in batch.groups
            for line in trajectory_rows(judged, prompt=self._prompts[judged.group.task_id])
        ]
        for group in batch.cancelled:
            trajectories += cancelled_rows(group, prompt=self._prompts[group.task_id])
        self._recorder.step(row, groups, trajectories, changes)

    def _close(self) -> None:
        """Account for what is in flight and pending: none of it will be used."""
        closing = self._collector.close()
        changes = self._ledger.closing(closing)
        if self._recorder is None or not (changes or closing.cancelled):
            return
        trajectories = [
            row
            for group in closing.cancelled
            for row in cancelled_rows(group, prompt=self._prompts[group.task_id], why=RUN_ENDED)
        ]
        self._recorder.closing(self.step, trajectories, changes)

    def _validation_due(self) -> bool:
        settings = self.settings
        return validation_due(
            self.step,
            enabled=settings.val_enabled,
            interval=settings.val_interval,
            start=settings.start_step,
            total=settings.total_steps,
        )

    def _checkpoint_due(self) -> bool:
        settings = self.settings
        return checkpoint_due(
            self.step,
            interval=settings.checkpoint_interval,
            start=settings.start_step,
            total=settings.total_steps,
        )

    def _validate(self) -> None:
        """A round of the current policy, where the run validates at all."""
        if self._validator is None:
            return
        began = self._clock()
        self._part = "validation"
        last = self.step == self.settings.total_steps
        seconds = self.settings.val_final_seconds if last else math.inf
        done = self._validator.run(step=self.step, policy_version=self.version, seconds=seconds)
        if self._recorder is not None:
            self._recorder.validation(done.row, done.trajectories)
        self._between["validation"] += self._clock() - began

    def _save(self, reason: str) -> None:
        if self._saved == self.step:
            return  # it is there already
        began = self._clock()
        self._part = "saving"
        state = self.state_dict()
        if self._recorder is not None:
            self._recorder.checkpoint(self.step, reason, state)
        self._saved = self.step
        self._between["saving"] += self._clock() - began

    def _nothing_left(self) -> Ending:
        head = (
            "nothing left to learn from these tasks" if self._only_ties else "nothing to train on"
        )
        reason = (
            f"{head}: {self.barren} steps in a row found no eligible group in a full pass over the "
            f"tasks. {self._last_step}"
        )
        if self.updates == 0:
            return Ending(failure=f"no update was ever applied; {reason}")
        if self.settings.val_enabled:
            self._validate()
        self._save("final")
        return Ending(ended=reason)


def _idleness(batch: Batch) -> dict[str, Any]:
    """How long nothing could be decoded, and what that waited for."""
    if batch.seconds <= 0:
        return {}
    share = batch.spent.idle / batch.seconds
    found: dict[str, Any] = {"sampler_idle_share": share}
    if share > IDLE_SHARE and batch.spent.idle > IDLE_SECONDS:
        grading = batch.spent.grading >= batch.spent.environment
        what, option = (
            ("grades", "reward_workers") if grading else ("environments", "environment_workers")
        )
        found["bottleneck"] = (
            f"sampling stood still for {share:.0%} of the collection, waiting for {what}: "
            f"make them faster, or raise {option}"
        )
    return found


def _apart(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The kept adapters by their place, and the optimizer's own tensors under no place."""
    parts: dict[str, dict[str, Tensor]] = {_HISTORY: {}, _REFERENCE: {}, "": {}}
    for name, tensor in tensors.items():
        place = next(place for place in parts if name.startswith(place))
        parts[place][name.removeprefix(place)] = tensor
    return parts


def _why(skipped: str, cut_short: str | None) -> str:
    return f"{skipped}: {cut_short}" if cut_short else skipped


def _bytes(tensor: Tensor) -> str:
    return bytes(tensor.tolist()).hex()


def _python_rng() -> list[Any]:
    version, internal, gauss = random.getstate()
    return [version, list(internal), gauss]
