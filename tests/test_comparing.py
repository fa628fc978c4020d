"""Two checkpoints side by side: by their rounds, by fresh replies, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stored
import tried
from hypothesis import given
from hypothesis import strategies as st
from supervised_world import World, chats

from nbtrain.client import Client, Run
from nbtrain.client.comparing import compare_checkpoints, most_different
from nbtrain.client.records import Checkpoint
from nbtrain.client.trying import trying_process
from nbtrain.errors import NotFound, Refused
from nbtrain.plan.picking import intervals

Reward = Callable[[int, int], float | None]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = Client(home=tmp_path_factory.mktemp("home"))
    yield client
    trying_process(stored.store_of(client)).close()


def validated(run: Run, step: int, tasks: range, reward: Reward, **more: Any) -> Checkpoint:
    """A checkpoint without files whose complete round sampled each task twice."""
    rows = [
        {
            "trajectory_id": task * 2 + sample,
            "group_id": task,
            "sample": sample,
            "task_id": f"{task:016x}",
            "status": "completed",
            "reason": "ENV_DONE",
            "reward": reward(task, sample),
            "eligible": False,
            "verdict": "held out: never trains",
            "output_tokens": 5,
            "text": {
                "prompt": [{"role": "user", "content": f"<b>question {task}</b>"}],
                "completion": f"<img src=x onerror=alert({task})> at {step}",
                "terms": {},
                "error": None,
            },
            **more,
        }
        for task in tasks
        for sample in (0, 1)
    ]
    figures = {"held_out_reward": 0.5, "completed_samples": len(rows), "seconds": 1.0}
    stored.writer(run).commit_validation(
        {"step": step, "round_completed": True, "expected_samples": len(rows), **figures}, rows
    )
    saved = stored.save(run, step)
    return next(c for c in run.checkpoint_list() if c.checkpoint_id == saved)


# --- by their rounds -----------------------------------------------------------------------------


def test_two_rounds_are_compared_task_by_task(client: Client) -> None:
    run = stored.create(client, "rounds")
    a = validated(run, 4, range(10), lambda task, sample: float(task % 2))
    b = validated(run, 8, range(2, 12), lambda task, sample: float(task in (2, 4, 5, 7)))
    found = client.training.checkpoints.compare(a, b.checkpoint_id[:10], tasks=5)
    assert found.recorded
    summary = found.summary
    assert summary is not None
    # of 2 to 9: odd ones earned before; 2, 4, 5 and 7 after
    assert (summary.tasks, summary.reward_a, summary.reward_b) == (8, 0.5, 0.5)
    gaps = [1.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0, -1.0]
    assert [summary.interval] == intervals([gaps])
    ids = [f"{task:016x}" for task in (2, 3, 4, 9, 5)]
    assert [task.task_id for task in found.tasks] == ids
    assert [task.difference for task in found.tasks] == [1, -1, 1, -1, 0]
    text = repr(found)
    assert "Mean held-out reward over 8 common tasks: 0.500 at step 4" in text
    assert "difference +0.000, 95 % interval" in text
    assert "it may be none." in text
    assert "2 tasks improved, 2 worsened, 4 earned the same. Shown are 5, chosen as" in text
    assert "The rounds graded 10 and 10 tasks, of which 8 are the same." in text
    assert len(found.tasks[0].a) == len(found.tasks[0].b) == 2
    table = found.to_frame()
    assert list(table["difference"]) == [1, -1, 1, -1, 0]
    assert table["reply_b"][0].count("at 8") == 2
    assert len(found.rewards) == 8
    assert list(found.rewards["difference"].abs()) == sorted(map(abs, gaps), reverse=True)


def test_what_the_model_wrote_is_escaped(client: Client) -> None:
    run = stored.create(client, "hostile")
    a = validated(run, 1, range(2), lambda task, sample: 0.0)
    b = validated(run, 2, range(2), lambda task, sample: 1.0)
    shown = client.training.checkpoints.compare(a, b)._repr_html_()
    assert "<img" not in shown
    assert "<b>question" not in shown
    assert shown.count("&lt;img") == 8
    assert "2 tasks improved, 0 worsened, 0 earned the same; all are shown" in shown


def test_rewards_count_as_in_a_round(client: Client) -> None:
    """A reply that a limit cut earns nothing; one that nobody graded is left out."""
    run = stored.create(client, "counted")
    graded: Reward = lambda task, sample: None if task == 1 else float(sample)  # noqa: E731
    a = validated(run, 1, range(3), graded)
    b = validated(run, 2, range(3), lambda task, sample: 1.0, reason="TRUNCATION")
    found = client.training.checkpoints.compare(a, b)
    assert dict(found.scores) == {f"{task:016x}": (0.5, 0.0) for task in (0, 2)}
    assert {reply.reward for task in found.tasks for reply in task.b} == {1.0}  # as recorded


def test_one_common_task_has_no_interval(client: Client) -> None:
    run = stored.create(client, "one")
    a = validated(run, 1, range(1), lambda task, sample: 0.0)
    b = validated(run, 2, range(1), lambda task, sample: 1.0)
    found = client.training.checkpoints.compare(a, b)
    assert found.summary is not None
    assert found.summary.interval is None
    assert "difference +1.000, of one task, which tells nothing about others" in repr(found)


def test_runs_of_one_workload_are_compared_and_their_settings_told(client: Client) -> None:
    first = stored.create(client, "warm", val_temperature=1.0)
    second = stored.create(client, "cold", val_temperature=0.0)
    a = validated(first, 4, range(3), lambda task, sample: 0.0)
    b = validated(second, 4, range(3), lambda task, sample: 1.0)
    text = repr(client.training.checkpoints.compare(a, b))
    assert "The rounds were sampled differently: val_temperature 1.0 and 0.0." in text
    assert f"step 4 of run {first.id[:12]} beside step 4 of run {second.id[:12]}" in text


rewards = st.floats(-1, 1).map(lambda x: round(x, 2))


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=4), st.tuples(rewards, rewards)),
    st.integers(1, 12),
)
def test_the_most_different_are_chosen(scores: dict[str, tuple[float, float]], count: int) -> None:
    chosen = most_different(scores, count)
    assert len(chosen) == len(set(chosen)) == min(count, len(scores))
    gap = {task: after - before for task, (before, after) in scores.items()}
    left = [task for task in scores if task not in chosen]
    for sign in (1, -1):
        mine = [sign * gap[task] for task in chosen if sign * gap[task] > 0]
        assert mine == sorted(mine, reverse=True)
        assert all(sign * gap[task] <= min(mine, default=2) for task in left)
    if any(gap[task] for task in left):
        assert all(gap[task] for task in chosen)
    assert most_different(dict(reversed(scores.items())), count) == chosen


# --- by fresh replies ----------------------------------------------------------------------------


def test_without_rounds_both_answer_the_same_held_out_tasks(client: Client) -> None:
    run = stored.create(client, "asked")
    a, b = tried.save(run, 4), tried.save(run, 8, seed=1)
    told: list[str] = []
    found = compare_checkpoints(client._parts, a, b, tasks=3, n=2, told=told.append)
    assert not found.recorded
    assert found.summary is None
    assert "loading the checkpoint of step 8" in told
    workload = client._parts.catalog.workload("sums")
    held_out = {task.task_id: task for task in workload.split(validation=True).held_out_tasks}
    assert len(found.tasks) == 3
    for task in found.tasks:
        assert task.task_id in held_out
        assert task.prompt == held_out[task.task_id].prompt
        assert task.reference == held_out[task.task_id].columns["answer"]
        assert task.reward_a is None
    text = repr(found)
    assert "The replies were sampled now and are not graded: temperature" in text
    seed = run.plan["seed"]
    for one, side in ((a, "a"), (b, "b")):
        for task in found.tasks:
            again = one.generate([task.prompt], n=2, seed=seed)
            assert [r.completion for r in again] == [r.completion for r in getattr(task, side)]
    assert list(found.to_frame()["reward_a"].isna()) == [True] * 3
    again = compare_checkpoints(client._parts, a, b, tasks=3, n=2)
    assert [task.task_id for task in again.tasks] == [task.task_id for task in found.tasks]


def test_a_round_that_is_not_complete_is_none(client: Client) -> None:
    run = stored.create(client, "partial")
    a, b = tried.save(run, 1), tried.save(run, 2, seed=1)
    stored.validate(run, 1, 0.5)
    stored.validate(run, 2, 0.5, complete=False)
    assert not client.training.checkpoints.compare(a, b, tasks=1).recorded


def test_without_held_out_tasks_it_says_what_they_are(client: Client) -> None:
    rows = [{"prompt": f"What is {n} + 1?"} for n in range(20)]
    workload = client.workloads.create("split", tasks=rows, rewards=_half, held_out=0.5)
    said = "Nothing is held out: these are tasks that were trained on."
    for validates in (True, False):
        run = tried.run_on(client, workload.id, val_enabled=validates)
        a, b = tried.save(run, 1), tried.save(run, 2, seed=1)
        found = client.training.checkpoints.compare(a, b, tasks=20)
        assert (said in repr(found)) is not validates
        assert len(found.tasks) == (run.plan.workload.held_out_tasks if validates else 20)


def _half(completion: str, task: dict[str, Any]) -> float:
    return 0.5


def test_supervised_runs_answer_rows_of_the_validation_dataset(client: Client) -> None:
    world = World(stored.store_of(client))
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"messages": [system, *row["messages"], {"role": "user", "content": "Thanks."}]}
        for row in chats(5)
    ]
    plan = world.plan(chats(), validation=rows, precision="fp32")
    run = Run(world.store, world.create(plan))
    a, b = tried.save(run, 1), tried.save(run, 2, seed=1)
    for step, loss in ((1, 0.5), (2, 0.25)):
        stored.read(run, step, loss)
    found = client.training.checkpoints.compare(a.checkpoint_id, b.checkpoint_id, tasks=3)
    assert [task.reference for task in found.tasks] == ["It is 3.", "It is 5.", "It is 9."]
    assert found.tasks[0].prompt == [system, {"role": "user", "content": "What is 1 + 2?"}]
    text = repr(found)
    assert "3 of 5 rows, spread evenly" in text
    assert "were trained on" not in text
    assert "greedy, at most 256 tokens" in text
    assert (
        "Their validation losses, of complete rounds over all rows, are 0.5000 and 0.2500" in text
    )
    again = a.generate([task.prompt for task in found.tasks])
    assert [r.completion for r in again] == [task.a[0].completion for task in found.tasks]


def test_supervised_runs_without_validation_answer_training_rows(client: Client) -> None:
    world = World(stored.store_of(client))
    run = Run(world.store, world.create(world.plan(chats(3), precision="fp32")))
    a, b = tried.save(run, 1), tried.save(run, 2, seed=1)
    found = client.training.checkpoints.compare(a, b)
    assert len(found.tasks) == 3
    assert "These rows were trained on." in repr(found)


# --- what is refused -----------------------------------------------------------------------------


def test_runs_of_different_work_are_refused_with_both_named(client: Client) -> None:
    world = World(stored.store_of(client))
    tuned = Run(world.store, world.create(world.plan(chats(4), precision="fp32")))
    a = stored.save(stored.create(client, "sums"), 1)
    b = stored.save(tuned, 2)
    with pytest.raises(Refused) as caught:
        client.training.checkpoints.compare(a, b)
    (problem,) = caught.value.problems
    assert problem.field == "b"
    assert "step 1 of run sums works on workload sums (" in problem.message
    assert f"step 2 of run {tuned.id[:12]} on dataset rows (" in problem.message
    assert problem.allowed == "checkpoints of runs of the same workload or dataset"


def test_bad_arguments_are_refused(client: Client) -> None:
    run = stored.create(client, "bad")
    a = stored.save(run, 1)
    with pytest.raises(Refused) as caught:
        client.training.checkpoints.compare(a, a, tasks=0, n=99)
    assert [problem.field for problem in caught.value.problems] == ["tasks", "n"]
    with pytest.raises(Refused, match="both are the checkpoint"):
        client.training.checkpoints.compare(a, a[:12])
    with pytest.raises(NotFound):
        client.training.checkpoints.compare(a, "f" * 12)
