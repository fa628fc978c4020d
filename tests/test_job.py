"""Whole jobs with awkward input: each gets its clear message, and nothing is lost."""

from __future__ import annotations

import json
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from peft import AutoPeftModelForCausalLM, get_peft_model_state_dict
from safetensors.numpy import load_file

import nbtrain
from nbtrain import Client, Run
from nbtrain.errors import PlanRefused, Refused, RunEnded
from nbtrain.store import open_store

TASKS = [
    {"prompt": f"What is {n} + 3?", "answer": f"<answer>{n + 3}</answer>"} for n in range(10, 40)
]
OPTIONS: dict[str, Any] = {
    "num_steps": 2,
    "batch_size": 2,
    "group_size": 4,
    "learning_rate": 5e-4,
    "val_num_tasks": 2,
    "max_output_tokens_per_turn": 12,
}


def start(rewards: list[Any], **changes: Any) -> Run:
    made = nbtrain.workload("awkward", tasks=TASKS, rewards=rewards, base_model="nbtrain/tiny")
    return Client().training.create(bench_id=made.id, options=OPTIONS | changes)


def failed_start(run: Run) -> str:
    """The failure of a run that must not get past its start checks."""
    with pytest.raises(RunEnded) as caught:
        run.wait(timeout=240)
    assert run.status == "failed"
    assert run.progress.completed_steps == 0
    assert len(run.checkpoints) == 0
    assert str(run.failure) in str(caught.value)
    return str(run.failure)


def raises(completion: str, task: dict[str, Any]) -> float:
    return {}["missing"]  # type: ignore[no-any-return]


def not_a_number(completion: str, task: dict[str, Any]) -> float:
    return float("nan")


def wrong_length(completions: Any, **_: Any) -> list[float]:
    return [1.0]


def hangs(completion: str, task: dict[str, Any]) -> float:
    while True:
        pass


def test_broken_rewards_fail_the_start_check_all_at_once(home: Path) -> None:
    run = start([raises, not_a_number, wrong_length, hangs], reward_timeout_seconds=2)
    failure = failed_start(run)
    assert "start checks failed, 4 problems" in failure
    for words in (
        ["raises", "KeyError", "missing"],
        ["not_a_number", "nan"],
        ["wrong_length", "1 value", "4"],
        ["hangs", "2 s", "reward_timeout_seconds"],
    ):
        for word in words:
            assert word in failure
    assert [r.id for r in Client().training.runs.list()] == [run.id]


def loud(completion: str, task: dict[str, Any]) -> float:
    import sys

    sys.stdout.write("o" * (1 << 20) + "\n")
    sys.stderr.write("e" * (1 << 20) + "\n")
    return float("<answer>" in completion) + len(completion) / 1000


def test_a_reward_that_prints_megabytes_neither_blocks_nor_fills_the_disk(home: Path) -> None:
    run = start([loud])
    run.wait(timeout=240)
    assert run.status == "succeeded"
    with open_store() as store:
        folder = store.run_folder(run.id)
        row = store.find_run(run.id)
    logs = folder / "logs"
    assert json.loads((folder / "plan.json").read_text()) == row.plan
    assert json.loads((folder / "resolved.json").read_text()) == row.resolved
    assert (folder / "plan.json").stat().st_mode & 0o777 == 0o600
    assert sum(path.stat().st_size for path in logs.iterdir()) < 45 * 2**20


def odd_types(completions: Any, **_: Any) -> list[Any]:
    import numpy as np

    values = [np.float32(1), np.int64(0), np.array(0.5), Decimal("0.25"), True]
    return [values[len(str(c)) % 5] for c in completions]


def test_numbers_of_any_kind_are_converted_once(home: Path) -> None:
    run = start([odd_types])
    run.wait(timeout=240)
    frame = run.trajectories
    rewards = set(frame.loc[frame["reason"] != "CANCELLED", "reward"])  # those had no time
    assert rewards <= {1.0, 0.0, 0.5, 0.25}
    assert len(rewards) > 1


