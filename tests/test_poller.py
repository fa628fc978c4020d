"""The thread behind live outputs: it follows, backs off, survives errors and ends."""

from __future__ import annotations

import threading
import time

import pytest

from nbtrain.notebook import poller
from nbtrain.notebook.poller import Poller


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "FASTEST", 0.005)
    monkeypatch.setattr(poller, "SLOWEST", 0.02)
    monkeypatch.setattr(poller, "_AFTER_AN_ERROR", 0.01)


class Countdown:
    def __init__(self, looks: int, *, failing: int = 0) -> None:
        self.left = looks
        self.failing = failing
        self.threads: set[str] = set()
        self.final = threading.Event()

    def look(self) -> tuple[bool, bool]:
        self.threads.add(threading.current_thread().name)
        if self.failing:
            self.failing -= 1
            msg = "the store was away"
            raise OSError(msg)
        self.left -= 1
        if self.left <= 0:
            self.final.set()
        return True, self.left <= 0


def wait_until(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_views_are_followed_by_one_thread_until_they_are_final(quick: None) -> None:
    followed = Poller()
    views = [Countdown(n) for n in (1, 5, 9)]
    for view in views:
        followed.watch(view)
    for view in views:
        assert view.final.wait(10)
    wait_until(lambda: followed.watching == 0)
    assert {name for view in views for name in view.threads} == {"nbtrain-poller"}


def test_the_thread_ends_with_its_last_view_and_comes_back(quick: None) -> None:
    followed = Poller()
    followed.watch(Countdown(1))
    wait_until(lambda: followed._thread is None)
    again = Countdown(2)
    followed.watch(again)
    assert again.final.wait(10)


def test_an_error_is_neither_raised_nor_printed(
    quick: None, capfd: pytest.CaptureFixture[str]
) -> None:
    followed = Poller()
    view = Countdown(2, failing=3)
    followed.watch(view)
    assert view.final.wait(10)
    followed.look_now(Countdown(1, failing=1))
    assert capfd.readouterr() == ("", "")


def test_stop_ends_the_thread_and_resume_goes_on_with_every_view(quick: None) -> None:
    followed = Poller()
    before, later = Countdown(10**9), Countdown(3)
    followed.watch(before)
    thread = followed._thread
    assert thread is not None
    followed.stop()
    assert not thread.is_alive()
    left = before.left
    followed.watch(later)  # a page that is still open asks for something meanwhile
    assert followed._thread is None
    before.left = min(left, 3)
    followed.resume()
    for view in (before, later):
        assert view.final.wait(10)
    wait_until(lambda: followed.watching == 0)
    followed.resume()
    assert followed._thread is None


def test_a_view_that_does_not_move_is_looked_at_less_often() -> None:
    due = poller._Due()
    pauses = []
    for _ in range(12):
        due.move(changed=False, failed=False)
        pauses.append(due.pause)
    assert pauses == sorted(pauses)
    assert pauses[-1] == poller.SLOWEST
    due.move(changed=True, failed=False)
    assert due.pause == poller.FASTEST
