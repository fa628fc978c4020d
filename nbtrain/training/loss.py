"""The GRPO and GSPO loss over ragged tokens.

Sampled tokens of all trajectories stand one after another in flat vectors; ``segments`` says whose
each is. No padding and no tokens of the environment, so nothing is masked and lengths alone decide
every mean.

GRPO (Shao et al. 2024) clips a ratio per token; GSPO (Zheng et al. 2025) clips one ratio per
sequence, the exponential of the mean log-ratio of its tokens. Both average over a trajectory's
tokens first, then over trajectories, with one normaliser for the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence"]

IMPORTANCE_CAP = 2.0
"""Largest weight that corrects for a sampler whose log-probs differ from the trainer's."""


@dataclass(slots=True)
class Tokens:
    """Flat per-token vectors of S trajectories with T sampled tokens in all.

    ``new`` (T,) carries the gradient; ``old`` (T,) is ``None`` for tokens sampled wholly by the
    current policy, whose ratio is exactly 1; ``reference`` (T,) is needed when KL counts;
    ``mismatch`` (T,) is the log of trainer over sampler under the policy that sampled the token,
    0 where nothing is to be corrected, ``None`` when that is everywhere;
    ``segments`` (T,) holds trajectory numbers in [0, S), ``lengths`` (S,) their token counts.
    """

    new: Tensor
    segments: Tensor
    lengths: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None
    mismatch: Tensor | None = None


@dataclass(slots=True)
class LossParts:
    """The loss of a micro-batch, divided by the normaliser, and what is reported beside it.

    ``clipped``, ``kl`` and ``ratios`` are sums over tokens, ``ratio`` is the largest ratio;
    ``capped`` (T,) is true where the importance weight stands at its cap, ``None`` where there
    are no weights.
    """

    loss: Tensor
    clipped: Tensor
    ratio: Tensor
    ratios: Tensor
    kl: Tensor
    capped: Tensor | None


def policy_loss(
    tokens: Tokens,
    advantages: Tensor,
    *,
    level: Level,
    clip_low: float,
    clip_high: float,
    kl_beta: float = 0.0,
    normaliser: float,
) -> LossParts:
    """Clipped policy-gradient loss, to be summed over micro-batches.

    Parameters
    ----------
    tokens
        The micro-batch.
    advantages
        (S,), one per trajectory.
    level
        ``"token"`` (GRPO) or ``"sequence"`` (GSPO).
    clip_low, clip_high
        The ratio is clipped to [1 - clip_low, 1 + clip_high].
    kl_beta
        Weight of the k3 estimate of the KL to the reference policy (Schulman 2020); 0 is none.
    normaliser
        Trajectories in the whole step, over all micro-batches and ranks.

    Raises
    ------
    ValueError
        When KL counts and ``tokens`` has no reference.
    """
    old = tokens.new.detach() if tokens.old is None else tokens.old
    log_ratio = tokens.new - old
    if level == "sequence":
        log_ratio = _sequence_mean(log_ratio, tokens)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    advantage = advantages[tokens.segments]
    per_token = -torch.minimum(ratio * advantage, clipped * advantage)
    kl = torch.zeros((), dtype=per_token.dtype, device=per_token.device)
    capped = None
    if tokens.mismatch is not None:
        weight = importance(tokens, level)
        capped = weight > IMPORTANCE_CAP
        per_token = per_token * weight.clamp(max=IMPORTANCE_CAP)
    if kl_beta > 0:
        if tokens.reference is None:
            msg = "kl_beta > 0 needs the reference policy's log-probs"
            raise ValueError(msg)
        gap = tokens.reference - tokens.new
        k3 = gap.exp() - gap - 1
        per_token = per_token + kl_beta * k3
        kl = k3.detach().sum()
    weights = 1.0 / tokens.lengths[tokens.segments].to(per_token.dtype)
    with torch.no_grad():
        on_clip = ((ratio < 1 - clip_low) & (advantage < 0)) | (
            (ratio > 1 + clip_high) & (advantage > 0)
        )
    return LossParts(
        loss=(per_token * weights).sum() / normaliser,
        clipped=on_clip.sum(),
        ratio=ratio.detach().max(),
        ratios=ratio.detach().sum(),
        kl=kl,
        capped=capped,
    )


def importance(tokens: Tokens, level: Level) -> Tensor:
    """Importance weights (T,) before the cap, from ``tokens.mismatch``.

    Each algorithm corrects at the level at which it takes its ratio. GRPO's ratio is a token's,
    so is its weight. GSPO's is the geometric mean over a sequence: the product over all its tokens
    would stand at the cap or at 0 for every long sequence, and a weight per token would bring the
    variance back in that GSPO averages out. So its weight is the geometric mean too.
    """
    assert tokens.mismatch is not None
    if level == "sequence":
        return _sequence_mean(tokens.mismatch, tokens).exp()
    return tokens.mismatch.exp()


def _sequence_mean(values: Tensor, tokens: Tokens) -> Tensor:
    """Each token's trajectory's mean of ``values``, (T,)."""
    sums = torch.zeros_like(tokens.lengths, dtype=values.dtype)
    sums = sums.index_add(0, tokens.segments, values)
    return (sums / tokens.lengths)[tokens.segments]
