"""Cost of a whole reinforcement step against stock ``trl.GRPOTrainer``.

    python tests/benchmarks/step_cost.py [--model FOLDER] [--dtype fp32|bf16] [--rounds 5]

CPU seconds per completion token trained: same model, weights' precision, LoRA, tasks and limits;
filters and oversampling off; one thread; each arm in a process of its own, arms interleaved, the
median over the rounds. Reward workers' CPU counts. TRL runs twice: with its own defaults, and with
the settings that are best on a CPU (no gradient checkpointing).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

ROOT = Path(__file__).parent.parent.parent
ARMS = ("nbtrain", "trl", "trl-defaults")


def sums(count: int) -> list[dict[str, Any]]:
    """Addition tasks with a preamble that makes prompts of a realistic length for large models."""
    rows = []
    for number in range(count):
        a, b = (number * 37) % 90 + 5, (number * 53) % 90 + 5
        rows.append({"question": f"What is {a} + {b}?", "answer": str(a + b)})
    return rows


PREAMBLE = (
    "You are a careful calculator. Work out the sum that you are asked for and answer with the "
    "result. Check the units first, then the tens, and carry where you must. "
)


def prompts(rows: list[dict[str, Any]], long: bool) -> list[list[dict[str, str]]]:
    """Chat prompts: bare for the embedded model, with examples (130 to 200 tokens) for others."""
    if not long:
        return [[{"role": "user", "content": row["question"]}] for row in rows]
    shots = []
    for a, b in ((12, 30), (41, 7)):
        shots += [
            {"role": "user", "content": f"{PREAMBLE}What is {a} + {b}?"},
            {"role": "assistant", "content": str(a + b)},
        ]
    return [[*shots, {"role": "user", "content": row["question"]}] for row in rows]


def correct(text: str, answer: str) -> float:
    """1 for the right number; a little for any number, so that groups differ."""
    digits = "".join(c for c in text if c.isdigit())
    return 1.0 if digits == answer else 0.1 * (len(text) % 5)


class Meter:
    """CPU seconds and completion tokens, by step."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.tokens: list[int] = []
        self._workers = psutil.Process().children(recursive=True)
        self._last = self.now()

    def now(self) -> float:
        return time.process_time() + sum(sum(w.cpu_times()[:2]) for w in self._workers)

    def step(self, tokens: int) -> None:
        now = self.now()
        self.cpu.append(now - self._last)
        self.tokens.append(tokens)
        self._last = self.now()


def run_nbtrain(options: argparse.Namespace) -> Meter:
    """The loop as a job runs it, with its sampler, reward workers, packing and update."""
    import torch

    torch.set_num_threads(1)
    from nbtrain.rewards import RewardPool, as_terms, pack
    from nbtrain.rollout.admission import AdmissionRules
    from nbtrain.rollout.collector import Collector, CollectorSettings
    from nbtrain.rollout.ragged import RaggedSampler
    from nbtrain.rollout.rollouts import Rollouts, Sampling
    from nbtrain.rollout.tokens import decode_completion, end_ids, render_prompt
    from nbtrain.rollout.types import TaskView
    from nbtrain.training.policy import Policy, load_tokenizer
    from nbtrain.training.update import Updater, UpdateSettings

    folder = Path(options.model)
    tokenizer = load_tokenizer(folder)
    rows = sums(64)
    tasks = [
        TaskView(f"{n:016x}", render_prompt(tokenizer, p, raw=False), p, dict(row))
        for n, (p, row) in enumerate(zip(prompts(rows, options.long), rows, strict=True))
    ]

    def reward(completion: str, task: dict[str, Any]) -> float:
        digits = "".join(c for c in completion if c.isdigit())
        return 1.0 if digits == task["answer"] else 0.1 * (len(completion) % 5)

    with tempfile.TemporaryDirectory() as scratch:
        packed, _ = pack(as_terms([reward]))
        path = Path(scratch) / "rewards.pkl"
        path.write_bytes(packed)
        policy = Policy.load(
            folder,
            precision=options.dtype,
            lora_rank=16,
            lora_alpha=32,
            target_modules="default",
            seed=0,
            device=torch.device("cpu"),
        )
        stops = end_ids(policy.model.generation_config, tokenizer)
        sampler = RaggedSampler(
            policy.model,
            slots=options.groups * 8,
            eos_ids=stops,
            pad_id=tokenizer.pad_token_id,
            max_context=1024,
        )
        with RewardPool(
            path, workers=2, timeout_seconds=60, log_path=Path(scratch) / "log"
        ) as pool:
            rollouts = Rollouts(
                sampler, pool, lambda ids: decode_completion(tokenizer, ids, stops), chat=True
            )
            everything = AdmissionRules(1, True, True, True, True, True, True)
            limits = Sampling(options.new_tokens, 1024, 1024)
            settings = CollectorSettings(options.groups, 8, 1024, 1e9, 0, everything, limits)
            collector = Collector(tasks, rollouts, settings)
            updater = Updater(
                policy, UpdateSettings("token", 0.2, 0.2, 0.0, 1.0, 1.0), weight_decay=0.0
            )
            pool.check_start()
            meter = Meter()
            for step in range(1, options.steps + 1):
                batch = collector.collect(step)
                updater.update(batch.used, 1e-5)
                sampler.new_policy(step)
                done = [t for j in batch.groups for t in j.group.trajectories]
                meter.step(sum(len(t.token_ids) for t in done))
    return meter


