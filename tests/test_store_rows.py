"""Writing a run's rows and reading them back; phases, attempts and commands."""

from __future__ import annotations

import math
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import event, text
from test_store import RESOLVED, make_run, training

from nbtrain.errors import PlanRefused, StoreError
from nbtrain.plan.phases import Phase, Status
from nbtrain.plan.resolved import BaseModelRef, ParentRef, ResolvedPlan, Setting, WorkloadRef
from nbtrain.store import RunWriter, Store, amendments, new_id, open_store, trajectory_ref


@pytest.fixture
def store(home: Path) -> Store:
    return open_store()


def sampled(n: int, reward: float | None = 1.0, **more: Any) -> dict[str, Any]:
    """A trajectory as the training loop hands it over."""
    words = {"prompt": f"task {n // 4}", "completion": f"reply {n}", "terms": {"exact": reward}}
    row = {"trajectory_id": n, "group_id": n // 4, "sample": n % 4, "reward": reward}
    return {**row, "output_tokens": 10, "text": {**words, "error": None}, **more}


def saved(step: int) -> dict[str, Any]:
    """A checkpoint as the training loop hands it over."""
    parts = {"weights": True, "training_state": True}
    return {"checkpoint_id": new_id(), "step": step, "path": f"/c/{step}", **parts}


# --- runs -------------------------------------------------------------------------------------


def test_a_new_run_holds_its_plan_and_what_the_resolved_plan_says(store: Store) -> None:
    resolved = ResolvedPlan(
        settings={"algorithm": Setting("algorithm", "grpo", "stated")},
        workload=WorkloadRef("a" * 64, "sums", 90, 10, "by content", "d" * 64),
        base_model=BaseModelRef("nbtrain/tiny", "embedded", "/m", "f" * 64, 256),
        parent=ParentRef("e" * 64, "b" * 64, 10, "/c"),
        display_name="more",
        start_step=10,
        total_steps=30,
        config_hash="c" * 64,
    )
    before = time.time()
    run = store.create_run("1" * 64, plan={"num_steps": 20, "note": "é"}, resolved=resolved)
    assert run == store.run(run.key)
    assert run.plan == {"num_steps": 20, "note": "é"}
    assert ResolvedPlan.from_json(run.resolved) == resolved
    assert before <= run.created_at <= time.time()
    shown = (run.run_id, run.short_id, run.name, run.kind, run.method, run.workload_name)
    assert shown == ("1" * 64, "1" * 12, "more", "train", "grpo", "sums")
    assert (run.parent_run_id, run.parent_checkpoint_id) == ("b" * 64, "e" * 64)
    assert (run.start_step, run.completed_steps, run.total_steps) == (10, 10, 30)
    assert (run.phase, run.status, run.saved_step) == (Phase.RESOLVING_DATASET, "pending", None)
    [attempt] = store.attempts(run.key)
    assert (attempt["number"], attempt["host_pid"], attempt["started_at"]) == (1, None, None)
    with pytest.raises(StoreError, match="the run 111111111111 exists already"):
        store.create_run("1" * 64, plan={}, resolved=resolved)
    assert store.runs(parent_run_id="b" * 64) == [run]


def test_a_plan_that_is_no_json_creates_no_run(store: Store) -> None:
    with pytest.raises(TypeError, match=r"plan\.reward is a "):
        store.create_run(new_id(), plan={"reward": object()}, resolved=RESOLVED)
    assert store.runs() == []


def test_phases_move_forward_by_compare_and_set(store: Store) -> None:
    run = make_run(store)

    def move(phase: str, attempt: int = 1, **more: Any) -> bool:
        return store.move_phase(run.key, phase, attempt=attempt, **more)

    assert move("AWAITING_CAPACITY", message="slot 1 of 1 is taken by first")
    assert not move("AWAITING_BASE_MODEL")  # backwards: another process was faster
    assert not move("QUEUED", attempt=2)
    assert not move("QUEUED", expect=Phase.STARTING_JOB)
    assert move("QUEUED", expect=(Phase.STARTING_JOB, Phase.AWAITING_CAPACITY))
    assert store.run(run.key).started_at is None
    assert move("TRAINING", expect="QUEUED")
    assert not move("TRAINING")
    running = store.run(run.key)
    assert (running.status, running.ended_for_good) == (Status.RUNNING, False)
    assert running.started_at is not None
    assert store.runs(open_only=True) == [running]
    assert move("FAILED", failure="killed by signal 9", ended="early")
    assert not move("CANCELLED")
    ended = store.run(run.key)
    assert (ended.phase, ended.failure, ended.ended) == ("FAILED", "killed by signal 9", "early")
    assert ended.ended_at is not None
    assert ended.started_at == running.started_at
    assert ended.ended_for_good
    assert store.runs(open_only=True) == []
    assert store.attempts(run.key)[0]["ended_at"] == ended.ended_at
    rows = store.phases(run.key)
    assert [row["phase"] for row in rows] == [
        "RESOLVING_DATASET",
        "AWAITING_CAPACITY",
        "QUEUED",
        "TRAINING",
        "FAILED",
    ]
    assert rows[1]["message"] == "slot 1 of 1 is taken by first"
    assert store.phases(run.key, after=rows[2]["id"]) == rows[3:]
    assert not store.move_phase(99, "FAILED", attempt=1)
    with pytest.raises(ValueError, match="LEARNING"):
        move("LEARNING")


def test_an_attempt_is_taken_up_once_and_kept_up_to_date(store: Store) -> None:
    run = make_run(store)
    host = {"host_pid": 7, "host_start_time": 1.5, "boot_id": "b", "hostname": "here"}
    assert store.start_attempt(run.key, 1, **host, connection_file="/k.json", threads=2)
    assert not store.start_attempt(run.key, 1, host_pid=8)
    assert store.update_attempt(run.key, 1, rank_pids=[9, np.int64(10)], exit_code=-9)
    assert not store.update_attempt(run.key, 2, exit_code=0)
    with pytest.raises(TypeError, match=r"attempt\.hots_pid is no column of attempts"):
        store.update_attempt(run.key, 1, hots_pid=1)
    [row] = store.attempts(run.key)
    assert {name: row[name] for name in host} == host
    assert (row["rank_pids"], row["exit_code"], row["threads"]) == ([9, 10], -9, 2)
    assert row["progress_at"] is None
    store.heartbeat(run.key, 1)
    store.heartbeat(run.key, 1, "rank")
    [later] = store.attempts(run.key)
    assert row["started_at"] < later["heartbeat_at"] < later["progress_at"] <= time.time()


def test_a_heartbeat_tells_what_the_job_does_and_leaves_what_was_told(store: Store) -> None:
    run = make_run(store)
    told = []
    for activity in ("loads", None, "samples", ""):
        store.heartbeat(run.key, 1, "rank", activity=activity)
        store.heartbeat(run.key, 1)
        told.append(store.attempt(run.key, 1)["activity"])
    assert told == ["loads", "loads", "samples", None]


def test_a_failed_run_gets_a_new_attempt_and_the_old_one_writes_no_more(store: Store) -> None:
    run, old = training(store)
    assert not store.start_attempt(run.key, 2)  # it still trains
    store.move_phase(run.key, "FAILED", attempt=1, failure="out of memory")
    with pytest.raises(StoreError, match="attempt 1 may write no more: its run is FAILED"):
        old.commit_step({"step": 1})
    assert not store.start_attempt(run.key, 1)
    assert not store.start_attempt(run.key, 3)
    assert not store.start_attempt(run.key, 2, phase="TRAINING")
    assert store.start_attempt(run.key, 2, host_pid=11)
    assert not store.start_attempt(run.key, 2, host_pid=12)
    again = store.run(run.key)
    assert (again.attempt, again.phase, again.failure) == (2, Phase.AWAITING_BASE_MODEL, None)
    assert again.ended_at is None
    assert [row["host_pid"] for row in store.attempts(run.key)] == [1, 11]
    assert not store.move_phase(run.key, "CLEANING_UP", attempt=1)
    with pytest.raises(StoreError, match="its run is AWAITING_BASE_MODEL, attempt 2"):
        old.commit_checkpoint(saved(1))
    with pytest.raises(StoreError, match="its run is gone"):
        RunWriter(store, 99, 1).commit_step({"step": 1})


def test_commands_are_handled_once(store: Store) -> None:
    run, writer = training(store)
    other, _ = training(store, name="other")
    first = store.request(run.key, "cancel", reason="typed", grace=np.float32(2))
    store.request(other.key, "cancel")
    second = store.request(run.key, "save")
    rows = writer.unhandled_commands()
    assert [(row["id"], row["command"]) for row in rows] == [(first, "cancel"), (second, "save")]
    assert rows[0]["args"] == {"reason": "typed", "grace": 2.0}
    assert writer.handled(first)
    assert not writer.handled(first)
    assert [row["id"] for row in writer.unhandled_commands()] == [second]
    assert len(store.commands(run.key, unhandled=False)) == 2


# --- steps ------------------------------------------------------------------------------------


def test_a_step_comes_back_whole(store: Store) -> None:
    run, writer = training(store)
    step = {"step": 1, "avg_reward": 0.25, "loss": 0.5, "update_applied": True, "used_groups": 1}
    groups = [{"group_id": 0, "task_id": "t", "size": 4, "eligible": 4, "outcome": "used"}]
    rewards = [0.0, 1.0, None, 0.0]
    trajectories = [sampled(n, reward, eligible=n != 2) for n, reward in enumerate(rewards)]
    key = writer.commit_step({**step, "kl": 0.1, "metrics": {"entropy": 2}}, groups, trajectories)
    [row] = store.steps(run.key)
    place = {"run": run.key, "attempt": 1, "step": 1, "superseded": False}
    assert row["id"] == key
    assert row.items() >= {**step, **place, "settled": True, "skip_reason": None}.items()
    assert row["metrics"] == {"entropy": 2, "kl": 0.1}
    [group] = store.groups(run.key)
    assert group.items() >= {**place, **groups[0], "consumed_step": None}.items()
    rows = store.trajectories(run.key)
    assert [item["reward"] for item in rows] == rewards
    assert [item["eligible"] for item in rows] == [True, True, False, True]
    assert all(item.items() >= {**place, "split": "train"}.items() for item in rows)
    assert "text" not in rows[0]
    texts = store.texts([rows[3]["id"], rows[0]["id"], 999])
    assert texts == {rows[n]["id"]: trajectories[n]["text"] for n in (0, 3)}
    assert trajectory_ref(run.run_id, rows[3]) == f"{run.run_id[:12]}-{rows[3]['id']}"
    now = store.run(run.key)
    assert (now.completed_steps, now.updates_applied, now.output_tokens) == (1, 1, 40)
    assert (now.attempted_trajectories, now.graded_trajectories) == (4, 3)


def test_a_step_is_committed_once_and_a_failed_one_can_be_made_again(store: Store) -> None:
    run, writer = training(store)
    for bad in (
        ({"step": 1, "loss": "low"},),
        ({},),
        ({"step": 1}, [{"task_id": "t"}]),
        ({"step": 1}, [], [sampled(0), {"rewrad": 1}]),
        ({"step": 1}, [], [sampled(0, text={"terms": object()})]),
    ):
        with pytest.raises(TypeError):
            writer.commit_step(*bad)
    with pytest.raises(StoreError, match="step 7 cannot be amended"):
        writer.commit_step({"step": 1}, [{"group_id": 0}], [sampled(0)], amend={7: {"loss": 1}})
    assert store.run(run.key) == run
    for read in (store.steps, store.groups, store.trajectories):
        assert read(run.key) == []
    writer.commit_step({"step": 1}, [{"group_id": 0}], [sampled(0)])
    with pytest.raises(StoreError, match="step 1 of attempt 1 is committed already"):
        writer.commit_step({"step": 1}, [{"group_id": 1}], [sampled(1)])
    assert store.run(run.key).attempted_trajectories == 1
    assert [row["group_id"] for row in store.groups(run.key)] == [0]


def test_what_is_not_finite_is_null_and_named(store: Store) -> None:
    run, writer = training(store)
    for step, bad in enumerate((math.nan, math.inf, -math.inf, torch.tensor(math.nan)), 1):
        writer.commit_step(
            {"step": step, "loss": bad, "avg_reward": 0.5, "by_term": {"exact": bad}},
            [{"group_id": step, "reward_std": bad}],
            [sampled(0), sampled(1, reward=bad)],
        )
    rows = store.steps(run.key)
    assert [row["loss"] for row in rows] == [None] * 4
    assert [row["avg_reward"] for row in rows] == [0.5] * 4
    for row in rows:
        assert row["metrics"]["by_term"] == {"exact": None}
        assert row["metrics"]["nonfinite"] == [
            "loss",
            "by_term.exact",
            "groups[0].reward_std",
            "trajectories[1].reward",
            "trajectories[1].text.terms.exact",
        ]
    assert store.run(run.key).graded_trajectories == 4
    with store.database.reading() as connection:
        stored = connection.execute(text("SELECT metrics FROM steps")).scalars().all()
    assert not any("NaN" in found or "Infinity" in found for found in stored)


def test_numbers_of_every_kind_are_taken(store: Store) -> None:
    run, writer = training(store)
    rewards = [np.float32(1), np.int64(0), torch.tensor(0.5), Decimal("0.25"), True]
    writer.commit_step(
        {"step": np.int64(1), "avg_reward": np.float64(0.55), "grad_norm": torch.tensor(2.0)},
        (),
        [sampled(n, reward) for n, reward in enumerate(rewards)],
    )
    found = [row["reward"] for row in store.trajectories(run.key)]
    assert found == [1.0, 0.0, 0.5, 0.25, 1.0]
    assert {type(reward) for reward in found} == {float}
    [step] = store.steps(run.key)
    assert (step["step"], step["avg_reward"], step["metrics"]) == (1, 0.55, {"grad_norm": 2.0})


def test_an_earlier_step_is_amended_in_the_same_transaction(store: Store) -> None:
    run, writer = training(store)
    writer.commit_step(
        {"step": 1, "pending_groups": 2, "settled": False, "kl": 1.0, "entropy": math.nan}
    )
    change = {"pending_groups": 0, "settled": True, "seconds": {"saving": 0.5}, "kl": math.inf}
    writer.commit_step({"step": 2}, amend={1: change})
    first, second = store.steps(run.key)
    assert (first["pending_groups"], first["settled"], second["settled"]) == (0, True, True)
    assert first["metrics"] == {
        "kl": None,
        "entropy": None,
        "seconds": {"saving": 0.5},
        "nonfinite": ["entropy", "kl"],
    }
    assert store.run(run.key).completed_steps == 2


def waiting(writer: RunWriter, step: int, group: int) -> None:
    """A step that ends with one group pending."""
    writer.commit_step(
        {"step": step, "pending_groups": 1, "settled": False, "kl": 0.5},
        [{"group_id": group, "outcome": "pending", "reason": "waits", "eligible": 2}],
        [sampled(n, n / 10, verdict="waits", eligible=True) for n in (2 * group, 2 * group + 1)],
    )


USED = {"outcome": "used", "reason": "admitted", "consumed_step": 2}


def used(trajectory: int, **more: Any) -> dict[int, dict[str, Any]]:
    told = {"used_reward": 0.5, "advantage": 0.7, "verdict": "trained on", "consumed_step": 2}
    return {trajectory: told | more, trajectory + 1: told}


def test_rows_of_earlier_steps_change_in_the_transaction_of_the_step_that_uses_them(
    store: Store,
) -> None:
    run, writer = training(store)
    other, noise = training(store, name="other")
    waiting(writer, 1, 1)
    waiting(noise, 1, 1)
    # A held-out trajectory of the same id is another one
    writer.commit_validation({"step": 1, "round_completed": True}, [sampled(2, 0.9)])
    writer.commit_step(
        {"step": 2},
        amend={1: {"pending_groups": 0, "used_groups": 1, "settled": True}},
        amend_groups={1: USED},
        amend_trajectories=used(2, advantage=math.nan),
    )
    first, second = store.steps(run.key)
    assert (first["pending_groups"], first["used_groups"], first["settled"]) == (0, 1, True)
    assert second["metrics"] == {"nonfinite": ["amend_trajectories[2].advantage"]}
    [group] = store.groups(run.key)
    assert group.items() >= {**USED, "eligible": 2, "step": 1}.items()
    rows = store.trajectories(run.key)
    assert [(row["split"], row["verdict"], row["advantage"]) for row in rows] == [
        ("train", "trained on", None),
        ("train", "trained on", 0.7),
        ("held_out", None, None),
    ]
    assert [row["reward"] for row in rows] == [0.2, 0.3, 0.9]
    assert store.groups(other.key)[0]["outcome"] == "pending"
    assert {row["verdict"] for row in store.trajectories(other.key)} == {"waits"}
    now = store.run(run.key)
    assert (now.attempted_trajectories, now.graded_trajectories, now.output_tokens) == (2, 2, 20)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"amend_groups": {1: USED, 7: USED}}, "1 groups cannot be amended, .* as 7$"),
        ({"amend_trajectories": used(3)}, "1 trajectories cannot be amended, .* as 4$"),
        ({"amend_trajectories": {n: {} for n in (3,)} | used(90)}, "as 90, 91$"),
    ],
)
def test_what_stands_nowhere_is_not_amended_and_named(
    store: Store, changes: dict[str, Any], complaint: str
) -> None:
    run, writer = training(store)
    waiting(writer, 1, 1)
    before = store.steps(run.key), store.groups(run.key), store.trajectories(run.key)
    with pytest.raises(StoreError, match=complaint):
        writer.commit_step({"step": 2}, **changes)
    assert (store.steps(run.key), store.groups(run.key), store.trajectories(run.key)) == before


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"amend_groups": {1: {"size": 3}}}, r"amend_groups\[1\]\.size may not change"),
        ({"amend_trajectories": {2: {"reward": 1.0}}}, r"trajectories\[2\]\.reward may not"),
        ({"amend_trajectories": {2: {"advantage": "up"}}}, r"\[2\]\.advantage is 'up'"),
    ],
)
def test_what_was_recorded_for_good_may_not_change(
    store: Store, changes: dict[str, Any], complaint: str
) -> None:
    run, writer = training(store)
    waiting(writer, 1, 1)
    with pytest.raises(TypeError, match=complaint):
        writer.commit_step({"step": 2}, **changes)
    assert store.run(run.key).completed_steps == 1


