"""A stand-in for the rank, for tests of the supervision only: no torch, obedient or bad on order.

``python -m tests.faults.rank_stub --run ID --attempt N``, as the host starts the real one. What it
does stands in the run's plan under ``"stub"``:

- ``helpers``: processes it starts, by name, see ``HELPERS``;
- ``print_mb``: so many MB are printed at once;
- ``deaf``: it looks at no command and ignores SIGTERM;
- ``then``: ``"complete"``, ``"raise"``, ``"exit"`` (code 7), ``"oom"`` (SIGKILL after 64 MB),
  ``"lost"`` (it says that it lost another rank), ``"start"`` (it loads for ever and looks at
  nothing), or ``"work"`` (the default: until it is cancelled);
- ``wait``: so many seconds pass before that;
- ``follower``: all this for every rank but rank 0, which looks at no commands.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from typing import Any

from nbtrain.processes import die_with_parent

IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
DIE = "import os; from nbtrain.processes import die_with_parent; die_with_parent(os.getppid())"
SLEEP = "print(1, flush=True); import time; time.sleep(600)"
HANG = "import re; re.match('(a+)+$', 'a' * 64 + 'b')"

HELPERS = {
    # A reward worker whose reward hangs in C code and never gives up the GIL.
    "hangs with the GIL": f"{DIE}; print(1, flush=True); {HANG}",
    # What a user's reward function may start: it knows nothing of us.
    "ignores SIGTERM": f"{IGNORE}; {SLEEP}",
    "own session": f"import os; os.setsid(); {IGNORE}; {SLEEP}",
}


class Cancelled(Exception):
    pass


class Terminated(Exception):
    pass


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--attempt", required=True, type=int)
    options = parser.parse_args()
    die_with_parent()

    from nbtrain.plan.phases import Phase
    from nbtrain.store import open_store
    from nbtrain.training.outcome import Outcome, outcome_path

    store = open_store()
    run = store.find_run(options.run)
    rank = int(os.environ["RANK"])
    orders: dict[str, Any] = run.plan["stub"]
    if rank:
        orders = orders.get("follower", {})
    if orders.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for name in orders.get("helpers", ()):
        start_helper(name)
    if orders.get("then") == "start":
        time.sleep(600)
    if rank == 0:
        began = store.move_phase(
            run.key, Phase.TRAINING, attempt=options.attempt, expect=Phase.QUEUED
        )
        assert began
    if orders.get("print_mb"):
        line = "x" * 1023 + "\n"
        for _ in range(orders["print_mb"] * 1024):
            sys.stdout.write(line)
    outcome = outcome_path(store.run_folder(run.run_id), options.attempt, rank)
    time.sleep(orders.get("wait", 0))
    if orders.get("then") == "lost":
        Outcome("failed", failure="connection closed", lost_rank=True).write(outcome)
        return 1
    try:
        if rank and orders.get("then", "work") == "work":
            time.sleep(600)
        work(store, run, options.attempt, orders)
    except Cancelled:
        Outcome("cancelled", "cancelled on request").write(outcome)
        return 0
    except Terminated:
        Outcome("failed", failure="stopped by SIGTERM from outside").write(outcome)
        return 1
    Outcome("completed").write(outcome)
    return 0


def start_helper(name: str) -> None:
    helper = subprocess.Popen(
        [sys.executable, "-c", HELPERS[name]], stdout=subprocess.PIPE, text=True
    )
    assert helper.stdout is not None
    helper.stdout.readline()


def work(store: Any, run: Any, attempt: int, orders: dict[str, Any]) -> None:
    then = orders.get("then", "work")
    if then == "complete":
        return
    if then == "raise":
        msg = "the stub was told to fail"
        raise ValueError(msg)
    if then == "exit":
        sys.exit(7)
    if then == "oom":
        memory = bytearray(64 * 2**20)
        os.kill(os.getpid(), signal.SIGKILL)
        del memory
    stop: list[int] = []
    if not orders.get("deaf"):
        signal.signal(signal.SIGTERM, lambda number, _frame: stop.append(number))
    while not stop:
        store.heartbeat(run.key, attempt, "rank")
        for row in [] if orders.get("deaf") else store.commands(run.key):
            store.handled(row["id"])
            raise Cancelled
        time.sleep(0.1)
    raise Terminated


if __name__ == "__main__":
    sys.exit(main())
