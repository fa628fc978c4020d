"""Make the embedded model ``nbtrain/tiny`` in one pass from scratch.

    OMP_NUM_THREADS=1 python -m nbtrain.training.embedded.make --out FOLDER

One seed, a fixed number of steps, one thread: the same machine kind and versions give the same
weights. First clean demonstrations, then ones of mixed quality, so that what the model can do
shows in only about a third of its samples (``demonstrations``). Takes some 8 CPU minutes.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nbtrain.catalog.samples import sums_rows
from nbtrain.training.embedded.demonstrations import (
    CLEAN,
    MIXED,
    Messages,
    Quality,
    single_turn,
    with_calculator,
)
from nbtrain.training.embedded.tokenizer import END, END_OF_TEXT, PAD, START, build_tokenizer

SEED = 17
CONTEXT = 1024
CLEAN_STEPS = 1000
MIXED_STEPS = 400
WARMUP_STEPS = 40
PEAK_RATE = 3e-3
FINAL_RATE = 1e-4
BATCH = 128
CALCULATOR_EVERY = 6  # every sixth batch holds calculator conversations, and nothing else


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained model of 675,200 parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [
        tokenizer.convert_tokens_to_ids(END),
        tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    ]
    # The end ids are its own: transformers shall not derive them from the model's configuration.
    model.generation_config._from_model_config = False
    return model


def encode(tokenizer: PreTrainedTokenizerFast, messages: Messages) -> tuple[list[int], list[int]]:
    """Ids of a conversation as the chat template renders it, and labels: replies, else -100."""
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        trained = message["role"] == "assistant"
        parts = ((f"{START}{message['role']}\n", False), (message["content"] + END, trained))
        for text, is_trained in (*parts, ("\n", False)):
            new = tokenizer.encode(text, add_special_tokens=False)
            ids += new
            labels += new if is_trained else [-100] * len(new)
    return ids, labels


def batch_of(
    tokenizer: PreTrainedTokenizerFast, step: int, quality: Quality, rng: Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and labels of one batch. Padding comes last, so no mask is needed."""
    make = with_calculator if step % CALCULATOR_EVERY == 0 else single_turn
    rows = [encode(tokenizer, make(quality, rng)) for _ in range(BATCH)]
    width = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    return ids, labels


def rate_at(step: int) -> float:
    """Learning rate of a 1-based step: linear warm-up, then cosine to ``FINAL_RATE``."""
    if step <= WARMUP_STEPS:
        return PEAK_RATE * step / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / (CLEAN_STEPS + MIXED_STEPS - WARMUP_STEPS)
    return FINAL_RATE + (PEAK_RATE - FINAL_RATE) * (1 + math.cos(math.pi * done)) / 2


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the trained tokens; the head runs on those positions alone."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        targets = labels[:, 1:]
        trained = targets != -100
        logits = model.lm_head(hidden[:, :-1][trained])
    return torch.nn.functional.cross_entropy(logits.float(), targets[trained])


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """All steps, printing a line every 50."""
    rng = Random(SEED)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": 0.05},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), foreach=True)
    for step in range(1, CLEAN_STEPS + MIXED_STEPS + 1):
        quality = CLEAN if step <= CLEAN_STEPS else MIXED
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        loss = loss_of(model, *batch_of(tokenizer, step, quality, rng))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f} cpu {time.process_time():.0f} s", flush=True)


@torch.no_grad()
def share_right(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[tuple[str, str]],
    *,
    greedy: bool,
) -> float:
    """Share of questions whose whole reply is the tagged answer; sampled at temperature 1."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question, _ in questions
    ]
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    sampling: dict[str, Any] = {} if greedy else {"top_k": 0, "top_p": 1.0, "temperature": 1.0}
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=20, do_sample=not greedy, **sampling
    )
    replies = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    right = [
        reply == f"<answer>{answer}</answer>"
        for reply, (_, answer) in zip(replies, questions, strict=True)
    ]
    return float(sum(right) / len(right))


def held_out_sums() -> list[tuple[str, str]]:
    """The 200 held-out sums with their answers; no demonstration showed them."""
    rows = sums_rows()[1]
    strip = len("<answer>")
    return [(row["prompt"][0]["content"], row["answer"][strip : -strip - 1]) for row in rows]


def report(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Shares of right tagged replies by task, greedy and at temperature 1."""
    from nbtrain.training.embedded.demonstrations import SINGLE_TURN

    rng = Random(SEED + 1)
    tasks = {task.__name__: [task(rng) for _ in range(256)] for task, _ in SINGLE_TURN}
    tasks["held_out_sums"] = held_out_sums()
    torch.manual_seed(SEED + 2)
    figures = {}
    for name, questions in tasks.items():
        for greedy in (True, False):
            key = f"{name} {'greedy' if greedy else 'sampled'}"
            figures[key] = share_right(model, tokenizer, questions, greedy=greedy)
            print(f"{key}: {figures[key]:.3f}", flush=True)
    return figures


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in bf16, configuration, tokenizer and chat template."""
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def main() -> None:
    """Make the model, save it, and print how often the saved one is right."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    tokenizer = build_tokenizer(CONTEXT)
    model = new_model(tokenizer)
    train(model, tokenizer)
    save(model, tokenizer, out)
    report(LlamaForCausalLM.from_pretrained(out, dtype=torch.float32), tokenizer)


if __name__ == "__main__":
    main()
