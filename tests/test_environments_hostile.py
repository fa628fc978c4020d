"""Environments that break their channel, fork, hang in closing or hold hostile values."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nbtrain.environments import EnvironmentEvent, EnvironmentPool, pack
from nbtrain.environments import EnvironmentEventKind as Kind
from nbtrain.environments import pool as pool_module
from nbtrain.environments.answers import read_answer
from nbtrain.environments.channel import FRAME_LIMIT, Channel, ChannelError, frame
from nbtrain.rewards import environment as environment_reward

Open = Callable[..., EnvironmentPool]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def start(environment: Any, workers: int = 2) -> EnvironmentPool:
            file = tmp_path / "environment.pkl"
            file.write_bytes(pack(environment)[0])
            log = tmp_path / "environments.log"
            return stack.enter_context(EnvironmentPool(file, workers=workers, log_path=log))

        yield start


def one(pool: EnvironmentPool, seconds: float = 60.0) -> EnvironmentEvent:
    end = time.monotonic() + seconds
    while not (events := pool.events(1.0)):
        assert time.monotonic() < end
    (event,) = events
    return event


def opened(pool: EnvironmentPool, key: int, **columns: Any) -> None:
    pool.open(key, columns)
    assert one(pool).kind is Kind.OPENED


def act(pool: EnvironmentPool, key: int, reply: str) -> EnvironmentEvent:
    pool.act(key, {"role": "assistant", "content": reply}, limit=60)
    event = one(pool)
    assert event.key == key
    return event


def closed(pool: EnvironmentPool, key: int) -> dict[str, Any]:
    pool.close(key)
    event = one(pool)
    assert (event.key, event.kind) == (key, Kind.CLOSED), event.error
    return dict(event.state)


# --- the channel -----------------------------------------------------------------------------


class Saboteur:
    """Its replies name what it puts into its own channel instead of an answer."""

    def reset(self) -> None:
        self.reward = 1.0

    def step(self, reply: str) -> str:
        zygote: Any = importlib.import_module("nbtrain.environments.zygote")
        head = struct.Struct(">QQ")

        def says(answer: Any) -> None:
            def forged(_: Any, call: int) -> bytes:
                data = pickle.dumps(answer)
                return head.pack(len(data), call) + data

            zygote.frame = forged

        def writes(data: bytes) -> None:
            for descriptor in range(3, 64):
                with contextlib.suppress(OSError):
                    os.fstat(descriptor)
                    if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket"):
                        os.write(descriptor, data)

        class Odd:
            def __reduce__(self) -> Any:
                return (print, ("read",))

        match reply:
            case "zeros":
                writes(bytes(16))
            case "garbage":
                writes(b"\xff" * 40)
            case "empty":
                zygote.frame = lambda _, call: head.pack(0, call)
            case "other call":
                data = pickle.dumps({"messages": [], "done": True, "seconds": 0.0})
                zygote.frame = lambda _, call: head.pack(len(data), call + 1) + data
            case "number":
                says(3)
            case "none":
                says(None)
            case "no seconds":
                says({"messages": [], "done": True})
            case "no messages":
                says({"messages": [1], "done": True, "seconds": 0.0})
            case "half":
                message = {"role": "user", "content": "", "more": [{"\udc00": 1}]}
                says({"messages": [message], "done": True, "seconds": 0.0})
            case "code":
                says({"messages": [Odd()], "done": True, "seconds": 0.0})
            case "huge":
                return "y" * ((64 << 20) + 1)
        return "more"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("zeros", "EOFError"),
        ("garbage", "18446744073709551615 bytes in one answer; at most 64 MiB"),
        ("empty", "EOFError"),
        ("other call", "which is not the one under way"),
        ("number", "its answer is a int"),
        ("none", "its answer is a NoneType"),
        ("no seconds", "its answer lacks its seconds"),
        ("no messages", "'messages' in its answer is not what it has to be"),
        ("half", "'messages' in its answer holds half a character, '\\udc00'"),
        ("code", "is not plain data"),
        ("huge", "bytes in one answer; at most 64 MiB"),
    ],
)
def test_who_breaks_its_channel_fails_alone(pools: EnvironmentPool, reply: str, said: str) -> None:
    opened(pools, 1)
    opened(pools, 2)
    failed = act(pools, 1, reply)
    assert failed.kind is Kind.FAILED
    assert not failed.timed_out
    assert "'Saboteur' broke the channel to its process, which was killed" in str(failed.error)
    assert said in str(failed.error)
    assert act(pools, 2, "go on").kind is Kind.OBSERVED
    assert closed(pools, 2) == {"reward": 1.0}


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    folder = tmp_path_factory.mktemp("saboteur")
    (folder / "environment.pkl").write_bytes(pack(Saboteur)[0])
    with EnvironmentPool(folder / "environment.pkl", workers=2, log_path=folder / "log") as made:
        yield made


def test_what_is_too_large_is_refused_by_its_head_alone() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with contextlib.closing(channel), theirs:
        theirs.sendall(struct.pack(">QQ", FRAME_LIMIT + 1, 1))
        with pytest.raises(ChannelError, match=f"{FRAME_LIMIT + 1} bytes in one answer"):
            channel.received()


def test_frames_carry_the_number_of_their_call() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with contextlib.closing(channel), theirs:
        theirs.sendall(frame({"a": 1}, 7) + frame([2], 8))
        assert channel.received() == [(7, {"a": 1}), (8, [2])]


DEEP: list[Any] = []
for _ in range(1000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("open", {"text": 3}),
        ("act", {"messages": [{"role": "user"}], "done": False}),
        ("act", {"messages": [{"role": "user", "content": "a", "more": b""}], "done": False}),
        ("act", {"messages": [{"role": "user", "content": "a", 3: 4}], "done": False}),
        ("act", {"messages": [], "done": 1}),
        ("close", {"state": None}),
        ("close", {"state": {1: 2}}),
        ("close", {"state": {"a": 10**400}}),
        ("close", {"state": {"a": DEEP}}),
        ("close", {"state": {"a": {1, 2}}}),
        ("probe", {"contract": {"form": "step"}}),
        ("probe", {"contract": None}),
        ("drop", {"error": 3}),
    ],
)
def test_answers_of_another_shape_are_refused(kind: Any, answer: dict[str, Any]) -> None:
    with pytest.raises(ChannelError):
        read_answer(kind, {"seconds": 0.0, **answer})


@pytest.mark.parametrize("seconds", [None, math.nan, math.inf, -1.0, "1", True])
def test_an_answer_says_how_long_it_took(seconds: Any) -> None:
    assert read_answer("drop", {"seconds": 0.5}) == {"seconds": 0.5}
    with pytest.raises(ChannelError, match="seconds"):
        read_answer("drop", {"seconds": seconds})


# --- forks -----------------------------------------------------------------------------------


class Forker:
    def reset(self, forks: bool) -> None:
        self.forks = forks
        self._process = os.getpid()

    def step(self, reply: str) -> str:
        if self.forks and os.fork() != 0:
            time.sleep(0.1)  # the twin, which comes back too, would answer first
        return f"{os.getpid() == self._process} {reply}"


def test_a_twin_by_fork_never_answers(pool: Open) -> None:
    environments = pool(Forker, workers=1)
    for key in range(4):
        opened(environments, key, forks=key % 2 == 0)
        for turn in range(3):
            event = act(environments, key, f"{key}.{turn}")
            assert event.kind is Kind.OBSERVED, event.error
            assert event.messages[0]["content"] == f"True {key}.{turn}"
        assert closed(environments, key) == {"forks": key % 2 == 0}


# --- closing ---------------------------------------------------------------------------------


class Clinging:
    def reset(self, how: str) -> None:
        self.how = how
        self.reward = 0.25
        if how == "reset":
            raise LookupError

    def step(self, reply: str) -> None:
        raise ZeroDivisionError

    def close(self) -> None:
        if self.how != "del":
            time.sleep(600)

    def __del__(self) -> None:
        if getattr(self, "how", "") == "del":
            time.sleep(600)


def test_a_hang_in_closing_costs_no_trajectory(
    pool: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pool_module, "_CLOSE_SECONDS", 0.3)
    monkeypatch.setattr(pool_module, "_LAST_SECONDS", 0.1)
    environments = pool(Clinging, workers=1)  # each needs the slot of the one before
    assert environments.start_seconds > 60
    for key, how in enumerate(["close", "del", "close"]):
        opened(environments, key, how=how)
        assert closed(environments, key) == {"how": how, "reward": 0.25}
    environments.open(7, {"how": "reset"})
    event = one(environments)
    assert "raised in reset: LookupError" in str(event.error)
    assert not event.timed_out
    opened(environments, 8, how="close")
    assert "raised in step: ZeroDivisionError" in str(act(environments, 8, "x").error)
    opened(environments, 9, how="close")
    log = (tmp_path / "environments.log").read_text()
    assert "Clinging.close did not answer within 0.3 s; its process was killed" in log


class Saving:
    def reset(self, path: str) -> None:
        self._path = path

    def step(self, reply: str) -> None: ...

    def close(self) -> None:
        time.sleep(0.2)
        Path(self._path).write_text("saved")


def test_the_end_of_the_pool_lets_the_last_ones_close(pool: Open, tmp_path: Path) -> None:
    environments = pool(Saving)
    opened(environments, 1, path=str(tmp_path / "saved"))
    closed(environments, 1)
    environments.close_all()
    assert (tmp_path / "saved").read_text() == "saved"


# --- state -----------------------------------------------------------------------------------


class OddText(str):
    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle")


class OddMapping(dict[str, Any]):
    def items(self) -> Any:
        raise ValueError("no items")


class Hostile:
    """``reset`` sets what ``gives`` names; some of its attributes hurt who looks at them."""

    def reset(self, gives: str = "") -> None:
        self.text = OddText("kept")
        self.mapping = OddMapping(a=1)
        self.number = 10**5000
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        self.deep = deep
        if gives:
            rewards = {"big": 10**400, "nan": math.nan, "text": "much", "odd": object()}
            self.reward = rewards[gives]

    def step(self, reply: str) -> Any:
        return {
            "text": OddText("said"),
            "mapping": OddMapping(role="user", content="x"),
            "reward": (None, 10**400, True),
            "number": 10**5000,
        }[reply]

    @property
    def leaves(self) -> None:
        sys.exit(2)

    @property
    def interrupts(self) -> None:
        raise KeyboardInterrupt


def test_hostile_attributes_are_left_out_and_logged(pool: Open, tmp_path: Path) -> None:
    environments = pool(Hostile)
    opened(environments, 1)
    assert closed(environments, 1) == {"text": "kept"}
    environments.close_all()
    log = (tmp_path / "environments.log").read_text()
    for name in ("mapping", "number", "deep", "leaves", "interrupts"):
        assert f"attribute {name!r} is " in log


@pytest.mark.parametrize("gives", ["big", "nan", "text", "odd"])
def test_a_reward_that_is_no_number_is_ungraded(pool: Open, gives: str) -> None:
    environments = pool(Hostile)
    opened(environments, 1, gives=gives)
    state = closed(environments, 1)
    assert "reward" in state
    seen = type("Seen", (), state)
    assert environment_reward()("", seen()) is None


def test_a_number_beyond_floats_reaches_the_reward_as_none() -> None:
    assert environment_reward()("", type("Seen", (), {"reward": 10**400})()) is None
    assert environment_reward()("", type("Seen", (), {"reward": 3})()) == 3.0


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("mapping", "step returned the message"),
        ("number", "step returned a int"),
    ],
)
def test_hostile_observations_fail_with_a_sentence(pool: Open, reply: str, said: str) -> None:
    environments = pool(Hostile)
    opened(environments, 1)
    event = act(environments, 1, reply)
    assert event.kind is Kind.FAILED
    assert said in str(event.error)


def test_observations_of_odd_types_are_read(pool: Open) -> None:
    environments = pool(Hostile)
    opened(environments, 1)
    event = act(environments, 1, "text")
    assert event.messages == ({"role": "user", "content": "said"},)
    assert act(environments, 1, "reward").done
    assert math.isnan(closed(environments, 1)["reward"])


class Hoarder:
    def reset(self) -> None:
        self.reward = 0.5
        self.small = "s" * 1000
        self.first = "a" * 400_000
        self.second = "b" * 500_000
        self.third = "c" * 600_000
        self.alone = [0.5] * 5_000_000

    def step(self, reply: str) -> None: ...


def test_all_attributes_together_have_a_limit(pool: Open, tmp_path: Path) -> None:
    environments = pool(Hoarder)
    opened(environments, 1)
    state = closed(environments, 1)
    assert set(state) == {"reward", "small", "first", "second"}
    environments.close_all()
    log = (tmp_path / "environments.log").read_text()
    assert "attribute 'third' of about 600000 bytes is left out" in log
    assert "attribute 'alone' is too large for rewards: over 1048576 bytes" in log
