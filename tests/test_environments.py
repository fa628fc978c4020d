"""What an environment may look like, how it travels, and workloads that have one."""

from __future__ import annotations

import json
import linecache
import typing
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.client.building import build
from nbtrain.client.client import Client
from nbtrain.environments import Contract, Tool, check_columns, pack, read_contract
from nbtrain.environments.calculator import Calculator
from nbtrain.environments.hints import hint_from_json, hint_to_json
from nbtrain.environments.packing import read_packed
from nbtrain.errors import Refused
from nbtrain.rewards import exact

# --- hints -----------------------------------------------------------------------------------

HINTS = st.recursive(
    st.sampled_from([int, float, str, bool, type(None), Any, list, dict, Literal["a", 1, None]]),
    lambda inner: st.one_of(
        inner.map(lambda hint: list[hint]),  # type: ignore[valid-type]
        inner.map(lambda hint: dict[str, hint]),  # type: ignore[valid-type]
        st.tuples(inner, inner).map(lambda pair: tuple[pair[0], pair[1]]),  # type: ignore[misc]
        st.tuples(inner, inner).map(lambda pair: Union[pair[0], pair[1]]),  # noqa: UP007
    ),
    max_leaves=6,
)


@given(HINTS)
def test_hints_survive_json(hint: Any) -> None:
    assert hint_from_json(json.loads(json.dumps(hint_to_json(hint)))) == hint


@pytest.mark.parametrize(
    "hint", [bytes, Path, tuple[int, ...], set[int], list[Path], typing.Callable, 3, Literal[b"x"]]
)
def test_hints_of_other_things_are_refused(hint: Any) -> None:
    with pytest.raises(TypeError, match="no type of a JSON value"):
        hint_to_json(hint)


def test_an_optional_hint_is_a_union() -> None:
    assert hint_to_json(Optional[int]) == hint_to_json(int | None) == {"union": ["int", "null"]}  # noqa: UP045


# --- contracts -------------------------------------------------------------------------------


class Base:
    def look(self) -> str:
        """Look around."""
        return ""


class Tools(Base):
    kind = "tools"

    def reset(self, *, seed: int, level: int = 1, **columns: Any) -> str: ...

    def get_reward(self) -> float: ...

    async def go(self, where: Literal["n", "s"], steps: int = 1) -> str:
        """Go somewhere.

        Args:
            where (str): The direction: n or s.
            steps: How far.
        """

    @property
    def never(self) -> int:
        raise AssertionError("a property was evaluated")

    def _private(self, x): ...


class Steps:
    def __init__(self, size: int = 3) -> None:
        raise AssertionError("it was constructed")

    def reset(self): ...

    async def step(self, reply): ...

    def close(self): ...


def test_the_contract_of_both_forms() -> None:
    contract, problems = read_contract(Tools)
    assert problems == []
    go = (("where", {"literal": ["n", "s"]}, True), ("steps", "int", False))
    doc = "Go somewhere.\n\nArgs:\n    where (str): The direction: n or s.\n    steps: How far."
    assert contract == Contract(
        "tools", (Tool("go", doc, go), Tool("look", "Look around.", ())), ("seed",)
    )
    assert Contract.from_json(json.loads(json.dumps(contract.to_json()))) == contract
    assert read_contract(Steps) == (Contract("step"), [])
    assert [p.message for p in check_columns(contract, ["level", "answer"])] == [
        "environment: reset needs the column 'seed', which the tasks do not have"
    ]
    assert check_columns(contract, ["seed"]) == []


def test_factories() -> None:
    def says() -> Steps: ...

    def says_not(): ...

    def needs(size: int) -> Steps: ...

    assert read_contract(says) == (Contract("step"), [])
    assert read_contract(says_not) == (None, [])
    _, problems = read_contract(needs)
    assert "environment 'needs' cannot be made without arguments: size" in problems[0].message


def source(text: str) -> type:
    space: dict[str, Any] = {"__name__": "__main__", "Any": Any, "Path": Path}
    exec(compile(text, "/tmp/ipykernel_1/7.py", "exec", dont_inherit=True), space)
    linecache.cache["/tmp/ipykernel_1/7.py"] = (len(text), None, text.splitlines(True), "")
    return space["E"]


