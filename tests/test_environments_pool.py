"""The pool of environments: real processes that answer, fail, hang, die and are let go."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbtrain.environments import EnvironmentEvent, EnvironmentPool, pack
from nbtrain.environments import EnvironmentEventKind as Kind

Open = Callable[..., EnvironmentPool]


class Counter:
    """Adds numbers; what it can do wrong is named by the column ``how``."""

    limit = 3

    def __init__(self) -> None:
        self.total = 0
        self._secret = object()
        self.lock = contextlib.nullcontext()

    def reset(self, how: str = "", prompt: Any = None) -> str | None:
        self.how = how
        self.prompt = prompt
        if how == "reset raises":
            raise LookupError(how)
        if how == "reset hangs":
            time.sleep(600)
        if how == "reset dies":
            os._exit(3)
        return {"silent": None, "reset returns a number": 3}.get(how, " Count.")

    def add(self, number: int, times: float = 1.0) -> int:
        """Add a number.

        Args:
            number: What to add.
            times: How often.
        """
        if self.how == "hangs":
            self.child = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
            print(f"child {self.child}", flush=True)
            time.sleep(600)
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        self.total += int(number * times)
        print(f"total {self.total}")
        return self.total

    async def later(self) -> str:
        """Answer a little later."""
        await asyncio.sleep(0.001)
        return "now"

    def bad(self) -> None:
        """Always raise."""
        raise ZeroDivisionError

    @property
    def reward(self) -> float:
        return self.total / 10

    @property
    def broken(self) -> float:
        raise RuntimeError


class Dialogue:
    """The step form; ``answers`` is what step returns, in order."""

    def reset(self, answers: list[Any]) -> None:
        self.answers = [tuple(a["tuple"]) if isinstance(a, dict) and "tuple" in a else a
                        for a in answers]  # fmt: skip
        self.heard: list[str] = []

    async def step(self, reply: str) -> Any:
        self.heard.append(reply)
        if reply == "sleep":
            time.sleep(600)
        return self.answers.pop(0)


class Fresh:
    resets = 0

    def reset(self) -> None:
        self.resets += 1
        self.process = os.getpid()

    def step(self, reply: str) -> None: ...


def calls(*named: Any) -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in named]
    return {"role": "assistant", "content": "", "tool_calls": made}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def start(environment: Any = Counter, **more: Any) -> EnvironmentPool:
            file = tmp_path / "environment.pkl"
            file.write_bytes(pack(environment)[0])
            given = {"workers": 2, "log_path": tmp_path / "environments.log"} | more
            return stack.enter_context(EnvironmentPool(file, **given))

        yield start


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, EnvironmentPool]]:
    with contextlib.ExitStack() as stack:
        made = {}
        for environment in (Counter, Dialogue):
            folder = tmp_path_factory.mktemp(environment.__name__)
            (folder / "environment.pkl").write_bytes(pack(environment)[0])
            made[environment] = stack.enter_context(
                EnvironmentPool(folder / "environment.pkl", workers=1, log_path=folder / "log")
            )
        yield made


@pytest.fixture
def shared(pools: dict[Any, EnvironmentPool]) -> Iterator[Callable[..., EnvironmentPool]]:
    """A pool that many tests use, one environment at a time under key 1."""
    yield lambda environment=Counter: pools[environment]
    for used in pools.values():
        used.drop([1])


def take(pool: EnvironmentPool, count: int = 1, seconds: float = 60.0) -> list[EnvironmentEvent]:
    events: list[EnvironmentEvent] = []
    end = time.monotonic() + seconds
    while len(events) < count:
        assert time.monotonic() < end, events
        events += pool.events(1.0)
    return events


def one(pool: EnvironmentPool) -> EnvironmentEvent:
    (event,) = take(pool)
    return event


def answer(pool: EnvironmentPool, reply: dict[str, Any], key: int = 1) -> EnvironmentEvent:
    pool.act(key, reply, limit=60)
    return one(pool)


def texts(event: EnvironmentEvent) -> list[str]:
    return [str(message["content"]) for message in event.messages]


# --- answers ---------------------------------------------------------------------------------


def test_a_trajectory_with_tools(pool: Open, tmp_path: Path) -> None:
    environments = pool()
    assert environments.check_start() is None
    assert [tool.name for tool in environments.contract.tools] == ["add", "bad", "later"]
    environments.open(1, {"prompt": [{"role": "user", "content": "Go."}], "other": 3})
    opened = one(environments)
    assert (opened.kind, opened.text) == (Kind.OPENED, " Count.")
    acted = answer(environments, calls(("add", {"number": 2}), ("add", {"number": 3, "times": 2})))
    assert acted.kind is Kind.OBSERVED
    assert acted.messages == (
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "tool", "name": "add", "content": "8"},
    )
    assert not acted.done
    assert texts(answer(environments, calls(("later", {})))) == ["now"]
    ended = answer(environments, {"role": "assistant", "content": "8"})
    assert (ended.messages, ended.done) == ((), True)
    environments.close(1)
    closed = one(environments)
    assert closed.kind is Kind.CLOSED
    assert closed.state == {
        "total": 8,
        "how": "",
        "prompt": [{"role": "user", "content": "Go."}],
        "limit": 3,
        "reward": 0.8,
    }
    environments.close_all()
    assert "total 8" in (tmp_path / "environments.log").read_text()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("nothing", {}), "there is no tool 'nothing'; there are: add, bad, later"),
        (("_hidden", {}), "there is no tool '_hidden'"),
        (("reset", {}), "there is no tool 'reset'"),
        (("add", {"count": 1}), "add: missing a required argument: 'number'"),
        (("add", {"number": 1, "count": 1}), "add: got an unexpected keyword argument 'count'"),
        (("bad", {}), "ZeroDivisionError"),
        (("add", "3"), "add: the arguments are no object"),
    ],
)
def test_what_goes_wrong_in_a_call_is_told_to_the_model(shared: Open, call: Any, said: str) -> None:
    environments = shared()
    environments.open(1, {})
    one(environments)
    event = answer(environments, calls(call, ("add", {"number": 1})))
    assert said in texts(event)[0]
    assert texts(event)[0].startswith("{'error': ")
    assert texts(event)[1] == "1"
    assert not event.done


def test_a_malformed_call_is_answered_and_not_executed(shared: Open) -> None:
    environments = shared()
    environments.open(1, {})
    one(environments)
    malformed = {"type": "malformed", "error": "the tool call is no JSON: …"}
    event = answer(environments, {"content": "", "tool_calls": [malformed]})
    assert texts(event) == ["{'error': 'the tool call is no JSON: …'}"]


TOOL = {"role": "tool", "content": "4"}


@pytest.mark.parametrize(
    ("returned", "messages", "done"),
    [
        ("more", [{"role": "user", "content": "more"}], False),
        (TOOL, [TOOL], False),
        ([TOOL, TOOL], [TOOL, TOOL], False),
        (None, [], True),
        ([], [], True),
        ({"tuple": ["more", False]}, [{"role": "user", "content": "more"}], False),
        ({"tuple": [TOOL, True]}, [TOOL], True),
        ({"tuple": ["end", 0.5, True]}, [{"role": "user", "content": "end"}], True),
        ({"tuple": [None, None, False]}, [], True),
    ],
)
def test_what_step_may_return(shared: Open, returned: Any, messages: Any, done: bool) -> None:
    environments = shared(Dialogue)
    environments.open(1, {"answers": [returned]})
    assert one(environments).text is None
    event = answer(environments, {"role": "assistant", "content": "hello"})
    assert (list(event.messages), event.done) == (messages, done)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (3, "step returned a int"),
        ({"tuple": ["a", 1.0, True, {}]}, "a tuple of 4"),
        ({"tuple": ["a", 2.0]}, "2.0 for done"),
        ({"tuple": ["a", "b", True]}, "'b' for the reward"),
        ({"role": "assistant", "content": "me"}, "the message {'role': 'assistant'"),
        ([{"role": "user"}], "the message {'role': 'user'}"),
    ],
)
def test_what_step_may_not_return(shared: Open, returned: Any, said: str) -> None:
    environments = shared(Dialogue)
    environments.open(1, {"answers": [returned]})
    one(environments)
    event = answer(environments, {"role": "assistant", "content": "hello"})
    assert event.kind is Kind.FAILED
    assert said in str(event.error)
    assert "(observation, reward, done)" in str(event.error)


def test_rewards_of_steps_add_up(shared: Open) -> None:
    environments = shared(Dialogue)
    answers = [
        {"tuple": ["a", 0.5, False]},
        {"tuple": ["b", None, False]},
        {"tuple": ["c", 1, True]},
    ]
    environments.open(1, {"answers": answers})
    one(environments)
    for text in ("x", "y", "z"):
        answer(environments, {"content": text})
    environments.close(1)
    assert one(environments).state == {"answers": [], "heard": ["x", "y", "z"], "reward": 1.5}


# --- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "said", "timed_out"),
    [
        ("reset raises", "environment 'Counter' raised in reset: LookupError: reset raises", False),
        ("reset returns a number", "reset returned a int; allowed: text or None", False),
        ("reset dies", "gave no answer: it ended its process with status 3", False),
        ("reset hangs", "Counter() or Counter.reset did not answer within 1 s", True),
    ],
)
def test_a_reset_that_fails(pool: Open, how: str, said: str, timed_out: bool) -> None:
    environments = pool(start_seconds=30)
    assert environments.check_start() is None
    environments.start_seconds = 1.0
    environments.open(1, {"how": how})
    event = one(environments)
    assert (event.kind, event.timed_out) == (Kind.FAILED, timed_out)
    assert said in str(event.error).splitlines()[0]
    if how == "reset raises":
        trace = str(event.error)
        assert "raise LookupError(how)" in trace
        assert "episode.py" not in trace
    with pytest.raises(ValueError, match="environment 1 is not open"):
        environments.act(1, {}, limit=1)
    environments.start_seconds = 30.0
    environments.open(1, {})
    assert one(environments).kind is Kind.OPENED


def test_a_hang_is_killed_with_what_it_started_and_fails_alone(pool: Open, tmp_path: Path) -> None:
    environments = pool(workers=3)
    for key, how in enumerate(["hangs", "dies", "", ""]):
        environments.open(key, {"how": how})
    assert {event.key for event in take(environments, 3)} == {0, 1, 2}
    assert (environments.waiting, environments.busy) == (1, 0)
    log = tmp_path / "environments.log"
    reply = calls(("add", {"number": 1}))
    environments.act(0, reply, limit=2)
    environments.act(1, reply, limit=60)
    environments.act(2, reply, limit=60)
    events = {event.key: event for event in take(environments, 4)}
    assert texts(events[2]) == ["1"]
    assert "killed by signal 9" in str(events[1].error)
    assert not events[1].timed_out
    assert events[3].kind is Kind.OPENED  # it got the place of the one that died
    assert events[0].timed_out
    assert "Counter.add did not answer within 2 s; its process was killed" in str(events[0].error)
    child = int(log.read_text().split("child ")[1].split()[0])
    wait_for(lambda: not running(child))


def test_one_that_dies_between_calls_fails_at_its_next(pool: Open) -> None:
    environments = pool()
    environments.open(1, {})
    one(environments)
    psutil.Process(children(environments)[0]).kill()
    wait_for(lambda: not children(environments))
    assert environments.events(0.1) == []
    event = answer(environments, calls(("add", {"number": 1})))
    assert event.kind is Kind.FAILED
    assert "killed by signal 9" in str(event.error)


def test_a_blocking_environment_blocks_no_other(pool: Open) -> None:
    environments = pool(Dialogue, workers=2)
    for key in (1, 2):
        environments.open(key, {"answers": ["go on"] * 50})
    take(environments, 2)
    environments.act(1, {"content": "sleep"}, limit=600)
    for _ in range(50):
        assert answer(environments, {"content": "hello"}, key=2).key == 2
    assert environments.busy == 1


class Steps:
    """Of the tools form, whatever its attributes are called."""

    def reset(self) -> None:
        self.step = 0
        self.get_reward = None

    def forward(self) -> int:
        """Go one step."""
        self.step += 1
        return self.step


def test_attributes_named_as_methods_of_the_other_form(pool: Open) -> None:
    environments = pool(Steps)
    environments.open(1, {})
    one(environments)
    assert texts(answer(environments, calls(("forward", {})))) == ["1"]
    environments.close(1)
    assert one(environments).state == {"step": 1, "get_reward": None}


def test_no_call_takes_longer_than_the_pool_allows(pool: Open) -> None:
    environments = pool(Dialogue)
    environments.open(1, {"answers": []})
    one(environments)
    environments.most_seconds = 0.5
    environments.act(1, {"content": "sleep"}, limit=600)
    event = one(environments)
    assert event.timed_out
    assert "Dialogue.step did not answer within 0.5 s" in str(event.error)


def test_dropped_environments_say_no_more(pool: Open) -> None:
    environments = pool(Dialogue, workers=2)
    for key in range(4):
        environments.open(key, {"answers": ["go on"] * 5})
    take(environments, 2)
    environments.act(0, {"content": "sleep"}, limit=600)
    environments.drop([0, 1, 2, 99])  # busy, idle, queued, unknown
    assert one(environments).key == 3
    assert (environments.waiting, environments.busy) == (0, 0)
    environments.open(0, {"answers": ["again"]})
    assert one(environments).kind is Kind.OPENED
    assert len(children(environments)) == 2


def test_a_process_is_used_again_by_who_waits_longest(pool: Open) -> None:
    environments = pool(Fresh, workers=1)
    for key in range(8):
        environments.open(key, {})
    opened: list[int] = []
    states = []
    while len(states) < 8:
        for event in take(environments):
            if event.kind is Kind.OPENED:
                opened.append(event.key)
                environments.close(event.key)
            else:
                states.append(dict(event.state))
    assert len({state["process"] for state in states}) == 1
    assert all(state["resets"] == 1 for state in states)  # an object of its own for each
    assert opened == list(range(8))


WALKING = '''
from __future__ import annotations
from typing import Literal
from pathlib import Path as Where

class Walk:
    def reset(self): self.at = 0
    def go(self, way: Literal["up", "down"]) -> Where:
        """Go.

        Args:
            way: The way.
        """
        return way

def make():
    return Walk()
'''


def test_hints_written_as_text_and_a_factory(
    pool: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "walking.py").write_text(WALKING)
    monkeypatch.syspath_prepend(tmp_path)
    walking = importlib.import_module("walking")
    for environment in (walking.Walk, walking.make):
        environments = pool(environment)
        assert environments.check_start() is None
        (tool,) = environments.contract.tools
        assert tool.parameters == (("way", {"literal": ["up", "down"]}, True),)
        environments.open(1, {})
        one(environments)
        assert texts(answer(environments, calls(("go", {"way": "up"})))) == ["up"]


# --- starting and ending ---------------------------------------------------------------------


class Unmakeable:
    def __init__(self) -> None:
        raise OSError("no such server")

    def reset(self) -> None: ...

    def step(self, reply: str) -> None: ...


def makes_nothing_useful():
    return object()


def test_the_start_check_says_what_is_wrong(pool: Open) -> None:
    problem = pool(Unmakeable).check_start()
    assert problem is not None
    assert "raised in its construction: OSError: no such server" in problem.message
    problem = pool(makes_nothing_useful).check_start()
    assert problem is not None
    assert "has no method reset" in problem.message


def test_code_that_cannot_be_loaded(pool: Open, tmp_path: Path) -> None:
    environments = pool()
    environments.close_all()
    file = tmp_path / "environment.pkl"
    head, _, _ = file.read_bytes().partition(b"\n")
    file.write_bytes(head + b"\ncnbtrain_missing\nthing\n.")
    with EnvironmentPool(file, workers=1, log_path=tmp_path / "log") as broken:
        problem = broken.check_start()
        assert problem is not None
        assert "could not be loaded: ModuleNotFoundError" in problem.message
        broken.open(1, {})
        event = one(broken)
        assert (event.kind, event.key) == (Kind.FAILED, 1)


def test_a_dead_zygote_is_replaced(pool: Open) -> None:
    environments = pool()
    environments.open(1, {})
    one(environments)
    zygote = psutil.Process(zygote_of(environments))
    left = children(environments)
    zygote.kill()
    wait_for(lambda: not any(running(pid) for pid in left))
    event = answer(environments, calls(("add", {"number": 1})))
    assert event.kind is Kind.FAILED
    environments.open(2, {})
    assert one(environments).kind is Kind.OPENED


def test_nothing_is_left_after_the_end(pool: Open) -> None:
    environments = pool(workers=4)
    for key, how in enumerate(["hangs", "", "", ""]):
        environments.open(key, {"how": how})
    take(environments, 4)
    environments.act(0, calls(("add", {"number": 1})), limit=600)
    left = [zygote_of(environments), *children(environments)]
    environments.close_all()
    assert not any(running(pid) for pid in left)
    with pytest.raises(RuntimeError, match="closed"):
        environments.open(9, {})


def test_everything_dies_with_the_rank(tmp_path: Path) -> None:
    (tmp_path / "environment.pkl").write_bytes(pack(Counter)[0])
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from nbtrain.environments import EnvironmentPool
pool = EnvironmentPool({str(tmp_path / "environment.pkl")!r}, workers=8,
                       log_path={str(tmp_path / "log")!r})
for key in range(8): pool.open(key, {{"how": "hangs"}})
opened = 0
while opened < 8: opened += len(pool.events(1.0))
call = {{"type": "function", "function": {{"name": "add", "arguments": {{"number": 1}}}}}}
pool.act(0, {{"content": "", "tool_calls": [call]}}, limit=600)
print("ready", flush=True)
while True: pool.events(1.0)
"""
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "ready\n"
    log = tmp_path / "log"
    wait_for(lambda: "child" in log.read_text())
    below = [process.pid for process in psutil.Process(rank.pid).children(recursive=True)]
    assert len(below) == 10  # the zygote, eight environments, and what one of them started
    rank.kill()
    rank.wait()
    rank.stdout.close()
    wait_for(lambda: not any(running(pid) for pid in below), seconds=5.0)


def zygote_of(environments: EnvironmentPool) -> int:
    process = environments._fleet._nursery._process
    assert process is not None
    return process.pid


def children(environments: EnvironmentPool) -> list[int]:
    found = psutil.Process(zygote_of(environments)).children()
    return [p.pid for p in found if running(p.pid)]


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