def test_a_resume_takes_back_what_the_lost_steps_had_changed(store: Store) -> None:
    run, first = training(store)
    waiting(first, 1, 1)
    first.commit_checkpoint(saved(1))
    before = store.steps(run.key), store.groups(run.key), store.trajectories(run.key)
    totals = store.run(run.key)
    first.commit_step(
        {"step": 2, "update_applied": True},
        amend={1: {"pending_groups": 0, "used_groups": 1, "settled": True, "kl": 2, "lag": 1}},
        amend_groups={1: USED},
        amend_trajectories=used(2),
    )
    first.commit_step({"step": 3}, amend={1: {"kl": math.nan}}, amend_groups={1: {"reason": "x"}})
    store.move_phase(run.key, "FAILED", attempt=1)
    store.start_attempt(run.key, 2)
    second = RunWriter(store, run.key, 2)
    assert second.supersede_after(1) == 2
    assert (store.steps(run.key), store.groups(run.key), store.trajectories(run.key)) == before
    now = store.run(run.key)
    assert (now.updates_applied, now.output_tokens) == (totals.updates_applied, 20)
    # The group still waits: this attempt may use it, though another one sampled it
    second.commit_step({"step": 2}, amend={1: {"settled": True}}, amend_groups={1: USED})
    assert store.groups(run.key)[0]["outcome"] == "used"
    assert store.steps(run.key)[0]["settled"]


