"""Watching in a real kernel: in place, throttled, bounded, and never in another cell."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

import pytest
import stored
from live_kernels import Kernel, kernel
from sqlalchemy import insert

from nbtrain.client import Client, Run
from nbtrain.store import tables

LONG = 10_000


def history(run: Run, steps: int) -> None:
    """The steps of a long run, written at once."""
    rows = [
        {
            "run": run._key,
            "attempt": 1,
            "step": n,
            "created_at": time.time(),
            "avg_reward": (n * 7919 % 101) / 202 + n / (2 * LONG),
            "used_reward": 0.5,
            "completed_groups": 3,
            "used_groups": 2,
            "no_signal_groups": 1,
            "update_applied": True,
            "settled": True,
            "metrics": {},
        }
        for n in range(1, steps + 1)
    ]
    with stored.store_of(Client()).database.writing() as connection:
        connection.execute(insert(tables.steps), rows)


def updates(seen: Kernel) -> list[dict[str, Any]]:
    """What was published for a static output so far, the kernel's queue drained."""
    seen.run("None")
    kinds = ("display_data", "update_display_data")
    found = [m for m in seen.messages if m["msg_type"] in kinds]
    return [m for m in found if "display_id" in m["content"]["transient"]]


def to_the_end(seen: Kernel, seconds: float = 30.0) -> list[dict[str, Any]]:
    """The same, once the run's end is shown: drawing takes its time on a busy machine."""
    deadline = time.monotonic() + seconds
    while "COMPLETED" not in (shown := updates(seen))[-1]["content"]["data"]["text/plain"]:
        assert time.monotonic() < deadline, shown[-1]["content"]["data"]["text/plain"]
        time.sleep(0.2)
    return shown


@pytest.fixture
def run(home: Path) -> Run:
    run = stored.create(Client(), "big", num_steps=LONG, val_interval_steps=100)
    stored.train(run)
    return run


def test_a_long_run_is_followed_in_place_throttled_and_bounded(run: Run) -> None:
    history(run, LONG - 300)
    for number in range(0, LONG - 300, 100):
        stored.validate(run, number, number / LONG)
        if number % 500 == 0:
            stored.save(run, number)
    with kernel() as seen:
        seen.run("%train watch big")
        begun = time.monotonic()
        for number in range(LONG - 299, LONG + 1):
            stored.step(run, number, 0.9, text=False)
            time.sleep(0.01)  # 300 steps in a few seconds, whatever the machine
            if number % 30 == 0:
                # a busy kernel is looked into by nobody, and still follows
                assert seen.run("sum(range(100_000)); print('mine')") == "mine\n"
        stored.finish(run)
        shown = to_the_end(seen)
        took = time.monotonic() - begun
    assert shown[0]["msg_type"] == "display_data"
    assert {m["msg_type"] for m in shown[1:]} == {"update_display_data"}
    (display,) = {m["content"]["transient"]["display_id"] for m in shown}
    assert display.startswith("nbtrain-")
    assert 2 < len(shown) <= 4 * took
    last = shown[-1]["content"]["data"]
    assert "succeeded, COMPLETED" in last["text/plain"]
    assert f"step {LONG:,} of {LONG:,}" in last["text/plain"]
    assert base64.b64decode(last["image/png"]).startswith(b"\x89PNG")
    assert sum(map(len, last.values())) < 50_000


BREAK = """
from nbtrain.client.followed import Followed
from nbtrain.notebook import poller
poller._AFTER_AN_ERROR = 0.2
whole = Followed._take
def broken(*_):
    met.append(1)
    raise OSError("the disk is gone")
met = []
Followed._take = broken
"""


def test_what_the_poller_meets_is_neither_printed_nor_raised(run: Run) -> None:
    with kernel() as seen:
        seen.run("%train watch big")
        seen.run(BREAK)
        stored.step(run, 1)
        seen.run("while len(met) < 3: time.sleep(0.05)")
        seen.run("Followed._take = whole")
        stored.finish(run)
        to_the_end(seen)
        assert not [m for m in seen.messages if m["msg_type"] in ("stream", "error")]


def test_the_last_word_of_a_wait_belongs_to_the_cell_that_waited(run: Run) -> None:
    with kernel() as seen:
        seen.run("%train watch big")
        stored.step(run, 1)
        stored.finish(run)
        seen.messages.clear()
        seen.run("nbtrain.attach('big').wait();")
        data = updates(seen)[-1]["content"]["data"]
    assert "succeeded, COMPLETED" in data["text/plain"]
    assert "image/png" in data
