"""Rules about the reward: terms that say nothing, signs that it is being gamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from nbtrain.client.diagnosis.facts import Facts, figure, mean, the_last
from nbtrain.client.diagnosis.signal import repeated
from nbtrain.report.findings import Finding
from nbtrain.store import Row

_SOLVED = 0.8
_LONG_TEXT = 40  # characters from which two equal replies are no coincidence
_FEW = 5  # steps
_ENOUGH_HELD_OUT = 30  # samples of a round


def _terms(facts: Facts) -> dict[str, list[float | None]]:
    """Each term's mean by step, ``None`` where a step does not have it."""
    told = [figure(step, "terms") or {} for step in facts.steps]
    names = dict.fromkeys(name for terms in told for name in terms)
    return {name: [terms.get(name) for terms in told] for name in names}


def constant_terms(facts: Facts) -> Iterator[Finding]:
    """Terms that never change, or never come."""
    terms = _terms(facts)
    for name, values in terms.items():
        known = [v for v in values if v is not None]
        if len(values) < _FEW:
            return
        only = len(terms) == 1
        if not known:
            sentence = f"The reward term {name} gave no score in {len(values)} steps."
        elif len(known) >= _FEW and max(known) == min(known) and (only or known[0] <= 0):
            sentence = (
                f"The reward term {name} is {known[0]:.3g} on average in every one of "
                f"{len(known)} steps, so it tells no reply from another."
            )
        else:
            continue
        yield Finding(
            "silent term",
            "problem" if only else "hint",
            sentence,
            f"Try the term by hand on a few replies of run.texts(): what should score, and why "
            f"does {name} not?",
            steps=(facts.steps[-1]["step"],),
            trajectories=tuple(t["ref"] for t in facts.trajectories[-3:]),
            weight=0.7 if only else 0.4,
        )


def traded_terms(facts: Facts) -> Iterator[Finding]:
    """One term rises while others fall."""
    first, last = facts.ends()
    if not first:
        return
    moved = {}
    for name in _terms(facts):
        begun, ended = (_mean_term(part, name) for part in (first, last))
        if begun is not None and ended is not None:
            moved[name] = (begun, ended)
    up = [name for name, (a, b) in moved.items() if b - a > 0.1]
    down = [name for name, (a, b) in moved.items() if a - b > 0.1]
    if up and down:
        told = ", ".join(f"{n} {moved[n][0]:.2f} → {moved[n][1]:.2f}" for n in (*up, *down))
        yield Finding(
            "one term dominates",
            "hint",
            f"From the first to the last fifth of the run one reward term grew at the cost of "
            f"another: {told}.",
            "Read a few replies (run.texts()); lower the weight of what grows, or make the reward "
            "a product.",
            trajectories=_best(facts),
            weight=0.6,
        )


def _mean_term(steps: Sequence[Row], name: str) -> float | None:
    scores = [(figure(step, "terms") or {}).get(name) for step in steps]
    return mean([score for score in scores if score is not None])


def length_drift(facts: Facts) -> Iterator[Finding]:
    """Replies become much longer or much shorter."""
    first, last = facts.ends()
    begun, ended = mean(facts.values("tokens_mean", first)), mean(facts.values("tokens_mean", last))
    if not begun or ended is None or abs(ended / begun - 1) <= 0.5:
        return
    longer = ended > begun
    yield Finding(
        "length drift",
        "hint",
        f"Replies became {'longer' if longer else 'shorter'}: {begun:.0f} → {ended:.0f} tokens on "
        "average from the first to the last fifth of the run.",
        "Read a few of them (run.texts()): is it better work, or does the reward pay for "
        f"{'length' if longer else 'brevity'}?",
        trajectories=_best(facts),
        weight=0.5,
    )


