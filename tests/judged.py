"""Batches of judged groups for an updater, made up at random, and a small policy to train."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tiny_models import tiny_model

from nbtrain.rollout.admission import Admission, GroupOutcome, GroupVerdict, advantages
from nbtrain.rollout.collector import JudgedGroup
from nbtrain.rollout.types import Group, TerminationReason, Trajectory
from nbtrain.training.policy import Policy


def tiny_policy(
    folder: Path,
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float64,
    noise: float = 0.2,
    seed: int = 1,
) -> Policy:
    """A tiny random model under an adapter that changes its scores."""
    if not (folder / "config.json").exists():
        tiny_model(family).save_pretrained(folder)
    policy = Policy.load(
        folder,
        precision="fp32",
        lora_rank=4,
        lora_alpha=8,
        target_modules="default",
        seed=seed,
        device=torch.device("cpu"),
    )
    policy.model.to(dtype)
    shake(policy, noise, seed=3)
    return policy


def shake(policy: Policy, noise: float, *, seed: int) -> None:
    """Move every weight of the adapter at random."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            step = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
            parameter.add_(step.to(parameter.dtype) * noise)


def judged(
    number: int,
    rewards: Sequence[float | None],
    *,
    lengths: Sequence[int] = (3, 7, 1, 5),
    prompt: int = 5,
    observed: bool = False,
    version: int = 0,
    first_id: int | None = None,
) -> JudgedGroup:
    """A group of one trajectory per reward; ``None`` is a trajectory that is not eligible."""
    rng = random.Random(number)
    prompt_ids = tuple(rng.randrange(5, 60) for _ in range(prompt))
    group = Group(number, number, f"{number:016x}", 0)
    for sample, reward in enumerate(rewards):
        count = lengths[sample % len(lengths)]
        ids = [rng.randrange(5, 60) for _ in range(count)]
        spans = [(1, 3)] if observed and count > 4 else []
        seen = {place for start, stop in spans for place in range(start, stop)}
        group.trajectories.append(
            Trajectory(
                trajectory_id=(100 * number if first_id is None else first_id) + sample,
                group_id=number,
                sample=sample,
                prompt_ids=prompt_ids,
                token_ids=ids,
                logprobs=[0.0 if n in seen else -rng.uniform(1, 5) for n in range(count)],
                versions=[-1 if n in seen else version for n in range(count)],
                reason=TerminationReason.ENV_DONE,
                reward=reward,
                observed=spans,
            )
        )
    eligible = [reward for reward in rewards if reward is not None]
    spread = iter(advantages(eligible))
    return JudgedGroup(
        group,
        [Admission(reward is not None, reward, "") for reward in rewards],
        GroupVerdict(True, None, "", len(set(eligible)) == 1, False, False),
        [0.0 if reward is None else next(spread) for reward in rewards],
        GroupOutcome.USED,
        "",
    )
