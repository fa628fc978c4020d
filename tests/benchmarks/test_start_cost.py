"""What a job takes to begin, loosely: CPU seconds of all its processes, most of them imports."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from live_kernels import TIMEOUT
from machine import imports, slowness

from nbtrain.client import Client, Run
from nbtrain.errors import RunEnded


def spent(run: Run) -> float:
    """CPU seconds that the processes of a run have taken, ended ones too."""
    (attempt,) = run._store.attempts(run._key)
    host = psutil.Process(attempt["host_pid"])
    every = [host, *host.children(recursive=True)]
    return float(sum(sum(one.cpu_times()[:4]) for one in every))


def test_the_first_trajectory_costs_10_s_at_most(home: Path) -> None:
    options = {"num_steps": 1000, "batch_size": 1, "group_size": 2, "val_enabled": False}
    run = Client().training.create(bench_id="sums", base_model_slug="nbtrain/tiny", options=options)
    try:
        deadline = time.monotonic() + TIMEOUT
        while not run.progress.completed_steps:
            assert time.monotonic() < deadline
            assert not run.is_over, run.failure
            time.sleep(0.02)
        assert 0.5 < spent(run) <= 10.0 * slowness(imports, tries=1)
    finally:
        run.cancel()
    with pytest.raises(RunEnded):
        run.wait(60)
