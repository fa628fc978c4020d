"""The updates of a supervised run with what goes on between them: validate, record, save."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nbtrain.errors import NbtrainError
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.rollout.ranks import Ranks
from nbtrain.training.cadence import validation_due
from nbtrain.training.exhausted import is_exhausted
from nbtrain.training.loop import Ending, LoopState
from nbtrain.training.supervised.evaluating import Evaluator
from nbtrain.training.supervised.exhausted import Part, sentence
from nbtrain.training.supervised.model import leaves_lean
from nbtrain.training.supervised.preparing import Prepared, naming
from nbtrain.training.supervised.rates import rates_of
from nbtrain.training.supervised.recording import SupervisedRecorder
from nbtrain.training.supervised.saved import plain_state
from nbtrain.training.supervised.trainer import SupervisedTrainer, TrainerSettings, UpdateDone

__all__ = ["SupervisedLoop"]


class SupervisedLoop:
    """Runs global steps ``plan.start_step + 1`` to ``total_steps`` of what was prepared.

    The adapter of ``ready`` is as the run is to start; ``optimizer`` is its state where the run
    goes on from a checkpoint. ``recorder`` is that of rank 0; other ranks have none. ``until`` is
    asked after every update with its step; a true answer ends the training there.
    """

    def __init__(
        self,
        plan: ResolvedPlan,
        ready: Prepared,
        *,
        total_steps: int,
        folder: Path,
        recorder: SupervisedRecorder | None,
        ranks: Ranks,
        environment: dict[str, Any],
        tick: Callable[[], None],
        optimizer: dict[str, Tensor] | None = None,
        until: Callable[[int], bool] = lambda step: False,
    ) -> None:
        assert ready.model is not None
        assert ready.rows is not None
        assert ready.order is not None
        assert ready.tokenizer is not None
        self._plan, self._ready, self._total = plan, ready, total_steps
        self._recorder, self._ranks, self._until = recorder, ranks, until
        self._environment = environment
        self._rate = rates_of(plan, total_steps)
        self._model, self._order = ready.model, ready.order
        self._before = ready.model.adapter_state()
        self._trainer = SupervisedTrainer(
            ready.model,
            ready.rows,
            ready.order,
            self._settings(),
            tokenizer=ready.tokenizer,
            folder=folder,
            tick=tick,
            after=self._after,
            ranks=ranks,
        )
        if optimizer is not None:
            self._trainer.load_optimizer_state(optimizer)
        self._evaluator = self._make_evaluator(tick)
        self._between = {"validation": 0.0, "saving": 0.0}
        self._saved: int | None = None
        self._part: Part = "training"

    def activity(self) -> str:
        """What it does now, in a sentence; safe to ask at any moment."""
        step = self._trainer.step
        if self._part == "training":
            return f"step {step + 1} of {self._total}: the update"
        if self._part == "validation":
            return f"validation of the model of step {step}"
        return f"saving the checkpoint of step {step}"

    def run(self) -> Ending:
        """Train to the last step; the ending says whether anything was learned.

        Raises :class:`~nbtrain.errors.NbtrainError` with what to lower when memory runs out, and
        for a loss or gradient that is no number.
        """
        try:
            if self._validation_due(self._plan.start_step):
                self._validate(self._plan.start_step)
            self._trainer.train()
        except (RuntimeError, MemoryError) as error:
            if not is_exhausted(error):
                raise
            raise NbtrainError(
                sentence(
                    error,
                    part=self._part,
                    step=self._trainer.step + (self._part == "training"),
                    plan=self._plan,
                    expected=self._ready.memory,
                    saved=self._saved,
                    name=naming(self._plan),
                )
            ) from error
        return self._ending()

    def _settings(self) -> TrainerSettings:
        plan = self._plan
        return TrainerSettings(
            start_step=plan.start_step,
            total_steps=self._total,
            seed=plan["seed"],
            rate=self._rate,
            weight_decay=plan["weight_decay"],
            max_grad_norm=plan["max_grad_norm"],
            packed=plan["packing"],
            pad_id=self._ready.pad_id,
            cap=plan["micro_batch_sequences"],
            gradient_checkpointing=plan["gradient_checkpointing"],
            lean=leaves_lean(plan),
        )

    def _make_evaluator(self, tick: Callable[[], None]) -> Evaluator | None:
        rows = self._ready.validation
        if rows is None:
            return None
        plan = self._plan
        size: int = plan["micro_batch_per_gpu"]
        return Evaluator(
            rows,
            per_pass=min(size, plan["micro_batch_sequences"] or size),
            pad_id=self._ready.pad_id,
            tick=tick,
            ranks=self._ranks,
        )

    def _after(self, done: UpdateDone) -> bool:
        """What follows an update; whether it was the last one."""
        if self._recorder is not None:
            self._recorder.update(done, self._between)
        self._between = dict.fromkeys(self._between, 0.0)
        stop = self._until(done.step)
        last = stop or done.step == self._total
        if last or self._validation_due(done.step):
            self._validate(done.step)
        every = self._plan["save_every"]
        if last or (every and done.step % every == 0):
            self._save(done.step, "final" if last else "interval")
        self._part = "training"
        return stop

    def _validation_due(self, step: int) -> bool:
        return validation_due(
            step,
            enabled=True,
            interval=self._plan["validation_frequency_steps"],
            start=self._plan.start_step,
            total=self._total,
        )

    def _validate(self, step: int) -> None:
        if self._evaluator is None:
            return
        self._part = "validation"
        row = self._evaluator.run(self._trainer.scores, step=step)
        if self._recorder is not None:
            self._recorder.validation(row)
        self._between["validation"] += row["seconds"]
        self._part = "training"

    def _save(self, step: int, reason: str) -> None:
        self._part = "saving"
        began = time.monotonic()
        if self._recorder is not None:
            plain = plain_state(
                self._plan,
                self._order,
                step=step,
                rate=self._rate(max(step, 1)),
                environment=self._environment,
                ranks=self._ranks.size,
            )
            adapter = self._model.adapter_state()
            state = LoopState(plain, adapter, self._trainer.optimizer_state())
            self._recorder.checkpoint(step, reason, state)
        self._saved = step
        self._between["saving"] += time.monotonic() - began

    def _ending(self) -> Ending:
        """Success has to be proved: updates, trained tokens and other weights than before."""
        trainer = self._trainer
        if not trainer.updates or not trainer.trained_tokens:
            return Ending(failure="no weight changed: no update was made")
        after = self._model.adapter_state()
        if all(torch.equal(after[name], before) for name, before in self._before.items()):
            said = (
                f"no weight changed: after {trainer.updates} updates on {trainer.trained_tokens} "
                "trained tokens the adapter is what it was"
            )
            return Ending(failure=said)
        return Ending()
