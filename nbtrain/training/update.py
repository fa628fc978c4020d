"""One optimizer update from one batch: lay out, score, back-propagate, sum, clip, step.

What teaches nothing is skipped before the backward pass: a trajectory of zero advantage has no
gradient at ``kl_beta`` 0. It still counts in the normaliser. A batch without any gradient skips
the update whole: no decay, no momentum. With several ranks every decision is taken on figures of
all of them, so that each does the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nbtrain.rollout.collector import JudgedGroup
from nbtrain.rollout.ranks import Alone, Ranks
from nbtrain.training.history import AdapterHistory
from nbtrain.training.loss import Level, LossParts, Tokens, policy_loss
from nbtrain.training.packing import DEFAULT, Layout, Part, Unit
from nbtrain.training.policy import Policy
from nbtrain.training.prefix import plan_units
from nbtrain.training.ratios import Below, Member, OldPolicies


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """What an update needs of the plan."""

    level: Level
    clip_low: float
    clip_high: float
    kl_beta: float
    temperature: float
    max_grad_norm: float
    layout: Layout = DEFAULT


@dataclass(slots=True)
class UpdateReport:
    """What an update did. ``skipped`` is the reason when no weight moved."""

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


_SUMS = (
    "members",
    "kept",
    "advantages",
    "loss",
    "tokens",
    "clipped",
    "ratios",
    "kl",
    "entropy",
    "gap",
    "compared",
    "stale",
    "lags",
    "recomputed",
    "capped",
    "unkept",
)
_MAXIMA = ("ratio_max", "lag_max")
_REFERENCE = 0
"""The only version that the KL reference is kept under."""


class Updater:
    """Owns the optimizer.

    ``tick`` is called between micro-batches and raises to stop a run. ``ranks`` train together:
    the loss's normaliser, the gradient, what is skipped and the metrics are those of all.
    ``history`` is needed below fp32 when batches may hold tokens of older policies; the updater
    keeps the current adapter in it before each update. KL is taken to the base model, until
    :meth:`refer_to` names an adapter.
    """

    def __init__(
        self,
        policy: Policy,
        settings: UpdateSettings,
        *,
        weight_decay: float,
        tick: Callable[[], None] = lambda: None,
        ranks: Ranks | None = None,
        history: AdapterHistory | None = None,
    ) -> None:
        self.policy = policy
        self.settings = settings
        self.history = history
        self.reference: AdapterHistory | None = None
        self._tick = tick
        self._ranks = ranks or Alone()
        self._parameters = list(policy.trainable.values())
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=0.0,
            weight_decay=weight_decay,
            fused=policy.device.type in ("cpu", "cuda"),
        )

    def refer_to(self, kept: Mapping[str, Tensor] | None = None) -> None:
        """Take KL to the adapter as it stands now, or to the one that ``reference`` had kept."""
        self.reference = AdapterHistory(self.policy.trainable, 1)
        if kept is None:
            self.reference.keep(_REFERENCE)
        else:
            self.reference.load(kept)

    def update(
        self, groups: Sequence[JudgedGroup], learning_rate: float, *, version: int
    ) -> UpdateReport:
        """Train on this rank's ``groups``; ``version`` is the policy version of the weights.

        Groups and trajectories are taken in the order of their ids. Tokens may be of ``version``
        or older.

        Raises
        ------
        ValueError
            When a token claims a later version.
        """
        if self.history is not None:
            self.history.keep(version)
        advantages, members = self._members(groups, version)
        counts = [
            sum(column)
            for column in zip(*self._ranks.gather((len(advantages), len(members))), strict=True)
        ]
        if not counts[0]:
            return UpdateReport(False, "no eligible group", {})
        if not counts[1]:
            return UpdateReport(False, "no gradient: every advantage is 0", {})
        gradient = self._attach_gradient()
        try:
            totals = self._backward(members, normaliser=counts[0], version=version)
            totals |= {
                "members": len(advantages),
                "kept": len(members),
                "advantages": sum(map(abs, advantages)),
            }
            self._ranks.sum([gradient])
            return self._apply(gradient, self._metrics(totals), learning_rate)
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def _members(
        self, groups: Sequence[JudgedGroup], version: int
    ) -> tuple[list[float], list[Member]]:
        """Advantages of all eligible trajectories, and those of them that have a gradient."""
        eligible = [
            (trajectory, advantage)
            for judged in sorted(groups, key=lambda judged: judged.group.group_id)
            for trajectory, admission, advantage in sorted(
                zip(judged.group.trajectories, judged.admissions, judged.advantages, strict=True),
                key=lambda row: row[0].trajectory_id,
            )
            if admission.eligible
        ]
        members = [
            Member.of(trajectory, advantage, version)
            for trajectory, advantage in eligible
            if trajectory.output_tokens and (advantage != 0.0 or self.settings.kl_beta > 0)
        ]
        return [advantage for _, advantage in eligible], members

    def _attach_gradient(self) -> Tensor:
        """One zeroed vector, of which every parameter's gradient is a view."""
        sizes = [parameter.numel() for parameter in self._parameters]
        first = self._parameters[0]
        flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        for parameter, piece in zip(self._parameters, torch.split(flat, sizes), strict=True):
            parameter.grad = piece.view_as(parameter)
        return flat

    def _backward(
        self, members: list[Member], *, normaliser: int, version: int
    ) -> dict[str, float]:
        items = [member.item for member in members]
        units = plan_units(items, self.settings.layout, self.policy.device, packs=self.policy.packs)
        old = OldPolicies(members, version=version, history=self.history, exact=self.policy.exact)
        old.recompute(units, lambda unit: self._scored(unit))
        totals = dict.fromkeys(_SUMS + _MAXIMA, 0.0)
        for member in members:
            totals["stale"] += sum(lag > 0 for lag in member.lags)
            totals["lags"] += sum(member.lags)
            totals["lag_max"] = max(totals["lag_max"], *member.lags)
        for unit in units:
            references = self._references(unit)
            for number, (part, new, entropy) in enumerate(self._scored(unit)):
                below = old.below(part, new)
                parts = self._loss(part, members, new, below, references[number], normaliser)
                torch.autograd.backward(parts.loss)
                _add(totals, parts, below, float(entropy.sum()), len(new))
        return totals

    def _scored(self, unit: Unit, *, adapter: bool = True) -> Any:
        for part, new, entropy in self.policy.scored(
            unit, temperature=self.settings.temperature, adapter=adapter
        ):
            self._tick()
            yield part, new, entropy

    def _references(self, unit: Unit) -> list[Tensor | None]:
        """Log-probs under the reference, part by part; ``None`` where KL does not count."""
        if self.settings.kl_beta == 0:
            return [None] * len(unit.parts)
        with torch.no_grad():
            if self.reference is None:
                return [new for _, new, _ in self._scored(unit, adapter=False)]
            with self.reference.using(_REFERENCE):
                return [new for _, new, _ in self._scored(unit)]

    def _loss(
        self,
        part: Part,
        members: list[Member],
        new: Tensor,
        below: Below,
        reference: Tensor | None,
        normaliser: int,
    ) -> LossParts:
        advantages = torch.tensor(
            [members[number].advantage for number in part.members],
            dtype=new.dtype,
            device=new.device,
        )
        return policy_loss(
            Tokens(new, part.segments, part.lengths, below.old, reference, below.mismatch),
            advantages,
            level=self.settings.level,
            clip_low=self.settings.clip_low,
            clip_high=self.settings.clip_high,
            kl_beta=self.settings.kl_beta,
            normaliser=normaliser,
        )

    def _metrics(self, totals: dict[str, float]) -> dict[str, Any]:
        """Figures of all ranks. Shares and means are over trained tokens unless named otherwise."""
        every = self._ranks.gather(totals)
        total = {name: math.fsum(one[name] for one in every) for name in _SUMS}
        tokens = total["tokens"]
        return {
            "loss": total["loss"],
            "clipped_share": total["clipped"] / tokens,
            "ratio_max": max(one["ratio_max"] for one in every),
            "ratio_mean": total["ratios"] / tokens,
            "kl": total["kl"] / tokens if self.settings.kl_beta > 0 else None,
            "entropy": total["entropy"] / tokens,
            "sampler_gap": _share(total["gap"], total["compared"]),
            "stale_token_share": total["stale"] / tokens,
            "stale_unkept_share": total["unkept"] / tokens,
            "lag_mean": total["lags"] / tokens,
            "lag_max": int(max(one["lag_max"] for one in every)),
            "importance_capped_share": _share(total["capped"], total["recomputed"]),
            "trained_tokens": int(tokens),
            "trained_trajectories": int(total["kept"]),
            "batch_trajectories": int(total["members"]),
            "advantage_mean_abs": total["advantages"] / total["members"],
        }

    def _apply(
        self, gradient: Tensor, metrics: dict[str, Any], learning_rate: float
    ) -> UpdateReport:
        norm = float(gradient.norm())
        metrics["grad_norm"] = norm
        if not (math.isfinite(norm) and math.isfinite(metrics["loss"])):
            return UpdateReport(False, "loss or gradient is not finite", metrics, finite=False)
        if norm > self.settings.max_grad_norm:
            gradient.mul_(self.settings.max_grad_norm / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        before = [parameter.detach().clone() for parameter in self._parameters]
        self.optimizer.step()
        moved = [p.detach() - b for p, b in zip(self._parameters, before, strict=True)]
        metrics["update_norm"] = float(torch.nn.utils.get_total_norm(moved))
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
                part: value.to(parameter.device, copy=True) for part, value in state.items()
            }


def _add(
    totals: dict[str, float], parts: LossParts, below: Below, entropy: float, tokens: int
) -> None:
    loss, clipped, largest, ratios, kl = torch.stack(
        [
            value.detach().to(torch.float64)
            for value in (parts.loss, parts.clipped, parts.ratio, parts.ratios, parts.kl)
        ]
    ).tolist()
    if parts.capped is not None and below.recomputed is not None:
        totals["recomputed"] += int(below.recomputed.sum())
        totals["capped"] += int((parts.capped & below.recomputed).sum())
    for name, value in (
        ("loss", loss),
        ("clipped", clipped),
        ("ratios", ratios),
        ("kl", kl),
        ("entropy", entropy),
        ("tokens", tokens),
        ("gap", below.gap),
        ("compared", below.compared),
        ("unkept", below.unkept),
    ):
        totals[name] += value
    totals["ratio_max"] = max(totals["ratio_max"], largest)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
