"""The policy: a frozen base model with a LoRA adapter that is never merged into it.

Deltas merged into bf16 weights mostly round away (93 to 98 % of an early update), so sampling,
scoring and training all go through the unmerged adapter. The base's weights stand in the plan's
precision, the adapter in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor

from nbtrain.rollout.forward import packs
from nbtrain.training.adapted import AdaptedModel, attach_adapter, load_tokenizer
from nbtrain.training.base_weights import DTYPES, load_base
from nbtrain.training.packing import Part, Unit
from nbtrain.training.prefix import keeps_apart, scored
from nbtrain.training.scoring import Scorer

__all__ = ["Policy", "load_tokenizer"]

NO_LIMIT = 1 << 40


class Policy(AdaptedModel):
    """Base model, adapter and device. ``model`` is the PEFT model that sampling and loss share.

    ``packs`` tells whether trajectories may share rows and prompts: the configuration allows it
    up to ``max_context`` tokens (default: any number), and a trial shows that this model's scores
    do not change by it. Otherwise every trajectory runs in a plain row of its own.
    """

    def __init__(
        self, model: PeftModel, device: torch.device, *, max_context: int | None = None
    ) -> None:
        super().__init__(model, device)
        self._scorer = Scorer(model)
        limit = NO_LIMIT if max_context is None else max_context
        self.packs = packs(model.config, limit) and keeps_apart(self._scorer, device)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        precision: str,
        lora_rank: int,
        lora_alpha: float,
        target_modules: str,
        seed: int,
        device: torch.device,
        max_context: int | None = None,
    ) -> Policy:
        """Load the base from ``folder`` and attach a fresh adapter, initialised from ``seed``.

        Raises
        ------
        StartChecksFailed
            When ``target_modules`` matches no linear module of the model, or the model is of no
            kind that can be trained.
        """
        base = load_base(folder, dtype=DTYPES[precision], device=device)
        model = attach_adapter(
            base,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            target_modules=target_modules,
            seed=seed,
        )
        model.eval()  # the adapter has no dropout; nothing else may be random either
        return cls(model, device, max_context=max_context)

    @property
    def exact(self) -> bool:
        """Whether every weight has 32 bits or more: sampler and trainer then agree to rounding."""
        return all(parameter.dtype.itemsize >= 4 for parameter in self.model.parameters())

    def scored(
        self, unit: Unit, *, temperature: float, adapter: bool = True
    ) -> Iterator[tuple[Part, Tensor, Tensor]]:
        """Each part of ``unit`` with its tokens' log-probs and entropies, both (T,).

        In fp32, or in the model's own precision where that is higher, under the full softmax at
        ``temperature`` (1 for greedy); ``adapter=False`` scores the base. With gradients on, a
        part must be back-propagated before the next is asked for, and the iterator run to its end.
        """
        return scored(self._scorer, unit, temperature=temperature, adapter=adapter)