def fails_later(completion: str, task: dict[str, Any]) -> float | None:
    """Fine on the first task, which is tried; then completions are broken in some way."""
    kind = len(completion) % 3
    if "10 + 3" in task["prompt"]:
        return 0.5
    if kind == 0 and task["prompt"].startswith("What is 1"):
        msg = "no such unit"
        raise RuntimeError(msg)
    if kind == 1 and task["prompt"].startswith("What is 2"):
        return None
    return float("<answer>" in completion) + kind / 10


def test_grades_that_fail_later_are_statuses_never_numbers(home: Path) -> None:
    run = start([fails_later], num_steps=3, val_enabled=False)
    run.wait(timeout=240)
    frame = run.trajectories
    frame = frame[frame["reason"] != "CANCELLED"]  # in flight when the run ended
    ungraded = frame[frame["reward"].isna()]
    assert not ungraded["eligible"].any()
    assert set(ungraded["reason"]) <= {"ERROR", "ENV_DONE", "TRUNCATION"}
    errors = frame[frame["reason"] == "ERROR"]
    assert errors["error"].str.contains("fails_later").all()
    assert errors["error"].str.contains("no such unit").all()
    assert run.progress.graded_trajectories == int(frame["reward"].notna().sum())


def breaks_down(completion: str, task: dict[str, Any]) -> float:
    """A grader that answers for a while, and then no more."""
    import tempfile
    from pathlib import Path

    calls = Path(tempfile.gettempdir()) / f"nbtrain-breaks-down-{task['run']}"
    with calls.open("a") as file:
        file.write(".")
    if calls.stat().st_size > 60:
        msg = "judge answers 503"
        raise ConnectionError(msg)
    return float("<answer>" in completion) + len(completion) / 100


def test_a_grader_that_breaks_down_fails_the_run(home: Path) -> None:
    """It does not succeed with nothing left to learn, and it does not try every task first."""
    this = uuid.uuid4().hex
    made = nbtrain.workload(
        "breaks",
        tasks=[task | {"run": this} for task in TASKS] * 20,
        rewards=[breaks_down],
        base_model="nbtrain/tiny",
        held_out=0.01,
    )
    run = Client().training.create(
        bench_id=made.id, options=OPTIONS | {"num_steps": 200, "val_enabled": False}
    )
    with pytest.raises(RunEnded, match="judge answers 503"):
        run.wait(timeout=240)
    assert run.status == "failed"
    assert "were not graded" in str(run.failure)
    assert run.progress.updates_applied > 0
    assert run.progress.attempted_trajectories < 400
    assert run.checkpoints["step_index"].max() == run.progress.completed_steps


def test_a_full_kind_of_refusals_creates_no_run(home: Path) -> None:
    client = Client()
    with pytest.raises(PlanRefused) as caught:
        client.training.create(
            bench_id="sums",
            base_model_slug="nbtrain/tiny",
            options={
                "stesp": 5,
                "batch_size": 1000,
                "group_size": True,
                "learning_rate": "fast",
                "algorithm": "dpo",
            },
        )
    said = str(caught.value)
    for word in ("stesp", "num_steps", "batch_size", "group_size", "learning_rate", "algorithm"):
        assert word in said
    assert len(caught.value.problems) == 5
    with pytest.raises(PlanRefused, match="nowhere"):
        client.training.create(bench_id="nowhere", base_model_slug="no/model", options={})
    assert len(client.training.runs.list()) == 0


def test_tasks_without_a_prompt_are_refused_with_their_columns(home: Path) -> None:
    with pytest.raises(Refused, match="question"):
        nbtrain.workload(
            "unprompted",
            tasks=[{"question": "1+1", "answer": "2"}],
            rewards=[nbtrain.rewards.exact("answer")],
            base_model="nbtrain/tiny",
        )


