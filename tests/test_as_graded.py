"""A batch as graded: what is rolled out trains, whatever ended it; nothing is drawn in place."""

from __future__ import annotations

import errno
import hashlib
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from described import EXACT, adapter_of, plan_of, run_here, sums
from hypothesis import given, settings
from hypothesis import strategies as st
from test_collector import collector, content, random_script, score
from test_loop import adds_up, length, make_loop, same
from tiny_models import tiny_model

from nbtrain.data.datasets import DatasetRegistry
from nbtrain.errors import NbtrainError, StartChecksFailed, Where
from nbtrain.rollout.admission import AS_GRADED, GroupOutcome, admit, judge
from nbtrain.rollout.draws import task_order
from nbtrain.rollout.ledger import Ledger, trajectory_rows
from nbtrain.rollout.types import Finish, SampleRequest, Trajectory
from nbtrain.rollout.types import TerminationReason as R
from nbtrain.store import open_store
from nbtrain.training import setup
from nbtrain.training.checking import check_only
from nbtrain.training.loop import Ending

NEVER = (R.STALE, R.CANCELLED)


def ended(reason: R, reward: float | None) -> Trajectory:
    return Trajectory(1, 1, 0, (1,), [2], [-1.0], [0], reason, reward=reward)


@given(st.sampled_from(list(R)), st.none() | st.floats(allow_nan=True))
def test_a_grade_is_kept_whatever_ended_the_trajectory(reason: R, reward: float | None) -> None:
    trajectory = ended(reason, reward)
    found = admit(trajectory, AS_GRADED)
    graded = reward is not None and abs(reward) < float("inf")
    assert found.eligible is (graded and reason not in NEVER)
    assert found.reward == (reward if found.eligible else None)
    if found.eligible:
        assert found.why == "as graded"
    elif reason in NEVER:
        assert found.why == f"{reason} never trains"
    else:
        assert found.why == "no grade: left out"


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.3, 1.0, 2.0]), max_size=6))
def test_a_group_with_a_grade_is_in_the_batch(rewards: list[float]) -> None:
    verdict = judge(rewards, AS_GRADED)
    assert verdict.admitted is bool(rewards)
    assert verdict.tied is (len(set(rewards)) == 1)
    if not rewards:
        assert verdict.outcome is GroupOutcome.TOO_SMALL
        assert verdict.why == "no completion was graded"


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 10_000))
def test_a_step_rolls_out_so_many_prompts_in_order_and_wraps_on(
    batch_size: int, in_flight: int, shuffle: int
) -> None:
    """Neither grades nor the order in which anything arrives decide what is rolled out."""
    order = random.Random(shuffle)
    collect, sampler = collector(
        rules=AS_GRADED,
        batch_size=batch_size,
        max_in_flight=in_flight,
        pick=lambda n: order.randrange(n),
    )
    expected = [(epoch, index) for epoch in range(6) for index in task_order(1, epoch, 7)]
    drawn: list[tuple[int, int]] = []
    ledger = Ledger()
    for step in (1, 2, 3):
        batch = collect.collect(step)
        drawn += [(j.group.epoch, j.group.task_index) for j in batch.groups]
        assert len(batch.groups) == batch_size
        assert [j.group.group_id for j in batch.used] == [
            j.group.group_id
            for j in batch.groups
            if any(t.reward is not None for t in j.group.trajectories)
        ]
        started, in_flight_now = collect.totals()
        row = ledger.step(batch, started=started, in_flight=in_flight_now)
        assert row["started_groups"] == step * batch_size
        assert row["completed_groups"] == row["used_groups"] + row["too_small_groups"]
        assert row["metrics"]["no_signal_not_trained"] == row["filtered_groups"] == 0
        assert row["no_signal_groups"] == sum(
            len({t.reward for t in j.group.trajectories if t.reward is not None}) == 1
            for j in batch.groups
        )
        assert (
            row["metrics"]["eligible_trajectories"]
            == row["metrics"]["graded_trajectories"]
            == sum(t.reward is not None for j in batch.groups for t in j.group.trajectories)
        )
        assert row["avg_reward"] == pytest.approx(row["used_reward"])
    assert drawn == expected[: len(drawn)]
    assert len(sampler.requests) == 3 * batch_size * 4