def run_trl(options: argparse.Namespace, *, best: bool) -> Meter:
    """Stock GRPOTrainer on the same tasks."""
    import torch

    torch.set_num_threads(1)
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    rows = sums(64)
    data = [
        {"prompt": p, "answer": row["answer"]}
        for p, row in zip(prompts(rows, options.long), rows, strict=True)
    ]
    seen = [0]

    def reward(completions: Any, answer: Any, completion_ids: Any, **_: Any) -> list[float]:
        seen[0] += sum(len(ids) for ids in completion_ids)
        return [correct(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            max_steps=options.steps,
            per_device_train_batch_size=options.groups * 8,
            num_generations=8,
            max_completion_length=options.new_tokens,
            beta=0.0,
            learning_rate=1e-5,
            loss_type="grpo",
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
            **({"gradient_checkpointing": False} if best else {}),
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )
        meter: list[Meter] = []

        class Count(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                meter.append(Meter())

            def on_step_end(self, *_: Any, **__: Any) -> None:
                meter[0].step(seen[0])
                seen[0] = 0

        trainer.add_callback(Count())
        trainer.train()
    return meter[0]


def one_arm(options: argparse.Namespace) -> None:
    """Run one arm in this process and print its figures; the first step warms up."""
    if options.arm == "nbtrain":
        meter = run_nbtrain(options)
    else:
        meter = run_trl(options, best=options.arm == "trl")
    cpu, tokens = sum(meter.cpu[1:]), sum(meter.tokens[1:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        "RESULT "
        + json.dumps({"cpu": cpu, "tokens": tokens, "steps": options.steps - 1, "peak_mib": peak})
    )


def measure(arguments: list[str], arm: str) -> dict[str, float]:
    """One arm in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments, "--arm", arm],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{arm} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def main() -> None:
    """Interleave the arms and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(ROOT / "nbtrain/catalog/embedded/tiny"))
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=20)
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long", action="store_true", help="prompts of 130 to 200 tokens")
    parser.add_argument("--arm", choices=ARMS)
    options = parser.parse_args()
    if options.arm:
        one_arm(options)
        return
    arguments = sys.argv[1:]
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(options.rounds):
        for arm in ARMS:
            results[arm].append(measure(arguments, arm))
    cost = {
        arm: statistics.median(1e3 * r["cpu"] / r["tokens"] for r in rounds)
        for arm, rounds in results.items()
    }
    heads = ("CPU ms / token", "CPU s / step", "tokens / step", "peak MiB", "ratio")
    print(f"{'arm':14}" + "".join(f"{head:>16}" for head in heads))
    for arm, rounds in results.items():
        step = statistics.median(r["cpu"] / r["steps"] for r in rounds)
        tokens = statistics.median(r["tokens"] / r["steps"] for r in rounds)
        peak = statistics.median(r["peak_mib"] for r in rounds)
        ratio = cost["nbtrain"] / cost[arm]
        print(f"{arm:14}{cost[arm]:16.3f}{step:16.3f}{tokens:16.0f}{peak:16.0f}{ratio:16.2f}")


if __name__ == "__main__":
    main()
