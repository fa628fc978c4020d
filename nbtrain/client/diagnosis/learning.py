"""Rules about the update: does the reward move, the rate, the ratios, entropy, the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from nbtrain.client.diagnosis.facts import Facts, mean, the_last
from nbtrain.plan.fields import counted
from nbtrain.plan.options import OPTIONS
from nbtrain.report.findings import Finding
from nbtrain.report.series import first_and_last

_ENOUGH = 20  # steps
_SURE = 3.0  # standard errors
_SOLVED = 0.95
_FEW = 5  # steps
_WARM = 10  # steps that may well be slow
_RATE = float(OPTIONS["learning_rate"].default)
_STILL = 1e-6  # norm of an update, all weights together


def trend(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Slope per step by least squares, and its standard error.

    Neighbouring steps are alike, so that n of them count as n (1 - ρ) / (1 + ρ), with ρ the
    residuals' correlation with their neighbours.
    """
    n = len(points)
    mean_x = sum(x for x, _ in points) / n
    mean_y = sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if n < 3 or spread == 0:
        return 0.0, math.inf
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    residuals = [y - mean_y - slope * (x - mean_x) for x, y in points]
    squares = sum(r * r for r in residuals)
    if squares == 0:
        return slope, 0.0
    rho = min(0.95, max(0.0, sum(a * b for a, b in pairwise(residuals)) / squares))
    return slope, math.sqrt(squares / (n - 2) / spread * (1 + rho) / (1 - rho))


def reward_moves(facts: Facts) -> Iterator[Finding]:
    """Whether the reward rises, falls, or does not move beyond its noise."""
    points = [(s, r) for s, r in facts.rewards if r is not None and math.isfinite(r)]
    if len(points) < _ENOUGH:
        return
    slope, error = trend(points)
    first, last, each = first_and_last(points) or (points[0][1], points[-1][1], 1)
    told = f"{first:.3f} → {last:.3f} (first and last {counted(each, 'step')})"
    if slope > _SURE * error:
        yield Finding("learning", "fine", f"It is learning: reward {told}.", weight=0.9)
    elif slope < -_SURE * error:
        yield Finding(
            "reward falls",
            "problem",
            f"The reward falls: {told}, {-slope:.2g} a step (standard error {error:.1g}).",
            "Lower learning_rate, set kl_beta, or go on from an earlier checkpoint (run.best()).",
            ("learning_rate", "kl_beta"),
            weight=0.9,
        )
    elif last < _SOLVED or not facts.unit_scale:
        yield Finding(
            "flat reward",
            "hint",
            f"The reward does not move beyond its noise: {told}, {slope:+.1g} a step "
            f"(standard error {error:.1g}).",
            "When groups do differ in their rewards: raise learning_rate or batch_size, or train "
            "longer.",
            ("learning_rate", "batch_size", "num_steps"),
            weight=0.6,
        )


def small_rate(facts: Facts) -> Iterator[Finding]:
    """The reward does not move, and neither do the weights."""
    points = [(s, r) for s, r in facts.rewards if r is not None and math.isfinite(r)]
    rate, norm = facts.option("learning_rate"), mean(facts.values("update_norm"))
    if len(points) < _FEW or rate is None or not facts.updates_applied:
        return
    slope, error = trend(points)
    solved = facts.unit_scale and (mean([r for _, r in points[-_FEW:]]) or 0.0) >= _SOLVED
    if abs(slope) > _SURE * error or solved:
        return
    moved = "" if norm is None else f"; an update moves the weights by {norm:.1g} in all"
    if rate < _RATE / 50:
        yield Finding(
            "small learning rate",
            "problem" if len(points) >= _ENOUGH else "hint",
            f"The reward does not move, and learning_rate is {rate:g}, {_RATE / rate:,.0f} times "
            f"smaller than the default of {_RATE:g}{moved}.",
            f"Raise learning_rate, for example to {_RATE:g}.",
            ("learning_rate",),
            weight=0.78,
        )
    elif norm is not None and norm < _STILL:
        yield Finding(
            "tiny updates",
            "hint",
            f"The reward does not move{moved} (update_norm), at a learning_rate of {rate:g}.",
            "Gradients that small come from rewards that hardly differ, or from an adapter that "
            "reaches little (lora_target_modules).",
            ("learning_rate", "lora_target_modules"),
            weight=0.62,
        )


def warm_up(facts: Facts) -> Iterator[Finding]:
    """The learning rate was a small part of its base value all along."""
    warm, base = facts.option("lr_warmup_steps") or 0, facts.option("learning_rate")
    rates = facts.values("learning_rate", facts.steps)
    if not rates or not base or not facts.updates_applied or max(rates) >= base / 5:
        return
    done = facts.completed_steps
    if facts.total_steps <= warm:
        top = facts.total_steps / warm
        yield Finding(
            "too few steps",
            "hint",
            f"{'The one step lies' if facts.total_steps == 1 else 'All steps lie'} within the "
            f"warm-up of {counted(warm, 'step')}: the learning rate ends at {top:.0%} of {base:g}.",
            f"Raise num_steps above {warm:,}, or lower lr_warmup_steps.",
            ("num_steps", "lr_warmup_steps"),
            weight=0.72,
        )
    elif len(rates) > _WARM and done < warm and not facts.is_over:
        yield Finding(
            "warming up",
            "hint",
            f"The learning rate is still warming up: {rates[-1]:.2g} after step {done:,} of "
            f"{warm:,}, {rates[-1] / base:.0%} of {base:g}.",
            "Wait, or lower lr_warmup_steps next time.",
            ("lr_warmup_steps",),
            weight=0.35,
        )


