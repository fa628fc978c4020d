"""Cost of a whole reinforcement step against stock ``trl.GRPOTrainer``.

    python tests/benchmarks/step_cost.py --case embedded
    python tests/benchmarks/step_cost.py --case llama-5m
    python tests/benchmarks/step_cost.py --case smollm2 --model FOLDER

CPU seconds per completion token trained: same model, weights' precision, LoRA, tasks and limits;
filters and oversampling off; one thread; each arm in a process of its own, arms interleaved, the
median over the rounds. Reward workers' CPU counts. TRL runs twice: with its own defaults, and with
the settings that are best on a CPU (no gradient checkpointing). The first step of every process
warms up and is left out. Prints Markdown.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

from step_arms import GROUP, Case, run_nbtrain, run_trl, small_llama

ROOT = Path(__file__).parent.parent.parent
ARMS = {"nbtrain": "nbtrain", "trl": "TRL, no checkpointing", "trl-defaults": "TRL, its defaults"}
CASES = {
    "embedded": Case(
        "embedded", "fp32", 8, 20, 11, model=str(ROOT / "nbtrain/catalog/embedded/tiny")
    ),
    "llama-5m": Case("llama-5m", "fp32", 4, 64, 6, preamble=1),
    "smollm2": Case("smollm2", "bf16", 2, 64, 4, preamble=2),
}
PARTS = ("generation", "forward", "backward", "reward workers", "rest")

Figures = dict[str, Any]


def one_arm(case: Case, arm: str) -> Figures:
    """Run one arm in this process; its first step warms up."""
    meter = run_nbtrain(case) if arm == "nbtrain" else run_trl(case, best=arm == "trl")
    steps = meter.steps[1:]
    return {
        "cpu": sum(step["cpu"] for step in steps),
        "tokens": sum(step["tokens"] for step in steps),
        "steps": len(steps),
        "parts": {part: sum(s["parts"].get(part, 0.0) for s in steps) for part in PARTS},
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure(case: Case, arm: str) -> Figures:
    """One arm in a fresh process."""
    command = [sys.executable, __file__, "--case", case.name, "--model", case.model]
    command += ["--steps", str(case.steps), "--arm", arm]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{arm} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: Figures = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def table(case: Case, results: dict[str, list[Figures]]) -> str:
    """The arms side by side, as Markdown, with ratios of medians to TRL's."""

    def median(arm: str, key: str, per: str | None = None) -> float:
        return statistics.median(r[key] / (r[per] if per else 1) for r in results[arm])

    rounds = len(results["nbtrain"])
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "transformers", "trl", "peft")
    )
    lines = [
        f"{case.name}, {case.dtype}, {case.groups} groups of {GROUP}, at most {case.new_tokens} "
        f"new tokens, {case.steps - 1} steps a round, median of {rounds}, one thread; "
        f"{datetime.datetime.now(tz=datetime.UTC).date()}, {versions}",
        "",
        "| arm | CPU ms a token | ratio | CPU s a step | tokens a step | peak MiB | ratio | "
        + " | ".join(PARTS)
        + " |",
        "|---" * (7 + len(PARTS)) + "|",
    ]
    for arm, label in ARMS.items():
        cost, peak = median(arm, "cpu", "tokens"), median(arm, "peak_mib")
        shares = [
            statistics.median(r["parts"][part] / r["cpu"] for r in results[arm]) for part in PARTS
        ]
        cells = [
            label,
            f"{1e3 * cost:.3f}",
            f"{median('nbtrain', 'cpu', 'tokens') / cost:.2f}",
            f"{median(arm, 'cpu', 'steps'):.3f}",
            f"{median(arm, 'tokens', 'steps'):.0f}",
            f"{peak:.0f}",
            f"{median('nbtrain', 'peak_mib') / peak:.2f}",
            *(f"{share:.0%}" for share in shares),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def prepared(case: Case, scratch: Path) -> Case:
    """The case with a model to run; the random one is made in ``scratch``."""
    if case.model:
        return case
    if case.name != "llama-5m":
        raise SystemExit(f"--case {case.name} needs --model FOLDER")
    small_llama(scratch)
    return replace(case, model=str(scratch))


def main() -> None:
    """Interleave the arms and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="embedded")
    parser.add_argument("--model", default="", help="model folder, for a case that has none")
    parser.add_argument("--steps", type=int, default=0, help="steps a round, the first warms up")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    case = CASES[options.case]
    case = replace(case, model=options.model or case.model, steps=options.steps or case.steps)
    if options.arm:
        print("RESULT " + json.dumps(one_arm(case, options.arm)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        case = prepared(case, Path(scratch))
        results: dict[str, list[Figures]] = {arm: [] for arm in ARMS}
        for _ in range(options.rounds):
            for arm, rounds in results.items():
                rounds.append(measure(case, arm))
    print(table(case, results))


if __name__ == "__main__":
    main()
