"""A supervised run stopped at any moment and gone on with equals the straight one, bit for bit.

With dropout, packed and not. Continuous integration stops in three updates, once by SIGKILL of a
real rank; the long mode kills after every step of twelve.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from supervised_world import World, chats

from nbtrain.store import StoredRun, open_store
from nbtrain.training import base_job
from nbtrain.training.control import Cancelled, Control
from nbtrain.training.supervised.job import SupervisedJob

STEPS = 12
OPTIONS: dict[str, Any] = {
    "epochs": 4,
    "micro_batch_per_gpu": 2,
    "gradient_accumulation": 2,
    "lora_dropout": 0.2,
    "learning_rate": 3e-3,
    "warmup_ratio": 0.2,
    "scheduler_kind": "cosine",
    "save_every": 1,
    "validation_frequency_steps": 5,
}
PACKED: dict[str, Any] = OPTIONS | {
    "packing": True,
    "max_seq_length": 60,
    "micro_batch_per_gpu": 1,
}
FORMS = {"plain": OPTIONS, "packed": PACKED}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBTRAIN_HOME", str(tmp_path_factory.mktemp("home")))
        with open_store() as store:
            yield World(store)


@pytest.fixture(scope="module")
def straight(world: World) -> dict[str, StoredRun]:
    """The runs that nobody disturbed."""
    runs = {}
    for form, options in FORMS.items():
        runs[form], ending = world.train(world.plan(chats(12 if form == "packed" else 10),
                                                    validation=chats(3), **options))  # fmt: skip
        assert ending.failure is None
    assert {run.total_steps for run in runs.values()} == {STEPS}
    return runs


def plan_of(world: World, form: str, **more: Any) -> Any:
    rows = chats(12 if form == "packed" else 10)
    return world.plan(rows, validation=chats(3), **FORMS[form], **more)


def record(world: World, run: StoredRun) -> dict[int, Any]:
    """Everything of a step that does not tell time."""
    return {
        step["step"]: (
            step["loss"],
            step["learning_rate"],
            {k: v for k, v in step["metrics"].items() if not k.startswith("seconds_")},
        )
        for step in world.steps(run)
    }


def final_files(world: World, run: StoredRun) -> dict[str, bytes]:
    """Adapter and optimizer of the last checkpoint."""
    last = world.store.checkpoints(run.key)[-1]
    assert last.step == STEPS
    folder = Path(last.path)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors |= load_file(folder / "training_state.safetensors")
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


def goes_on_as(world: World, form: str, halted: StoredRun, straight: StoredRun) -> None:
    resumed, ending = world.train(plan_of(world, form, parent=halted))
    assert ending.failure is None
    before = world.store.checkpoints(halted.key)[-1].step
    expected = record(world, straight)
    kept = {at: row for at, row in record(world, halted).items() if at <= before}
    assert kept | record(world, resumed) == expected
    assert min(record(world, resumed)) == before + 1
    assert final_files(world, resumed) == final_files(world, straight)
    message = next(
        p["message"] for p in world.store.phases(resumed.key) if p["phase"] == "TRAINING"
    )
    assert f"step {before} to {STEPS}, {STEPS - before} updates" in message
    assert "; exact" in message


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", sorted(random.Random(4).sample(range(1, STEPS), 3)))
def test_stopped_within_an_update_and_gone_on(
    step: int,
    form: str,
    world: World,
    straight: dict[str, StoredRun],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halted = world.create(plan_of(world, form))

    class Halting(Control):
        looks = 0

        def __call__(self) -> None:
            if world.store.run(halted.key).completed_steps >= step:
                self.looks += 1
                if self.looks == 2:  # behind the first pass of the update that follows
                    raise Cancelled
            super().__call__()

    with monkeypatch.context() as patch:
        patch.setattr(base_job, "Control", Halting)
        with pytest.raises(Cancelled):
            SupervisedJob(world.store, halted, 1).run()
    goes_on_as(world, form, halted, straight[form])


def killed_after(world: World, form: str, step: int) -> StoredRun:
    """A run whose real rank got SIGKILL as soon as ``step`` was committed, and a checkpoint."""
    run = world.create(plan_of(world, form))
    (rank,) = world.start(run)
    end = time.monotonic() + 120
    while world.store.run(run.key).completed_steps < step or not world.store.checkpoints(run.key):
        assert rank.poll() is None, (world.store.home / "rank0.log").read_text()[-3000:]
        assert time.monotonic() < end
        time.sleep(0.002)
    os.kill(rank.pid, signal.SIGKILL)
    assert rank.wait(10) == -signal.SIGKILL
    assert world.store.checkpoints(run.key)[-1].step < STEPS, "nothing is left to compare"
    return run


@pytest.mark.skipif(sys.platform != "linux", reason="ranks die with their parent on Linux")
def test_killed_and_gone_on(world: World, straight: dict[str, StoredRun]) -> None:
    goes_on_as(world, "packed", killed_after(world, "packed", 4), straight["packed"])


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", range(1, STEPS - 1))
def test_killed_after_every_step(
    step: int, form: str, world: World, straight: dict[str, StoredRun]
) -> None:
    goes_on_as(world, form, killed_after(world, form, step), straight[form])
