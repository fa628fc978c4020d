"""Commands and heartbeats between decode steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nbtrain.errors import StoreError
from nbtrain.training.control import Cancelled, Control, FollowerControl, Terminated


def control(commands: list[dict[str, Any]]) -> tuple[Control, list[int], list[float], list[float]]:
    now = [0.0]
    handled: list[int] = []
    beats: list[float] = []

    def waiting() -> list[dict[str, Any]]:
        return [c for c in commands if c["id"] not in handled]

    made = Control(waiting, handled.append, lambda _: beats.append(now[0]), clock=lambda: now[0])
    return made, handled, beats, now


def test_a_cancel_command_stops_and_is_answered_once() -> None:
    made, handled, _, _ = control([{"id": 4, "command": "cancel"}])
    with pytest.raises(Cancelled, match="request"):
        made()
    assert handled == [4]


def test_heartbeats_and_polls_are_throttled() -> None:
    made, _, beats, now = control([])
    for tenth in range(31):
        now[0] = tenth / 10
        made()
    assert beats == [0.0, 1.0, 2.0, 3.0]


def test_what_a_rank_does_is_told_with_its_heartbeat_when_that_has_changed() -> None:
    now, told = [0.0], [StoreError("locked"), None, None, None, None, None]
    heard: list[str | None] = []

    def beat(activity: str | None) -> None:
        heard.append(activity)
        failure = told.pop(0)
        if failure is not None:
            raise failure

    made = Control(list, lambda _: None, beat, clock=lambda: now[0])
    said = ["loads", "loads", "loads", "samples", None, None]
    made.activity = lambda: said[int(now[0])]
    for half_second in range(12):
        now[0] = half_second / 2
        made()
    assert heard == ["loads", "loads", None, "samples", "", None]  # again where it went astray


def test_what_takes_long_is_said_before_it_begins() -> None:
    now, heard = [0.0], list[str | None]()
    made = Control(list, lambda _: None, heard.append, clock=lambda: now[0])
    made()
    made.doing("loads the model", now=True)
    made.doing("samples")
    made()
    assert heard == [None, "loads the model"]
    now[0] = 1.0
    made()
    assert heard[2:] == ["samples"]


@pytest.fixture
def sigterm() -> Iterator[Callable[[], None]]:
    before = signal.getsignal(signal.SIGTERM)
    yield lambda: os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


def test_sigterm_alone_is_no_cancel(sigterm: Callable[[], None]) -> None:
    made, _, _, _ = control([])
    made.listen_for_sigterm()
    made()
    sigterm()
    with pytest.raises(Terminated, match="SIGTERM from outside"):
        made.waiting()


def test_sigterm_behind_a_cancel_is_the_cancel(sigterm: Callable[[], None]) -> None:
    commands: list[dict[str, Any]] = []
    made, handled, _, _ = control(commands)
    made.listen_for_sigterm()
    made()
    # Asked and signalled within the quarter second in which no commands are looked at.
    commands.append({"id": 1, "command": "cancel"})
    sigterm()
    with pytest.raises(Cancelled):
        made()
    assert handled == [1]


def test_waiting_for_other_ranks_looks_at_commands_but_is_no_progress() -> None:
    commands: list[dict[str, Any]] = []
    made, _, beats, now = control(commands)
    for second in range(5):
        now[0] = float(second)
        made.waiting()
    assert beats == []
    commands.append({"id": 1, "command": "cancel"})
    now[0] = 5.0
    with pytest.raises(Cancelled):
        made.waiting()


def test_a_follower_shows_progress_now_and_then_while_it_works() -> None:
    now = [0.0]
    beats: list[float] = []
    made = FollowerControl(lambda: beats.append(now[0]), clock=lambda: now[0])
    for second in range(31):
        now[0] = float(second)
        made()
    for second in range(31, 60):
        now[0] = float(second)
        made.waiting()
    assert beats == [10.0, 20.0, 30.0]


def test_a_locked_store_does_not_stop_training() -> None:
    calls: list[str] = []

    def locked(*_: object) -> Any:
        calls.append("look")
        msg = "the store was locked by another process for 20 s"
        raise StoreError(msg)

    now = [0.0]
    made = Control(locked, lambda _: None, locked, clock=lambda: now[0])
    for second in range(5):
        now[0] = float(second)
        made()
    assert len(calls) >= 5


def test_nothing_on_the_way_swallows_a_cancel() -> None:
    assert not issubclass(Cancelled, Exception)
    assert not issubclass(Terminated, Exception)