def test_a_resume_takes_back_what_the_end_of_the_run_had_changed(store: Store) -> None:
    run, first = training(store)
    waiting(first, 1, 1)
    first.commit_checkpoint(saved(1))
    stale = {"outcome": "discarded", "reason": "the run ended"}
    first.commit_closing(1, [sampled(9, None)], amend_groups={1: stale})
    assert store.groups(run.key)[0]["outcome"] == "discarded"
    assert store.run(run.key).attempted_trajectories == 3
    store.move_phase(run.key, "FAILED", attempt=1)
    store.start_attempt(run.key, 2)
    RunWriter(store, run.key, 2).supersede_after(1)
    assert store.groups(run.key)[0]["outcome"] == "pending"


def test_what_was_before_is_kept_while_it_may_be_gone_back_to(store: Store) -> None:
    _, writer = training(store)

    def kept() -> list[int]:
        with store.database.reading() as connection:
            return list(connection.execute(text("SELECT step FROM amendments")).scalars())

    for step in range(1, 7):
        waiting(writer, step, step)
        writer.commit_step({"step": step + 100}, amend_groups={step: USED})
        if step % 2 == 0:
            writer.commit_checkpoint(saved(step + 100))
    assert kept() == [105, 106]
    assert writer.commit_checkpoint({**saved(107), "training_state": False})
    assert kept() == [105, 106]