def test_cut_completions_train_with_their_own_reward_and_say_so() -> None:
    collect, _ = collector(rules=AS_GRADED, count=30, batch_size=30)
    batch = collect.collect(1)
    rows = [row for judged in batch.groups for row in trajectory_rows(judged, prompt="p")]
    cut = [row for row in rows if row["reason"] == "TRUNCATION" and row["reward"] is not None]
    assert cut
    for row in rows:
        trained = row["reward"] is not None
        assert row["eligible"] is trained
        assert row["used_reward"] == row["reward"]
        assert row["verdict"] == ("as graded" if trained else "no grade: left out")
    assert any(row["used_reward"] for row in cut)


def test_it_goes_on_from_a_state_in_the_middle_of_an_epoch() -> None:
    straight, _ = collector(rules=AS_GRADED)
    batches = [content(straight.collect(step)) for step in range(1, 6)]
    for at in range(5):
        first, _ = collector(rules=AS_GRADED)
        for step in range(1, at + 1):
            first.collect(step)
        second, _ = collector(rules=AS_GRADED)
        second.load_state_dict(first.state_dict())
        assert [content(second.collect(s)) for s in range(at + 1, 6)] == batches[at:]


def test_what_ran_out_of_time_is_cancelled_and_the_rest_trains() -> None:
    now = [0.0]

    def script(request: SampleRequest) -> tuple[list[int], Finish]:
        now[0] += 1.0
        return [request.stream[-1] % 2], Finish.STOP

    collect, _ = collector(
        rules=AS_GRADED, script=script, reward=float, clock=lambda: now[0], batch_timeout=9.5
    )
    batch = collect.collect(1)
    assert (len(batch.used), len(batch.cancelled)) == (2, 1)
    assert "batch_timeout_seconds" in str(batch.cut_short)
    assert not batch.barren


def test_a_step_without_a_grade_is_barren_and_costs_no_further_prompt() -> None:
    collect, sampler = collector(rules=AS_GRADED, reward=lambda text: None)
    batch = collect.collect(1)
    assert batch.barren
    assert batch.grading_failed
    assert batch.used == []
    assert batch.cut_short == "12 of 12 trajectories were not graded"
    assert len(sampler.requests) == 3 * 4
    assert len(collect.collect(2).groups) == 3


# --- in the loop ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    return folder


def graded_loop(folder: Path, **changes: Any) -> Any:
    return make_loop(folder, rules=AS_GRADED, val_interval=0, **changes)


def test_missing_grades_cost_a_step_and_five_of_them_the_run(model_folder: Path) -> None:
    """A grader that is away for four steps is waited for; one that stays away fails the run."""
    scores: list[Any] = [length]
    loop, records = graded_loop(model_folder, total=30, reward=lambda text: scores[0](text))
    loop.advance()
    before = loop.state_dict()
    scores[0] = lambda text: None
    for _ in range(4):
        loop.advance()
        assert loop._ending(None) is None
    assert same(before.adapter, loop.state_dict().adapter)
    assert same(before.optimizer, loop.state_dict().optimizer)
    scores[0] = length
    loop.advance()
    assert loop.barren == 0
    skipped = records.steps[1]
    assert not skipped["update_applied"]
    assert skipped["skip_reason"] == "no eligible group: 12 of 12 trajectories were not graded"
    assert skipped["metrics"]["incomplete"] == skipped["metrics"]["attempted_trajectories"] == 12
    scores[0] = lambda text: None
    ending = loop.run()
    assert ending.failure == (
        "5 steps up to 11 taught nothing: 12 of 12 trajectories were not graded"
    )
    assert records.saved[-1][0] == loop.step == 11
    adds_up(records.steps)


