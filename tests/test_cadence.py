"""When a run validates and saves, and which training state it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.plan.picking import Candidate, pick
from nbtrain.training.cadence import checkpoint_due, validation_due
from nbtrain.training.retention import Kept, sweep_checkpoints, sweep_training_states


def steps(rule, start: int, total: int, interval: int, **more: object) -> list[int]:  # type: ignore[no-untyped-def]
    return [
        s
        for s in range(start, total + 1)
        if rule(s, start=start, total=total, interval=interval, **more)
    ]


def test_the_first_seed_validates_101_times() -> None:
    assert len(steps(validation_due, 0, 100, 1, enabled=True)) == 101


def test_start_interval_and_final() -> None:
    assert steps(validation_due, 0, 25, 10, enabled=True) == [0, 10, 20, 25]
    assert steps(checkpoint_due, 0, 25, 10) == [0, 10, 20, 25]


def test_a_resumed_run_keeps_the_global_cadence() -> None:
    assert steps(validation_due, 13, 33, 10, enabled=True) == [13, 20, 30, 33]


def test_interval_zero_or_disabled_never_validates() -> None:
    assert steps(validation_due, 0, 9, 0, enabled=True) == []
    assert steps(validation_due, 0, 9, 3, enabled=False) == []


kept = st.builds(
    Kept,
    checkpoint_id=st.uuids().map(str),
    step=st.integers(0, 50),
    training_state=st.booleans(),
    pinned=st.booleans(),
    held_out_reward=st.none() | st.sampled_from([-1.0, 0.0, 0.5, 1.0]),
)


@given(st.lists(kept, max_size=12, unique_by=lambda c: c.step), st.integers(1, 3), st.data())
def test_the_delete_set_is_all_minus_everything_referenced(
    checkpoints: list[Kept], ties: int, data: st.DataObject
) -> None:
    referenced = set(
        data.draw(st.lists(st.sampled_from([c.checkpoint_id for c in checkpoints] or ["x"])))
    )
    swept = set(sweep_training_states(checkpoints, referenced=referenced, ties=ties))
    holding = sorted((c for c in checkpoints if c.training_state), key=lambda c: c.step)
    scores = [c.held_out_reward for c in holding if c.held_out_reward is not None]
    alike = [c for c in holding if scores and c.held_out_reward == max(scores)]
    for checkpoint in holding:
        must_stay = (
            checkpoint in holding[-2:]
            or checkpoint in alike[:ties]
            or checkpoint.pinned
            or checkpoint.checkpoint_id in referenced
        )
        assert (checkpoint.checkpoint_id in swept) == (not must_stay)
    assert swept <= {c.checkpoint_id for c in holding}


@given(st.lists(kept, max_size=12, unique_by=lambda c: c.step), st.integers(1, 5))
def test_whole_checkpoints_go_but_for_first_best_newest_and_pinned(
    checkpoints: list[Kept], keep: int
) -> None:
    swept = set(sweep_checkpoints(checkpoints, keep=keep))
    ordered = sorted(checkpoints, key=lambda c: c.step)
    scores = [c.held_out_reward for c in ordered if c.held_out_reward is not None]
    best = next((c for c in ordered if scores and c.held_out_reward == max(scores)), None)
    for checkpoint in ordered:
        stays = (
            checkpoint in (ordered[0], best)
            or checkpoint in ordered[1:][-keep:]
            or checkpoint.pinned
        )
        assert (checkpoint.checkpoint_id in swept) == (not stays)
    assert sweep_checkpoints(checkpoints, keep=None) == []


def scored(step: int, scores: Sequence[float]) -> Kept:
    """A checkpoint whose round read so much of each task."""
    named = {str(n): value for n, value in enumerate(scores)}
    reward = sum(scores) / len(scores)
    return Kept(f"at {step}", step, training_state=True, held_out_reward=reward, scores=named)


def test_what_ties_with_the_top_keeps_its_training_state() -> None:
    saved = [
        scored(0, [0.0] * 12),
        scored(5, [1.0] * 9 + [0.0, 0.0, 1.0]),
        scored(10, [1.0] * 9 + [0.0, 1.0, 0.0]),
        scored(15, [1.0] * 9 + [0.0, 1.0, 1.0]),
        scored(20, [0.0] * 12),
        scored(25, [0.0] * 12),
    ]
    assert sweep_training_states(saved) == ["at 0"]
    # bounded: the earliest of those that tie, and the top itself
    assert sweep_training_states(saved, ties=1) == ["at 0", "at 10"]
    # as a whole the first, the best, the top and the newest stay
    assert sweep_checkpoints(saved, keep=1) == ["at 10", "at 20"]


def test_the_best_of_a_run_that_learns_has_its_training_state_at_every_save() -> None:
    """Also as the top rises and the checkpoint that was best no longer ties with it."""
    random = np.random.default_rng(5)
    harder = random.normal(0, 1.5, 50)
    saved: list[Kept] = []
    changed = 0
    best = -1
    for step in range(20):
        right = random.random(50) < 1 / (1 + np.exp(-(harder + step / 5 - 1.5)))
        saved.append(scored(step, right.astype(float).tolist()))
        picked = pick([Candidate(c.step, c.held_out_reward or 0.0, c.scores) for c in saved])
        assert picked is not None
        assert saved[picked.best].training_state, step
        changed += picked.best != best
        best = picked.best
        gone = set(sweep_training_states(saved))
        saved = [
            replace(c, training_state=c.training_state and c.checkpoint_id not in gone)
            for c in saved
        ]
    assert changed > 3
    assert sum(c.training_state for c in saved) <= 11
