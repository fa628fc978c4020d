"""The contract of samplers on the ragged one, and what is its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_contract import (
    SEVEN,
    SamplerContract,
    alone,
    drain,
    group_requests,
    prompt,
    worst_gap,
)
from tiny_models import EOS, FAMILIES, IMAGE_TEXT_FULL, PAD, VOCABULARY, tiny_config, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, BloomConfig, GPT2LMHeadModel, MambaConfig

from nbtrain.rollout.ragged import RaggedSampler
from nbtrain.rollout.types import Finish, Sample, Sampler, SampleRequest


class TestRagged(SamplerContract):
    families = (*FAMILIES, *IMAGE_TEXT_FULL)

    def make(
        self,
        model: nn.Module,
        *,
        slots: int = 8,
        eos_ids: Sequence[int] = (),
        max_context: int = 128,
    ) -> Sampler:
        return RaggedSampler(
            model, slots=slots, eos_ids=eos_ids, pad_id=PAD, max_context=max_context
        )


# --- the ragged sampler's own ---------------------------------------------------------------


def test_equal_prompts_are_prefilled_once_and_different_ones_together() -> None:
    sampler = RaggedSampler(tiny_model("llama"), slots=64, eos_ids=(), max_context=128)
    sampler.submit(group_requests([10, 12, 14], 8))
    drain(sampler)
    assert sampler.counts.prefills == 1
    assert sampler.counts.prefilled_tokens == 3 * 14


def test_a_group_larger_than_the_slots_is_prefilled_once() -> None:
    model = tiny_model("llama")
    sampler = RaggedSampler(model, slots=3, eos_ids=(), max_context=128)
    requests = group_requests([10], 12)
    sampler.submit(requests)
    assert worst_gap(model, requests, drain(sampler)) < 1e-5
    assert sampler.counts.prefills == 1


def test_only_live_rows_are_decoded() -> None:
    sampler = RaggedSampler(tiny_model("llama"), slots=4, eos_ids=(), max_context=128)
    sampler.submit(
        [SampleRequest(i, prompt(5), length, (i,)) for i, length in enumerate([2, 9, 3, 5])]
    )
    drain(sampler)
    # The first token comes with the prefill, every other one costs one row of one step.
    assert sampler.counts.decoded_rows == (2 + 9 + 3 + 5) - 4
    assert sampler.counts.decodes == 8


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_attention_gives_the_same(family: str) -> None:
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    requests = group_requests([3, 17, 9], 3)
    sampler = RaggedSampler(model, slots=5, eos_ids=(), max_context=128)
    sampler.submit(requests)
    assert worst_gap(model, requests, drain(sampler)) < 1e-5


def test_buffers_slide_and_grow_without_a_trace() -> None:
    model = tiny_model("llama")
    lengths = [2, 3, 2, 40, 4, 2, 90, 3, 2, 60]
    requests = [
        SampleRequest(i, prompt(lengths[i % 10], i), 5 + (i * 7) % 23, (i,)) for i in range(40)
    ]
    sampler = RaggedSampler(model, slots=3, eos_ids=(), max_context=200)
    bytes_seen = set()
    done: dict[int, Sample] = {}
    sampler.submit(requests[:3])
    for request in requests[3:]:
        sampler.submit([request])
        done |= {sample.request_id: sample for sample in sampler.step()}
        bytes_seen.add(sampler.kv_bytes)
    done |= drain(sampler)
    assert len(done) == 40
    assert worst_gap(model, requests, done) < 1e-5
    # Far more columns went by than were ever held.
    assert sampler.counts.decodes > 150
    assert len(bytes_seen) > 1


def test_the_memory_budget_holds_while_everything_gets_its_turn() -> None:
    model = tiny_model("llama")
    per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes
    requests = group_requests([20, 5, 40, 11], 4, tokens=(30, 3, 17))
    budget = 300 * per_token
    sampler = RaggedSampler(model, slots=16, eos_ids=(), max_context=128, kv_budget_bytes=budget)
    sampler.submit(requests)
    done: dict[int, Sample] = {}
    running = set()
    while sampler.pending:
        done |= {sample.request_id: sample for sample in sampler.step()}
        assert sampler.kv_bytes <= budget
        running.add(sampler.running)
    assert len(done) == 16
    assert 2 <= max(running) < 8
    assert worst_gap(model, requests, done) < 1e-5


def test_a_request_that_can_never_fit_the_budget_is_refused() -> None:
    sampler = RaggedSampler(
        tiny_model("llama"), slots=4, eos_ids=(), max_context=128, kv_budget_bytes=60 * 256
    )
    sampler.submit([SampleRequest(1, prompt(5), 10, (1,))])
    with pytest.raises(ValueError, match="more than the budget of 15360"):
        sampler.submit([SampleRequest(2, prompt(40), 20, (2,))])
    assert set(drain(sampler)) == {1}


def test_release_frees_the_memory_and_sampling_goes_on_afterwards() -> None:
    model = tiny_model("llama")
    sampler = RaggedSampler(model, slots=4, eos_ids=(), max_context=128)
    requests = group_requests([9, 6], 3)
    sampler.submit(requests)
    sampler.step()
    with pytest.raises(RuntimeError, match="4 replies are running"):
        sampler.release()
    drain(sampler)
    assert sampler.kv_bytes > 0
    sampler.release()
    assert sampler.kv_bytes == 0
    sampler.submit(requests)
    assert worst_gap(model, requests, drain(sampler)) < 1e-5


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 12)),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 12), st.just(0)),
    ),
    max_size=25,
)


@given(script=STEPS, slots=st.integers(1, 5), budget=st.sampled_from([None, 180]))
@settings(max_examples=25, deadline=None)
def test_any_order_of_calls_gives_each_request_its_own_reply(script, slots, budget) -> None:
    model = _LLAMA64
    sampler = RaggedSampler(
        model,
        slots=slots,
        eos_ids=(SEVEN,),
        max_context=64,
        kv_budget_bytes=budget and budget * 2 * 2 * 2 * 8 * 8,
    )
    requests: dict[int, SampleRequest] = {}
    done: dict[int, Sample] = {}
    for action, one, other in script:
        if action == "submit":
            new = [SampleRequest(len(requests) + i, prompt(one), other, (one, i)) for i in range(2)]
            sampler.submit(new)
            requests |= {request.request_id: request for request in new}
        elif action == "step":
            done |= {sample.request_id: sample for sample in sampler.step()}
        else:
            done |= {sample.request_id: sample for sample in sampler.cancel([one])}
        assert sampler.pending == len(requests) - len(done)
        assert sampler.running <= slots
    done |= drain(sampler)
    assert done.keys() == requests.keys()
    for i, sample in done.items():
        expected = _reply(requests[i])
        if sample.finish is Finish.CANCELLED:
            assert sample.token_ids == expected[: len(sample.token_ids)]
        else:
            assert sample.token_ids == expected


_LLAMA64 = tiny_model("llama", dtype=torch.float64)
_REPLIES: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}


def _reply(request: SampleRequest) -> list[int]:
    key = request.prompt_ids, request.stream
    if key not in _REPLIES:
        longest = SampleRequest(0, request.prompt_ids, 12, request.stream)
        _REPLIES[key] = alone(_LLAMA64, longest, (SEVEN,))
    return _REPLIES[key][: request.max_new_tokens]


# --- which models it takes ------------------------------------------------------------------


def test_a_sliding_window_is_refused_only_where_it_would_slide() -> None:
    config = tiny_config("phi3")
    config.sliding_window = 24
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=r"sliding window of 24, .* max_context 25"):
        RaggedSampler(model, slots=2, eos_ids=(EOS,), max_context=25)
    sampler = RaggedSampler(model, slots=2, eos_ids=(EOS,), max_context=24)
    requests = group_requests([10], 3)
    sampler.submit(requests)
    assert worst_gap(model, requests, drain(sampler)) < 1e-5


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4),
            r"type 'mamba' has layers of type linear_attention",
        ),
        (
            BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2),
            "takes its positions from the attention mask",
        ),
    ],
    ids=["mamba", "bloom"],
)
def test_models_with_another_kind_of_cache_are_refused(config, why) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=why):
        RaggedSampler(model, slots=2, eos_ids=(), max_context=64)


class _Elsewhere(GPT2LMHeadModel):
    """Takes its positions from elsewhere than ``position_ids``, which no configuration tells."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        return super().forward(input_ids=input_ids, **kwargs)


def test_a_model_whose_logits_change_with_the_cache_is_refused() -> None:
    torch.manual_seed(0)
    model = _Elsewhere(tiny_config("gpt2")).eval()
    with pytest.raises(ValueError, match=r"logits change by .* with the ragged sampler's cache"):
        RaggedSampler(model, slots=2, eos_ids=(), max_context=64)


@pytest.mark.parametrize(
    "arguments",
    [{"slots": 0}, {"max_context": 1}, {"eos_ids": (VOCABULARY,)}, {"eos_ids": (-1,)}],
)
def test_arguments_out_of_range_are_refused(arguments) -> None:
    with pytest.raises(ValueError, match=r"slots|end id"):
        RaggedSampler(
            tiny_model("llama"), **{"slots": 2, "eos_ids": (), "max_context": 64} | arguments
        )
