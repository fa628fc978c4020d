"""What writing a step to the store costs the training process, in CPU seconds.

    python tests/benchmarks/store_write.py

Steps with trajectories of 2 kB of text each (a prompt that the group shares and a completion of
words drawn by Zipf's law) are committed through the public writer while a second process polls
as a notebook does. The promise: at most 2 ms and 20 µs per trajectory.
"""

from __future__ import annotations

import functools
import multiprocessing
import random
import string
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nbtrain.store import RunWriter, Store, new_id, open_store

GROUP = 8
STEP_SECONDS, TRAJECTORY_SECONDS = 0.002, 20e-6
POLL_SECONDS = 0.25  # a notebook reads at 4 Hz


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one step with that many trajectories: the median and the mean of many."""

    trajectories: int
    median: float
    mean: float

    @property
    def bar(self) -> float:
        """What is promised."""
        return STEP_SECONDS + TRAJECTORY_SECONDS * self.trajectories


def words(rng: random.Random, characters: int) -> str:
    """A text of about that many characters."""
    weights = [1 / (rank + 2) for rank in range(len(_VOCABULARY))]
    return " ".join(rng.choices(_VOCABULARY, weights, k=characters // 6))[:characters]


_VOCABULARY = [
    "".join(random.Random(n).choices(string.ascii_lowercase, k=2 + n % 8)) for n in range(5000)
]


class Steps:
    """Made-up steps, each with all the columns that a reinforcement run fills."""

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        self._prompts = [words(rng, 600) for _ in range(64)]
        self._completions = [words(rng, 1400) for _ in range(512)]
        self._metrics = {f"metric_{n}": rng.random() for n in range(60)}

    def step(self, number: int) -> dict[str, Any]:
        """The step's own row: key columns and 60 metrics."""
        row = {"avg_reward": 0.5, "used_reward": 0.4, "loss": 0.1, "learning_rate": 1e-4}
        ledger = ("completed", "used", "no_signal", "filtered", "pending", "started")
        counts = {f"{name}_groups": n for n, name in enumerate(ledger)}
        applied = {"update_applied": True, "metrics": self._metrics}
        return {"step": number, **row, **counts, **applied}

    def group(self, number: int, n: int) -> dict[str, Any]:
        """A group's row."""
        task = {"task_id": f"{n:016x}", "task_index": n, "epoch": 0, "outcome": "used"}
        size = {"size": GROUP, "eligible": GROUP, "reward_mean": 0.5, "reward_std": 0.2}
        place = {"group_id": number * 1000 + n, "consumed_step": number}
        return {**place, **task, **size, "output_tokens": 8 * 300}

    def trajectory(self, number: int, n: int) -> dict[str, Any]:
        """A trajectory's row and its texts."""
        group, sample = divmod(n, GROUP)
        text = {
            "prompt": self._prompts[(number + group) % len(self._prompts)],
            "completion": self._completions[(number * 7 + n) % len(self._completions)],
            "terms": {"correct": float(n % 2), "format": 0.5},
            "error": None,
        }
        place = {"trajectory_id": number * 10_000 + n, "group_id": number * 1000 + group}
        grade = {"reward": float(n % 2), "used_reward": float(n % 2), "eligible": True}
        counts = {"turns": 1, "prompt_tokens": 150, "output_tokens": 300}
        policy = {"policy_version": number, "consumed_step": number}
        return {
            **place,
            **grade,
            **counts,
            **policy,
            "sample": sample,
            "task_id": f"{group:016x}",
            "status": "completed",
            "reason": "ENV_DONE",
            "verdict": "trained on",
            "advantage": 0.7,
            "seconds": 1.5,
            "text": text,
        }


@functools.cache
def made_up_steps() -> Steps:
    """The steps that everything here writes; making up the words takes longer than writing."""
    return Steps()


