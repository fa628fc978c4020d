"""One optimizer update from one batch: pack, score, back-propagate, clip, step.

What teaches nothing is skipped before the backward pass: a trajectory of zero advantage has no
gradient at ``kl_beta`` 0. It still counts in the normaliser. A batch without any gradient skips
the update whole: no decay, no momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nbtrain.rollout.collector import JudgedGroup
from nbtrain.training.loss import Level, LossParts, Tokens, policy_loss
from nbtrain.training.packing import Packable, build_row, plan_rows
from nbtrain.training.policy import Policy

ROW_TOKENS = 768
"""Tokens of a packed row. Attention in a row is dense, so cost grows with its square."""


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """What an update needs of the plan."""

    level: Level
    clip_low: float
    clip_high: float
    kl_beta: float
    temperature: float
    max_grad_norm: float
    row_tokens: int = ROW_TOKENS


@dataclass(slots=True)
class UpdateReport:
    """What an update did. ``skipped`` is the reason when no weight moved; sums are over tokens."""

    applied: bool
    skipped: str | None
    metrics: dict[str, Any]
    finite: bool = True
    """False when the loss or the gradient was not finite, which is why nothing was applied."""

    @property
    def loss(self) -> float | None:
        """Loss over the batch, ``None`` when nothing was measured."""
        value = self.metrics.get("loss")
        return None if value is None else float(value)


class Updater:
    """Owns the optimizer. ``tick`` is called between micro-batches and raises to stop a run."""

    def __init__(
        self,
        policy: Policy,
        settings: UpdateSettings,
        *,
        weight_decay: float,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy = policy
        self.settings = settings
        self._tick = tick
        self.optimizer = torch.optim.AdamW(
            list(policy.trainable.values()), lr=0.0, weight_decay=weight_decay
        )

    def update(self, groups: Sequence[JudgedGroup], learning_rate: float) -> UpdateReport:
        """Train on ``groups``, each trajectory sampled wholly by the current policy.

        Groups and trajectories are taken in the order of their ids.
        """
        members = [
            (trajectory, advantage)
            for judged in sorted(groups, key=lambda judged: judged.group.group_id)
            for trajectory, admission, advantage in zip(
                judged.group.trajectories, judged.admissions, judged.advantages, strict=True
            )
            if admission.eligible
        ]
        if not members:
            return UpdateReport(False, "no eligible group", {})
        kept = [
            (trajectory, advantage)
            for trajectory, advantage in members
            if trajectory.token_ids and (advantage != 0.0 or self.settings.kl_beta > 0)
        ]
        if not kept:
            return UpdateReport(False, "no gradient: every advantage is 0", {})
        self.optimizer.zero_grad(set_to_none=True)
        metrics = self._backward(kept, normaliser=len(members))
        advantages = [advantage for _, advantage in members]
        metrics["advantage_mean_abs"] = sum(map(abs, advantages)) / len(advantages)
        return self._apply(metrics, learning_rate)

    def _backward(self, kept: list[Any], *, normaliser: int) -> dict[str, Any]:
        items = [Packable(t.prompt_ids, tuple(t.token_ids), advantage) for t, advantage in kept]
        sums = dict.fromkeys(("loss", "clipped", "kl", "entropy", "gap", "tokens"), 0.0)
        largest = 0.0
        for plan in plan_rows(items, row_tokens=self.settings.row_tokens):
            self._tick()
            row = build_row(plan, items, self.policy.device)
            new, entropy = self.policy.logprobs(row, temperature=self.settings.temperature)
            reference = None
            if self.settings.kl_beta > 0:
                with torch.no_grad():
                    reference, _ = self.policy.logprobs(
                        row, temperature=self.settings.temperature, adapter=False
                    )
            parts = self._loss(row, items, new, reference, normaliser)
            torch.autograd.backward(parts.loss)
            sampled = [x for number in row.members for x in kept[number][0].logprobs]
            gap = (new.detach() - torch.tensor(sampled, device=new.device)).abs().sum()
            sums["loss"] += float(parts.loss.detach())
            sums["clipped"] += float(parts.clipped)
            sums["kl"] += float(parts.kl)
            sums["entropy"] += float(entropy.sum())
            sums["gap"] += float(gap)
            sums["tokens"] += len(sampled)
            largest = max(largest, float(parts.ratio))
        tokens = sums["tokens"]
        return {
            "loss": sums["loss"],
            "clipped_share": sums["clipped"] / tokens,
            "kl": sums["kl"] / tokens if self.settings.kl_beta > 0 else None,
            "entropy": sums["entropy"] / tokens,
            "sampler_gap": sums["gap"] / tokens,
            "ratio_max": largest,
            "trained_tokens": int(tokens),
            "trained_trajectories": len(kept),
            "batch_trajectories": normaliser,
        }

    def _loss(
        self, row: Any, items: list[Packable], new: Any, reference: Any, normaliser: int
    ) -> LossParts:
        advantages = torch.tensor(
            [items[number].advantage for number in row.members],
            dtype=new.dtype,
            device=new.device,
        )
        return policy_loss(
            Tokens(new, row.segments, row.lengths, None, reference),
            advantages,
            level=self.settings.level,
            clip_low=self.settings.clip_low,
            clip_high=self.settings.clip_high,
            kl_beta=self.settings.kl_beta,
            normaliser=normaliser,
        )

    def _apply(self, metrics: dict[str, Any], learning_rate: float) -> UpdateReport:
        norm = float(
            torch.nn.utils.clip_grad_norm_(
                list(self.policy.trainable.values()), self.settings.max_grad_norm
            )
        )
        metrics["grad_norm"] = norm
        if not (math.isfinite(norm) and math.isfinite(metrics["loss"])):
            self.optimizer.zero_grad(set_to_none=True)
            return UpdateReport(False, "loss or gradient is not finite", metrics, finite=False)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return UpdateReport(True, None, metrics)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Moments and step counts by ``<parameter>|<name>``; empty before any update."""
        flat = {}
        for name, parameter in self.policy.trainable.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                flat[f"{name}|{key}"] = torch.as_tensor(value).detach().to("cpu", copy=True)
        return flat

    def load_optimizer_state(self, flat: dict[str, torch.Tensor]) -> None:
        """Strict counterpart of :meth:`optimizer_state`. Raises ``ValueError`` when it misfits."""
        by_name: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in flat.items():
            name, _, part = key.rpartition("|")
            by_name.setdefault(name, {})[part] = value
        unknown = by_name.keys() - self.policy.trainable.keys()
        if unknown or (by_name and by_name.keys() != self.policy.trainable.keys()):
            msg = "the optimizer state does not belong to this adapter"
            raise ValueError(msg)
        self.optimizer.state.clear()
        for name, state in by_name.items():
            parameter = self.policy.trainable[name]
            self.optimizer.state[parameter] = {
                part: value.clone() if part == "step" else value.to(parameter.device, copy=True)
                for part, value in state.items()
            }
