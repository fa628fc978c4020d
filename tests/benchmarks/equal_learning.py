"""Whether this loop learns as stock ``trl.GRPOTrainer`` does: ``sums``, the embedded model.

    python tests/benchmarks/equal_learning.py --out tests/benchmarks/curves

Both sides take the same tasks in the same order, eight groups of eight a step, from the same
weights, at a constant rate, without filters and at staleness 0; each arm runs in a process of its
own. Each final policy then answers 1,000 tasks that neither side trained on, four times at
temperature 1, by the same decoder and with the same random streams. The interval is that of the
mean paired difference over seeds and tasks (bootstrap, 95 %). Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import numpy as np

CLIPS = {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}
ARMS = {"nbtrain": "nbtrain", "trl": "TRL"}
RATE = 5e-4
SAMPLES = 4
TASKS = 1000

Arm = dict[str, Any]
"""``rewards`` of training, step by step, and ``held_out`` rewards, task by task."""


def recipe_of(algorithm: str, seed: int, steps: int) -> Any:
    """What both sides train under."""
    from sums_runs import Recipe

    return Recipe(
        seed,
        steps,
        algorithm=algorithm,
        learning_rate=RATE,
        clip=CLIPS[algorithm],
        in_flight=64,
        filtered=False,
        warmup=0,
    )


def held_out(count: int) -> list[Any]:
    """Tasks of pairs that stand on neither side of ``sums``."""
    from sums_runs import task_view, views

    taken = {task.prompt[0]["content"] for side in views() for task in side}
    pairs = [(a, b) for a in range(100) for b in range(100)]
    order = np.random.default_rng(0).permutation(len(pairs))
    tasks = [task_view(20_000 + int(n), *pairs[n]) for n in order]
    return [task for task in tasks if task.prompt[0]["content"] not in taken][:count]


def training_tasks(seed: int, steps: int) -> list[Any]:
    """The tasks that a run of this seed trains on, in order."""
    from sums_runs import views

    from nbtrain.rollout.draws import task_order

    train, _ = views()
    return [train[index] for index in task_order(seed, 0, len(train))[: 8 * steps]]


def run_nbtrain(algorithm: str, seed: int, steps: int, tasks: int) -> Arm:
    """This loop."""
    from sums_runs import Records, run

    recipe, records = recipe_of(algorithm, seed, steps), Records()
    result = run(recipe, held_out=held_out(tasks), samples=SAMPLES, records=records)
    if records.tasks != {task.task_id for task in training_tasks(seed, steps)}:
        raise SystemExit("the two sides did not train on the same tasks")
    return {"rewards": result.rewards, "held_out": result.held_out}


def run_trl(algorithm: str, seed: int, steps: int, tasks: int) -> Arm:
    """Stock GRPOTrainer; its adapter answers through this project's decoder."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model_state_dict
    from sums_runs import EMBEDDED, GROUP_SIZE, evaluate, load_policy, tokenizer
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    recipe = recipe_of(algorithm, seed, steps)
    rows = [{"prompt": t.prompt, **t.columns} for t in training_tasks(seed, steps)]

    def exact(completions: Any, answer: Any, **_: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [float(c[0]["content"] == a) for c, a in pairs]

    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32),
            reward_funcs=exact,
            args=GRPOConfig(
                output_dir=scratch,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                seed=seed,
                shuffle_dataset=False,
                max_steps=steps,
                per_device_train_batch_size=recipe.batch_size * GROUP_SIZE,
                num_generations=GROUP_SIZE,
                max_completion_length=24,
                loss_type="grpo",
                scale_rewards="group",
                importance_sampling_level="sequence" if algorithm == "gspo" else "token",
                epsilon=recipe.clip[0],
                epsilon_high=recipe.clip[1],
                beta=0.0,
                use_bias_correction_kl=False,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                weight_decay=0.01,
                max_grad_norm=1.0,
                report_to=[],
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )
        trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    policy = load_policy(seed)
    policy.load_adapter_state(get_peft_model_state_dict(trainer.model))
    answers = evaluate(policy, held_out(tasks), samples=SAMPLES, seed=seed)
    return {"rewards": rewards, "held_out": answers}


