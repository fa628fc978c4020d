"""A run killed at any moment and resumed equals the straight run, bit for bit on one CPU.

Everything is real: host kernel, rank, reward workers, store, the embedded model. Continuous
integration kills at three seeded steps; the long mode at every step of twelve but the last two.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from nbtrain import Client, Run
from nbtrain.processes import marked
from nbtrain.store import open_store

STEPS = 12
OPTIONS: dict[str, Any] = {
    "num_steps": STEPS,
    "max_staleness": 0,
    "batch_size": 3,
    "group_size": 4,
    "learning_rate": 1e-3,
    "lr_warmup_steps": 3,
    "lr_hold_steps": 4,
    "val_interval_steps": 4,
    "val_num_tasks": 4,
    "max_output_tokens_per_turn": 16,
}


def final_files(run: Run) -> dict[str, Any]:
    """Adapter and optimizer of a run's last checkpoint, by tensor name."""
    with open_store() as store:
        last = store.checkpoints(store.find_run(run.id).key)[-1]
    assert last.step == STEPS
    folder = Path(last.path)
    return load_file(folder / "adapter_model.safetensors") | load_file(
        folder / "training_state.safetensors"
    )


def rewards(run: Run) -> dict[int, float]:
    frame = run.rewards
    return dict(zip(frame["step"], frame["avg_reward"], strict=True))


def kill_rank_after(run: Run, step: int) -> None:
    """SIGKILL the rank as soon as ``step`` is committed."""
    with open_store() as store:
        row = store.find_run(run.id)
        end = time.monotonic() + 120
        while time.monotonic() < end:
            row = store.find_run(run.id)
            pids = store.attempts(row.key)[-1]["rank_pids"]
            if row.completed_steps >= step and pids:
                for pid, *_ in pids:
                    os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.01)
    pytest.fail(f"step {step} was not reached")


def wait_failed(run: Run) -> None:
    end = time.monotonic() + 15
    while run.status != "failed" and time.monotonic() < end:
        time.sleep(0.1)
    assert run.status == "failed"
    assert "SIGKILL" in str(run.failure)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run that nobody disturbed, and the home that all runs of this file share."""
    home = tmp_path_factory.mktemp("home")
    before = os.environ.get("NBTRAIN_HOME")
    os.environ["NBTRAIN_HOME"] = str(home)
    run = Client().training.create(
        bench_id="sums", base_model_slug="nbtrain/tiny", options=OPTIONS, display_name="straight"
    )
    run.wait(timeout=300)
    yield run
    if before is None:
        del os.environ["NBTRAIN_HOME"]
    else:
        os.environ["NBTRAIN_HOME"] = before


def killed_and_resumed(straight: Run, step: int) -> None:
    client = Client()
    killed = client.training.create(
        bench_id="sums", base_model_slug="nbtrain/tiny", options=OPTIONS, display_name="killed"
    )
    kill_rank_after(killed, step)
    wait_failed(killed)
    assert list(marked(f"{killed.id}/")) == []
    newest = killed.checkpoints["step_index"].max()
    assert newest <= step + 1
    checkpoint = next(
        c for c in client.training.checkpoints.list(killed.id) if c.step_index == newest
    )
    assert newest < STEPS, "the run was done before the signal reached it: nothing was compared"
    resumed = client.training.create(
        parent_checkpoint_id=checkpoint, options={"num_steps": int(STEPS - newest)}
    )
    resumed.wait(timeout=300)
    expected = rewards(straight)
    for at, reward in (rewards(killed) | rewards(resumed)).items():
        assert reward == expected[at], f"step {at}"
    one, other = final_files(straight), final_files(resumed)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("step", sorted(random.Random(20).sample(range(1, STEPS - 2), 3)))
def test_killed_and_resumed_equals_straight(straight: Run, step: int) -> None:
    killed_and_resumed(straight, step)


@pytest.mark.long
@pytest.mark.parametrize("step", range(1, STEPS - 1))
def test_killed_after_every_step(straight: Run, step: int) -> None:
    killed_and_resumed(straight, step)
