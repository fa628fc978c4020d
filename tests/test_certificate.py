"""What a resume says of itself."""

from __future__ import annotations

from typing import Any

import pytest

from nbtrain.training.certificate import certificate

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
        options=OPTIONS | options,
        parent_options=OPTIONS,
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
        options=before,
        parent_options=before,
    )
    assert "2 finished groups taken along, 3 unfinished ones start again" in text
    assert "not exact: trajectories run across updates" in text