def no_decay(facts: Facts) -> Iterator[Finding]:
    """Held-out reward fell from its best, and the rate never decays."""
    flat = (facts.option("lr_warmup_steps") or 0) + (facts.option("lr_hold_steps") or 0)
    held = [
        (r["step"], r["held_out_reward"], r["expected_samples"] or 1)
        for r in facts.rounds
        if r["round_completed"] and r["held_out_reward"] is not None
    ]
    if flat < facts.total_steps or len(held) < 3:
        return
    step, top, samples = max(held, key=lambda point: point[1])
    last = held[-1][1]
    if top - last > max(0.05, 2 * math.sqrt(0.5 / samples)):
        yield Finding(
            "no decay",
            "hint",
            f"Held-out reward fell from {top:.3f} at step {step} to {last:.3f}, and the learning "
            f"rate never decays: warm-up and hold take {flat:,} of {facts.total_steps:,} steps.",
            "Lower lr_hold_steps, so that the rate falls towards the end.",
            ("lr_hold_steps", "lr_min_ratio"),
            steps=(step, held[-1][0]),
            weight=0.5,
        )


def clipped(facts: Facts) -> Iterator[Finding]:
    """Most ratios are clipped."""
    share = mean(facts.values("clipped_share"))
    if share is not None and share > 0.5:
        yield Finding(
            "clipped",
            "problem",
            f"{share:.0%} of the ratios of {the_last(len(facts.recent), 'step')} were clipped: "
            "most of what was sampled taught nothing.",
            f"Raise clip_low and clip_high (now {facts.option('clip_low')} and "
            f"{facts.option('clip_high')}), or lower learning_rate or max_staleness.",
            ("clip_low", "clip_high", "learning_rate", "max_staleness"),
            weight=share,
        )


def sampler_gap(facts: Facts) -> Iterator[Finding]:
    """Sampler and trainer disagree about the same weights."""
    gap = mean(facts.values("sampler_gap"))
    if gap is not None and gap > 0.05:
        yield Finding(
            "sampler gap",
            "problem" if gap > 0.3 else "hint",
            f"Sampler and trainer differ by {gap:.3f} nats a token on the same weights.",
            "precision fp32 closes the gap; so does another sampler, where the model allows it.",
            ("precision", "sampler"),
            weight=min(1.0, 0.4 + gap),
        )


def entropy(facts: Facts) -> Iterator[Finding]:
    """The policy has become nearly certain."""
    first, last = facts.ends()
    begun, ended = mean(facts.values("entropy", first)), mean(facts.values("entropy", last))
    if begun and ended is not None and ended < 0.1 * begun:
        yield Finding(
            "entropy collapse",
            "hint" if facts.is_learned else "problem",
            f"Entropy fell from {begun:.3g} to {ended:.3g} nats a token: replies to a task are all "
            "alike by now.",
            "Raise temperature or set kl_beta; lower learning_rate.",
            ("temperature", "kl_beta", "learning_rate"),
            weight=0.6,
        )


def divergence(facts: Facts) -> Iterator[Finding]:
    """The policy is far from where it started."""
    kl = mean(facts.values("kl"))
    if kl is not None and kl > 1.0:
        yield Finding(
            "divergence",
            "hint",
            f"The policy is {kl:.2f} nats a token from its reference.",
            "Raise kl_beta or lower learning_rate.",
            ("kl_beta", "learning_rate"),
            weight=0.5,
        )


def gradient(
    facts: Facts,
    *,
    needs: str = "rewards that differ and an adapter",
    calmer: str = "batch_size",
    weight: float = 0.8,
) -> Iterator[Finding]:
    """The gradient is always clipped, or nothing.

    ``needs`` are what it comes from, ``calmer`` the setting that averages over more.
    """
    norms, limit = facts.values("grad_norm"), facts.option("max_grad_norm")
    if len(norms) < 5:
        return
    if max(norms) == 0.0:
        yield Finding(
            "no gradient",
            "problem",
            f"The gradient of the last {len(norms)} updates is exactly 0.",
            f"It comes from {needs} on the right modules (lora_target_modules).",
            ("lora_target_modules",),
            weight=weight,
        )
    elif limit and min(norms) > limit:
        yield Finding(
            "gradient clipped",
            "hint",
            f"Every one of the last {len(norms)} gradients was scaled down to {limit:g}; their "
            f"norms were {min(norms):.2g} to {max(norms):.2g}.",
            f"Raise max_grad_norm, or {calmer} for calmer gradients.",
            ("max_grad_norm", calmer),
            weight=0.3,
        )


RULES = (
    *(
        reward_moves,
        small_rate,
        warm_up,
        no_decay,
        clipped,
        sampler_gap,
        entropy,
        divergence,
        gradient,
    ),
)
