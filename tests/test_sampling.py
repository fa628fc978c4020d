"""Choosing tokens: streams of uniforms, inverse CDF, cuts and log-probs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbtrain.rollout.rows import close_gaps
from nbtrain.rollout.sampling import UNIFORMS_PER_BLOCK, choose, uniforms

WIDE = 5003  # takes the path by chunks, with a last chunk that is not full


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def test_a_stream_is_a_function_of_its_key_and_block_alone() -> None:
    first = uniforms((42, 0, 1, 2), 0)
    assert first.shape == (UNIFORMS_PER_BLOCK,)
    assert np.array_equal(first, uniforms((42, 0, 1, 2), 0))
    others = [
        uniforms(key, block)
        for key, block in [((42, 0, 1, 2), 1), ((42, 0, 12), 0), ((42, 0, 1, 3), 0)]
    ]
    assert not any(np.intersect1d(first, other).size for other in others)


def test_uniforms_are_uniform() -> None:
    values = np.concatenate([uniforms((7, i), 0) for i in range(500)])
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=32, range=(0, 1))[0]
    expected = len(values) / 32
    # Chi-square with 31 degrees of freedom: above 70 once in ten thousand streams.
    assert ((counts - expected) ** 2 / expected).sum() < 70


@pytest.mark.parametrize(
    ("uniform", "expected"),
    [(0.0, 0), (0.0999, 0), (0.1001, 2), (0.5999, 2), (0.6001, 3), (1 - 2**-53, 3)],
)
def test_the_choice_is_the_inverse_of_the_cumulative_distribution(uniform, expected) -> None:
    ids, logprobs = choose(logits_of([0.1, 0.0, 0.5, 0.4]), one(uniform), 1.0, 1.0, -1)
    assert ids.tolist() == [expected]
    assert logprobs.item() == pytest.approx(math.log([0.1, 0, 0.5, 0.4][expected]), abs=1e-12)


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, -1, [0, 1, 2, 3]),
        (1.0, 2, [1, 3]),
        (1.0, 9, [0, 1, 2, 3]),
        (0.7, -1, [1, 3]),
        (0.71, -1, [0, 1, 3]),
        (1e-9, -1, [3]),
        # Top-p counts within what top-k left: 0.4 of 0.9 is below 0.45.
        (0.45, 3, [1, 3]),
        (0.44, 3, [3]),
    ],
)
def test_cuts_keep_the_most_likely_ids(top_p, top_k, kept) -> None:
    probabilities = [0.2, 0.3, 0.1, 0.4]
    steps = torch.linspace(0, 1 - 1e-9, 997, dtype=torch.float64)
    logits = logits_of(probabilities).expand(len(steps), -1)
    ids, logprobs = choose(logits, steps, 1.0, top_p, top_k)
    assert sorted(set(ids.tolist())) == kept
    share = sum(probabilities[i] for i in kept)
    for token in kept:
        drawn = (ids == token).double().mean().item()
        assert drawn == pytest.approx(probabilities[token] / share, abs=2e-3)
    # Cut or not, the log-prob is that of the full distribution.
    expected = torch.tensor(probabilities, dtype=torch.float64).log()[ids]
    assert torch.allclose(logprobs, expected, atol=1e-12)


def test_temperature_divides_the_logits_and_zero_is_greedy_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]], dtype=torch.float64)
    _, warm = choose(logits, one(0.999), 0.5, 1.0, -1)
    ids, cold = choose(logits, one(0.999), 0.0, 1.0, -1)
    assert ids.tolist() == [1]
    assert cold.item() == pytest.approx(logits.log_softmax(-1)[0, 1].item(), abs=1e-12)
    assert warm.item() == pytest.approx((logits / 0.5).log_softmax(-1)[0, 2].item(), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_wide_vocabulary_gives_what_the_whole_cumulative_sum_gives(dtype, top_p) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, WIDE, generator=generator, dtype=dtype)
    u = torch.rand(64, generator=generator, dtype=torch.float64)
    ids, logprobs = choose(logits, u, 1.0, top_p, -1)
    probabilities = logits.double().softmax(-1)
    if top_p < 1:
        ranked, order = probabilities.sort(descending=True)
        ranked[ranked.cumsum(-1) - ranked >= top_p] = 0
        allowed = torch.zeros_like(probabilities).scatter(-1, order, ranked)
    else:
        allowed = probabilities
    cumulative = allowed.cumsum(-1)
    target = u * cumulative[:, -1]
    # The target lies within the chosen id's part of the distribution, up to fp32 rounding.
    at = cumulative.gather(-1, ids[:, None]).squeeze(-1)
    own = allowed.gather(-1, ids[:, None]).squeeze(-1)
    slack = 1e-5 if dtype == torch.float32 else 1e-12
    assert bool((own > 0).all())
    assert bool((at - own <= target + slack).all())
    assert bool((target < at + slack).all())
    full = probabilities.log().gather(-1, ids[:, None]).squeeze(-1)
    assert torch.allclose(logprobs.double(), full, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [7, 2048, 2049, 2304, WIDE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_of_the_unit_interval_choose_possible_ids(vocabulary, dtype) -> None:
    for possible in ([0], [vocabulary - 1], [vocabulary // 2], [0, vocabulary - 1]):
        logits = torch.full((2, vocabulary), -torch.inf, dtype=dtype)
        logits[:, possible] = torch.rand(len(possible), dtype=dtype)
        u = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
        ids, logprobs = choose(logits, u, 1.0, 1.0, -1)
        assert ids.tolist() == [possible[0], possible[-1]]
        assert bool(logprobs.isfinite().all())


def test_top_p_looks_past_the_first_candidates_when_they_are_not_enough() -> None:
    logits = torch.zeros(1, WIDE, dtype=torch.float64)
    steps = torch.linspace(0, 1 - 1e-9, 2600, dtype=torch.float64)
    ids, _ = choose(logits.expand(len(steps), -1), steps, 1.0, 0.5, -1)
    # A flat distribution: half of the vocabulary, far more than the first 1,024, stays.
    assert len(ids.unique()) == math.ceil(WIDE / 2)


def test_bf16_logits_are_widened_before_anything_is_computed() -> None:
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    u = torch.rand(8, dtype=torch.float64)
    ids, logprobs = choose(logits, u, 1.0, 1.0, -1)
    expected = logits.float().log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs, expected, atol=1e-6)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
@settings(max_examples=200, deadline=None)
def test_closing_gaps_keeps_every_live_row_and_moves_as_few_as_possible(case) -> None:
    rows, dead = case
    holes, movers = close_gaps(rows, sorted(dead))
    table = list(range(rows))
    for hole, mover in zip(holes, movers, strict=True):
        table[hole] = table[mover]
    left = rows - len(dead)
    assert sorted(table[:left]) == sorted(set(range(rows)) - dead)
    assert len(movers) == len([row for row in dead if row < left])
