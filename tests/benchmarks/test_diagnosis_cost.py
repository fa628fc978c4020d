"""What a diagnosis of a long run costs, in CPU seconds: the best of a few tries.

``python tests/benchmarks/test_diagnosis_cost.py`` prints the figure.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import stored
from machine import slowness, writing
from sqlalchemy import text

from nbtrain.client import Client, Run

# CPU seconds grow when other processes share the core's two threads: up to 1.5 times was seen
SLACK = 1.5
STEPS, TRAJECTORIES, GROUP = 10_000, 1_000_000, 8

_NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) "
_STEPS = _NUMBERS.format(STEPS) + (
    "INSERT INTO steps (run, attempt, step, superseded, created_at, avg_reward, completed_groups, "
    "no_signal_groups, update_applied, settled, metrics) SELECT :run, 1, i, 0, 0, (i % 7) / 7.0, "
    "12, 3, 1, 1, :metrics FROM n"
)
_GROUPS = _NUMBERS.format(TRAJECTORIES // GROUP) + (
    "INSERT INTO groups (run, attempt, step, superseded, group_id, task_index, epoch, outcome) "
    f"SELECT :run, 1, 1 + i * {GROUP} / {TRAJECTORIES // STEPS}, 0, i, i % 900, 2, 'used' FROM n"
)
_TRAJECTORIES = _NUMBERS.format(TRAJECTORIES) + (
    "INSERT INTO trajectories (run, attempt, step, superseded, split, trajectory_id, group_id, "
    f"reward, reason) SELECT :run, 1, 1 + (i - 1) / {TRAJECTORIES // STEPS}, 0, 'train', i, "
    f"i / {GROUP}, 0.5, 'ENV_DONE' FROM n"
)


def long_run() -> Run:
    """A run of many steps, written at once."""
    run = stored.create(Client(), "long", num_steps=STEPS)
    stored.train(run)
    figures = ", ".join(f'"figure_{n}": {n / 3}' for n in range(60))
    given = {"run": run._key, "metrics": f'{{{figures}, "terms": {{"exact": 0.5}}}}'}
    with run._store.database.writing() as connection:
        connection.execute(text(_STEPS), given)
        for statement in (_GROUPS, _TRAJECTORIES):
            connection.execute(text(statement), {"run": run._key})
        done = f"UPDATE runs SET completed_steps = {STEPS} WHERE id = :run"
        connection.execute(text(done), {"run": run._key})
    return run


def cost(run: Run) -> float:
    """CPU seconds of one diagnosis."""
    begun = time.process_time()
    assert run.diagnose().rules
    return time.process_time() - begun


def test_a_diagnosis_of_a_long_run_costs_1_s_at_most(home: Path) -> None:
    run = long_run()
    assert min(cost(run) for _ in range(3)) <= SLACK * slowness(writing)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NBTRAIN_HOME"] = folder
        made = long_run()
        print(" ".join(f"{cost(made):.2f}" for _ in range(4)), "CPU seconds")
