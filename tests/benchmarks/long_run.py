"""A long run with everything that can go wrong mixed in, its books checked after every commit.

    python tests/benchmarks/long_run.py --steps 300

The job of a run, in this process: the embedded model in the environment of ``calculator`` made
unreliable, staleness 3, replies cut by their limit, trajectories that time out, environments and
rewards that fail, and grades that are None. After every commit the store's rows must add up, those
of earlier steps included. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.environments.calculator import Calculator

if TYPE_CHECKING:  # workers import this module again where it is the program: keep it light
    from watched_job import Watched

OPTIONS: dict[str, Any] = {
    "batch_size": 2,
    "group_size": 4,
    "max_staleness": 3,
    "learning_rate": 3e-4,
    "max_output_tokens_per_turn": 8,
    "max_output_tokens_per_trajectory": 11,
    "max_concurrent_trajectories": 48,
    "trajectory_timeout_seconds": 3,
    "val_interval_steps": 50,
    "val_num_tasks": 8,
    "reward_workers": 4,
    "environment_workers": 16,
}


def chance() -> float:
    """A number in 0 to 1. The processes of environments are forks: their own luck is the same."""
    return random.SystemRandom().random()


class Unreliable(Calculator):
    """The calculator, which fails now and then and seldom does not come back."""

    def step(self, reply: str) -> dict[str, Any] | None:
        """As the calculator's, when it works."""
        luck = chance()
        if luck < 0.01:
            time.sleep(600)
        if luck < 0.03:
            msg = "the calculator is out of order"
            raise RuntimeError(msg)
        return super().step(reply)


def unreliable(completions: Any, environments: Any, answer: Any, **_: Any) -> list[float | None]:
    """The environment's reward, for even answers with a little noise.

    One task in 50 hangs it and one makes it fail; one in five gets no grade for a completion.
    """
    number = int(answer[0])
    if number % 50 == 0:
        time.sleep(600)
    if number % 50 == 1:
        msg = "the grader is out of order"
        raise RuntimeError(msg)
    time.sleep(0.2 * chance())  # several at a time come back after an update: some must wait
    noise = 0.1 * (number % 2 == 0)
    rewards: list[float | None] = [
        getattr(state, "reward", 0.0) + noise * chance() for state in environments
    ]
    if number % 5 == 2:
        rewards[0] = None
    return rewards


def run(steps: int, **options: Any) -> tuple[Any, Watched]:
    """The run's object and what the checks saw; raises ``AssertionError`` where books misfit."""
    from watched_job import Watched, WatchedJob

    import nbtrain
    from nbtrain.catalog.samples import calculator_rows
    from nbtrain.client import Client, Run
    from nbtrain.processes import process_identity
    from nbtrain.store import new_id, open_store

    train, held_out = calculator_rows()
    made = nbtrain.workload(
        "unreliable",
        tasks=train,
        rewards=[unreliable],
        environment=Unreliable,
        base_model="nbtrain/tiny",
        held_out=held_out,
    )
    view = Client().training.resolve(
        options=OPTIONS | {"num_steps": steps} | options, bench_id=made.id
    )
    store, who = open_store(), process_identity(os.getpid())
    assert who is not None
    row = store.create_run(new_id(), plan={}, resolved=view.plan)
    (store.run_folder(row.run_id) / "logs").mkdir(parents=True, exist_ok=True)
    store.start_attempt(
        row.key, 1, host_pid=who.pid, host_start_time=who.start_time, boot_id=who.boot_id
    )
    watched = Watched()
    job = WatchedJob(store, row, 1)
    job.watched = watched
    ending = job.run()
    assert ending.failure is None, ending.failure
    assert watched.checks == steps, ending.ended
    return Run(store, row), watched


def check_end(found: Any, steps: int) -> dict[str, int]:
    """Nothing is left over; returns how often each reason came up, None grades included."""
    from watched_job import check_row

    rows = found._store.steps(found._key)
    assert len(rows) == steps
    for row in rows:
        check_row(row)
    assert all(row["settled"] and row["pending_groups"] == 0 for row in rows)
    assert rows[-1]["in_flight_groups"] == 0
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row["metrics"]["termination_reasons"])
        reasons["updates"] += bool(row["update_applied"])
        reasons["graded"] += row["metrics"]["graded_trajectories"]
        reasons["discarded"] += row["discarded_groups"]
        reasons["cancelled"] += row["cancelled_groups"]
        reasons["completed"] += row["completed_groups"]
    grades = [row["reward"] for row in found._store.trajectories(found._key, limit=None)
              if row["split"] == "train" and row["reason"] == "ENV_DONE"]  # fmt: skip
    return dict(reasons) | {"no grade": grades.count(None)}


def main() -> None:
    """Run it and print what happened."""
    import torch

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="folder for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["NBTRAIN_HOME"] = home
        found, watched = run(options.steps)
        counts = check_end(found, options.steps)
    print(f"{options.steps} steps, {watched.checks} checks, {watched.amended} amendments\n")
    print("| " + " | ".join(counts) + " |")
    print("|---" * len(counts) + "|")
    print("| " + " | ".join(map(str, counts.values())) + " |\n")
    memory, first = watched.memory, min(50, options.steps // 2)
    settled = memory[first - 1 :]
    print(f"memory at step {first}: {settled[0]:.0f} MiB, at the end {settled[-1]:.0f}, "
          f"between {min(settled):.0f} and {max(settled):.0f}")  # fmt: skip
    if options.out:
        from curves_drawn import save

        figures = {"counts": counts, "memory_mib": memory[::10], "amended": watched.amended}
        save(figures, options.out / "long_run.json")


if __name__ == "__main__":
    main()
