"""Endurance: a run with everything that can go wrong, and one with nothing left to learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from long_run import check_end, run

import nbtrain
from nbtrain.client import Client
from nbtrain.client import Run as ClientRun
from nbtrain.errors import RunEnded


def test_the_books_are_right_after_every_commit(home: Path) -> None:
    found, watched = run(60, val_interval_steps=30)
    counts = check_end(found, 60)
    assert watched.checks == 60
    assert counts["updates"] > 30
    # whether one times out before it is stale depends on the machine; 300 steps demand it
    for reason in ("ENV_DONE", "ERROR", "LIMIT_REACHED", "no grade"):
        assert counts[reason] > 0, reason


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_memory_stays_flat_over_300_steps(home: Path) -> None:
    found, watched = run(300)
    counts = check_end(found, 300)
    for reason in ("ENV_DONE", "ERROR", "LIMIT_REACHED", "TIMEOUT", "STALE", "no grade"):
        assert counts[reason] > 0, reason
    assert watched.amended > 0
    start, *later = watched.memory[49:]
    assert max(later) <= 1.1 * start
    assert min(later) >= 0.9 * start


# --- nothing left to learn -----------------------------------------------------------------------

TASKS = [{"prompt": f"What is {n} + 3?", "many": n} for n in range(10, 18)]
OPTIONS: dict[str, Any] = {
    "num_steps": 30,
    "batch_size": 2,
    "group_size": 4,
    "max_staleness": 3,
    "learning_rate": 1e-4,
    "max_output_tokens_per_turn": 8,
    "val_enabled": False,
}


def always(completion: str, task: dict[str, Any]) -> float:
    return 1.0


def soon(completions: Any, **_: Any) -> list[float]:
    """Contrast in the first groups, then everything passes."""
    import tempfile
    from pathlib import Path

    calls = Path(tempfile.gettempdir()) / "nbtrain-soon"
    with calls.open("a") as file:
        file.write(".")
    if calls.stat().st_size > 12:
        return [1.0] * len(completions)
    return [n / 10 for n in range(len(completions))]


def start(reward: Any) -> ClientRun:
    made = nbtrain.workload(
        "passes", tasks=TASKS, rewards=[reward], base_model="nbtrain/tiny", held_out=0
    )
    return Client().training.create(bench_id=made.id, options=OPTIONS)


def test_tasks_that_all_pass_at_once_fail_the_run_with_the_reason(home: Path) -> None:
    run = start(always)
    with pytest.raises(RunEnded):
        run.wait(240)
    assert run.status == "failed"
    assert "no update was ever applied" in str(run.failure)
    assert "nothing left to learn" in str(run.failure)
    steps = run.metrics
    assert len(steps) == 5
    assert not steps["update_applied"].any()
    assert (steps["completed_groups"] == steps["no_signal_groups"]).all()
    assert (steps["avg_reward"] == 1).all()
    assert steps["skip_reason"].str.contains("a full pass over the 8 tasks").all()


def test_tasks_that_all_pass_later_end_the_run_early(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "calls"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    run = start(soon)
    run.wait(240)
    assert run.status == "succeeded"
    assert "nothing left to learn" in str(run.ended)
    steps = run.metrics
    assert 5 < len(steps) < 30
    assert steps["update_applied"].iloc[0]
    assert not steps["update_applied"].tail(5).any()
    assert run.checkpoint_list()[-1].step_index == len(steps)
    assert steps["settled"].all()
    assert steps["in_flight_groups"].iloc[-1] == 0
