"""``trl.SFTTrainer`` on rows that we tokenized, labelled and put in order.

The trainer's own loop runs the updates: one item of its loader is one whole update, so that how
an update is split into passes is ours to say, the last of an epoch may be short, and a resumed
run simply starts its loader later. Everything that is random in an update is drawn from the seed
and its global step.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

from nbtrain.errors import NbtrainError
from nbtrain.rollout.ranks import Alone, Ranks
from nbtrain.training.adapted import AdaptedModel
from nbtrain.training.supervised.collate import collate, trained_tokens
from nbtrain.training.supervised.order import Order, dropout_seed
from nbtrain.training.supervised.rows import TokenizedRows
from nbtrain.training.supervised.scores import RowScores

__all__ = ["NotFiniteError", "SupervisedTrainer", "TrainerSettings", "UpdateDone"]

_ROWS_SAID = 20
"""Rows of an update that a failure names."""


class NotFiniteError(NbtrainError):
    """The loss or the gradient of an update is no number: nothing of it was applied."""


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """How updates are made; steps are global. ``rate`` gives the learning rate of a step.

    ``cap`` splits passes to at most so many sequences. ``lean`` runs plain LoRA layers as one
    operation each (see :class:`RowScores`).
    """

    start_step: int
    total_steps: int
    seed: int
    rate: Callable[[int], float]
    weight_decay: float
    max_grad_norm: float
    packed: bool
    pad_id: int = 0
    cap: int | None = None
    gradient_checkpointing: bool = False
    lean: bool = True


@dataclass(slots=True)
class UpdateDone:
    """An update that was applied. ``rows`` are positions in the dataset, in the update's order."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    epoch: float
    trained_tokens: int
    tokens: int
    sequences: int
    rows: list[int]
    seconds: float


@dataclass(slots=True)
class _Update:
    """One item of the loader: this rank's passes of an update, and figures of all ranks."""

    step: int
    passes: list[dict[str, Tensor]]
    rows: list[int]
    sequences: int
    trained: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Sums:
    loss: float = 0.0
    began: float = field(default_factory=time.monotonic)


class _Updates(torch.utils.data.Dataset[_Update]):
    """The updates from one global step on, each read when it is due."""

    def __init__(
        self, rows: TokenizedRows, order: Order, settings: TrainerSettings, ranks: Ranks
    ) -> None:
        self._rows, self._order, self._settings = rows, order, settings
        self._ranks = ranks

    def __len__(self) -> int:
        return self._settings.total_steps - self._settings.start_step

    def __getitem__(self, index: int) -> _Update:
        if index >= len(self):
            raise IndexError(index)
        settings = self._settings
        step = settings.start_step + index + 1
        sequences = self._order.update(step)
        rows = [row for sequence in sequences for row in sequence]
        passes = self._order.passes(
            step, rank=self._ranks.rank, ranks=self._ranks.size, cap=settings.cap
        )
        batches = [
            collate(self._rows, one, packed=settings.packed, pad_id=settings.pad_id)
            for one in passes
        ]
        mine = (sum(map(trained_tokens, batches)), sum(b["labels"].numel() for b in batches))
        every = self._ranks.gather(mine)
        return _Update(
            step,
            batches,
            rows,
            len(sequences),
            trained=sum(trained for trained, _ in every),
            tokens=int(self._rows.lengths[rows].sum()),
        )


class _Planned(LRScheduler):
    """The plan's rate of each global step, to the last bit."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: TrainerSettings) -> None:
        self._settings = settings
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The rate of the update that comes next; behind the last one, the last."""
        settings = self._settings
        step = min(settings.start_step + self.last_epoch + 1, settings.total_steps)
        rate = settings.rate(step)
        return [rate for _ in self.optimizer.param_groups]


