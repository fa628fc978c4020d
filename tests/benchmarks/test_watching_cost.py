"""What watching a run costs a notebook's kernel, and what a panel on a long run takes.

Watching is measured as CPU seconds of the kernel over wall seconds: a run makes three steps a
second with texts, rounds and saves between them, its static output is shown and a page shows one
panel, or ten. All drawing after the first picture is counted; the first one also loads matplotlib.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import stored
from live_kernels import Kernel, kernel
from machine import imports, slowness
from pages import KernelPage
from test_notebook_cost import SLACK, huge

from nbtrain.client import Client, Run
from nbtrain.client.feed import Feed
from nbtrain.notebook.panel import messages

SECONDS = 45.0
PACE = 1 / 3
BAR = 0.01


class Training:
    """Steps at a steady pace from a thread of its own, as a job would commit them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.step = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._go, daemon=True)

    def _go(self) -> None:
        while not self._end.wait(PACE):
            self.step += 1
            rewards = [n % 5 / 4 for n in range(self.step, self.step + 16)]
            stored.step(self.run, self.step, reward=self.step % 7 / 7, rewards=rewards)
            if self.step % 30 == 0:
                stored.validate(self.run, self.step, self.step % 11 / 11)
                stored.save(self.run, self.step)

    def __enter__(self) -> Training:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def spent(seen: Kernel) -> float:
    return float(seen.run("time.process_time()"))


@pytest.mark.parametrize("panels", [0, 1, 10])  # 0: no page is there
def test_watching_a_run_costs_one_percent_of_a_core(home: Path, panels: int) -> None:
    run = stored.create(Client(), "watched", num_steps=10_000)
    stored.train(run)
    with Training(run) as training, kernel() as seen:
        seen.run("%train watch watched")
        seen.run("from nbtrain.notebook import live")
        seen.run(f"more = [live.new_panel(nbtrain.attach('watched')) for _ in range({panels - 1})]")
        pages = [KernelPage(seen, n) for n in range(panels)]
        for page in pages:
            page.send({"kind": "hello"})
        time.sleep(10)  # the first picture, and matplotlib with it
        cpu, begun, first = spent(seen), time.monotonic(), training.step
        time.sleep(SECONDS)
        cpu, took = spent(seen) - cpu, time.monotonic() - begun
        steps = training.step - first
        for page in pages:
            for message in seen.messages:
                page.take(message)
        updates = [c for page in pages for c, _ in page.heard if c["kind"] == "update"]
    share = cpu / took
    print(
        f"{panels} panels: {share:.2%} of a core, "
        f"{steps / took:.1f} steps/s, "
        f"{len(updates) / took:.1f} updates/s, "
        f"{sum(len(json.dumps(u)) for u in updates) / 1024 / took:.1f} kB/s of JSON"
    )
    assert steps / took > 2
    assert len(updates) >= panels * SECONDS / 4
    assert share <= BAR * slowness(imports)


def test_the_whole_of_a_long_run_is_there_at_once(home: Path) -> None:
    run = huge()
    tries = []
    for _ in range(3):
        fresh = Run(run._store, stored.row_of(run))
        begun = time.process_time()
        update = Feed(fresh).whole()
        content, buffers = messages.update(update)
        tries.append(time.process_time() - begun)
    size = len(json.dumps(content)), sum(buffer.nbytes for buffer in buffers)
    print(
        f"whole of 10,000 steps: {min(tries):.3f} CPU s, {size[0]:,} bytes of JSON, "
        f"{size[1]:,} of columns"
    )
    assert update.tables[0].rows == 10_000
    assert min(tries) <= SLACK * slowness(imports)
    assert size[0] < 50_000
    assert size[1] <= 10_000 * 11 * 8
