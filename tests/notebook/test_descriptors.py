"""A descriptor cell in a real kernel: trained for real, attached to again, checked alone."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest
from live_kernels import CellFailed, Kernel, kernel

from nbtrain.client import Client

PREPARE = """
client = nbtrain.Client()
client.workloads.create("triage")
client.datasets.register("triage-train", [
    {"messages": [{"role": "user", "content": f"Ticket {n}"},
                  {"role": "assistant", "content": "billing"}]}
    for n in range(16)
])
"""
TRAIN = """%%train {flags}
kind: run
workload: triage
baseModel: nbtrain/tiny
config:
  dataset: triage-train
  maxSeqLength: 256
  hyperparams:
    optimizer: {{learningRate: 1e-3}}
    training: {{epochs: 2}}
execution: {{saveEvery: 2}}
"""


def test_a_descriptor_cell_trains_and_is_the_same_cell_again(home: Path) -> None:
    with kernel() as notebook:
        notebook.run(PREPARE)
        notebook.run(TRAIN.format(flags="--name triage --into run --wait"))
        assert notebook.run("run.status, run.progress.completed_steps") == "('succeeded', 4)"
        notebook.run(TRAIN.format(flags="--name triage --into again"))
        assert notebook.run("again == run") == "True"
        _interrupt_a_check(notebook)
    client = Client()
    assert len(client.training.runs.list()) == 1
    assert client.training.runs.get("triage").checkpoint_list()[-1].step_index == 4


def _interrupt_a_check(notebook: Kernel) -> None:
    pid = int(notebook.run("print(os.getpid())"))
    seen: list[psutil.Process] = []

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not seen and time.monotonic() < deadline:
            seen.extend(_checks(pid))
            time.sleep(0.05)
        notebook.manager.interrupt_kernel()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(CellFailed) as failed:
        notebook.run(TRAIN.format(flags="--dry-run --check"))
    thread.join()
    assert failed.value.ename == "KeyboardInterrupt"
    assert seen
    gone, alive = psutil.wait_procs(seen, timeout=5)
    assert not alive, gone


def _checks(pid: int) -> list[psutil.Process]:
    family = psutil.Process(pid).children(recursive=True)
    return [each for each in family if "nbtrain.training.check" in " ".join(each.cmdline())]
