"""This loop learns as stock TRL's does: one seed, few steps, a wide margin.

``-m long`` runs ``equal_learning.py`` whole; its last curves stand in ``curves/``.
"""

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest
from equal_learning import compare, held_out, interval, measure, training_tasks
from sums_runs import views


def test_no_task_is_on_two_sides() -> None:
    apart = [task.prompt[0]["content"] for task in held_out(1000)]
    assert len(set(apart)) == 1000
    taught = {task.prompt[0]["content"] for side in views() for task in side}
    assert len(taught) == 2200
    assert not taught & set(apart)
    tasks = training_tasks(seed=1, steps=60)
    assert len({task.task_id for task in tasks}) == 480
    assert {task.prompt[0]["content"] for task in tasks} <= taught


def test_the_interval_is_that_of_the_mean_paired_difference() -> None:
    rng = np.random.default_rng(3)
    theirs = rng.random(2000)
    ours = theirs + rng.normal(0.02, 0.1, 2000)
    difference, low, high = interval(ours.tolist(), theirs.tolist())
    error = 0.1 / 2000**0.5
    assert difference == pytest.approx(float((ours - theirs).mean()))
    assert low == pytest.approx(difference - 1.96 * error, abs=error / 5)
    assert high == pytest.approx(difference + 1.96 * error, abs=error / 5)


def test_it_learns_as_trl_does() -> None:
    arms = {arm: measure(arm, "grpo", seed=0, steps=20, tasks=200) for arm in ("nbtrain", "trl")}
    learnt = {arm: mean(found["held_out"]) for arm, found in arms.items()}
    for found in arms.values():
        assert len(found["rewards"]) == 20
        assert mean(found["rewards"][:2]) < 0.4
    assert learnt["nbtrain"] > 0.6
    assert learnt["nbtrain"] > learnt["trl"] - 0.1


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_interval_lies_above_the_bar() -> None:
    found = compare(["grpo", "gspo"], [0, 1, 2], steps=60, tasks=1000)
    for algorithm in ("grpo", "gspo"):
        _, low, _ = found[algorithm]["difference"]
        assert low > -0.05