RESET = "    def reset(self): pass\n"
TOOL = "    def t(self{}):\n        '''Do it.\n\n        Args:\n            x: One.\n        '''\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (RESET, ["has neither step nor a public method that is a tool"]),
        (TOOL.format(""), ["has no method reset"]),
        ("    pass\n", ["has no method reset", "has neither step nor"]),
        (RESET + "    def step(self, r): pass\n" + TOOL.format(""), ["has step and other public"]),
        (RESET + "    def step(self): pass\n", ["step takes ()"]),
        (RESET + "    def step(self, a, b): pass\n", ["step takes (a, b)"]),
        (RESET + "    def step(self, a='', *, b: int): pass\n", ["step takes (a='', b: int)"]),
        (RESET + "    def step(self, a=''): pass\n", []),
        (RESET + "    def step(self, a): yield 1\n", ["step is a generator"]),
        (RESET + "    def t(self): pass\n", ["tool E.t has no docstring"]),
        (RESET + TOOL.format(", x"), ["the argument 'x' has no type hint"]),
        (RESET + TOOL.format(", x: Path"), ["is no type of a JSON value"]),
        (RESET + TOOL.format(", x: int, y: int"), ["the argument 'y' is not in the docstring"]),
        (RESET + TOOL.format(", *x: int"), ["the argument 'x' is not given by its name"]),
        (
            RESET + TOOL.format(", x, y: int"),
            ["the argument 'x' has no type hint", "the argument 'y' is not in the docstring"],
        ),
        (
            RESET + TOOL.format("") + "    def close(self, now): pass\n",
            ["close takes (now)"],
        ),
    ],
)
def test_everything_wrong_is_said_at_once(body: str, said: list[str]) -> None:
    cls = source(f"class E:\n{body}")
    _, problems = read_contract(cls)
    assert len(problems) == len(said), problems
    for problem, text in zip(problems, said, strict=True):
        assert text in problem.message
        assert problem.field == "environment"


@pytest.mark.parametrize("thing", [3, "Steps", None])
def test_things_that_are_no_environment(thing: Any) -> None:
    _, problems = read_contract(thing)
    assert "Pass the class itself" in str(problems[0].hint)


# --- packing ---------------------------------------------------------------------------------

CELL = """
{comment}
class E:
    size = {size}
    def reset(self): self.n = {helper}
    def step(self, reply): return {returned}
"""


def identity(**changes: str) -> dict[str, Any]:
    given = {"comment": "", "size": "3", "helper": "1", "returned": "None"} | changes
    return pack(source(CELL.format(**given)))[1]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"comment": "# a remark\n\n"}, True),
        ({"size": "4"}, False),
        ({"helper": "2"}, False),
        ({"returned": "'x'"}, False),
    ],
)
def test_an_environment_counts_by_its_content(change: dict[str, str], same: bool) -> None:
    assert (identity(**change) == identity()) is same


def test_packed_environments_are_read_without_running_them(tmp_path: Path) -> None:
    data, about, contract = pack(Tools)
    file = tmp_path / "environment.pkl"
    file.write_bytes(data)
    packed = read_packed(file)
    assert (packed.name, packed.contract) == ("Tools", contract)
    assert about["name"] == "Tools"
    file.write_bytes(b'{"format": 1}\n')
    with pytest.raises(Refused, match="does not hold packed environment"):
        read_packed(file)


def test_what_cannot_travel_is_named(tmp_path: Path) -> None:
    handle = (tmp_path / "log.txt").open("w")

    class E:
        def reset(self) -> None:
            handle.write("x")

        def step(self, reply: str) -> None: ...

    with pytest.raises(Refused) as refused:
        pack(E)
    handle.close()
    (problem,) = refused.value.problems
    assert "environment 'E' uses the closed-over variable 'handle' of the method 'reset'" in (
        problem.message
    )


# --- workloads -------------------------------------------------------------------------------

ROWS = [{"prompt": f"What is {n}?", "answer": str(n), "seed": n} for n in range(20)]


def refusals(**given: Any) -> list[str]:
    with pytest.raises(Refused) as refused:
        build("w", **{"tasks": ROWS, **given})
    return [problem.message for problem in refused.value.problems]


