"""What a resume says of itself."""

from __future__ import annotations

from typing import Any

import pytest
from plan_world import described_world, descriptor, put

from nbtrain.training.certificate import certificate, counted, counted_options, differences

STATE: dict[str, Any] = {
    "step": 10,
    "updates_applied": 9,
    "schedule": {"learning_rate": 1e-3},
    "collector": {"pending": [], "unfinished": [[]]},
    "environment": {"device": "cpu", "precision": "fp32", "threads": 1, "kv_budget_bytes": 5},
}
OPTIONS: dict[str, Any] = {
    "seed": 42,
    "learning_rate": 1e-3,
    "num_steps": 10,
    "val_num_tasks": 5,
    "max_staleness": 0,
}


def told(environment: dict[str, Any] | None = None, **options: Any) -> str:
    return certificate(
        STATE,
        total_steps=30,
        rate_after=5e-4,
        environment=STATE["environment"] | (environment or {}),
        before=counted_options(OPTIONS),
        after=counted_options(OPTIONS | options),
        stale=bool((OPTIONS | options)["max_staleness"]),
    )


def test_a_resume_says_from_where_to_where_and_the_rates() -> None:
    text = told()
    assert "step 10 to 30, 20 updates" in text
    assert "optimizer (9 updates)" in text
    assert "learning rate 0.001 -> 0.0005" in text
    assert text.endswith("; exact")


def test_what_does_not_change_the_weights_leaves_it_exact() -> None:
    assert told(num_steps=20, val_num_tasks=50).endswith("; exact")


@pytest.mark.parametrize(
    ("environment", "options", "names"),
    [
        ({"threads": 2}, {}, ["threads 1 -> 2"]),
        ({"precision": "bf16"}, {"seed": 7}, ["precision fp32 -> bf16", "seed 42 -> 7"]),
        ({"kv_budget_bytes": 6}, {}, ["kv_budget_bytes 5 -> 6"]),
        ({}, {"learning_rate": 1e-4}, ["learning_rate 0.001 -> 0.0001"]),
        ({}, {"max_staleness": 2}, ["max_staleness 0 -> 2", "so that timing counts"]),
    ],
)
def test_whatever_the_bits_depend_on_is_named_when_it_differs(
    environment: dict[str, Any], options: dict[str, Any], names: list[str]
) -> None:
    text = told(environment, **options)
    assert "; exact" not in text
    for name in names:
        assert name in text.partition("not exact: ")[2]


def test_what_was_unfinished_is_said_to_start_again() -> None:
    before = OPTIONS | {"max_staleness": 3}
    text = certificate(
        STATE | {"collector": {"pending": [{}, {}], "unfinished": [[4, 5], [7]]}},
        total_steps=30,
        rate_after=5e-4,
        environment=STATE["environment"],
        before=before,
        after=before,
        stale=True,
    )
    assert "2 finished groups taken along, 3 unfinished ones start again" in text
    assert "not exact: trajectories run across updates" in text


def test_what_differs_in_one_way_is_told_once() -> None:
    text = certificate(
        STATE,
        total_steps=30,
        rate_after=5e-4,
        environment=STATE["environment"] | {"precision": "bf16"},
        before={"precision": "fp32"},
        after={"precision": "bf16"},
    )
    assert text.endswith("not exact: precision fp32 -> bf16")


def changed(method: str, path: str, value: Any, **common: Any) -> list[str]:
    """What a resume of a descriptor says when it states one field anew."""
    world = described_world()
    document = descriptor(method)
    for name, each in common.items():
        document = put(document, f"config.{name.replace('__', '.')}", each)
    one, two = (world.plan(d, workload="t") for d in (document, put(document, path, value)))
    return differences(counted(one, one.total_steps), counted(two, two.total_steps))


SIZED = {"hyperparams__training": {"microBatchPerGpu": 2, "gradientAccumulation": 4}}
CONSTANT = {"hyperparams__scheduler": {"kind": "constant"}}
EXACT = [{"kind": "exact", "column": "answer"}]
RL_CONSTANT = {"rlHyperparams__scheduler": {"kind": "constant"}, "reward": {"terms": EXACT}}


@pytest.mark.parametrize(
    ("method", "path", "value", "common", "names"),
    [
        ("sft", "execution.saveEvery", 3, {}, []),
        ("sft", "execution.microBatchSequences", 1, {}, []),
        ("sft", "config.maxSeqLength", 1024, SIZED, []),
        (
            "sft",
            "config.maxSeqLength",
            1024,
            SIZED | {"data__packing": True},
            ["maxSeqLength 2048 -> 1024"],
        ),
        (
            "sft",
            "config.maxSeqLength",
            1024,
            SIZED | {"data__truncation": "right"},
            ["maxSeqLength 2048 -> 1024"],
        ),
        ("sft", "config.hyperparams.training.epochs", 4, CONSTANT, []),
        (
            "sft",
            "config.hyperparams.lora.dropout",
            0.25,
            {"hyperparams__lora": {"dropout": 0.5}},
            ["lora.dropout 0.5 -> 0.25"],
        ),
        ("sft", "config.loss.assistantTurns", "all", {}, ["loss.assistantTurns last -> all"]),
        ("grpo", "execution.microBatchSequences", 1, {}, []),
        ("grpo", "config.maxSeqLength", 4096, {}, []),
        ("grpo", "config.rlHyperparams.maxSteps", 70, RL_CONSTANT, []),
        (
            "grpo",
            "config.rlHyperparams.optimizer.learningRate",
            0.002,
            {"rlHyperparams__optimizer": {"learningRate": 0.001}},
            ["optimizer.learningRate 0.001 -> 0.002"],
        ),
        (
            "grpo",
            "config.reward.terms",
            [{"kind": "regex", "pattern": "a"}],
            RL_CONSTANT,
            [
                "reward.terms[0].column answer -> None",
                "reward.terms[0].kind exact -> regex",
                "reward.terms[0].pattern None -> a",
            ],
        ),
        (
            "grpo",
            "config.rlHyperparams.maxSteps",
            70,
            {"rlHyperparams__scheduler": {"kind": "cosine", "warmupRatio": 0.1},
             "rlHyperparams__maxSteps": 40},
            ["last step of the schedule 40 -> 70", "warm-up steps 4 -> 7"],
        ),
    ],
)  # fmt: skip
def test_every_field_that_counts_is_compared_once(
    method: str, path: str, value: Any, common: dict[str, Any], names: list[str]
) -> None:
    assert changed(method, path, value, **common) == names
