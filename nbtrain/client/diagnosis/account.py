"""Rules about time: what the seconds went into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from nbtrain.client.diagnosis.facts import Facts, figure, mean
from nbtrain.plan.fields import counted
from nbtrain.report.findings import Finding

_PARTS = ("sampling", "grading", "environment", "waiting", "loss", "validation", "saving")


def validation(facts: Facts) -> Iterator[Finding]:
    """Validation takes a large share of the time."""
    spent = {part: facts.total(f"seconds_{part}", facts.steps) for part in _PARTS}
    share = spent["validation"] / sum(spent.values()) if any(spent.values()) else 0.0
    every = facts.option("val_interval_steps") or 0
    if share > 0.4:
        yield Finding(
            "validation cost",
            "hint",
            f"{share:.0%} of the time goes into validation, every "
            f"{'step' if every == 1 else counted(every, 'step')} on "
            f"{counted(facts.option('val_num_tasks') or 0, 'task')}.",
            "Raise val_interval_steps, or lower val_num_tasks.",
            ("val_interval_steps", "val_num_tasks"),
            weight=0.4 * share,
        )


def bottleneck(facts: Facts) -> Iterator[Finding]:
    """The sampler has nothing to do."""
    idle = mean(facts.values("sampler_idle_share"))
    if idle is None or idle <= 0.2:
        return
    said = Counter(text for step in facts.recent if (text := figure(step, "bottleneck")))
    told = f": {said.most_common(1)[0][0].rstrip('.')}" if said else ""
    yield Finding(
        "bottleneck",
        "problem" if idle > 0.6 else "hint",
        f"The sampler could decode nothing in {idle:.0%} of the collection's time{told}.",
        "More reward_workers or environment_workers, or more max_concurrent_trajectories, keep it "
        "busy.",
        ("reward_workers", "environment_workers", "max_concurrent_trajectories"),
        steps=tuple(s["step"] for s in facts.recent if figure(s, "bottleneck"))[-3:],
        weight=0.5 * idle,
    )


RULES = (validation, bottleneck)
