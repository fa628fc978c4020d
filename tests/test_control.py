"""Commands and heartbeats between decode steps."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from nbtrain.errors import StoreError
from nbtrain.training.control import Cancelled, Control


def control(commands: list[dict[str, Any]]) -> tuple[Control, list[int], list[float], list[float]]:
    now = [0.0]
    handled: list[int] = []
    beats: list[float] = []

    def waiting() -> list[dict[str, Any]]:
        return [c for c in commands if c["id"] not in handled]

    made = Control(waiting, handled.append, lambda: beats.append(now[0]), clock=lambda: now[0])
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


def test_sigterm_stops_at_the_next_look() -> None:
    made, _, _, _ = control([])
    before = signal.getsignal(signal.SIGTERM)
    try:
        made.listen_for_sigterm()
        made()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Cancelled, match="SIGTERM"):
            made()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_locked_store_does_not_stop_training() -> None:
    calls: list[str] = []

    def locked() -> Any:
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
