"""How long the sampler has nothing to decode while rewards or environments are slow.

    python tests/benchmarks/idle_sampler.py --model FOLDER

Two workloads run through the client with ``max_staleness`` 3: one whose reward takes 0 to 3 s at
random, and one whose environment blocks for 5 s before it answers the first reply. With 64
workers, workers divided by latency cover what the sampler brings; with 2 they do not. The share
of each collection in which nothing could be decoded is that of the steps after the first. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

THINGS = ("animals", "rivers", "colours", "tools", "planets", "fruits", "cities", "trees")
TASKS = [
    {"prompt": f"Name {count} {thing}.", "seconds": 0.0}
    for count in range(1, 13)
    for thing in THINGS
]
OPTIONS: dict[str, Any] = {
    "num_steps": 6,
    "batch_size": 4,
    "group_size": 8,
    "max_staleness": 3,
    "learning_rate": 1e-6,
    "max_output_tokens_per_turn": 64,
    "train_on_truncation": True,
    "val_enabled": False,
}


def thinks(completion: str, task: dict[str, Any]) -> float:
    """A reward that takes up to ``seconds`` of its task; how varied the words are."""
    time.sleep(random.Random(completion).uniform(0, task["seconds"]))
    words = completion.split()
    return len(set(words)) / (len(words) + 1)


class Slow:
    """An environment that blocks for ``seconds`` of its task before it answers."""

    def reset(self, seconds: float) -> None:
        """Begin."""
        self.seconds = seconds
        self.reward = 0.0

    def step(self, reply: str) -> str | None:
        """Block at the first reply; the second ends it."""
        self.reward += len(set(reply.split())) / 100
        if self.seconds:
            time.sleep(self.seconds)
            self.seconds = 0
            return "And which of them is the biggest?"
        return None


def start(case: str, *, base_model: str, seconds: float, workers: int, **options: Any) -> Any:
    """A run of ``case`` (rewards or environments) whose latency is ``seconds`` at most."""
    import nbtrain
    from nbtrain import Client

    tasks = [task | {"seconds": seconds} for task in TASKS]
    parts: dict[str, Any] = {"environment": Slow} if case == "environments" else {"rewards": thinks}
    made = nbtrain.workload(f"slow-{case}", tasks=tasks, base_model=base_model, **parts)
    name = "environment_workers" if case == "environments" else "reward_workers"
    settings = OPTIONS | {name: workers} | options
    return Client().training.create(bench_id=made.id, options=settings)


def figures(run: Any) -> dict[str, Any]:
    """What the steps after the first say."""
    steps = run.metrics.iloc[1:]
    seconds = {
        part: float(steps[f"seconds_{part}"].sum())
        for part in ("sampling", "grading", "environment", "waiting", "loss")
    }
    collecting = sum(seconds.values()) - seconds["loss"]
    idle = seconds["grading"] + seconds["environment"]
    said = steps["bottleneck"].dropna() if "bottleneck" in steps else []
    return {
        "steps": len(steps),
        "idle": idle / collecting,
        "worst": float(steps["sampler_idle_share"].max()),
        "collecting": collecting / len(steps),
        "loss": seconds["loss"] / len(steps),
        "waiting": seconds["waiting"] / len(steps),
        "in_flight": int(steps["in_flight_groups"].max()),
        "tokens": mean(steps["output_tokens"]),
        "bottleneck": list(said),
    }


def main() -> None:
    """Run the four cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or GGUF file of the base model")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 2])
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the latencies, on a slow machine"
    )
    parser.add_argument("--cases", nargs="+", default=["rewards", "environments"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["NBTRAIN_HOME"] = home
        from nbtrain import Client

        Client().base_models.select(Path(options.model), name="slow-model")
        print("| case | latency s | workers | idle | worst step | collecting s | loss s | "
              "groups in flight | tokens a step | bottleneck |")  # fmt: skip
        print("|---" * 10 + "|")
        for case in options.cases:
            for workers in options.workers:
                latency = options.scale * (5.0 if case == "environments" else 3.0)
                run = start(
                    case,
                    base_model="slow-model",
                    seconds=latency,
                    workers=workers,
                    num_steps=options.steps,
                )
                run.wait(1800)
                found = figures(run)
                said = found["bottleneck"][-1] if found["bottleneck"] else ""
                print(
                    f"| {case} | {latency:g} | {workers} | {found['idle']:.0%} | "
                    f"{found['worst']:.0%} | {found['collecting']:.1f} | {found['loss']:.1f} | "
                    f"{found['in_flight']} | {found['tokens']:.0f} | "
                    f"{said} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
