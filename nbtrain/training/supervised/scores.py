"""Log-probs of a batch's trained tokens, with the model's own head run for those alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nbtrain.rollout.lean_lora import LeanLora
from nbtrain.training.lora_linear import trained_lora
from nbtrain.training.scoring import head_seeing, token_scores
from nbtrain.training.supervised.collate import IGNORED

__all__ = ["RowScores"]


class RowScores:
    """Runs a causal or image-text model under PEFT for the log-probs of labels.

    ``lean`` runs plain LoRA layers as one operation each; their gradient is PEFT's to rounding.
    It is not for layers with dropout, and not for activations that are computed again.
    """

    def __init__(self, model: Any, *, lean: bool) -> None:
        self.model = model
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._head: nn.Module = base.get_output_embeddings()
        self._lean = LeanLora(model.modules(), trained_lora) if lean else None

    def lean(self) -> AbstractContextManager[None]:
        """Around forward and backward pass."""
        return nullcontext() if self._lean is None else self._lean.active()

    def __call__(self, batch: dict[str, Tensor], model: Any = None) -> tuple[Tensor, Tensor]:
        """Log-probs (T,) in fp32 of the labels that are not ignored, and their rows (T,).

        Row by row, in the order of tokens. ``model`` is what is called, by default the model.
        """
        logits, targets, rows = self._logits(batch, model)
        log_probs, _ = token_scores(logits, targets, 1.0)
        return log_probs, rows

    @torch.no_grad()
    def measured(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The same without gradient, and with the model left in eval mode: nothing is random."""
        if self.model.training:
            self.model.eval()
        return self(batch)

    @torch.no_grad()
    def foremost(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What :meth:`measured` gives, and which labels (T,) the model puts first."""
        if self.model.training:
            self.model.eval()
        logits, targets, rows = self._logits(batch)
        log_probs, _ = token_scores(logits, targets, 1.0)
        return log_probs, rows, logits.argmax(-1) == targets

    def _logits(self, batch: dict[str, Tensor], model: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (T, vocabulary) where a label is not ignored, those labels, and their rows."""
        labels = batch["labels"][:, 1:]
        rows, columns = (labels != IGNORED).nonzero(as_tuple=True)
        scored = rows * batch["labels"].shape[1] + columns
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        with head_seeing(self._head, scored):
            logits = (model or self.model)(**inputs, use_cache=False).logits
        if logits.shape[:-1] != (1, len(scored)):
            msg = f"the model's head does not run once over its input: {tuple(logits.shape)}"
            raise RuntimeError(msg)
        return logits[0], labels[rows, columns], rows
