"""How much room a model leaves to reinforcement, measured with stock TRL (extra ``test``).

    python -m nbtrain.training.embedded.measure --model FOLDER --seeds 0 1 2

GRPO on the sample workload ``sums``: LoRA of rank 16, 8 prompts of 8 samples a step, constant
rate, no KL. Prints the mean reward of each ten steps, the gain (last ten minus first ten), and
the share of right held-out sums before and after.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nbtrain.catalog.samples import sums_rows
from nbtrain.training.embedded.make import held_out_sums, share_right


def exact_reward(
    completions: list[list[dict[str, str]]], answer: list[str], **_: Any
) -> list[float]:
    """1 where the whole reply is the tagged answer, else 0."""
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer, strict=True)]


def rewards_of(folder: Path, seed: int, steps: int, rate: float) -> list[float]:
    """Mean reward of every step of one run; prints held-out shares before and after."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    torch.manual_seed(seed)
    before = _held_out(model, tokenizer)
    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out, max_steps=steps, learning_rate=rate, lr_scheduler_type="constant",
            num_generations=8, per_device_train_batch_size=64, max_completion_length=20,
            temperature=1.0, top_p=1.0, top_k=0, beta=0.0, seed=seed, use_cpu=True, bf16=False,
            gradient_checkpointing=False, logging_steps=1, report_to=[], save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=exact_reward,
            args=settings,
            train_dataset=Dataset.from_list(sums_rows()[0]),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )
        trainer.train()
    after = _held_out(trainer.model, tokenizer)
    print(f"held-out sums, sampled and greedy: {before} -> {after}")
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def _held_out(model: Any, tokenizer: Any) -> tuple[float, float]:
    model.eval()
    shares = [share_right(model, tokenizer, held_out_sums(), greedy=g) for g in (False, True)]
    return round(shares[0], 3), round(shares[1], 3)


def main() -> None:
    """Measure every seed and print the worst gain."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the model's folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=5e-4, help="constant learning rate")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gains = []
    for seed in options.seeds:
        started = time.process_time()
        rewards = rewards_of(options.model, seed, options.steps, options.rate)
        tens = [
            sum(rewards[n : n + 10]) / len(rewards[n : n + 10]) for n in range(0, len(rewards), 10)
        ]
        gains.append(tens[-1] - tens[0])
        print(
            f"seed {seed}: {' '.join(f'{t:.2f}' for t in tens)}  gain {gains[-1]:.3f}  "
            f"{time.process_time() - started:.0f} CPU seconds",
            flush=True,
        )
    print(f"worst gain {min(gains):.3f}")


if __name__ == "__main__":
    main()
