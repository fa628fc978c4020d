"""What a supervised run will take: updates, tokens and memory, by arithmetic alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_world import World, described_world, descriptor, put

from nbtrain.plan.registry import MachineInfo, ModelSizes
from nbtrain.plan.resolve import resolve
from nbtrain.plan.supervised_estimate import SupervisedEstimate, UpdateRate, estimate_supervised
from nbtrain.plan.supervised_estimate import UpdateRates as Rates

# 2 layers of width 64, a vocabulary of 1,000: 64,000 embedded weights of 200,000
SIZES = ModelSizes(64, 128, 2, 4, 2, 16, 1000)


@pytest.fixture
def world() -> World:
    world = described_world()
    world.here = MachineInfo(int4=True)
    world.models = [replace(m, parameters=200_000, sizes=SIZES) for m in world.models]
    return world


def told(world: World, document: Any = None, **how: Any) -> SupervisedEstimate:
    plan = resolve(document or descriptor(), registry=world)
    return estimate_supervised(plan, world.base_model(plan.base_model.slug), **how)


def test_updates_sequences_and_tokens(world: World) -> None:
    e = told(world)
    assert (e.updates, e.sequences_per_update, e.rows, e.epochs) == (39, 8, 100, 3.0)
    assert e.max_tokens == 39 * 8 * 2048
    assert (e.seconds, e.expected_tokens) == (None, None)
    assert "time unknown until the first step" in repr(e)
    packed = told(world, put(descriptor(), "config.data.packing", True))
    assert packed.line.startswith("expected: at most 39 updates of 8 sequences")


def test_time_is_never_made_up(world: World) -> None:
    e = told(world, measured=Rates((UpdateRate(2.0, 400.0, 100.0),)))
    assert (e.seconds, e.expected_tokens, e.expected_trained_tokens) == (78.0, 15_600, 3900)
    other = told(world, measured=Rates((UpdateRate(2.0, 400.0, 100.0),), alike=False))
    assert (other.seconds, other.seconds_per_token) == (None, 0.005)


def test_memory_by_its_parts(world: World) -> None:
    memory = told(world).memory
    assert memory is not None
    assert memory.weights == 2 * 200_000
    # rank 8: 16 bytes of a weight, its gradient and moments
    linear = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128)
    assert memory.adapter == 16 * 2 * 8 * linear
    tokens = 2 * 2048
    logits = tokens * 1000 * (2 * 2 + 8)
    layer = tokens * (10 * 64 + 5 * 128) * 2
    assert memory.activations == 2 * layer + logits
    kept = told(world, put(descriptor(), "config.model.gradientCheckpointing", True)).memory
    assert kept is not None
    assert kept.activations == 2 * tokens * 64 * 2 + layer + logits
    int4 = told(world, put(descriptor(), "config.model.precision", "INT4")).memory
    assert int4 is not None
    assert int4.weights < memory.weights
    one = told(world, put(descriptor(), "execution.microBatchSequences", 1)).memory
    assert one is not None
    assert one.activations == memory.activations / 2


def test_too_little_memory_is_hinted_at(world: World) -> None:
    assert told(world, free_bytes=10**9).warnings == ()
    (warning,) = told(world, free_bytes=10**7).warnings
    assert "lower maxSeqLength" in warning
    assert "10 MB free now" in repr(told(world, free_bytes=10**7))
    plan = resolve(descriptor(), registry=world)
    assert "memory unknown" in repr(estimate_supervised(plan))
