"""Client code as people know it from elsewhere runs here: only the import and the ids differ."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import descriptors
import pytest

from nbtrain.client import Client, Run

CHOOSE = """
from nbtrain import Client

client = Client()
bench_id = "sums"
catalog = client.training.list_options(bench_id=bench_id)

for model in catalog.models:
    print(model.base_model_slug, model.options)
"""

START = """
run = client.training.create(
    bench_id=bench_id,
    base_model_slug="nbtrain/tiny",
    options={"num_steps": 20},
)
print(run.training_run_id)
"""

WATCH = """
import time

while True:
    training = client.training.runs.retrieve(run.training_run_id)
    progress = client.training.runs.progress(run.training_run_id)
    print(training.status, progress.completed_steps, progress.total_steps)
    if training.status in {"succeeded", "failed", "cancelled"}:
        break
    time.sleep(30)

if training.status != "succeeded":
    raise RuntimeError(f"Training {training.status}: {training.failure}")
"""

INSPECT = """
trajectories = list(client.trajectories.list(training_run_id=run.training_run_id))
print(len(trajectories), [(item.trajectory_id, item.status) for item in trajectories])
for step in client.training.runs.list_step_summaries(run.training_run_id).items:
    print(step.step, step.no_signal_groups, step.used_groups, step.pending_groups)
"""

PICK = """
for point in client.training.rewards.list_history(run.training_run_id):
    print(point.step, point.avg_reward)
for point in client.training.rewards.list_held_out_rewards(run.training_run_id):
    print(point.step, point.held_out_reward, point.round_completed,
          point.completed_samples, point.expected_samples)

checkpoints = client.training.checkpoints.list(run.training_run_id)
checkpoint = max(checkpoints, key=lambda c: c.step_index)
print(checkpoint.step_index, checkpoint.checkpoint_id, checkpoint.base_model_slug)
"""

RESUME = """
resumed = client.training.create(
    bench_id=bench_id,
    base_model_slug=checkpoint.base_model_slug,
    parent_checkpoint_id=checkpoint.checkpoint_id,
    options={"num_steps": 20},
    display_name="Resumed training",
)
print(resumed.training_run_id)
"""

SPEND_LESS = """
run = client.training.create(
    bench_id=bench_id,
    base_model_slug="nbtrain/tiny",
    options={
        "num_steps": 50,
        "max_concurrent_trajectories": 384,
        "val_interval_steps": 10,
        "val_num_tasks": 25,
    },
)
"""


DESCRIPTOR = """
client = Client()
client.datasets.register("support-triage-train", "rows.jsonl")
client.workloads.create("support-triage")
plan = client.training.resolve(descriptor)
print(plan.config["method"], plan.execution["gpus"], plan.origins["config.dataset"], plan.hints)
print(len(plan.to_frame()), plan.config_hash)
started = client.training.start(descriptor)
print(started.run_id, started.config_hash, len(started.earlier_runs))
"""


def test_a_descriptor_s_code_runs_as_it_stands(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launched: list[Run],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps(row) + "\n" for row in descriptors.TICKETS)
    (tmp_path / "rows.jsonl").write_text(rows)
    descriptors.select_models(Client(), tmp_path)
    (tmp_path / "run.json").write_text(descriptors.SUPERVISED)
    for descriptor in (json.loads(descriptors.SUPERVISED), tmp_path / "run.json"):
        exec(DESCRIPTOR, {"Client": Client, "descriptor": descriptor})
    first, frame, started, *again = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "sft 1 stated ['execution.saveEvery 20 saves nothing before the end, at"
    )
    assert "keepAdapters 4 changes nothing" in first
    assert int(frame.split()[0]) > 35
    assert started.split() == [launched[0].id, frame.split()[1], "0"]
    assert again[-1].split() == [launched[1].id, frame.split()[1], "1"]


def test_the_code_runs_as_it_stands(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.3)))
    names: dict[str, Any] = {}

    def execute(code: str) -> list[str]:
        capsys.readouterr()
        exec(compile(code, "<cell>", "exec"), names)
        return capsys.readouterr().out.splitlines()

    assert execute(CHOOSE)[0].startswith("nbtrain/tiny ")
    (training_run_id,) = execute(START)
    assert len(training_run_id) == 64
    # A run is read anew each time, so its end may fall between the print and the question
    assert execute(WATCH)[-1].endswith(" 20 20")
    assert names["training"].status == "succeeded"
    count, *steps = execute(INSPECT)
    assert int(count.split()[0]) == len(names["trajectories"]) > 20 * 32 * 8
    assert [int(line.split()[0]) for line in steps] == list(range(1, 21))
    # a group stands in the step it completed in; 32 trained in each
    assert sum(int(line.split()[2]) for line in steps) == 20 * 32
    assert all(line.split()[3] == "0" for line in steps), "nothing waits when the run has ended"
    told = execute(PICK)
    assert len(told) == 20 + 21 + 1
    assert told[-1].split()[0] == "20"
    assert all(line.split()[2:] == ["True", "50", "50"] for line in told[20:41])
    execute(RESUME)
    resumed: Run = names["resumed"]
    assert (resumed.plan.start_step, resumed.plan.total_steps) == (20, 40)
    resumed.cancel()
    execute(SPEND_LESS)
    assert names["run"].plan["max_concurrent_trajectories"] == 384
    names["run"].cancel()
    for run in (resumed, names["run"]):
        while not run.is_over:
            time.sleep(0.2)
        assert run.status == "cancelled"
