"""What every sampler refuses, whatever it samples with."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from nbtrain.rollout.types import SampleRequest

__all__ = ["check_request", "check_requests", "end_table"]


def end_table(
    eos_ids: Collection[int], vocabulary: int, *, slots: int, max_context: int
) -> npt.NDArray[np.bool_]:
    """Which ids end a reply, (vocabulary,). Raises ``ValueError`` for an argument out of range."""
    if slots < 1 or max_context < 2:
        msg = f"slots is {slots} and must be at least 1, max_context {max_context} at least 2"
        raise ValueError(msg)
    is_end = np.zeros(vocabulary, np.bool_)
    for eos in eos_ids:
        if not 0 <= eos < vocabulary:
            msg = f"end id {eos} is outside the vocabulary of {vocabulary}"
            raise ValueError(msg)
        is_end[eos] = True
    return is_end


def check_requests(
    requests: Sequence[SampleRequest], taken: Collection[int], max_context: int, vocabulary: int
) -> None:
    """:func:`check_request` for each; their ids must differ from one another and the taken."""
    new: set[int] = set()
    for request in requests:
        if request.request_id in taken or request.request_id in new:
            msg = f"request id {request.request_id} is taken"
            raise ValueError(msg)
        new.add(request.request_id)
        check_request(request, max_context, vocabulary)


def check_request(request: SampleRequest, max_context: int, vocabulary: int) -> None:
    """Raise ``ValueError`` for a request that cannot be sampled as it stands.

    The prompt must leave room for one token within ``max_context`` and hold ids below
    ``vocabulary``; an id outside would end a GPU's whole context, not just this request.
    """
    prompt = request.prompt_ids
    if not 0 < len(prompt) < max_context:
        _refuse(
            request,
            f"the prompt has {len(prompt)} tokens; allowed: 1 to {max_context - 1} "
            f"(max_context {max_context} less one)",
        )
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocabulary:
        _refuse(request, f"prompt id {low if low < 0 else high} is not in the vocabulary")
    if request.max_new_tokens < 1:
        _refuse(request, f"max_new_tokens is {request.max_new_tokens}; allowed: at least 1")
    if not 0 <= request.temperature < math.inf:
        _refuse(request, f"temperature is {request.temperature}; allowed: 0 or more")
    if not 0 < request.top_p <= 1:
        _refuse(request, f"top_p is {request.top_p}; allowed: above 0, at most 1")
    if request.top_k != -1 and request.top_k < 1:
        _refuse(request, f"top_k is {request.top_k}; allowed: -1, or at least 1")


def _refuse(request: SampleRequest, why: str) -> None:
    msg = f"request {request.request_id}: {why}"
    raise ValueError(msg)
