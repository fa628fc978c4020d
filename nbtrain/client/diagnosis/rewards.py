"""Rules about the reward: errors, terms that say nothing, signs that it is being gamed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from nbtrain.client.diagnosis.facts import Facts, figure, mean
from nbtrain.report.findings import Finding
from nbtrain.store import Row

_SOLVED = 0.8
_LONG_TEXT = 40  # characters from which two equal replies are no coincidence
_FEW = 5  # steps
_ERROR = 120  # characters of an error


def ungraded(facts: Facts) -> Iterator[Finding]:
    """Trajectories without a grade, and the error behind most of them."""
    finished = [t for t in facts.trajectories if t["reason"] in ("ENV_DONE", "ERROR")]
    lost = [t for t in finished if t["reward"] is None]
    share = len(lost) / len(finished) if finished else 0.0
    if share < 0.02:
        return
    errors = Counter((t["error"] or "no grade came").splitlines()[0] for t in lost)
    error, times = errors.most_common(1)[0]
    first = next(t for t in lost if (t["error"] or "no grade came").splitlines()[0] == error)
    yield Finding(
        "ungraded",
        "problem" if share >= 0.2 else "hint",
        f"{len(lost):,} of the last {len(finished):,} finished trajectories have no grade; "
        f"{times:,} of them say: {error[:_ERROR]}",
        f"Repair the reward: client.trajectories.list(…) has the .traceback of {first['ref']}.",
        ("reward_timeout_seconds",) if "time" in error.lower() else (),
        tuple(dict.fromkeys((first["ref"], *(t["ref"] for t in lost[-4:])))),
        weight=0.5 + 0.5 * share,
    )


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
    if facts.total("correct") > _SOLVED * facts.total("completed_trajectories"):
        return
    seen: Counter[tuple[int, str]] = Counter((group, text) for group, _, text in facts.texts)
    long = [t for t in facts.texts if len(t[2]) >= _LONG_TEXT]
    same = [t for t in long if seen[t[0], t[2]] > 1]
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
        f"Replies of the last {len(facts.recent)} steps are {length:.0f} tokens long on average, "
        f"of {limit:,} allowed.",
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
    noise = (0.5 / sum(n for *_, n in first) + 0.5 / sum(n for *_, n in last)) ** 0.5
    if ended - begun < max(0.1, 2 * noise):
        return
    yield Finding(
        "train–held-out gap",
        "problem" if rose <= 0 else "hint",
        f"Training reward runs away from the held-out one: the gap grew from {begun:+.2f} to "
        f"{ended:+.2f} while held-out reward moved by {rose:+.2f}.",
        "The tasks are learned by heart: pick an earlier checkpoint (run.best()), add tasks, or "
        "set kl_beta.",
        ("kl_beta", "num_steps"),
        steps=tuple(r["step"] for r in held[-3:]),
        weight=0.65,
    )


def _best(facts: Facts) -> tuple[str, ...]:
    graded = [t for t in facts.trajectories if t["reward"] is not None]
    last = graded[-1]["step"] if graded else 0
    newest = [t for t in graded if t["step"] == last]
    return tuple(t["ref"] for t in sorted(newest, key=lambda t: -t["reward"])[:3])


RULES = (ungraded, constant_terms, traded_terms, length_drift, duplicates, at_the_limit, gap)
