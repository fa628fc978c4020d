"""Troubles that people had elsewhere with their reward functions: here they do not happen.

Held by the tests of their parts as well:

RW-03  test_rewards_pool::test_rewards_run_in_the_main_thread_with_signals
RW-06  a loss that is no number: test_cases::test_a_run_whose_loss_is_no_number_fails_…
RW-07  test_rewards_scoring::test_a_group_gets_one_value_for_each_completion,
       ::test_a_column_that_was_lost_shows_as_a_wrong_length,
       test_rewards_pool::test_a_trial_returns_every_problem_at_once
RW-09  test_rewards_pool::test_async_rewards_are_awaited_together,
       test_rewards_scoring::test_a_coroutine_that_nothing_awaits_is_a_clear_error
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reward_functions as functions
from judged import tiny_policy
from test_cases_rl import EVERYTHING, SAMPLING, collect, ledger, tasks
from test_loop import same

from nbtrain.rewards import GradeRequest, RewardPool, as_terms, pack, trial
from nbtrain.rollout.admission import AdmissionRules, GroupOutcome, advantages
from nbtrain.rollout.collector import Batch
from nbtrain.rollout.draws import task_order
from nbtrain.rollout.judging import judged_group
from nbtrain.rollout.ledger import trajectory_rows
from nbtrain.rollout.types import TerminationReason
from nbtrain.training.update import Updater, UpdateSettings

LIMIT = 1.0


def one_group_odd(completions: list[Any], **kw: Any) -> list[float]:
    if any("odd" in str(completion) for completion in completions):
        return [1.0, float("nan"), 0.0, float("inf")][: len(completions)]
    return [n / 4 for n in range(len(completions))]


class Asked:
    """The shared pool, asked for one of its terms."""

    def __init__(self, pool: RewardPool, name: str) -> None:
        self._pool = pool
        self._term = [term.name for term in pool.terms].index(name)
        self.timeout_seconds = pool.timeout_seconds
        self.finished = pool.finished

    def submit(self, key: int, request: GradeRequest, *, limit: float | None = None) -> None:
        self._pool.submit(key, request, terms=[self._term], limit=limit)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    folder = tmp_path_factory.mktemp("pool")
    items = [
        *(functions.group_spins, functions.key_error, functions.some_raise, functions.waits),
        one_group_odd,
    ]
    file = folder / "rewards.pkl"
    file.write_bytes(pack(as_terms(items))[0])
    with RewardPool(file, workers=1, timeout_seconds=LIMIT, log_path=folder / "log") as made:
        assert made.check_start() is None
        yield made


@pytest.mark.parametrize(
    ("own_limit", "reason", "option"),
    [
        (math.inf, TerminationReason.ERROR, "train_on_error"),
        (LIMIT / 2, TerminationReason.TIMEOUT, "train_on_timeout"),
    ],
)
def test_rw01_a_reward_that_never_comes_back_costs_its_group_alone(
    pool: RewardPool, own_limit: float, reason: TerminationReason, option: str
) -> None:
    hangs = task_order(1, 0, 8)[0]  # drawn in the first wave
    batch = collect(
        Asked(pool, "group_spins"),
        lambda task, sample: "a tower" if task == hangs else "a house",
        rules=replace(EVERYTHING, **{option: False}),
        sampling=replace(SAMPLING, timeout=own_limit),
        rows=tasks(8),
        batch_size=7,
    )
    assert len(batch.used) == 7
    (left_out,) = [judged for judged in batch.groups if judged.outcome is not GroupOutcome.USED]
    assert left_out.group.task_index == hangs
    for trajectory in left_out.group.trajectories:
        assert (trajectory.reason, trajectory.reward) == (reason, None)
        assert f"of task {left_out.group.task_id} did not answer within" in str(trajectory.error)
        assert "its process was killed" in str(trajectory.error)
    assert option in left_out.admissions[0].why
    admitted = judged_group(left_out.group, EVERYTHING)
    assert [a.reward for a in admitted.admissions] == [0.0] * 4
    assert ledger(batch)["metrics"]["termination_reasons"] == {"ENV_DONE": 28, str(reason): 4}


def test_rw04_a_reward_that_always_raises_ends_the_step_with_its_words(pool: RewardPool) -> None:
    batch = collect(Asked(pool, "key_error"), rules=AdmissionRules(2))
    assert batch.grading_failed
    assert "16 of 16 trajectories were not graded" in str(batch.cut_short)
    assert "raised KeyError: 'missing_key'" in str(batch.cut_short)
    request = GradeRequest("?", ["a", "b"])
    found = next(p for p in trial(pool, request) if "key_error" in p.message)  # before step 1
    assert "Traceback (most recent call last)" in found.message
    assert 'c["missing_key"]' in found.message


def test_rw04_a_reward_that_raises_now_and_then_is_counted_and_never_a_number(
    pool: RewardPool,
) -> None:
    batch = collect(
        Asked(pool, "some_raise"),
        lambda task, sample: "bad" if sample == 3 else "good",
        rules=replace(EVERYTHING, train_on_error=False),
    )
    metrics = ledger(batch)["metrics"]
    assert (metrics["graded_trajectories"], metrics["error"]) == (12, 4)
    assert metrics["termination_reasons"] == {"ENV_DONE": 12, "ERROR": 4}
    assert ledger(batch)["avg_reward"] == 1.0
    for judged in batch.used:
        *_, raised = trajectory_rows(judged, prompt="")
        assert (raised["reward"], raised["eligible"]) == (None, False)
        assert "raised ValueError: no no" in raised["error"]
        assert "\n" not in raised["error"]
        assert "Traceback" in raised["text"]["error"]


def test_rw06_rewards_that_are_no_numbers_leave_the_batch_whole(
    pool: RewardPool, tmp_path: Path
) -> None:
    batch = collect(
        Asked(pool, "one_group_odd"),
        lambda task, sample: "odd" if task == 2 else "even",
        rules=AdmissionRules(2),
        rows=tasks(5),
        batch_size=5,
    )
    assert len(batch.used) == 5
    odd = next(judged for judged in batch.used if judged.group.task_index == 2)
    assert [t.reward for t in odd.group.trajectories] == [1.0, None, 0.0, None]
    reasons = [str(t.reason) for t in odd.group.trajectories]
    assert reasons == ["ENV_DONE", "ERROR", "ENV_DONE", "ERROR"]
    assert "returned nan for completion 2" in str(odd.group.trajectories[1].error)
    assert "returned inf for completion 4" in str(odd.group.trajectories[3].error)
    assert odd.advantages == [advantages([1.0, 0.0])[0], 0.0, advantages([1.0, 0.0])[1], 0.0]
    assert ledger(batch)["metrics"]["error"] == 2
    policy = tiny_policy(tmp_path)
    before = policy.adapter_state()
    updater = Updater(policy, UpdateSettings("token", 0.2, 0.2, 0.0, 1.0, 1.0), weight_decay=0.0)
    report = updater.update(batch.used, 1e-3, version=0)
    assert report.applied
    assert math.isfinite(report.metrics["grad_norm"])
    assert report.metrics["batch_trajectories"] == 18
    assert not same(before, policy.adapter_state())


def test_rw09_async_rewards_are_graded_beside_a_loop_that_runs(pool: RewardPool) -> None:
    """As in a notebook, whose kernel runs an event loop of its own."""

    async def cell() -> Batch:
        return collect(Asked(pool, "waits"))

    batch = asyncio.run(cell())
    assert [t.reward for judged in batch.used for t in judged.group.trajectories] == [1.0] * 16
