"""One causal language model as a function: from ids, mask, positions and cache to logits.

Here lie the differences between models that the samplers need not know: PEFT wrappers, the
names of arguments across transformers versions, which architectures' caches can be held.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from nbtrain.catalog.architecture import own_cache
from nbtrain.rollout.cache import (
    KvShape,
    KvStore,
    PrefillCache,
    PromptBlock,
    ShapeCache,
    additive_mask,
)
from nbtrain.rollout.lean_lora import LeanLora

__all__ = [
    "CausalForward",
    "ModelCall",
    "check_gap",
    "described",
    "packs",
    "refuse_unsupported",
]

_ATTENTION = ("sdpa", "eager")
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def refuse_unsupported(config: Any, max_context: int) -> None:
    """Raise ``ValueError`` for a model whose cache is not plain keys and values of all tokens.

    A sliding window at least ``max_context`` wide never slides and is let through.
    """
    reason = own_cache(described(config), max_context)
    if reason is not None:
        msg = (
            f"the model of type {config.model_type!r} {reason}, which the ragged sampler cannot "
            f"hold at max_context {max_context}"
        )
        raise ValueError(msg)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    attention = getattr(text, "_attn_implementation", None)
    if attention not in _ATTENTION:
        msg = f"attention implementation {attention!r} is not one of {', '.join(_ATTENTION)}"
        raise ValueError(msg)


def packs(config: Any, max_context: int) -> bool:
    """Whether the model takes several sequences in one row, kept apart by a 4D mask.

    True where every layer attends to all tokens of up to ``max_context``; a recurrent layer
    would carry its state from one sequence into the next, and a window has a mask of its own.
    """
    try:
        refuse_unsupported(config, max_context)
    except ValueError:
        return False
    return True


def described(config: Any) -> Mapping[str, Any]:
    """The configuration as its file would state it, with what transformers fills in by itself."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    stated: dict[str, Any] = text.to_dict()
    stated["layer_types"] = getattr(text, "layer_types", None)
    return stated


def check_gap(ours: Tensor, own: Tensor, dtype: torch.dtype, sampler: str) -> None:
    """Raise ``ValueError`` when logits with a cache are too far from the model's own without.

    Both are (rows, vocabulary). Catches what no configuration tells: positions taken from
    elsewhere than ``position_ids``, attention biases of the model's own, state kept in modules.
    """
    expected = own.double()
    gap = float((ours.double() - expected).norm() / (expected - expected.mean()).norm())
    limit = 0.1 if dtype.itemsize < 4 else 1e-3
    if not gap <= limit:
        msg = (
            f"the model's logits change by {gap:.2g} of their size (allowed: {limit}) when "
            f"it decodes with the {sampler} sampler's cache"
        )
        raise ValueError(msg)


class ModelCall:
    """A Hugging Face causal or image-text LM, wrapped by PEFT or not, called for sampling.

    The model itself is called, so adapters that are not merged apply.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        wrapper: Any = model
        inner = wrapper.get_base_model() if hasattr(model, "get_base_model") else wrapper
        # PEFT's wrapper adds nothing to the call where adapters lie in the layers themselves, yet
        # costs 3 % of a small model's decode step.
        prefixed = inner is not wrapper and wrapper.active_peft_config.is_prompt_learning
        self._called = wrapper if prefixed else inner
        names = inspect.signature(inner.forward).parameters
        self._takes_positions = "position_ids" in names
        self._cache_name = next((name for name in _CACHE_NAMES if name in names), _CACHE_NAMES[0])
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self._states: list[dict[str, Any]] = []
        self.device = next(model.parameters()).device
        kinds = {parameter.dtype for parameter in model.parameters()}
        self.dtype = min((d for d in kinds if d.is_floating_point), key=lambda d: d.itemsize)
        """The least precise type among the weights: what accuracy to expect of the logits."""
        self.refresh()

    def refresh(self) -> None:
        """Take in modules added to the model since (an adapter loaded later, say)."""
        modules = list(self._model.modules())
        self._states = [module.__dict__ for module in modules]
        self._lora = LeanLora(modules)

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

    def own_logits(self, ids: Sequence[int]) -> Tensor:
        """Logits (vocabulary,) after the last id by one pass without any cache."""
        inputs = torch.tensor([ids], device=self.device)
        logits: Tensor = self._model(input_ids=inputs, use_cache=False).logits[0, -1]
        return logits


class CausalForward(ModelCall):
    """Calls a model with keys and values that the ragged sampler holds.

    Their shape is learned by a first forward pass. Raises ``ValueError`` for a model that cannot
    be sampled this way.
    """

    def __init__(self, model: nn.Module, max_context: int, pad_id: int = 0) -> None:
        refuse_unsupported(model.config, max_context)
        super().__init__(model)
        self._pad_id = pad_id
        with self.inference():
            try:
                self.shape, self.vocabulary = self._learn()
                ours, own = self._probe()
            except (TypeError, ValueError, RuntimeError, AttributeError) as exc:
                msg = f"the model cannot be run with the ragged sampler's cache: {exc}"
                raise ValueError(msg) from exc
        check_gap(ours, own, self.dtype, "ragged")

    def __call__(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> Tensor:
        """Logits (rows, vocabulary) after the last column of ``ids`` (rows, columns)."""
        out = self._called(
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

    def _probe(self) -> tuple[Tensor, Tensor]:
        """Logits of two decoded rows with our cache, and the model's own."""
        step = max(1, self.vocabulary // 7)
        long = tuple(place * step % self.vocabulary for place in range(6))
        short = (*long[3:5], long[0])
        store = KvStore(self.shape)
        store.append(self.prefill([long[:-1], short[:-1]]), [0, 1], 2, 64)
        cache, mask, positions = store.decode_cache(2, 64)
        last = torch.tensor([long[-1:], short[-1:]], device=self.device)
        ours = self(last, mask, torch.from_numpy(positions).to(self.device), cache)
        return ours, torch.stack([self.own_logits(long), self.own_logits(short)])