@pytest.mark.parametrize("total", [1, 3])
def test_a_short_run_that_never_gets_a_grade_fails_too(model_folder: Path, total: int) -> None:
    loop, records = graded_loop(model_folder, total=total, reward=lambda text: None)
    ending = loop.run()
    assert "taught nothing: 12 of 12 trajectories were not graded" in str(ending.failure)
    assert len(records.steps) == total
    loop, _ = graded_loop(model_folder, total=total + 1)
    loop.advance()
    loop._collector._flight._rewards._score = lambda text: None
    ending = loop.run()
    assert ending.failure is None, "what was learned before counts"


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_ties_train_through_kl_alone(model_folder: Path, beta: float) -> None:
    scores: list[Any] = [length]
    loop, records = graded_loop(model_folder, reward=lambda text: scores[0](text))
    loop._updater.settings = replace(loop._updater.settings, kl_beta=beta)
    loop.advance()  # the policy is no longer the reference
    before = loop.state_dict()
    scores[0] = lambda text: 0.0
    loop.advance()
    row = records.steps[-1]
    assert row["used_groups"] == row["no_signal_groups"] == 3
    assert row["metrics"]["no_signal_not_trained"] == 0
    assert row["update_applied"] is (beta > 0)
    assert same(before.adapter, loop.state_dict().adapter) is (beta == 0)
    if beta:
        assert row["metrics"]["batch_trajectories"] == row["metrics"]["trained_trajectories"] == 12
    else:
        assert row["skip_reason"] == "no gradient: every advantage is 0"
    assert loop.barren == 0


def test_without_an_interval_the_final_checkpoint_is_the_only_one(model_folder: Path) -> None:
    loop, records = graded_loop(model_folder, total=5)
    loop.settings = replace(loop.settings, checkpoint_interval=None)
    assert loop.run().failure is None
    assert [(step, reason) for step, reason, _ in records.saved] == [(5, "final")]


def test_a_made_up_reply_can_go_without_a_grade() -> None:
    """What the properties above rely on: some replies have no grade, some are cut."""
    replies = [
        random_script(SampleRequest(1, (1, 2), 8, (1, 0, task, 0, sample)))
        for task in range(30)
        for sample in range(4)
    ]
    grades = [score("".join(map(str, ids))) for ids, _ in replies]
    assert None in grades
    assert any(finish is Finish.LENGTH for _, finish in replies)


CUT = {"max_output_tokens_per_turn": 4, "max_output_tokens_per_trajectory": 4}
"""Some replies are cut at four tokens, some end before."""


# --- a whole run by descriptor --------------------------------------------------------------------


