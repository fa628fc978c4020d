"""Which of our own decoders samples from a model."""

from __future__ import annotations

from typing import Any, Literal

from nbtrain.rollout.generate import GenerateSampler
from nbtrain.rollout.ragged import RaggedSampler

__all__ = ["Decoder", "decoder"]

Decoder = RaggedSampler | GenerateSampler


def decoder(
    model: Any, *, kind: Literal["ragged", "generate", "any"] = "any", **arguments: Any
) -> Decoder:
    """The ragged decoder, or the plain one where it cannot hold the model's cache.

    A model whose configuration promises a cache that the ragged decoder can hold may turn out to
    have another: ``any`` then samples with the plain one, ``ragged`` does not. ``arguments`` are
    those that both take.

    Raises
    ------
    ValueError
        When nothing that ``kind`` allows can decode this model.
    """
    if kind != "generate":
        try:
            return RaggedSampler(model, **arguments)
        except ValueError:
            if kind == "ragged":
                raise
    return GenerateSampler(model, **arguments)
