"""Log-probs of a micro-batch's tokens, with little more than the arithmetic they need.

The head runs for scored positions only, whatever the model puts behind it; log-prob and entropy
come from one pass over the vocabulary, and so does their gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nbtrain.rollout.cache import additive_mask
from nbtrain.rollout.lean_lora import LeanLora
from nbtrain.training.lora_linear import trained_lora
from nbtrain.training.packing import Part

__all__ = ["Scorer", "head_seeing", "token_scores"]

Scores = tuple[Tensor, Tensor]
"""Log-probs of targets and entropies at their positions, both (T,)."""


class Scorer:
    """Runs one causal language model under PEFT for its log-probs."""

    def __init__(self, model: Any) -> None:
        self.model = model
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        names = inspect.signature(base.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self._head: nn.Module = base.get_output_embeddings()
        self.vocabulary: int = base.get_input_embeddings().weight.shape[0]
        self._lean = LeanLora(model.modules(), trained_lora)

    def logits(
        self, part: Part, *, cache: Any = None, use_cache: bool = False, adapter: bool = True
    ) -> Tensor:
        """Logits (T, vocabulary) of the part's scored positions, behind ``cache`` if given."""
        inputs: dict[str, Any] = {"input_ids": part.input_ids, "use_cache": use_cache}
        if (allowed := part.allowed()) is not None:
            inputs["attention_mask"] = additive_mask(allowed, self.model.dtype)
        if part.position_ids is not None:
            inputs["position_ids"] = part.position_ids
        if cache is not None:
            inputs[self.cache_name] = cache
        base = nullcontext() if adapter else self.model.disable_adapter()
        with (
            base,
            self._lean.active() if adapter else nullcontext(),
            head_seeing(self._head, part.scored),
        ):
            logits: Tensor = self.model(**inputs).logits
        if logits.shape[:-1] != (1, len(part.scored)):
            msg = f"the model's head does not run once over its input: {tuple(logits.shape)}"
            raise RuntimeError(msg)
        return logits[0]


@contextmanager
def head_seeing(head: nn.Module, scored: Tensor) -> Iterator[None]:
    """The head sees the ``scored`` positions, counted through all rows, as (1, T, hidden).

    ``logits_to_keep`` would keep the same columns of every row, and not all models have it.
    """

    def pick(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = args[0]
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, scored)[None], *args[1:]

    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


def token_scores(logits: Tensor, targets: Tensor, temperature: float) -> Scores:
    """Log-probs (T,) of ``targets`` and entropies (T,) under the full softmax at ``temperature``.

    In fp32, or in the logits' own precision where that is higher; temperature 0 is scored at 1.
    Entropies carry no gradient.
    """
    scores: Scores = _apply(logits, targets, temperature or 1.0)
    return scores


class _TokenScores(torch.autograd.Function):
    """One buffer of probabilities serves entropy and gradient: (onehot - p) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Scores:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1.0:
            wide = wide / temperature
        log_z = wide.logsumexp(-1, keepdim=True)
        chosen = wide.gather(-1, targets[:, None])[:, 0] - log_z[:, 0]
        probabilities = (wide - log_z).exp_()
        entropy = log_z[:, 0] - torch.linalg.vecdot(probabilities, wide)
        ctx.save_for_backward(targets)
        ctx.probabilities, ctx.dtype, ctx.temperature = probabilities, logits.dtype, temperature
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (targets,) = ctx.saved_tensors
        scale = (upstream / ctx.temperature)[:, None]
        # The buffer is used up: a second backward pass fails rather than being wrong.
        gradient, ctx.probabilities = ctx.probabilities, None
        gradient.mul_(-scale).scatter_add_(-1, targets[:, None], scale)
        return gradient.to(ctx.dtype), None, None


_apply: Any = _TokenScores.apply
