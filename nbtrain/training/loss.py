"""The GRPO and GSPO loss over ragged tokens.

Tokens of all trajectories stand one after another in flat vectors; ``segments`` says whose each
is. No padding, so nothing is masked and lengths alone decide every mean.

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


@dataclass(slots=True)
class Tokens:
    """Flat per-token vectors of S trajectories with T tokens in all.

    ``new`` (T,) carries the gradient; ``old`` (T,) is ``None`` for tokens sampled wholly by the
    current policy, whose ratio is exactly 1; ``reference`` (T,) is needed when KL counts;
    ``segments`` (T,) holds trajectory numbers in [0, S), ``lengths`` (S,) their token counts.
    """

    new: Tensor
    segments: Tensor
    lengths: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None


@dataclass(slots=True)
class LossParts:
    """The loss of a micro-batch; what is reported beside it is a sum over tokens."""

    loss: Tensor
    clipped: Tensor
    ratio: Tensor
    kl: Tensor


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

    Returns
    -------
    LossParts
        ``loss`` is already divided by the normaliser; ``clipped`` and ``kl`` are sums over
        tokens, ``ratio`` the largest ratio.
    """
    old = tokens.new.detach() if tokens.old is None else tokens.old
    log_ratio = tokens.new - old
    if level == "sequence":
        sums = torch.zeros_like(tokens.lengths, dtype=log_ratio.dtype)
        sums = sums.index_add(0, tokens.segments, log_ratio)
        log_ratio = (sums / tokens.lengths)[tokens.segments]
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    advantage = advantages[tokens.segments]
    objective = torch.minimum(ratio * advantage, clipped * advantage)
    per_token = -objective
    kl = torch.zeros((), dtype=per_token.dtype, device=per_token.device)
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
        kl=kl,
    )