def new_writer(store: Store) -> RunWriter:
    """The writer of a fresh run in TRAINING."""
    resolved = {
        "settings": {"algorithm": {"value": "gspo", "origin": "default"}},
        "workload": {"workload_id": "0" * 64, "name": "sums"},
        "base_model": {"slug": "nbtrain/tiny"},
        "parent": None,
        "display_name": "bench",
        "start_step": 0,
        "total_steps": 1000,
        "config_hash": "0" * 64,
    }
    run = store.create_run(new_id(), plan={}, resolved=resolved)
    store.move_phase(run.key, "TRAINING", attempt=1)
    return RunWriter(store, run.key, 1)


def amendments(number: int, trajectories: int) -> dict[str, Any]:
    """What changes when all groups of step ``number`` waited and the next step uses them."""
    used = {"outcome": "used", "reason": "admitted", "consumed_step": number + 1}
    trained = {"used_reward": 0.5, "advantage": 0.7, "verdict": "trained on"}
    return {
        "amend": {number: {"pending_groups": 0, "used_groups": 8, "settled": True}},
        "amend_groups": {number * 1000 + n: used for n in range(trajectories // GROUP)},
        "amend_trajectories": {
            number * 10_000 + n: {**trained, "consumed_step": number + 1}
            for n in range(trajectories)
        },
    }


def measure(store: Store, trajectories: int, steps: int, *, amending: bool = False) -> Cost:
    """Commit ``steps`` steps and return what one of them cost this process.

    With ``amending`` every step changes all rows of the one before.
    """
    writer, made, costs = new_writer(store), made_up_steps(), []
    for number in range(1, steps + 1):
        row = made.step(number)
        groups = [made.group(number, n) for n in range(trajectories // GROUP)]
        sampled = [made.trajectory(number, n) for n in range(trajectories)]
        changes = amendments(number - 1, trajectories) if amending and number > 1 else {}
        begun = time.process_time()
        writer.commit_step(row, groups, sampled, **changes)
        costs.append(time.process_time() - begun)
    costs.sort()
    return Cost(trajectories, costs[steps // 2], sum(costs) / steps)


def _watch(home: Path, run_key: int, steps: int, seen: Connection) -> None:
    """Poll a run's steps as a notebook does and send each step with the time it was seen at."""
    store, after = open_store(home), 0
    seen.send("ready")
    while steps:
        for row in store.steps(run_key, after):
            seen.send((row["step"], time.time()))
            after = row["id"]
            steps -= 1
        time.sleep(POLL_SECONDS)


def delays(home: Path, steps: int = 10) -> list[float]:
    """Seconds from the end of each commit until another process at 4 Hz has the row."""
    store = open_store(home)
    writer, made = new_writer(store), made_up_steps()
    mine, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    watcher = multiprocessing.get_context("spawn").Process(
        target=_watch, args=(home, writer.run_key, steps, theirs), daemon=True
    )
    watcher.start()
    mine.recv()
    committed = {}
    for number in range(1, steps + 1):
        writer.commit_step(made.step(number), (), [made.trajectory(number, n) for n in range(64)])
        committed[number] = time.time()
        time.sleep(0.1)
    found = dict(mine.recv() for _ in range(steps))
    watcher.join()
    return [found[number] - committed[number] for number in committed]


def main() -> None:
    """Print a small table."""
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "home") as store:
        print(f"{'trajectories':>12} {'amended':>8} {'median ms':>10} {'mean ms':>8} {'bar ms':>7}")
        for amending in (False, True):
            for trajectories in (0, 64, 256):
                cost = measure(store, trajectories, 150, amending=amending)
                row = [1e3 * value for value in (cost.median, cost.mean, cost.bar)]
                changed = trajectories if amending else 0
                print(f"{trajectories:12} {changed:8} {row[0]:10.2f} {row[1]:8.2f} {row[2]:7.2f}")
    with tempfile.TemporaryDirectory() as folder:
        late = delays(Path(folder) / "home")
        print(f"seen by a reader at 4 Hz after {max(late):.2f} s at most")


if __name__ == "__main__":
    main()