def test_validation_stands_apart_from_training(store: Store) -> None:
    run, writer = training(store)
    round_ = {"step": 0, "policy_version": 0, "held_out_reward": 0.5, "round_completed": True}
    writer.commit_validation({**round_, "completed_samples": 2}, [sampled(0), sampled(1, 0.0)])
    writer.commit_step({"step": 1}, (), [sampled(0)])
    writer.commit_validation({**round_, "step": 1, "round_completed": False}, [sampled(0, None)])
    with pytest.raises(StoreError, match="the validation round at step 1 is committed already"):
        writer.commit_validation({**round_, "step": 1})
    rounds = store.validation_rounds(run.key)
    assert [(row["step"], row["round_completed"]) for row in rounds] == [(0, True), (1, False)]
    assert rounds[0].items() >= round_.items()
    assert store.validation_rounds(run.key, after=rounds[0]["id"]) == rounds[1:]
    held_out = store.trajectories(run.key, split="held_out")
    assert [row["step"] for row in held_out] == [0, 0, 1]
    assert len(store.texts(row["id"] for row in held_out)) == 3
    assert len(store.trajectories(run.key, split="train")) == 1
    assert store.trajectory_count(run.key) == 4
    assert store.trajectory_count(run.key, split="held_out") == 3
    assert store.run(run.key).attempted_trajectories == 1
    with pytest.raises(ValueError, match="split is 'test'"):
        store.trajectories(run.key, split="test")


