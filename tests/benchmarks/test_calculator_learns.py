"""The sample workload ``calculator`` is learnt: two turns and a tool, on the embedded model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from nbtrain.client import Client, Run

OPTIONS: dict[str, Any] = {
    "batch_size": 8,
    "group_size": 8,
    "max_staleness": 0,
    "learning_rate": 5e-4,
    "lr_warmup_steps": 2,
    "max_output_tokens_per_turn": 24,
    "val_num_tasks": 100,
}


def learn(**options: Any) -> tuple[Run, list[float]]:
    """A run that is over, and its held-out rewards from the start to the end."""
    run = Client().training.create(
        bench_id="calculator", base_model_slug="nbtrain/tiny", options=OPTIONS | options
    )
    run.wait(540)
    return run, list(run.validation["held_out_reward"])


def test_fifteen_steps_teach_the_calculator(home: Path) -> None:
    run, held_out = learn(num_steps=15, val_interval_steps=15)
    assert len(held_out) == 2
    assert held_out[0] <= 0.35
    assert held_out[1] >= held_out[0] + 0.15
    turns = run.metrics["turns_mean"]
    assert turns.iloc[-1] > 2, "it is the tool's answer that is learnt from"


@pytest.mark.long
def test_thirty_steps_reach_the_bar_within_three_minutes(home: Path) -> None:
    """On a machine that does nothing else."""
    began = time.monotonic()
    _, held_out = learn(num_steps=30, val_interval_steps=10, val_num_tasks=200)
    assert time.monotonic() - began <= 180
    assert held_out[0] <= 0.3
    assert held_out[-1] >= 0.7
