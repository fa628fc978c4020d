"""The loop of a reinforcement run: collect, update, validate, record, save.

All that a run carries from step to step is in one :meth:`Loop.state_dict`: two loops with equal
states do the same from there on, bit for bit on one machine, thread count and version.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nbtrain.plan.schedule import learning_rate
from nbtrain.rollout.admission import GroupOutcome
from nbtrain.rollout.collector import Batch, Collector
from nbtrain.rollout.ledger import (
    cancelled_rows,
    group_row,
    said,
    step_ledger,
    trajectory_rows,
)
from nbtrain.rollout.types import Sampler, TaskView
from nbtrain.training.cadence import checkpoint_due, validation_due
from nbtrain.training.policy import Policy
from nbtrain.training.update import Updater, UpdateReport
from nbtrain.training.validation import Validator

BARREN_STEPS = 5
"""Steps in a row that may end without one eligible group before the run ends."""

NOT_FINITE_STEPS = 3
"""Updates in a row whose loss or gradient may be not finite before the run fails."""


class Recorder(Protocol):
    """Where a loop's results go. Each call returns when its rows are committed."""

    def step(
        self, row: dict[str, Any], groups: list[dict[str, Any]], trajectories: list[dict[str, Any]]
    ) -> None:
        """A step with the groups and trajectories completed in it."""
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
    """Schedule and cadence, in global steps."""

    start_step: int
    total_steps: int
    learning_rate: float
    lr_warmup_steps: int
    lr_hold_steps: int
    lr_min_ratio: float
    val_enabled: bool
    val_interval: int
    checkpoint_interval: int

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
    """Runs global steps ``start_step + 1`` to ``total_steps``."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        policy: Policy,
        updater: Updater,
        sampler: Sampler,
        collector: Collector,
        validator: Validator | None,
        recorder: Recorder,
        tasks: list[TaskView],
        environment: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.policy = policy
        self._updater = updater
        self._sampler = sampler
        self._collector = collector
        self._validator = validator
        self._recorder = recorder
        self._prompts = {task.task_id: task.prompt for task in tasks}
        self._environment = environment or {}
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

    def state_dict(self) -> LoopState:
        """The loop between two steps."""
        plain = {
            "step": self.step,
            "policy_version": self.version,
            "updates_applied": self.updates,
            "barren_steps": self.barren,
            "not_finite_steps": self.not_finite,
            "collector": self._collector.state_dict(),
            "rng": {"torch": _bytes(torch.get_rng_state()), "python": _python_rng()},
            "schedule": {"learning_rate": self.settings.rate(max(self.step, 1))},
            "environment": self._environment,
        }
        return LoopState(plain, self.policy.adapter_state(), self._updater.optimizer_state())

    def load_state_dict(self, state: LoopState) -> None:
        """Go on where ``state`` was taken. Raises ``ValueError`` when it does not fit."""
        self.policy.load_adapter_state(state.adapter)
        self._updater.load_optimizer_state(state.optimizer)
        self._collector.load_state_dict(state.plain["collector"])
        self.step = state.plain["step"]
        self.version = state.plain["policy_version"]
        self.updates = state.plain["updates_applied"]
        self.barren = state.plain["barren_steps"]
        self.not_finite = state.plain["not_finite_steps"]
        rng = state.plain["rng"]
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(rng["torch"])), dtype=torch.uint8))
        version, internal, gauss = rng["python"]
        random.setstate((version, tuple(internal), gauss))
        self._sampler.new_policy(self.version)

    def load_weights(self, adapter: dict[str, Tensor]) -> None:
        """Start from these weights with everything else fresh. ``ValueError`` when they misfit."""
        self.policy.load_adapter_state(adapter)
        self._sampler.new_policy(self.version)

    def run(self) -> Ending:
        """Train to the final step, or to where nothing is left to learn."""
        if self._validation_due():
            self._validate()
        self._save("start")
        while self.step < self.settings.total_steps:
            self.advance()
            last = self.step == self.settings.total_steps
            if self.not_finite >= NOT_FINITE_STEPS:
                reason = f"the loss or gradient was not finite in {self.not_finite} steps in a row"
                return Ending(failure=reason)
            if self._grading_failed is not None:
                self._save("interval")  # what was learned is there to go on from
                return Ending(failure=f"step {self.step} taught nothing: {self._grading_failed}")
            if self.barren >= BARREN_STEPS:
                return self._nothing_left()
            if self._validation_due():
                self._validate()
            if self._checkpoint_due():
                self._save("final" if last else "interval")
        if self.updates == 0:
            return Ending(ended=f"no weight changed: no step had a gradient. {self._last_step}")
        return Ending()

    def advance(self) -> UpdateReport:
        """Run one step and record it."""
        step = self.step + 1
        rate = self.settings.rate(step)
        sampled_by = self.version
        batch = self._collector.collect(step)
        began = self._clock()
        report = self._updater.update(batch.used, rate)
        seconds = {
            "sampling": batch.spent.sampling,
            "grading": batch.spent.grading,
            "waiting": batch.seconds - batch.spent.sampling - batch.spent.grading,
            "loss": self._clock() - began,
            **self._between,  # since the step before
        }
        self._between = dict.fromkeys(self._between, 0.0)
        self.step = step
        if report.applied:
            self.updates += 1
            self.version += 1
            self._sampler.new_policy(self.version)
        self.barren = self.barren + 1 if batch.barren else 0
        self.not_finite = 0 if report.finite else self.not_finite + 1
        self._only_ties = all(j.outcome is GroupOutcome.NO_SIGNAL for j in batch.groups)
        self._record(batch, report, rate, sampled_by, seconds)
        if batch.grading_failed:
            self._grading_failed = batch.cut_short
        return report

    def _record(
        self,
        batch: Batch,
        report: UpdateReport,
        rate: float,
        sampled_by: int,
        seconds: dict[str, float],
    ) -> None:
        row = step_ledger(batch)
        metrics = row["metrics"] | report.metrics
        metrics.pop("loss", None)
        metrics["policy_version"] = sampled_by
        metrics |= {f"seconds_{part}": value for part, value in seconds.items()}
        row |= {
            "step": batch.step,
            "loss": report.loss,
            "learning_rate": rate,
            "update_applied": report.applied,
            "skip_reason": report.skipped and _why(report.skipped, batch.cut_short),
            "started_groups": self._collector.started_groups,
            "metrics": metrics,
        }
        self._last_step = said(row)
        groups = [group_row(judged, step=batch.step) for judged in batch.groups]
        trajectories = [
            line
            for judged in batch.groups
            for line in trajectory_rows(
                judged, step=batch.step, prompt=self._prompts[judged.group.task_id]
            )
        ]
        for group in batch.cancelled:
            trajectories += cancelled_rows(group, prompt=self._prompts[group.task_id])
        self._recorder.step(row, groups, trajectories)

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
        done = self._validator.run(step=self.step, policy_version=self.version)
        self._recorder.validation(done.row, done.trajectories)
        self._between["validation"] += self._clock() - began

    def _save(self, reason: str) -> None:
        began = self._clock()
        self._recorder.checkpoint(self.step, reason, self.state_dict())
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


def _why(skipped: str, cut_short: str | None) -> str:
    return f"{skipped}: {cut_short}" if cut_short else skipped


def _bytes(tensor: Tensor) -> str:
    return bytes(tensor.tolist()).hex()


def _python_rng() -> list[Any]:
    version, internal, gauss = random.getstate()
    return [version, list(internal), gauss]