def duplicates(facts: Facts) -> Iterator[Finding]:
    """The same long reply several times in a group.

    Silent where nearly all replies are right: a task that is solved has one answer.
    """
    right = facts.total("correct") > _SOLVED * facts.total("completed_trajectories")
    if right and facts.unit_scale:
        return
    long = [t for t in facts.texts if len(t[2]) >= _LONG_TEXT]
    same = repeated(facts, _LONG_TEXT)
    if len(long) < 8 or len(same) < 0.5 * len(long):
        return
    yield Finding(
        "duplicates",
        "hint",
        f"{len(same)} of the {len(long)} long replies of the last step are word for word those of "
        "another one in their group.",
        "Raise temperature: equal replies earn equal rewards and teach nothing.",
        ("temperature",),
        tuple(ref for _, ref, _ in same[:5]),
        tuple(dict.fromkeys(group for group, _, _ in same))[:5],
        weight=0.55,
    )


def at_the_limit(facts: Facts) -> Iterator[Finding]:
    """Replies fill what they are given."""
    names = ("max_output_tokens_per_turn", "max_output_tokens_per_trajectory")
    limit = min((n for name in names if (n := facts.option(name))), default=None)
    length = mean(facts.values("tokens_mean"))
    if limit is None or length is None or len(facts.recent) < _FEW or length < 0.9 * limit:
        return
    yield Finding(
        "length at limit",
        "hint",
        f"Replies of {the_last(len(facts.recent), 'step')} are {length:.0f} tokens long on "
        f"average, of {limit:,} allowed.",
        "Raise the limit, or pay for an end within it.",
        names,
        weight=0.45,
    )


def gap(facts: Facts) -> Iterator[Finding]:
    """Training reward runs away from the held-out one."""
    by_step = dict(facts.rewards)
    pairs = []
    held = [r for r in facts.rounds if r["round_completed"] and r["held_out_reward"] is not None]
    edges = [facts.start_step, *(r["step"] for r in held)]
    for (before, at), round_ in zip(pairwise(edges), held, strict=True):
        known = [v for s in range(before + 1, at + 1) if (v := by_step.get(s)) is not None]
        trained = mean(known)
        if trained is not None:
            pairs.append((trained, round_["held_out_reward"], round_["expected_samples"] or 1))
    third = len(pairs) // 3
    if third < 2:
        return
    first, last = pairs[:third], pairs[-third:]
    begun = sum(t - h for t, h, _ in first) / third
    ended = sum(t - h for t, h, _ in last) / third
    rose = sum(h for _, h, _ in last) / third - sum(h for _, h, _ in first) / third
    # Every round has the same tasks: more rounds are not more of them
    samples = min(n for *_, n in pairs)
    spread = _spread(facts)
    noise = spread * (2 / samples) ** 0.5
    if samples < _ENOUGH_HELD_OUT or ended - begun < max(0.2 * spread, 2 * noise):
        return
    grew = (
        f"the gap grew from {begun:+.2f} to {ended:+.2f} while held-out reward moved by {rose:+.2f}"
    )
    learns = rose > noise
    yield Finding(
        "train–held-out gap",
        "hint" if learns else "problem",
        f"Held-out reward rises too, but more slowly than that of training: {grew}."
        if learns
        else f"Training reward runs away from the held-out one: {grew}.",
        "More tasks carry over better; run.best() names the checkpoint that does best."
        if learns
        else "The tasks are learned by heart: pick an earlier checkpoint (run.best()), add tasks, "
        "or set kl_beta.",
        ("num_steps",) if learns else ("kl_beta", "num_steps"),
        steps=tuple(r["step"] for r in held[-3:]),
        weight=0.4 if learns else 0.65,
    )


def _spread(facts: Facts) -> float:
    """Standard deviation of a sample's reward: as recorded, else the most that 0 to 1 allow."""
    return mean(facts.values("reward_std", facts.steps)) or 0.5


def _best(facts: Facts) -> tuple[str, ...]:
    graded = [t for t in facts.trajectories if t["reward"] is not None]
    last = graded[-1]["step"] if graded else 0
    newest = [t for t in graded if t["step"] == last]
    return tuple(t["ref"] for t in sorted(newest, key=lambda t: -t["reward"])[:3])


RULES = (constant_terms, traded_terms, length_drift, duplicates, at_the_limit, gap)