def test_a_checkpoint_is_committed_once_and_its_training_state_can_go(store: Store) -> None:
    run, writer = training(store)
    rows = [saved(n) for n in range(3)]
    for row in rows:
        writer.commit_checkpoint(row)
    with pytest.raises(StoreError, match=f"checkpoint {rows[0]['checkpoint_id'][:12]} is commit"):
        writer.commit_checkpoint(rows[0])
    with pytest.raises(ValueError, match="is not an id"):
        writer.commit_checkpoint({**rows[0], "checkpoint_id": "../x"})
    dropped, pinned, parent = (row["checkpoint_id"] for row in rows)
    assert store.pin(pinned)
    assert not store.pin(pinned)
    child = make_run(store, parent={"run_id": run.run_id, "checkpoint_id": parent})
    assert store.referenced_checkpoints() == {parent}
    assert store.drop_training_state(dropped) == "/c/0"
    assert [store.drop_training_state(item) for item in (dropped, pinned, parent)] == [None] * 3
    assert [row.training_state for row in store.checkpoints(run.key)] == [False, True, True]
    store.move_phase(child.key, "CANCELLED", attempt=1)
    assert store.referenced_checkpoints() == set()
    assert store.drop_training_state(parent) == "/c/2"
    assert store.pin(pinned, pinned=False)
    assert store.drop_training_state(pinned) == "/c/1"
    gone = {"run_id": run.run_id, "checkpoint_id": pinned}
    with pytest.raises(PlanRefused, match="has lost its training state"):
        make_run(store, parent=gone)
    weights = RESOLVED["settings"] | {"load_weights_only": {"value": True}}
    assert make_run(store, parent=gone, settings=weights).parent_checkpoint_id == pinned


