"""A dataset's rows as tasks of a reinforcement run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from datasets_world import CASES, chat, text, written

from nbtrain.catalog import Task
from nbtrain.data.datasets import DatasetRegistry
from nbtrain.data.tasks import DatasetTasks
from nbtrain.errors import Refused
from nbtrain.store import open_store

REWARDS = Path("rewards.pkl")


@pytest.fixture
def registry(home: Path) -> DatasetRegistry:
    return DatasetRegistry(open_store())


def tasks_of(registry: DatasetRegistry, source: Any) -> list[Task]:
    return DatasetTasks(registry.register("d", source), rewards_path=REWARDS).tasks()


def test_the_prompt_stands_before_the_last_assistant_message(registry: DatasetRegistry) -> None:
    row = chat("1+1?", "2", level=3)
    found = registry.register("d", [row])
    (task,) = tasks_of(registry, [row])
    columns = {
        "level": 3,
        "answer": "2",
        "ground_truth": "2",
        "data_source": found.dataset_id,
    }
    assert task.prompt == [{"role": "user", "content": "1+1?"}]
    assert task.columns == columns
    assert task == Task.from_row({"prompt": row["messages"][:1], **columns})


def test_a_row_without_an_answer_is_all_prompt_and_own_columns_stay(
    registry: DatasetRegistry,
) -> None:
    (task,) = tasks_of(registry, CASES / "RW-07.rows.jsonl")
    assert task.prompt == [{"role": "user", "content": "1+1?"}]
    assert (task.columns["answer"], task.columns["ground_truth"]) == ("2", "2")
    earlier = [*chat("a", "b")["messages"], {"role": "user", "content": "c"}]
    (task,) = tasks_of(registry, [{"messages": earlier}])
    assert task.prompt == earlier
    assert task.columns["answer"] is task.columns["ground_truth"] is None


def test_values_reach_the_reward_as_they_stand(registry: DatasetRegistry, tmp_path: Path) -> None:
    rows = [chat(str(n), para="1a" if n == 7 else n, big=2**70, f=3.0) for n in range(10)]
    tasks = tasks_of(registry, written(tmp_path, text(*rows)))
    assert [task.columns["para"] for task in tasks] == [0, 1, 2, 3, 4, 5, 6, "1a", 8, 9]
    assert repr(tasks[0].columns["f"]) == "3.0"
    assert tasks[0].columns["big"] == 2**70
    assert len({task.task_id for task in tasks}) == 10


def test_both_spellings_of_a_prompt_are_one_task(registry: DatasetRegistry) -> None:
    def row(content: Any, arguments: Any, said: Any) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        call = {"id": "c", "type": "function", "function": function}
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
            {"role": "assistant", "content": content},
        ]
        return {"messages": messages}

    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    one, two = tasks_of(registry, [row("xy", {"a": 1}, ""), row(parts, '{"a": 1}', None)])
    assert one == two
    assert one.columns["answer"] == "xy"


def test_prompts_that_end_with_nobodys_turn_are_refused_by_line(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    done = {"role": "assistant", "content": "a"}
    rows = [chat(), {"messages": [done]}, {"messages": [*chat()["messages"], done]}]
    found = registry.register("d", written(tmp_path, "\n" + text(*rows)))
    with pytest.raises(Refused) as refused:
        DatasetTasks(found, rewards_path=REWARDS).split(validation=False)
    told = [(p.message, p.where.line) for p in refused.value.problems if p.where is not None]
    assert told == [
        ("the prompt is empty", 3),
        ("the prompt's last message is the assistant's", 4),
    ]


def test_columns_of_the_prompts_own_name_are_refused(registry: DatasetRegistry) -> None:
    found = registry.register("d", [chat(prompt="x", completions=1)])
    with pytest.raises(Refused) as refused:
        DatasetTasks(found, rewards_path=REWARDS)
    assert [problem.found for problem in refused.value.problems] == ["prompt", "completions"]


def test_every_row_trains_and_the_other_dataset_is_held_out(registry: DatasetRegistry) -> None:
    train = registry.register("t", [chat("a"), chat("a")])
    other = registry.register("v", [chat("b")])
    tasks = DatasetTasks(train, rewards_path=REWARDS, validation=other)
    both, alone = tasks.split(validation=True), tasks.split(validation=False)
    assert (both.train, both.held_out, alone.train, alone.held_out) == (2, 1, 2, 0)
    assert both.train_digest == alone.train_digest == train.dataset_id
    assert both.held_out_digest == other.dataset_id
    assert alone.held_out_digest == hashlib.sha256(b"").hexdigest()
    assert both.description == "every row of dataset t"
    assert (tasks.name, tasks.raw, tasks.environment_path) == ("t", False, None)
    assert tasks.rewards_path == REWARDS
