"""Two ranks on the CPU train as one does: through the client, the host, gloo and the store."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from stub_runs import nothing_left, ranks_of, until

from nbtrain import Client, Run
from nbtrain.store import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the host's tests are Linux's")

OPTIONS: dict[str, Any] = {
    "num_steps": 2,
    "batch_size": 3,
    "group_size": 4,
    "learning_rate": 1e-3,
    "lr_warmup_steps": 0,
    "max_staleness": 0,
    "val_interval_steps": 1,
    "val_num_tasks": 5,
    "max_output_tokens_per_turn": 16,
}


def started(ranks: int, **options: Any) -> Run:
    return Client().training.create(bench_id="sums", options=OPTIONS | {"gpus": ranks} | options)


def trained(algorithm: str, ranks: int) -> Run:
    run = started(ranks, algorithm=algorithm)
    run.wait(timeout=240)
    assert run.status == "succeeded", (run.failure, run.log)
    return run


# What must be the same, and what only nearly: sums are added up in another order.
GROUP = ["group_id", "task_id", "outcome", "size", "reward_mean", "output_tokens", "consumed_step"]
STEP = ["completed_groups", "used_groups", "no_signal_groups", "filtered_groups"]
STEP += ["graded_trajectories", "trained_trajectories", "output_tokens", "update_applied"]
NEARLY = ["avg_reward", "used_reward", "loss", "grad_norm", "entropy", "learning_rate"]
POINT = ["step", "round_completed", "completed_samples", "expected_samples", "held_out_reward"]


def ranks_of_run(run: Run) -> int:
    with open_store() as store:
        row = store.find_run(run.id)
        nothing_left(store, row)
        return len(store.attempts(row.key)[-1]["rank_pids"])


@pytest.mark.parametrize("algorithm", ["gspo", pytest.param("grpo", marks=pytest.mark.long)])
def test_two_ranks_train_as_one(
    algorithm: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    one, two = (trained(algorithm, ranks) for ranks in (1, 2))
    assert (ranks_of_run(one), ranks_of_run(two)) == (1, 2)
    assert "2 CPU ranks: this machine has no GPU" in set(two.events["message"])
    for step in (1, 2):
        first, second = (run.sampled_groups(step)[GROUP] for run in (one, two))
        pd.testing.assert_frame_equal(first, second)
    pd.testing.assert_frame_equal(one.metrics[STEP], two.metrics[STEP])
    pd.testing.assert_frame_equal(one.metrics[NEARLY], two.metrics[NEARLY], rtol=1e-4, atol=1e-6)
    pd.testing.assert_frame_equal(one.validation[POINT], two.validation[POINT])


@pytest.mark.parametrize(
    ("ends", "status", "says"),
    [
        ("cancel", "cancelled", "cancelled on request"),
        ("kill rank 1", "failed", "rank 1 of 2 was killed by signal 9 (SIGKILL)"),
        pytest.param(
            "terminate rank 0",
            "failed",
            "rank 0 of 2: stopped by SIGTERM from outside",
            marks=pytest.mark.long,
        ),
    ],
)
def test_two_ranks_end_together(
    ends: str, status: str, says: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = started(2, num_steps=5000, val_enabled=False)
    with open_store() as store:
        row = store.find_run(run.id)
        until(lambda: store.run(row.key).completed_steps >= 2 or run.is_over, 120)
        assert not run.is_over, run.failure or run.log
        if ends == "cancel":
            run.cancel()
        elif ends == "kill rank 1":
            os.kill(ranks_of(store, row)[1].pid, signal.SIGKILL)
        else:
            os.kill(ranks_of(store, row)[0].pid, signal.SIGTERM)
        assert until(lambda: run.is_over, 20)
        nothing_left(store, row)
    assert run.status == status
    assert says in (run.failure or run.ended or "")