class SupervisedTrainer(SFTTrainer):  # type: ignore[misc]
    """Global steps ``start_step + 1`` to ``total_steps`` of a supervised run.

    Parameters
    ----------
    adapted
        The model, its adapter as it is to start.
    rows, order
        What is trained on, and in which order.
    folder
        Where the trainer may put files. It writes none that anybody reads.
    tick
        Called between passes; raises to stop the run.
    after
        Called after every update with what it did; a true answer ends the training there.
    ranks
        That train together: loss, gradient and figures are those of all.
    """

    def __init__(
        self,
        adapted: AdaptedModel,
        rows: TokenizedRows,
        order: Order,
        settings: TrainerSettings,
        *,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        tick: Callable[[], None] = lambda: None,
        after: Callable[[UpdateDone], bool | None] = lambda done: None,
        ranks: Ranks | None = None,
    ) -> None:
        self._settings, self._adapted = settings, adapted
        self._rows, self._order = rows, order
        self._ranks = ranks or Alone()
        self._tick, self._after = tick, after
        self._parameters = list(adapted.trainable.values())
        self._adamw: torch.optim.AdamW | None = None
        if settings.gradient_checkpointing:
            base: Any = adapted.model.get_base_model()
            # transformers renamed it in 5.23; the old name warns there
            new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
            getattr(base, new if hasattr(base, new) else old)({"use_reentrant": False})
        before = [parameter.data for parameter in self._parameters]
        with warnings.catch_warnings():
            # Names that TRL still uses and transformers has renamed: nothing for a run's log
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(
                model=adapted.model,
                args=_arguments(settings, folder, adapted.device),
                train_dataset=Dataset.from_dict({"row": list(range(len(rows)))}),
                data_collator=_itself,
                processing_class=tokenizer,
            )
        # It has narrowed the adapter of a four-bit base to bf16, where early updates round away.
        for parameter, data in zip(self._parameters, before, strict=True):
            parameter.data = data
        self.processing_class = None  # else it would change the model's special tokens
        self.remove_callback(PrinterCallback)
        self.scores = RowScores(adapted.model, lean=settings.lean)
        self.create_optimizer()
        self._sums = _Sums()
        self._current: _Update | None = None
        self._norm = math.nan
        self.updates = 0
        """Updates applied by this trainer."""
        self.trained_tokens = 0
        """Tokens in their losses, of all ranks."""

    @property
    def step(self) -> int:
        """The global step of the last update."""
        return self._settings.start_step + self.updates

    # --- what the trainer asks of its subclass ----------------------------------------------

    def get_train_dataloader(self) -> Any:
        """A loader of whole updates, this rank's part of each."""
        updates = _Updates(self._rows, self._order, self._settings, self._ranks)
        return DataLoader(updates, batch_size=None, shuffle=False, collate_fn=_itself)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW on every adapter weight, with one decay for all."""
        if self._adamw is None:
            self._adamw = torch.optim.AdamW(
                self._parameters,
                lr=0.0,
                weight_decay=self._settings.weight_decay,
                fused=self._adapted.device.type in ("cpu", "cuda"),
            )
        self.optimizer = self._adamw
        return self._adamw

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The plan's schedule from ``start_step`` on."""
        self.lr_scheduler = _Planned(self.create_optimizer(), self._settings)
        return self.lr_scheduler

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> tuple[Any, Any]:
        """No wrapper around the model: ranks add up their gradients once an update."""
        self.create_optimizer()
        self.create_scheduler(max_steps)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        """An update knows its own number of trained tokens."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """All passes of one update; their gradients add up to that of the mean over its tokens."""
        update: _Update = inputs
        self._current, self._sums = update, _Sums()
        if update.trained == 0:
            msg = f"step {update.step} has no trained token ({self._said(update)})"
            raise NotFiniteError(msg)
        torch.manual_seed(dropout_seed(self._settings.seed, update.step, self._ranks.rank))
        total = torch.zeros((), dtype=torch.float32, device=self._adapted.device)
        with self.scores.lean():
            for one in update.passes:
                self._tick()
                total += super().training_step(model, one, update.trained).float()
        self._tick()
        if self._ranks.size > 1:
            for parameter in self._parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self._ranks.sum([*(p.grad for p in self._parameters), total])
        self._sums.loss = float(total)
        if not math.isfinite(self._sums.loss):
            msg = f"the loss of step {update.step} is {self._sums.loss} ({self._said(update)})"
            raise NotFiniteError(msg)
        return total

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """A pass's share of the mean over the trained tokens of the whole update."""
        log_probs, _ = self.scores(inputs, model)
        return -log_probs.sum() / num_items_in_batch

    def _clip_grad_norm(self, model: Any) -> Tensor:
        """Clip, after making sure that there is a number to clip."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm)
        self._norm = float(norm)
        assert self._current is not None
        if not math.isfinite(self._norm):
            msg = (
                f"the gradient of step {self._current.step} is not finite "
                f"({self._said(self._current)})"
            )
            raise NotFiniteError(msg)
        return norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """After an update, in place of the trainer's own logging and saving."""
        update, self._current = self._current, None
        if update is None:
            return  # called once more at the end of the loader
        self.updates += 1
        self.trained_tokens += update.trained
        per_epoch = self._order.updates_per_epoch
        done = UpdateDone(
            step=update.step,
            loss=self._sums.loss,
            learning_rate=self._settings.rate(update.step),
            grad_norm=self._norm,
            epoch=update.step / per_epoch,
            trained_tokens=update.trained,
            tokens=update.tokens,
            sequences=update.sequences,
            rows=update.rows,
            seconds=time.monotonic() - self._sums.began,
        )
        if self._after(done):
            self.control.should_training_stop = True

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Nothing: the run's own record is kept elsewhere."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted."""
        return 0

    def _send_telemetry(self) -> None:
        """Never."""

    # --- optimizer state, as checkpoints hold it ----------------------------------------------

    def optimizer_state(self) -> dict[str, Tensor]:
        """Moments and step counts by ``<parameter>|<name>``; empty before any update."""
        state = self.create_optimizer().state
        return {
            f"{name}|{key}": torch.as_tensor(value).detach().to("cpu", copy=True)
            for name, parameter in self._adapted.trainable.items()
            for key, value in state.get(parameter, {}).items()
        }

    def load_optimizer_state(self, flat: dict[str, Tensor]) -> None:
        """Strict counterpart of :meth:`optimizer_state`. Raises ``ValueError`` when it misfits."""
        trainable = self._adapted.trainable
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in flat.items():
            name, _, part = key.rpartition("|")
            by_name.setdefault(name, {})[part] = value
        if by_name and by_name.keys() != trainable.keys():
            msg = "the optimizer state does not belong to this adapter"
            raise ValueError(msg)
        optimizer = self.create_optimizer()
        optimizer.state.clear()
        for name, state in by_name.items():
            parameter = trainable[name]
            optimizer.state[parameter] = {
                part: value.to(parameter.device, copy=True) for part, value in state.items()
            }

    @staticmethod
    def _said(update: _Update) -> str:
        rows = ", ".join(str(row) for row in update.rows[:_ROWS_SAID])
        more = (
            "" if len(update.rows) <= _ROWS_SAID else f" and {len(update.rows) - _ROWS_SAID} more"
        )
        return f"rows at positions {rows}{more}"


def _itself(item: Any) -> Any:
    return item


def _arguments(settings: TrainerSettings, folder: Path, device: torch.device) -> SFTConfig:
    """The trainer's own arguments: it logs, saves, packs and reports nothing by itself."""
    return SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        num_train_epochs=1,
        max_steps=settings.total_steps - settings.start_step,
        learning_rate=settings.rate(settings.start_step + 1),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,  # asked of the model itself
        use_cpu=device.type == "cpu",
        seed=settings.seed,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        logging_nan_inf_filter=False,
        average_tokens_across_devices=False,
        remove_unused_columns=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        packing=False,
        router_aux_loss_coef=0.0,  # the loss is that of the trained tokens, and nothing else
        ddp_find_unused_parameters=False,
    )
