"""Choosing tokens: one uniform per token from a reply's own stream, inverse CDF, log-probs.

A reply's uniforms are a function of its stream alone, and the choice is a search in the
cumulative distribution in vocabulary order. So the sampled ids depend on the stream and the
policy; which other replies share the batch matters only where rounding tips a uniform that lies at
the edge between two tokens (never seen in fp32, 2 of 1,024 replies in bf16).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["UNIFORMS_PER_BLOCK", "choose", "choose_rows", "uniforms"]

UNIFORMS_PER_BLOCK = 64

_CHUNK = 256
_WHOLE_CUMSUM = 2048
"""Widest vocabulary whose cumulative sum is taken whole; wider ones go by chunks of 256."""

_TOP_P_CANDIDATES = 1024
"""Top-p looks at this many most likely ids first; a full sort of 50k ids costs 20 times more."""


def uniforms(stream: Sequence[int], block: int) -> npt.NDArray[np.float64]:
    """Uniforms in [0, 1) number ``64 * block`` to ``64 * block + 63`` of a stream, 53 bits each.

    The extendable hash of the stream's integers and the block number: nothing is carried from
    token to token, so a reply's place in its stream is just the count of its tokens.
    """
    key = ",".join(map(str, stream)) + f":{block}"
    digest = hashlib.shake_128(key.encode()).digest(8 * UNIFORMS_PER_BLOCK)
    return np.ldexp((np.frombuffer(digest, dtype="<u8") >> 11).astype(np.float64), -53)


def choose(
    logits: Tensor, uniform: Tensor, temperature: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor]:
    """Choose one id for each row of ``logits`` (rows, vocabulary).

    ``uniform`` (rows,) float64 in [0, 1) decides each row's choice; it is unused at
    ``temperature`` 0, which takes the most likely id. ``top_k`` -1 and ``top_p`` 1 cut nothing;
    with both, top-p counts within what top-k left.

    Returns ids (rows,) int64 and log-probs (rows,) of these ids under the full softmax at
    ``temperature`` (at 1 for greedy) before any cut, in fp32; float64 logits stay float64.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 0:
        top, ids = wide.max(-1)
        return ids, top - wide.logsumexp(-1)
    if temperature != 1:
        wide = wide / temperature
    probabilities = wide.softmax(-1)
    allowed = probabilities
    if top_p < 1 or 0 < top_k < wide.shape[-1]:
        allowed = _cut(probabilities, top_p, top_k)
    ids = _inverse_cdf(allowed, uniform)
    return ids, probabilities.gather(-1, ids[:, None]).squeeze(-1).log()


def choose_rows(
    logits: Tensor,
    uniform: npt.NDArray[np.float64],
    settings: Sequence[tuple[float, float, int]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.floating]]:
    """:func:`choose` for rows each with a temperature, top-p and top-k of its own; on the host."""
    drawn = torch.from_numpy(uniform).to(logits.device)
    if settings.count(settings[0]) == len(settings):
        ids, logprobs = choose(logits, drawn, *settings[0])
    else:
        ids = torch.empty(len(settings), dtype=torch.long, device=logits.device)
        logprobs = torch.empty(len(settings), dtype=torch.double, device=logits.device)
        for same in dict.fromkeys(settings):
            rows = [row for row, each in enumerate(settings) if each == same]
            some = choose(logits[rows], drawn[rows], *same)
            ids[rows], logprobs[rows] = some[0], some[1].double()
    if ids.device.type == "cpu":
        return ids.numpy(), logprobs.numpy()
    # One transfer, one wait for the device: float64 holds every id exactly.
    both = torch.stack((ids.double(), logprobs.double())).cpu().numpy()
    return both[0].astype(np.int64), both[1]


def _cut(probabilities: Tensor, top_p: float, top_k: int) -> Tensor:
    """The probabilities with everything outside top-k, then top-p, set to 0."""
    vocabulary = probabilities.shape[-1]
    limited = 0 < top_k < vocabulary
    width = top_k if limited else min(vocabulary, _TOP_P_CANDIDATES)
    values, ids = probabilities.topk(width)
    cumulative = values.cumsum(-1)
    if not limited and width < vocabulary and bool((cumulative[:, -1] < top_p).any()):
        values, ids = probabilities.sort(descending=True, stable=True)
        cumulative = values.cumsum(-1)
    if top_p < 1:
        total = cumulative[:, -1:] if limited else 1.0
        # An id stays while the more likely ones before it have not reached top_p together.
        values = torch.where(cumulative - values < top_p * total, values, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, ids, values)


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first id whose cumulative weight exceeds ``uniform`` times the total weight."""
    # Below one in the weights' own precision, so that the search never runs past the end.
    below_one = 1 - torch.finfo(weights.dtype).eps / 2
    share = uniform.to(weights.dtype).clamp_(max=below_one)[:, None]
    vocabulary = weights.shape[-1]
    if vocabulary <= _WHOLE_CUMSUM:
        cumulative = weights.cumsum(-1)
        target = share * cumulative[:, -1:]
        return torch.searchsorted(cumulative, target, right=True).squeeze(-1)

    # A cumulative sum over the vocabulary is scalar work; sums of chunks are vectorised, and
    # only the chunk that holds the target is looked at in detail.
    whole = vocabulary - vocabulary % _CHUNK
    sums = weights[:, :whole].reshape(len(weights), -1, _CHUNK).sum(-1)
    if whole < vocabulary:
        sums = torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True)), -1)
    cumulative = sums.cumsum(-1)
    target = share * cumulative[:, -1:]
    chunk = torch.searchsorted(cumulative, target, right=True)
    rest = target - (cumulative.gather(-1, chunk) - sums.gather(-1, chunk))
    ids = chunk * _CHUNK + torch.arange(_CHUNK, device=weights.device)
    inside = weights.gather(-1, ids.clamp(max=vocabulary - 1)).masked_fill_(ids >= vocabulary, 0)
    cumulative = inside.cumsum(-1)
    # Summed in another order the chunk may come out a rounding smaller than the target's rest.
    rest = torch.minimum(rest, below_one * cumulative[:, -1:])
    found = torch.searchsorted(cumulative, rest, right=True)
    return ids.gather(-1, found).squeeze(-1)