def test_a_run_over_a_datasets_rows(home: Path) -> None:
    """Three steps of two prompts over five rows: the last step of the epoch wraps on."""
    terms = [{"kind": "format", "pattern": "<answer>.*", "weight": 0.5}, *EXACT]
    with open_store() as store:
        dataset = DatasetRegistry(store).register("five", sums(5))
        plan = plan_of(dataset, terms=terms, micro_batch_sequences=2, **CUT)
        run, ending = run_here(store, plan)
        assert ending == Ending()
        steps = store.steps(run.key)
        assert [row["completed_groups"] for row in steps] == [2, 2, 2]
        assert [row["started_groups"] for row in steps] == [2, 4, 6]
        for row in steps:
            assert row["used_groups"] + row["too_small_groups"] == 2
            assert row["update_applied"]
            assert row["metrics"]["graded_trajectories"] == 8
            assert row["metrics"]["batch_trajectories"] == 8
            assert row["avg_reward"] == row["used_reward"]
        assert steps[0]["metrics"]["kl"] == 0.0, "it begins as the base"
        rows = store.trajectories(run.key)
        assert len(rows) == 24
        assert {row["verdict"] for row in rows} == {"as graded"}
        assert all(row["used_reward"] == row["reward"] for row in rows)
        reasons = Counter(row["reason"] for row in rows)
        assert reasons["LIMIT_REACHED"] > 0 < reasons["ENV_DONE"], reasons
        assert sorted(group["epoch"] for group in store.groups(run.key)) == [0] * 5 + [1]

        (checkpoint,) = store.checkpoints(run.key)
        assert (checkpoint.step, checkpoint.reason) == (3, "final")
        (model,) = store.models(run.key)
        weights = adapter_of(checkpoint.path).read_bytes()
        assert model["weights_digest"] == hashlib.sha256(weights).hexdigest()
        assert model["spec"] == {
            "lora_rank": plan["lora_rank"],
            "lora_alpha": plan["lora_alpha"],
            "lora_target_modules": "default",
            "method": "grpo",
            "step": 3,
        }
        checks = {check["name"]: check for check in run.checks}
        assert {name: check["verdict"] for name, check in checks.items()} == dict.fromkeys(
            (
                "memory_least",
                "memory_longest",
                "adapter_targets",
                "longest_prompt",
                "template_round_trip",
                "reward_answers",
                "reward_failures",
            ),
            "passed",
        )
        assert checks["reward_answers"]["measured"] == 1.0
        assert checks["longest_prompt"]["refuse"] == 256 - 4


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")], ids=["own", "file"]
)
def test_memory_that_runs_out_in_start_up_is_told(
    error: Exception, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise error

    monkeypatch.setattr(setup, "load_policy", exhausted)
    with open_store() as store:
        plan = plan_of(DatasetRegistry(store).register("sums", sums(4)))
        with pytest.raises(NbtrainError, match=r"^out of memory in start-up: .*no checkpoint was"):
            run_here(store, plan)


def test_everything_that_keeps_a_run_from_starting_is_told_at_once(
    home: Path, tmp_path: Path
) -> None:
    """By physical line of the file, and the figures stand on the run all the same."""
    rows = sums(4)
    rows[2]["messages"][0]["content"] = "a" * 400
    lines = [json.dumps(row) for row in rows]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([*lines[:2], "", "", *lines[2:]]) + "\n", "utf-8")
    terms = [{"kind": "exact", "column": "nowhere", "weight": 1.0}]
    with open_store() as store:
        dataset = DatasetRegistry(store).register("gaps", str(file))
        plan = plan_of(dataset, terms=terms)
        with pytest.raises(StartChecksFailed) as caught:
            run_here(store, plan)
        told = [str(problem) for problem in caught.value.problems]
        (run,) = store.runs()
        failed = {check["name"] for check in run.checks if check["verdict"] == "refused"}
        assert failed == {"longest_prompt", "reward_answers", "reward_failures"}
        assert len(told) == 2
        assert "1 training prompts leave less than 8 tokens: lines 5 (" in told[0]
        assert caught.value.problems[0].where == Where(line=5, source="gaps")
        assert "at most 248 tokens of prompt" in told[0]
        assert "nowhere" in told[1]
        assert store.models() == []

        before = set(psutil.Process().children(recursive=True))
        checks, problems = check_only(store, plan, tmp_path / "check")
        assert [str(problem) for problem in problems] == told
        assert {c.name for c in checks if c.verdict == "refused"} == failed
        assert len(store.runs()) == 1
        assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize("bad", [[0], [0, 3]])
def test_a_bad_row_is_not_what_the_reward_is_judged_by(home: Path, bad: list[int]) -> None:
    rows = sums(6)
    for n in range(6):
        rows[n]["messages"][1]["content"] = "no label here" if n in bad else f'{{"sum": {n}}}'
    with open_store(home) as store:
        dataset = DatasetRegistry(store).register("labels", rows)
        terms = [{"kind": "json-label-match", "name": "json-label-match", "weight": 1.0}]
        run, ending = run_here(store, plan_of(dataset, terms=terms, num_steps=1))
        checks = {check["name"]: check for check in store.run(run.key).checks}
        assert checks["reward_answers"]["measured"] == 1.0
        assert ending.failure is None


def test_no_row_with_a_grade_refuses_the_start(home: Path) -> None:
    rows = sums(6)
    for row in rows:
        row["messages"][1]["content"] = "no label here"
    with open_store(home) as store:
        dataset = DatasetRegistry(store).register("plain", rows)
        terms = [{"kind": "json-label-match", "name": "json-label-match", "weight": 1.0}]
        with pytest.raises(StartChecksFailed, match="0 of 4 completions of the trial were graded"):
            run_here(store, plan_of(dataset, terms=terms, num_steps=1))