def test_a_workload_with_an_environment_needs_no_rewards(home: Path) -> None:
    client = Client()
    item = client.workloads.create("mine", tasks=ROWS, environment=Tools)
    assert (item.environment, item.reward_names) == ("Tools", ["environment"])
    assert "environment Tools>" in repr(item)
    again = client.workloads.get("mine")
    assert again == item
    path = again._workload.environment_path
    assert path is not None
    assert read_packed(path).name == "Tools"
    assert path.stat().st_mode & 0o077 == 0
    with_reward = client.workloads.create(
        "m", tasks=ROWS, environment=Tools, rewards=exact("answer")
    )
    without = client.workloads.create("n", tasks=ROWS, rewards=exact("answer"))
    assert len({item.id, with_reward.id, without.id}) == 3
    assert (without.environment, without._workload.environment_path) == (None, None)


def test_folders_from_before_environments_still_load(home: Path) -> None:
    client = Client()
    item = client.workloads.create("mine", tasks=ROWS, rewards=exact("answer"))
    file = item._workload.folder / "workload.json"
    about = json.loads(file.read_text())
    del about["environment"]
    file.write_text(json.dumps(about))
    assert client.workloads.get("mine").environment is None
    assert client.workloads.create("mine", tasks=ROWS, rewards=exact("answer")).id == item.id


def test_the_ids_of_workloads_without_environment_stay_what_they_were() -> None:
    made = build("w", tasks=ROWS[:2], rewards=exact("answer"), held_out=0)
    assert made.workload_id.startswith("81ac641a5ca5e7dd")


def test_refusals_come_together() -> None:
    told = refusals(environment=source(f"class E:\n{RESET}"), raw=True, rewards=3, tasks=[])
    assert len(told) == 4
    for text in ("rewards", "speaks in chat messages", "neither step nor", "tasks is empty"):
        assert any(text in message for message in told), text
    rows = [{"prompt": "a", "answer": "b"}]
    assert refusals(environment=Tools, tasks=rows) == [
        "environment: reset needs the column 'seed', which the tasks do not have"
    ]

    def reads(completion: str, environment: Any) -> float: ...

    assert "reads the environment, and the workload has none" in refusals(rewards=reads)[0]


# --- the sample ------------------------------------------------------------------------------


def test_the_sample_is_in_every_home(home: Path) -> None:
    item = Client().workloads.get("calculator")
    assert (item.environment, item.base_model) == ("Calculator", "nbtrain/tiny")
    assert item == Client().workloads.sample("calculator")
    assert [len(item.tasks()), len(item.held_out_tasks())] == [2000, 200]
    task = item.tasks()[0]
    a, b = task.columns["expression"].split("+")
    assert task.prompt[0]["content"] == f"What is {a} + {b}? Use the calculator."
    assert int(task.columns["answer"]) == int(a) + int(b)
    sums = Client().workloads.get("sums")
    held_out = [t.prompt[0]["content"] for t in item.held_out_tasks()]
    asked = [text.removesuffix(" Use the calculator.") for text in held_out]
    assert asked == [t.prompt[0]["content"] for t in sums.held_out_tasks()]


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (["<calc>2+3</calc>", "<answer>5</answer>"], 1.0),
        ([" <calc>2+3</calc>\n", "The answer is 5"], 1.0),
        (["<calc>2+3</calc>", "<answer>6</answer>"], 0.0),
        (["<calc>2+3</calc>", ""], 0.0),
        (["<calc>2+4</calc>", "5"], 0.0),
        (["<answer>5</answer>"], 0.0),
        (["<calc>2+3</calc>", "<calc>2+3</calc>"], 0.0),
        (["<calc>2+3</calc> 5"], 0.0),
    ],
)
def test_the_calculator(replies: list[str], reward: float) -> None:
    environment = Calculator()
    environment.reset("2+3", "5")
    *calls, last = replies
    for call in calls:
        a, b = call.strip().removeprefix("<calc>").removesuffix("</calc>").split("+")
        assert environment.step(call) == {"role": "tool", "content": str(int(a) + int(b))}
    assert environment.step(last) is None
    assert environment.reward == reward
