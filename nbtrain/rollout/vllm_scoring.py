"""Which log-probs vLLM can report: one way of scoring for a whole engine, chosen beforehand.

vLLM scores a sampled token either before everything ("raw": temperature 1, nothing cut) or after
everything ("processed": at the temperature, but renormalised over what top-p and top-k left).
The loss needs the temperature and no cut. Without cuts the second is that; at temperature 1 the
first is. With both, the logits can be scaled inside the model, where its class reads
``logit_scale``: then temperature 1 is the wanted one, for every request of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nbtrain.errors import Problem, StartChecksFailed

__all__ = ["Drawing", "Scoring"]

_LOWEST_TEMPERATURE = 0.01
"""vLLM silently raises lower ones to this."""

_READ_LOGIT_SCALE = frozenset({"LlamaForCausalLM"})
"""Architectures whose vLLM class reads ``logit_scale``, as far as that is tested."""


class Drawing(Protocol):
    """How tokens are drawn: a request, or the settings of many."""

    @property
    def temperature(self) -> float:
        """0 is greedy."""
        ...

    @property
    def top_p(self) -> float:
        """1 cuts nothing."""
        ...

    @property
    def top_k(self) -> int:
        """-1 cuts nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Scoring:
    """How an engine scores what it samples.

    ``mode`` is vLLM's ``logprobs_mode``. ``scaled`` is the temperature by which the model itself
    divides its logits, ``None`` where it does not.
    """

    mode: str
    scaled: float | None = None

    @classmethod
    def of(cls, drawings: Sequence[Drawing], architecture: str) -> Scoring:
        """The scoring that is right for all ``drawings`` on a model of this architecture.

        Raises
        ------
        StartChecksFailed
            When no single one is.
        """
        found = [cls("processed_logprobs"), cls("raw_logprobs")]
        if architecture in _READ_LOGIT_SCALE:
            found += [cls("raw_logprobs", d.temperature) for d in drawings if d.temperature > 0]
        for scoring in found:
            if all(scoring.refusal(drawing) is None for drawing in drawings):
                return scoring
        raise StartChecksFailed([_no_scoring(drawings, architecture)])

    def refusal(self, drawing: Drawing) -> str | None:
        """Why the log-probs of this drawing would be others than the loss needs, else ``None``."""
        greedy = drawing.temperature == 0
        cut = not greedy and (drawing.top_p < 1 or drawing.top_k != -1)
        if 0 < drawing.temperature < _LOWEST_TEMPERATURE:
            return (
                f"temperature is {drawing.temperature}; allowed with vLLM: 0, or at least "
                f"{_LOWEST_TEMPERATURE}"
            )
        if self.scaled is not None:
            if drawing.temperature != self.scaled:
                return f"temperature is {drawing.temperature}; this engine samples at {self.scaled}"
        elif self.mode == "raw_logprobs":
            if drawing.temperature not in (0, 1):
                return f"temperature is {drawing.temperature}; this engine samples at 0 or 1"
        elif cut:
            return (
                f"top_p is {drawing.top_p} and top_k {drawing.top_k}; this engine samples with "
                "top_p 1 and top_k -1"
            )
        return None


def _no_scoring(drawings: Sequence[Drawing], architecture: str) -> Problem:
    low = [d for d in drawings if 0 < d.temperature < _LOWEST_TEMPERATURE]
    if low:
        return Problem(
            field="temperature",
            message="the temperature is too low for the vLLM sampler",
            found=low[0].temperature,
            allowed=f"0, or at least {_LOWEST_TEMPERATURE}",
            hint="Or set sampler to 'ragged'",
        )
    settings = dict.fromkeys((d.temperature, d.top_p, d.top_k) for d in drawings)
    said = "; ".join(f"temperature {t:g} with top_p {p:g} and top_k {k}" for t, p, k in settings)
    return Problem(
        field="sampler",
        message=f"vLLM cannot report the log-probs needed for {said} on a {architecture}",
        found="vllm",
        allowed="top_p 1 and top_k -1, or temperature 1, in training and validation alike",
        hint="Change top_p and top_k, or temperature (and val_…), or set sampler to 'ragged'",
    )