def test_a_dropped_training_state_no_longer_counts(store: Store, tmp_path: Path) -> None:
    run, writer = training(store)
    (tmp_path / "training_state.safetensors").write_bytes(b"x" * 700)
    (tmp_path / "state.json").write_bytes(b"x" * 50)
    whole = {**saved(1), "path": str(tmp_path), "size_bytes": 1000}
    gone = {**saved(2), "path": str(tmp_path / "gone"), "size_bytes": 1000}
    for row in (whole, gone):
        writer.commit_checkpoint(row)
        assert store.drop_training_state(row["checkpoint_id"]) == row["path"]
        assert store.drop_training_state(row["checkpoint_id"]) is None
    assert [row.size_bytes for row in store.checkpoints(run.key)] == [250, 1000]


def test_rows_past_the_restored_step_are_kept_and_hidden(store: Store) -> None:
    run, first = training(store)
    for step in (1, 2, 3):
        first.commit_step(
            {"step": step, "update_applied": step != 2, "avg_reward": step / 10},
            [{"group_id": step}],
            [sampled(step), sampled(9, None)],
        )
        first.commit_validation({"step": step, "round_completed": True}, [sampled(0)])
        first.commit_checkpoint(saved(step))
    store.move_phase(run.key, "FAILED", attempt=1)
    store.start_attempt(run.key, 2)
    second = RunWriter(store, run.key, 2)
    assert second.supersede_after(1) == 2
    assert second.supersede_after(1) == 0
    now = store.run(run.key)
    assert (now.completed_steps, now.saved_step, now.updates_applied) == (1, 1, 1)
    assert (now.attempted_trajectories, now.graded_trajectories, now.output_tokens) == (2, 1, 20)
    second.commit_step({"step": 2, "avg_reward": 0.7}, [{"group_id": 2}], [sampled(2)])
    with pytest.raises(StoreError, match="attempt 2 has steps already"):
        second.supersede_after(1)
    assert [(r["attempt"], r["avg_reward"]) for r in store.rewards(run.key)] == [(1, 0.1), (2, 0.7)]
    for read, shown, kept in (
        (store.steps, 2, 4),
        (store.groups, 2, 4),
        (store.trajectories, 4, 10),
        (store.validation_rounds, 1, 3),
        (store.checkpoints, 1, 3),
    ):
        assert len(read(run.key)) == shown
        assert len(read(run.key, superseded=True)) == kept
    assert len(store.trajectories(run.key, step=2)) == 1
    assert store.run(run.key).attempted_trajectories == 3