def test_prompts_that_fill_the_context_are_refused_by_row(home: Path) -> None:
    long = "a" * 2000
    made = nbtrain.workload(
        "long",
        tasks=[*TASKS, {"prompt": long, "answer": "x"}],
        rewards=[nbtrain.rewards.exact("answer")],
        base_model="nbtrain/tiny",
    )
    run = Client().training.create(
        bench_id=made.id,
        options=OPTIONS | {"val_enabled": False, "lora_target_modules": "nothing_like_this"},
    )
    failure = failed_start(run)
    assert "start checks failed, 2 problems" in failure
    assert "nothing_like_this" in failure
    assert "no room for a reply" in failure
    assert "31" in failure
    assert "1023 tokens" in failure


@pytest.mark.parametrize(("precision", "kept"), [("fp32", False), ("bf16", True)])
def test_older_adapters_are_kept_only_where_they_score_something(
    home: Path, precision: str, kept: bool
) -> None:
    """In fp32 the sampler's log-probs stand; below it, those of the version that sampled."""
    made = nbtrain.workload(
        "spread", tasks=TASKS, rewards=[spread], base_model="nbtrain/tiny", held_out=0.0
    )
    options = OPTIONS | {"precision": precision, "val_interval_steps": 0, "max_staleness": 3}
    run = Client().training.create(bench_id=made.id, options=options)
    run.wait(timeout=240)
    with open_store() as store:
        last = store.checkpoints(store.find_run(run.id).key)[-1]
    saved = load_file(Path(last.path) / "training_state.safetensors")
    assert any(name.startswith("history/") for name in saved) == kept


def spread(completion: str, task: dict[str, Any]) -> float:
    return len(completion) / 100


def test_the_best_of_a_real_run_goes_on_and_is_exported(home: Path, tmp_path: Path) -> None:
    made = nbtrain.workload(
        "picked", tasks=TASKS, rewards=[spread], base_model="nbtrain/tiny", held_out=0.3
    )
    options = OPTIONS | {
        "num_steps": 14, "checkpoint_interval_steps": 1, "val_interval_steps": 1,
        "val_num_tasks": 6,
    }  # fmt: skip
    client = Client()
    run = client.training.create(bench_id=made.id, options=options)
    run.wait(timeout=240)
    saved = run.checkpoint_list()
    assert len(saved) == 15
    rounds = run.validation
    assert (rounds["low"] <= rounds["held_out_reward"]).all()
    assert (rounds["held_out_reward"] <= rounds["high"]).all()
    assert (rounds["low"] < rounds["high"]).any()

    best = run.best()
    assert best.has_training_state
    alike = [c.step_index for c in saved if c.ties_with is not None]
    assert best.step_index == min([best.ties_with or best.step_index, *alike])
    plan = client.training.resolve(options={"num_steps": 1}, parent_checkpoint_id=best).plan
    assert plan.start_step == best.step_index
    bare = [c for c in saved if not c.has_training_state]
    holding = [c for c in saved if c.has_training_state]
    assert len(bare) >= 4
    with pytest.raises(PlanRefused, match="holds no training state") as refused:
        client.training.resolve(options={"num_steps": 1}, parent_checkpoint_id=bare[0])
    told = str(refused.value)
    assert "--weights-only" in told
    near = min(holding, key=lambda c: abs(c.step_index - bare[0].step_index))
    assert f"step {near.step_index} ({near.checkpoint_id[:12]})" in told

    folder = bare[0].export(tmp_path / "adapter")
    model = AutoPeftModelForCausalLM.from_pretrained(folder)
    loaded = get_peft_model_state_dict(model)
    written = load_file(Path(bare[0].path) / "adapter_model.safetensors")
    assert loaded.keys() == written.keys()
    assert all((loaded[name].numpy() == written[name]).all() for name in written)
    assert any(written[name].any() for name in written if "lora_B" in name)