def measure(arm: str, algorithm: str, seed: int, steps: int, tasks: int = TASKS) -> Arm:
    """One arm in a fresh process."""
    command = [sys.executable, __file__, "--arm", arm, "--algorithms", algorithm]
    command += ["--seeds", str(seed), "--steps", str(steps), "--tasks", str(tasks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{arm} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: Arm = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Mean paired difference, ours less theirs, and its 95 % bootstrap interval."""
    differences = np.array(ours) - np.array(theirs)
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(differences), (10_000, len(differences)), dtype=np.int32)
    low, high = np.quantile(differences[drawn].mean(axis=1), [0.025, 0.975])
    return float(differences.mean()), float(low), float(high)


def row(algorithm: str, arms: dict[str, list[Arm]]) -> str:
    """A line of the table: held-out means by seed, difference and interval."""
    by_seed = {name: [mean(arm["held_out"]) for arm in found] for name, found in arms.items()}
    pooled = {name: [r for arm in found for r in arm["held_out"]] for name, found in arms.items()}
    difference, low, high = interval(pooled["nbtrain"], pooled["trl"])
    cells = [algorithm.upper()]
    for name in ARMS:
        cells.append(" / ".join(f"{score:.3f}" for score in by_seed[name]))
    cells += [f"{difference:+.3f}", f"{low:+.3f} to {high:+.3f}"]
    return "| " + " | ".join(cells) + " |"


def compare(algorithms: Sequence[str], seeds: Sequence[int], steps: int, tasks: int) -> Arm:
    """Run all arms, print the table as it comes, and return their curves and intervals."""
    print(f"sums, {steps} steps of 8 groups of 8, lr {RATE:g}, {tasks} held-out tasks a seed\n")
    print("| algorithm | held-out, nbtrain, by seed | TRL, by seed | difference | 95 % interval |")
    print("|---" * 5 + "|")
    found: Arm = {"steps": steps, "tasks": tasks, "seeds": list(seeds)}
    for algorithm in algorithms:
        arms: dict[str, list[Arm]] = {name: [] for name in ARMS}
        for seed in seeds:
            for name, results in arms.items():
                results.append(measure(name, algorithm, seed, steps, tasks))
        print(row(algorithm, arms), flush=True)
        pooled = {n: [r for arm in some for r in arm["held_out"]] for n, some in arms.items()}
        found[algorithm] = {
            "difference": interval(pooled["nbtrain"], pooled["trl"]),
            **{
                name: {
                    "rewards": [arm["rewards"] for arm in some],
                    "held_out": [mean(arm["held_out"]) for arm in some],
                }
                for name, some in arms.items()
            },
        }
    return found


def draw(found: Arm, path: Path) -> None:
    """Training reward by step, every seed, one picture for each algorithm."""
    from curves_drawn import panels

    pictures = {}
    for algorithm in (name for name in CLIPS if name in found):
        sides = {label: found[algorithm][name]["rewards"] for name, label in ARMS.items()}
        pictures[algorithm.upper()] = sides
    panels(pictures, path, x="step", y="mean reward, training")


def main() -> None:
    """Run one arm, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", choices=CLIPS, default=list(CLIPS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--out", type=Path, help="folder for the curves")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        import torch

        torch.set_num_threads(1)
        one = {"nbtrain": run_nbtrain, "trl": run_trl}[options.arm]
        arm = one(options.algorithms[0], options.seeds[0], options.steps, options.tasks)
        print("RESULT " + json.dumps(arm))
        return
    found = compare(options.algorithms, options.seeds, options.steps, options.tasks)
    if options.out:
        from curves_drawn import save

        save(found, options.out / "equal_learning.json")
        draw(found, options.out / "equal_learning.png")


if __name__ == "__main__":
    main()
