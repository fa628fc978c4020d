"""One causal language model as a function: from ids, mask, positions and cache to logits.

Here lie the differences between models that the samplers need not know: PEFT wrappers, the
names of arguments across transformers versions, which architectures' caches can be held.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from nbtrain.rollout.cache import (
    KvShape,
    KvStore,
    PrefillCache,
    PromptBlock,
    ShapeCache,
    additive_mask,
)
from nbtrain.rollout.lean_lora import LeanLora

__all__ = ["CausalForward", "refuse_unsupported"]

_ATTENTION = ("sdpa", "eager")


def refuse_unsupported(config: Any, max_context: int) -> None:
    """Raise ``ValueError`` for a model whose cache is not plain keys and values of all tokens.

    A sliding window at least ``max_context`` wide never slides and is let through.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    window = getattr(config, "sliding_window", None)
    types = set(getattr(config, "layer_types", None) or ())
    if not types and window is not None and getattr(config, "use_sliding_window", True):
        types = {"sliding_attention"}
    if window is not None and window >= max_context:
        types.discard("sliding_attention")
    other = sorted(types - {"full_attention"})
    if other:
        msg = (
            f"model type {config.model_type!r} has layers of type {', '.join(other)}, which the "
            f"ragged sampler cannot hold"
        )
        if "sliding_attention" in other:
            msg += f" (sliding window {window} is below max_context {max_context})"
        raise ValueError(msg)
    attention = getattr(config, "_attn_implementation", None)
    if attention not in _ATTENTION:
        msg = f"attention implementation {attention!r} is not one of {', '.join(_ATTENTION)}"
        raise ValueError(msg)


class CausalForward:
    """Calls a Hugging Face causal LM, wrapped by PEFT or not, for sampling.

    The model itself is called, so adapters that are not merged apply. Its KV shape is learned
    by a first forward pass. Raises ``ValueError`` for a model that cannot be sampled this way.
    """

    def __init__(self, model: nn.Module, max_context: int, pad_id: int = 0) -> None:
        refuse_unsupported(model.config, max_context)
        self._model = model
        self._pad_id = pad_id
        wrapper: Any = model
        inner = wrapper.get_base_model() if hasattr(model, "get_base_model") else wrapper
        names = inspect.signature(inner.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self._states: list[dict[str, Any]] = []
        self.device = next(model.parameters()).device
        self.refresh()
        with self.inference():
            try:
                self.shape, self.vocabulary = self._learn()
                gap = self._gap()
            except (TypeError, ValueError, RuntimeError, AttributeError) as exc:
                msg = f"the model cannot be run with the ragged sampler's cache: {exc}"
                raise ValueError(msg) from exc
        limit = 0.1 if self.shape.dtype.itemsize < 4 else 1e-3
        if not gap <= limit:
            msg = (
                f"the model's logits change by {gap:.2g} of their size (allowed: {limit}) when "
                f"it decodes with the ragged sampler's cache"
            )
            raise ValueError(msg)

    def refresh(self) -> None:
        """Take in modules added to the model since (an adapter loaded later, say)."""
        self._states = [module.__dict__ for module in self._model.modules()]
        self._lora = LeanLora(self._model.modules())

    @contextmanager
    def inference(self) -> Iterator[None]:
        """No gradients and every module in eval mode; afterwards each is as it was."""
        # Written past nn.Module's own attribute logic: model.eval() and .train() cost as much
        # as a tenth of a small model's forward pass, each.
        training = [state for state in self._states if state["training"]]
        for state in training:
            state["training"] = False
        try:
            with torch.inference_mode(), self._lora.active():
                yield
        finally:
            for state in training:
                state["training"] = True

    def __call__(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> Tensor:
        """Logits (rows, vocabulary) after the last column of ``ids`` (rows, columns)."""
        out = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: cache},
            **self._extra,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> PromptBlock:
        """Run whole prompts, padded on the left, and keep their keys, values and last logits."""
        width = max(map(len, prompts))
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        pad = (self._pad_id,)
        padded = torch.tensor([pad * (width - len(prompt)) + prompt for prompt in prompts])
        positions = torch.arange(width) - (width - lengths)[:, None]
        mask = None
        if int(lengths.min()) < width:
            column = torch.arange(width)
            real = positions >= 0
            # Padding sees itself, so that its (unused) values are finite.
            allowed = (real[:, None, :] & (column <= column[:, None])) | torch.eye(width).bool()
            mask = additive_mask(allowed[:, None].to(self.device), self.shape.dtype)
        buffers = self.shape.buffers(len(prompts), width)
        logits = self(
            padded.to(self.device),
            mask,
            positions.clamp(min=0).to(self.device),
            PrefillCache(self.shape, buffers),
        )
        return PromptBlock(buffers, lengths.numpy(), logits)

    def _learn(self) -> tuple[KvShape, int]:
        cache = ShapeCache()
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        logits = self(ids, None, ids, cache)
        shape = cache.shape()
        if shape is None:
            msg = "not every layer keeps plain keys and values"
            raise ValueError(msg)
        return shape, logits.shape[-1]

    def _gap(self) -> float:
        """How far logits with our cache are from the model's own without one, relatively.

        Catches what no configuration tells: positions taken from elsewhere than
        ``position_ids``, attention biases of the model's own, a cache used in another way.
        """
        step = max(1, self.vocabulary // 7)
        long = tuple(place * step % self.vocabulary for place in range(6))
        short = (*long[3:5], long[0])
        own = [
            self._model(input_ids=torch.tensor([ids], device=self.device)).logits[0, -1]
            for ids in (long, short)
        ]
        store = KvStore(self.shape)
        store.append(self.prefill([long[:-1], short[:-1]]), [0, 1], 2, 64)
        cache, mask, positions = store.decode_cache(2, 64)
        last = torch.tensor([long[-1:], short[-1:]], device=self.device)
        ours = self(last, mask, torch.from_numpy(positions).to(self.device), cache)
        expected = torch.stack(own).double()
        return float((ours.double() - expected).norm() / (expected - expected.mean()).norm())