# --- polling ----------------------------------------------------------------------------------


def test_a_poller_gets_what_is_new_and_nothing_twice(store: Store) -> None:
    run, writer = training(store)
    other, noise = training(store, name="other")
    seen: dict[str, list[int]] = {"steps": [], "groups": [], "trajectories": []}
    readers = {"steps": store.steps, "groups": store.groups, "trajectories": store.trajectories}
    for step in range(1, 8):
        writer.commit_step({"step": step}, [{"group_id": step}], [sampled(n) for n in range(3)])
        noise.commit_step({"step": step}, [{"group_id": step}], [sampled(n) for n in range(2)])
        if step % 3 == 0:
            for name, read in readers.items():
                seen[name] += [r["id"] for r in read(run.key, after=max(seen[name], default=0))]
    for name, read in readers.items():
        everything = [row["id"] for row in read(run.key)]
        assert everything[: len(seen[name])] == seen[name]
        assert everything == sorted(set(everything))
        assert len(seen[name]) in (6, 18)
    assert all(row["run"] == other.key for row in store.steps(other.key))


def test_pages_columns_and_chunks(store: Store) -> None:
    run, writer = training(store)
    for step in range(1, 6):
        writer.commit_step({"step": step, "avg_reward": step}, (), [sampled(n) for n in range(10)])
    rows = store.trajectories(run.key)
    assert store.trajectories(run.key, limit=7) == rows[:7]
    assert store.trajectories(run.key, limit=7, newest=True) == rows[-7:]
    assert store.trajectories(run.key, rows[44]["id"], limit=7, newest=True) == rows[45:]
    assert store.trajectories(run.key, step=3) == rows[20:30]
    assert store.trajectories(run.key, step=3, columns=("reward",)) == [{"reward": 1.0}] * 10
    assert store.steps(run.key, limit=2) == store.steps(run.key)[:2]
    chunks = list(store.trajectory_chunks(run.key, ("step", "reward"), size=16))
    assert [len(chunk) for chunk in chunks] == [16, 16, 16, 2]
    assert [row for chunk in chunks for row in chunk] == [
        (row["id"], row["step"], row["reward"]) for row in rows
    ]
    assert list(store.trajectory_chunks(run.key, ("step",), split="held_out")) == []


