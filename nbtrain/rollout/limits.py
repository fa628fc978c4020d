"""How replies are sampled and what bounds a trajectory. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nbtrain.rollout.types import Finish, TerminationReason

__all__ = ["Sampling", "ending", "room", "with_model_defaults"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How replies are sampled.

    ``max_new_tokens`` bounds a reply, ``max_trajectory_tokens`` all replies of a trajectory,
    ``max_context`` prompt, replies and what the environment says together, and ``max_turns`` the
    turns of agent and environment. ``timeout`` bounds the seconds of execution: sampling,
    environment and grading; waiting for a slot or a process, and constructing and resetting the
    environment, do not count.
    """

    max_new_tokens: int
    max_trajectory_tokens: int
    max_context: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    timeout: float = math.inf
    max_turns: int = 1_000_000


def room(sampling: Sampling, *, held: int, sampled: int) -> int:
    """Tokens the next reply may have, at most 0 when it may have none.

    ``held`` are the tokens of the whole sequence so far, ``sampled`` those of its replies.
    """
    return min(
        sampling.max_new_tokens,
        sampling.max_trajectory_tokens - sampled,
        sampling.max_context - held,
    )


def ending(sampling: Sampling, finish: Finish, *, sampled: int) -> TerminationReason | None:
    """Why a trajectory ends with a reply that finished so; ``None`` when the reply is whole."""
    if finish is Finish.STOP:
        return None
    if finish is Finish.CANCELLED:
        return TerminationReason.CANCELLED
    return full(sampling, sampled=sampled)


def full(sampling: Sampling, *, sampled: int) -> TerminationReason:
    """The name of the limit that leaves no room: the trajectory's own, or turn and context."""
    if sampled >= sampling.max_trajectory_tokens:
        return TerminationReason.LIMIT_REACHED
    return TerminationReason.TRUNCATION


def with_model_defaults(
    sampling: Sampling, *, top_p: float | None, top_k: int | None, model: dict[str, float | None]
) -> Sampling:
    """Fill ``null`` top-p and top-k with the model's own generation settings (none: no cut)."""
    own_p, own_k = model.get("top_p"), model.get("top_k")
    p = top_p if top_p is not None else (1.0 if own_p is None else float(own_p))
    k = top_k if top_k is not None else (-1 if not own_k else int(own_k))
    return replace(sampling, top_p=p, top_k=k)


def under_budget(sampling: Sampling, budget: int | None) -> Sampling:
    """``sampling`` with a trajectory's output tokens bounded by ``budget`` where there is one."""
    if budget is None:
        return sampling
    return replace(sampling, max_trajectory_tokens=min(sampling.max_trajectory_tokens, budget))
