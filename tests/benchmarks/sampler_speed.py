"""Tokens per CPU second: the ragged sampler against ``model.generate``.

    python tests/benchmarks/sampler_speed.py                     # 675k-parameter Llama, fp32
    python tests/benchmarks/sampler_speed.py --model FOLDER      # a real model, bf16

Both arms sample the same prompts (groups of 8) from the same weights at temperature 1, on one
thread, interleaved. A random part of the vocabulary are the end ids, chosen so that a token ends
its reply with probability about ``1 / mean``: replies are as ragged as real ones, and equally so
in both arms. Counted are the tokens up to each reply's end.

The last line is the ragged arm's share of the machine's own limit: the tokens that one thread
could decode if a step of all slots were nothing but the base weights' matrix products, at the
rate this process reaches on products of that shape.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from nbtrain.rollout.ragged import RaggedSampler
from nbtrain.rollout.types import SampleRequest

Prompts = list[tuple[int, ...]]


def load(arguments: argparse.Namespace) -> nn.Module:
    """The model to measure, with a LoRA adapter of rank 16 unless told otherwise."""
    torch.manual_seed(0)
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=276,
                hidden_size=128,
                intermediate_size=384,
                num_hidden_layers=3,
                num_attention_heads=4,
                max_position_embeddings=1024,
                tie_word_embeddings=True,
            )
        )
    if arguments.lora:
        model = get_peft_model(
            model,
            LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
    return model.eval()


def end_ids_for(model: nn.Module, prompt: tuple[int, ...], mean: float) -> list[int]:
    """Random ids that together have probability ``1 / mean`` after ``prompt``."""
    if mean <= 0:
        return []
    with torch.no_grad():
        chance = model(input_ids=torch.tensor([prompt])).logits[0, -1].float().softmax(-1)
    order = torch.randperm(len(chance), generator=torch.Generator().manual_seed(1))
    count = int(torch.searchsorted(chance[order].cumsum(0), torch.tensor(1 / mean))) + 1
    return order[:count].tolist()


def generate_arm(
    model: nn.Module, prompts: Prompts, group: int, cap: int, ends: list[int]
) -> Callable[[int], int]:
    """One batch of all replies by ``model.generate``; returns tokens sampled."""
    width = max(map(len, prompts))
    rows = [(0,) * (width - len(p)) + p for p in prompts for _ in range(group)]
    mask = [(0,) * (width - len(p)) + (1,) * len(p) for p in prompts for _ in range(group)]
    ids, mask_ids = torch.tensor(rows), torch.tensor(mask)
    config = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=cap,
        eos_token_id=ends or None, pad_token_id=0,
    )  # fmt: skip

    def run(seed: int) -> int:
        torch.manual_seed(seed)
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask_ids, generation_config=config)[
                :, width:
            ]
        stop = torch.isin(out, torch.tensor(ends)).int()
        return int((stop.cumsum(1) - stop == 0).sum())

    return run


def ragged_arm(
    model: nn.Module, prompts: Prompts, group: int, cap: int, ends: list[int], slots: int
) -> Callable[[int], int]:
    """All replies by the ragged sampler; returns tokens sampled."""
    sampler = RaggedSampler(model, slots=slots, eos_ids=ends, max_context=1024)

    def run(seed: int) -> int:
        sampler.submit(
            [
                SampleRequest(row, prompt, cap, (seed, task, sample))
                for task, prompt in enumerate(prompts)
                for sample, row in enumerate(range(task * group, (task + 1) * group))
            ]
        )
        tokens = 0
        while sampler.pending:
            tokens += sum(len(sample.token_ids) for sample in sampler.step())
        return tokens

    return run


def measure(arms: dict[str, Callable[[int], int]], rounds: int) -> dict[str, float]:
    """Median tokens per CPU second of each arm over interleaved rounds, after one to warm up."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for seed in range(rounds + 1):
        for name, arm in arms.items():
            began = time.process_time()
            tokens = arm(seed)
            if seed:
                rates[name].append(tokens / (time.process_time() - began))
    return {name: statistics.median(values) for name, values in rates.items()}


def matmul_limit(model: nn.Module, slots: int) -> float:
    """Tokens per CPU second of ``slots`` rows through every base weight matrix, and no more."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m.in_features > 16]
    layers = [m for m in layers if m.out_features > 16]  # the adapters' own are left out
    shapes = [(m.in_features, m.out_features, m.weight.dtype) for m in layers]
    weights = [m.weight for m in layers]
    rows = {(i, d): torch.randn(slots, i, dtype=d) for i, _, d in shapes}
    best = float("inf")
    with torch.inference_mode():
        for _ in range(7):
            began = time.process_time()
            for (width, _, dtype), weight in zip(shapes, weights, strict=True):
                torch.nn.functional.linear(rows[width, dtype], weight)
            best = min(best, time.process_time() - began)
    return slots / best


def main() -> None:
    """Measure and print one line an arm, one for the ratio and one for the share of the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="model folder; default: a random small Llama")
    parser.add_argument("--lora", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rows", type=int, default=64, help="replies in all")
    parser.add_argument("--group", type=int, default=8, help="replies for each prompt")
    parser.add_argument("--slots", type=int, default=64, help="replies decoded at once")
    parser.add_argument("--mean", type=float, default=8, help="mean reply length; 0: all at cap")
    parser.add_argument("--cap", type=int, default=20, help="max_new_tokens")
    parser.add_argument("--prompt", type=int, nargs=2, default=(18, 26), help="prompt lengths")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = load(arguments)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    low, high = arguments.prompt
    prompts = [
        tuple(torch.randint(3, vocabulary, (length,), generator=generator).tolist())
        for length in torch.randint(
            low, high + 1, (arguments.rows // arguments.group,), generator=generator
        ).tolist()
    ]
    ends = end_ids_for(model, prompts[0], arguments.mean)
    shared = (model, prompts, arguments.group, arguments.cap, ends)
    rates = measure(
        {"generate": generate_arm(*shared), "ragged": ragged_arm(*shared, arguments.slots)},
        arguments.rounds,
    )
    for name, rate in rates.items():
        print(f"{name:9s} {rate:9.1f} tokens per CPU second")
    print(f"ratio     {rates['ragged'] / rates['generate']:9.2f}")
    limit = matmul_limit(model, arguments.slots)
    print(f"limit     {limit:9.1f}, of which ragged reaches {rates['ragged'] / limit:.0%}")


if __name__ == "__main__":
    main()
