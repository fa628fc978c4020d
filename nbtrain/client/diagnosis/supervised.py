"""Rules about supervised runs: does the loss fall, does the validation loss, and if not, why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from nbtrain.client.diagnosis import learning
from nbtrain.client.diagnosis.facts import Facts, figure, mean, the_last
from nbtrain.client.diagnosis.learning import trend
from nbtrain.plan.fields import counted
from nbtrain.report.findings import Finding
from nbtrain.report.series import first_and_last
from nbtrain.store import Row

_ENOUGH = 10  # steps from which a trend is told
_SURE = 3.0  # standard errors
_TINY = 0.05  # nats a token: nothing is left to learn
_SMALL = 0.02  # of the validation loss: what two rounds may differ by
_FELL = 0.05  # of the training loss: what counts as falling where its trend is sure
_CLEARLY = 0.1  # of the training loss: what nobody would call flat
_MEMORISED = 0.1  # of the validation loss: what it rises by where rows are learned by heart
_RATE = 1e-4  # the default
_FEW_TOKENS = 32  # trained tokens of an update
_FEW_UPDATES = 10


def _points(facts: Facts) -> list[tuple[int, float]]:
    return [(s, v) for s, v in facts.losses if v is not None and math.isfinite(v)]


def _rounds(facts: Facts) -> list[Row]:
    return [r for r in facts.rounds if r["round_completed"] and r["loss"] is not None]


def _read(reading: Row) -> str:
    told = f"{reading['loss']:.3f}"
    perplexity = reading.get("perplexity")
    return told if perplexity is None else f"{told} (perplexity {perplexity:.4g})"


def not_finite(facts: Facts) -> Iterator[Finding]:
    """Losses or gradients that are no numbers."""
    lost = [s for s, v in facts.losses if v is None or not math.isfinite(v)]
    named = [s["step"] for s in facts.steps if "grad_norm" in (figure(s, "nonfinite") or ())]
    steps = sorted({*lost, *named})
    if steps:
        rows = _rows_of(facts, steps[-1])
        yield Finding(
            "not finite",
            "problem",
            f"The loss or the gradient is not finite in {counted(len(steps), 'step')}, first in "
            f"step {steps[0]:,}{rows}.",
            "Lower learning_rate; when it is the first step, look at its rows, and train in fp32 "
            "where bf16 overflows.",
            ("learning_rate",),
            steps=tuple(steps[:5]),
            weight=0.97,
        )


def _rows_of(facts: Facts, step: int) -> str:
    found = [figure(s, "row_ids") for s in facts.steps if s["step"] == step]
    return f" (rows {', '.join(map(str, found[0][:5]))} …)" if found and found[0] else ""


def loss_moves(facts: Facts) -> Iterator[Finding]:
    """Whether the training loss falls, rises, or does not move beyond its noise."""
    points = _points(facts)
    moved = first_and_last(points)
    if len(points) < _ENOUGH or moved is None:
        return
    slope, error = trend(points)
    first, last, each = moved
    told = f"loss {first:.3f} → {last:.3f} (first and last {counted(each, 'step')})"
    if slope > _SURE * error and last > (1 + _FELL) * first:
        yield Finding(
            "loss rises",
            "problem",
            f"The training loss rises: {told}, {slope:.2g} a step (standard error {error:.1g}).",
            "Lower learning_rate, or raise warmup_ratio.",
            ("learning_rate", "warmup_ratio"),
            weight=0.9,
        )
    elif _falls(points):
        rounds = _rounds(facts)
        held = f"; validation loss {_read(rounds[0])} → {_read(rounds[-1])}" if rounds else ""
        rows = f", and none of {facts.train_tasks:,} rows was dropped" if facts.train_tasks else ""
        yield Finding("learning", "fine", f"It is learning: {told}{held}{rows}.", weight=0.9)
    elif last > _TINY and _is_flat(points):
        # What goes on from a checkpoint may have little left to learn
        yield Finding(
            "flat loss",
            "hint" if facts.start_step else "problem",
            f"The training loss does not fall: {told}, {slope:+.1g} a step (standard error "
            f"{error:.1g}).",
            "Raise learning_rate, or lora_rank; look at what is trained: "
            "client.datasets.preview(…) marks it.",
            ("learning_rate", "lora_rank"),
            weight=0.7,
        )


def _falls(points: Sequence[tuple[int, float]]) -> bool:
    moved = first_and_last(points)
    if len(points) < 3 or moved is None:
        return False
    slope, error = trend(points)
    first, last, _ = moved
    return slope < -_SURE * error or last < (1 - 2 * _CLEARLY) * first


def _is_flat(points: Sequence[tuple[int, float]]) -> bool:
    """Whether the loss may be said not to fall; between that and falling nothing is said."""
    moved = first_and_last(points)
    fell = moved is not None and moved[1] < (1 - _CLEARLY) * moved[0]
    return not fell and not _falls(points)


def memorising(facts: Facts) -> Iterator[Finding]:
    """The pair to read: training loss falls while validation loss does not."""
    rounds, points = _rounds(facts), _points(facts)
    moved = first_and_last(points)
    if len(rounds) < 3 or moved is None:
        return
    first, last, _ = moved
    best = min(rounds, key=lambda r: (r["loss"], r["step"]))
    now = rounds[-1]
    rose = now["loss"] - best["loss"]
    if first - last <= _FELL * first or not _falls(points):
        return
    pair = f"training loss fell from {first:.3f} to {last:.3f}"
    if rose > _SMALL * best["loss"]:
        yield Finding(
            "memorising",
            "problem" if rose > _MEMORISED * best["loss"] else "hint",
            f"It memorises: {pair} while validation loss rose from {_read(best)} at step "
            f"{best['step']:,} to {_read(now)} at step {now['step']:,}.",
            f"Keep the checkpoint at or near step {best['step']:,} (run.best()); next time fewer "
            "epochs, more rows, or lora_dropout.",
            ("epochs", "max_steps", "lora_dropout"),
            steps=(best["step"], now["step"]),
            weight=0.86,
        )
    elif abs(now["loss"] - rounds[0]["loss"]) <= _SMALL * rounds[0]["loss"]:
        yield Finding(
            "memorising",
            "hint",
            f"{pair[0].upper()}{pair[1:]} while validation loss stayed at {_read(now)}: what is "
            "learned of these rows does not carry over.",
            "More rows, or rows nearer to those of the validation dataset.",
            steps=(rounds[0]["step"], now["step"]),
            weight=0.66,
        )


def known_already(facts: Facts) -> Iterator[Finding]:
    """The loss is next to nothing from the first step on."""
    begun = mean([v for _, v in _points(facts)[:3]])
    if begun is None or begun >= _TINY or facts.start_step:
        return
    yield Finding(
        "nothing to learn",
        "problem",
        f"The loss is {begun:.4f} in the first steps already: what is trained is known to the "
        "model, or is trivial.",
        "Look at what is trained: client.datasets.preview(…) marks it. A mask that leaves only "
        "the end of a turn looks like this.",
        weight=0.83,
    )


def small_rate(facts: Facts) -> Iterator[Finding]:
    """A learning rate near nothing."""
    rate = facts.option("learning_rate")
    if not facts.updates_applied or rate is None or rate >= _RATE / 50:
        return
    if not _is_flat(_points(facts)):
        return
    yield Finding(
        "small learning rate",
        "problem" if len(facts.losses) >= _ENOUGH else "hint",
        f"The loss does not fall, and learning_rate is {rate:g}, {_RATE / rate:,.0f} times smaller "
        f"than the default of {_RATE:g}.",
        f"Raise learning_rate, for example to {_RATE:g}.",
        ("learning_rate",),
        weight=0.8,
    )


def warm_up(facts: Facts) -> Iterator[Finding]:
    """The learning rate was a small part of its peak all along."""
    base, ratio = facts.option("learning_rate"), facts.option("warmup_ratio") or 0.0
    rates = facts.values("learning_rate", facts.steps)
    warm = math.ceil(ratio * facts.total_steps)
    if not rates or not base or max(rates) >= base / 2 or facts.completed_steps >= warm:
        return
    yield Finding(
        "warming up",
        "hint",
        f"The learning rate is still warming up: {rates[-1]:.2g} after step "
        f"{facts.completed_steps:,} of {warm:,}, {rates[-1] / base:.0%} of {base:g}.",
        "Wait, or lower warmup_ratio next time.",
        ("warmup_ratio",),
        weight=0.35,
    )


def few_tokens(facts: Facts) -> Iterator[Finding]:
    """A loss that does not fall in updates that rest on few trained tokens."""
    trained, read = mean(facts.values("trained_tokens")), mean(facts.values("tokens"))
    if trained is None or trained >= _FEW_TOKENS or len(facts.recent) < 3:
        return
    if not _is_flat(_points(facts)):
        return
    of = f" of {read:,.0f} read" if read else ""
    yield Finding(
        "few trained tokens",
        "problem" if len(facts.losses) >= _ENOUGH else "hint",
        f"The loss does not fall, and an update rests on {trained:,.0f} trained tokens{of} on "
        f"average of {the_last(len(facts.recent), 'step')}.",
        "Raise gradient_accumulation, or train on more of each row: assistant_turns: all.",
        ("gradient_accumulation", "assistant_turns"),
        weight=0.75,
    )


def few_updates(facts: Facts) -> Iterator[Finding]:
    """A run of a handful of updates."""
    updates = facts.total_steps - facts.start_step
    micro, passes = facts.option("micro_batch_per_gpu"), facts.option("gradient_accumulation")
    if updates >= _FEW_UPDATES or not micro or not passes or facts.smoke:
        return
    yield Finding(
        "few updates",
        "hint",
        f"The run makes {counted(updates, 'update')} of {micro * passes:,} sequences from "
        f"{facts.train_tasks:,} rows: hardly enough to learn from.",
        "Lower gradient_accumulation, or raise epochs.",
        ("gradient_accumulation", "epochs"),
        weight=0.45,
    )


def part_of_the_rows(facts: Facts) -> Iterator[Finding]:
    """A run that ends before it has seen every row once."""
    last = facts.values("epoch")
    if not facts.is_over or not last or last[-1] >= 1 or facts.smoke or facts.start_step:
        return
    yield Finding(
        "rows not seen",
        "hint",
        f"The run went through {last[-1]:.0%} of its {facts.train_tasks:,} rows; the others "
        "taught nothing.",
        "Raise max_steps, or leave it out.",
        ("max_steps",),
        weight=0.4,
    )


def gradient(facts: Facts) -> Iterator[Finding]:
    """The gradient is nothing, or always clipped."""
    return learning.gradient(facts, needs="an adapter", calmer="gradient_accumulation", weight=0.85)


def validation(facts: Facts) -> Iterator[Finding]:
    """Validation that is absent, cut off, or takes a large share of the time."""
    if not facts.validates and not facts.smoke:
        yield Finding(
            "no validation",
            "hint",
            "There is no validation dataset: nothing tells learning from memorising, and "
            "run.best() has nothing to go by.",
            "State validation_dataset: rows that do not train.",
            ("validation_dataset",),
            weight=0.42,
        )
    cut = [r for r in facts.rounds if not r["round_completed"]]
    if cut:
        last = cut[-1]
        yield Finding(
            "validation cut off",
            "hint",
            f"{counted(len(cut), 'validation round')} did not complete; the latest read "
            f"{last['completed_samples'] or 0:,} of {last['expected_samples'] or 0:,} rows.",
            "Only complete rounds are compared.",
            steps=tuple(r["step"] for r in cut[-5:]),
            weight=0.4,
        )
    spent = {n: v for s in facts.recent for n, v in _seconds(s).items()}
    total = {name: facts.total(name) for name in spent}
    share = total.get("seconds_validation", 0.0) / sum(total.values()) if any(total.values()) else 0
    every = facts.option("validation_frequency_steps") or 1
    if share > 0.4:
        yield Finding(
            "validation cost",
            "hint",
            f"{share:.0%} of the time of {the_last(len(facts.recent), 'step')} goes into "
            f"validation, every {counted(every, 'step')}.",
            "Raise validation_frequency_steps, or validate on fewer rows.",
            ("validation_frequency_steps",),
            weight=0.4 * share,
        )


def _seconds(step: Row) -> dict[str, float]:
    found = step.get("metrics") or {}
    return {name: value for name, value in found.items() if name.startswith("seconds_")}


RULES = (
    *(not_finite, loss_moves, memorising, known_already, small_rate, warm_up, few_tokens),
    *(few_updates, part_of_the_rows, gradient, validation),
)
