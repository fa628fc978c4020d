"""The contract of samplers on the plain one, over every kind of cache; and what is its own."""

from __future__ import annotations

from collections.abc import Sequence

from sampler_contract import SamplerContract
from tiny_models import OWN_CACHE, PAD
from torch import nn

from nbtrain.rollout.generate import GenerateSampler
from nbtrain.rollout.types import Sampler


class TestGenerate(SamplerContract):
    families = ("llama", *OWN_CACHE)

    def make(
        self,
        model: nn.Module,
        *,
        slots: int = 8,
        eos_ids: Sequence[int] = (),
        max_context: int = 128,
    ) -> Sampler:
        return GenerateSampler(
            model, slots=slots, eos_ids=eos_ids, pad_id=PAD, max_context=max_context
        )