def test_texts_of_scattered_trajectories(store: Store) -> None:
    run, writer = training(store)
    for step in range(1, 4):
        rows = [sampled(n, text=None) if n % 5 == 0 else sampled(n) for n in range(40)]
        writer.commit_step({"step": step}, (), rows)
    keys = {row["id"]: row["trajectory_id"] for row in store.trajectories(run.key)}
    wanted = [key for key in keys if key % 7 == 3]
    expected = {key: f"reply {keys[key]}" for key in wanted if keys[key] % 5}
    found = store.texts(reversed(wanted))
    assert {key: words["completion"] for key, words in found.items()} == expected
    assert store.texts([]) == {}


@pytest.mark.parametrize(
    ("query", "plan"),
    [
        (
            lambda s: s.steps(1, after=5),
            "SEARCH steps USING INDEX ix_steps_run (run=? AND id>?)",
        ),
        (lambda s: s.rewards(1), "SEARCH steps USING COVERING INDEX ix_steps_reward (run=?)"),
        (
            lambda s: s.groups(1, after=5),
            "SEARCH groups USING INDEX ix_groups_run (run=? AND id>?)",
        ),
        (
            lambda s: s.groups(1, step=2),
            "SEARCH groups USING INDEX ix_groups_step (run=? AND step=?)",
        ),
        (
            lambda s: s.trajectories(1, after=5),
            "SEARCH trajectories USING INDEX ix_trajectories_run (run=? AND id>?)",
        ),
        (
            lambda s: s.trajectories(1, limit=9, newest=True),
            "SEARCH trajectories USING INDEX ix_trajectories_run (run=?)",
        ),
        (
            lambda s: s.trajectories(1, step=2),
            "SEARCH trajectories USING INDEX ix_trajectories_step (run=? AND step=?)",
        ),
        (
            lambda s: s.trajectories(1, split="held_out"),
            "SEARCH trajectories USING INDEX ix_trajectories_held_out (run=? AND split=?)",
        ),
        (
            lambda s: s.texts([4]),
            "SEARCH trajectory_texts USING INTEGER PRIMARY KEY (rowid<?)",
        ),
        (
            lambda s: s.validation_rounds(1, after=5),
            "SEARCH validation_rounds USING INDEX ix_validation_rounds_run (run=? AND id>?)",
        ),
        (
            lambda s: s.phases(1, after=5),
            "SEARCH phases USING INDEX ix_phases_run (run=? AND id>?)",
        ),
        (
            lambda s: s.commands(1),
            "SEARCH commands USING INDEX ix_commands_run (run=?)",
        ),
        (
            lambda s: s.runs(name="first"),
            "SEARCH runs USING INDEX ix_runs_name (name=?)",
        ),
    ],
)
def test_every_poll_is_answered_by_an_index_without_sorting(
    store: Store, query: Any, plan: str
) -> None:
    asked: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        if statement.startswith("SELECT"):
            asked.append((statement, parameters))

    event.listen(store.engine, "before_cursor_execute", note)
    query(store)
    event.remove(store.engine, "before_cursor_execute", note)
    [(statement, parameters)] = asked
    with store.database.reading() as connection:
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
    assert [row[-1] for row in rows] == [plan]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("groups", "SEARCH t USING INDEX ix_groups_group (run=? AND group_id=?)"),
        (
            "trajectories",
            "SEARCH t USING INDEX ix_trajectories_trajectory (run=? AND trajectory_id=?)",
        ),
    ],
)
def test_rows_to_be_amended_are_found_by_an_index(store: Store, name: str, plan: str) -> None:
    with store.database.reading() as connection:
        query = f"EXPLAIN QUERY PLAN {amendments._FIND[name]}"
        rows = connection.exec_driver_sql(query, ("[1]", 1)).all()
    assert plan in [row[-1] for row in rows]
