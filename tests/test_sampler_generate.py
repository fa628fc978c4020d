"""The contract of samplers on the plain one, over every kind of cache; and what is its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sampler_contract import (
    SamplerContract,
    drain,
    group_requests,
    prompt,
    shared_model,
    worst_gap,
)
from tiny_models import FAMILIES, IMAGE_TEXT_FULL, OWN_CACHE, PAD, VOCABULARY, tiny_config
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    MambaForCausalLM,
    RecurrentGemmaConfig,
    RwkvConfig,
)

from nbtrain.catalog.architecture import sampler_kind
from nbtrain.rollout.forward import packs
from nbtrain.rollout.generate import GenerateSampler
from nbtrain.rollout.ragged import RaggedSampler
from nbtrain.rollout.types import Sample, Sampler, SampleRequest


class TestGenerate(SamplerContract):
    families = ("llama", "gemma3", "gemma3_image", "qwen3_5_image", "mamba", "jamba")

    def make(
        self,
        model: nn.Module,
        *,
        slots: int = 8,
        eos_ids: Sequence[int] = (),
        max_context: int = 128,
    ) -> Sampler:
        return GenerateSampler(
            model, slots=slots, eos_ids=eos_ids, pad_id=PAD, max_context=max_context
        )


# --- its own --------------------------------------------------------------------------------


def generate(model: nn.Module, **knobs: Any) -> GenerateSampler:
    return GenerateSampler(model, **{"slots": 8, "eos_ids": (), "max_context": 128} | knobs)


@pytest.mark.parametrize("family", sorted(OWN_CACHE.keys() - set(TestGenerate.families)))
def test_further_architectures_pass_the_heart_of_the_contract(family: str) -> None:
    model = shared_model(family, lora=True)
    requests = group_requests([3, 9, 17], 3)
    sampler = generate(model, slots=6)
    sampler.submit(requests)
    assert worst_gap(model, requests, drain(sampler)) < 1e-5


def test_a_group_is_prefilled_once_and_equal_lengths_share_a_batch() -> None:
    sampler = generate(shared_model("qwen3_next"), slots=64)
    sampler.submit(group_requests([10, 10, 14], 8, tokens=(5,)))
    drain(sampler)
    assert sampler.counts.prefills == 2
    assert sampler.counts.prefilled_tokens == 10 + 10 + 14
    assert sampler.counts.decodes == 2 * 4  # the first token comes with the prefill


@pytest.mark.parametrize("family", ["mistral", "mamba"])
def test_finished_rows_leave_the_cache_at_once(family: str) -> None:
    model = shared_model(family)
    lengths = [2, 9, 3, 5]
    sampler = generate(model)
    requests = [SampleRequest(i, prompt(5), n, (i,)) for i, n in enumerate(lengths)]
    sampler.submit(requests)
    held, done = [], {}
    while sampler.pending:
        done |= {sample.request_id: sample for sample in sampler.step()}
        held.append(sampler.kv_bytes)
    assert sampler.counts.decoded_rows == sum(lengths) - 4
    assert held[1] < held[0]
    assert held[-1] == 0
    assert worst_gap(model, requests, done) < 1e-5


def test_a_group_waits_until_it_fits_as_a_whole() -> None:
    sampler = generate(shared_model("mistral"), slots=4)
    sampler.submit(group_requests([5, 9], 3, tokens=(2, 4, 6)))
    running = []
    while sampler.pending:
        sampler.step()
        running.append(sampler.running)
    # One slot stands empty until two replies of the first group have ended.
    assert running[0] == 3
    assert sampler.counts.prefills == 2


@pytest.mark.parametrize("family", ["llama", "jamba", "mamba"])
def test_the_memory_budget_holds_while_everything_gets_its_turn(family: str) -> None:
    model = shared_model(family)
    requests = group_requests([20, 5, 20, 11], 4, tokens=(30, 3, 17))
    free = generate(model, slots=16)
    free.submit(requests)
    most = 0
    while free.pending:
        free.step()
        most = max(most, free.kv_bytes)
    budget = most // 2
    sampler = generate(model, slots=16, kv_budget_bytes=budget)
    sampler.submit(requests)
    done: dict[int, Sample] = {}
    running = set()
    while sampler.pending:
        done |= {sample.request_id: sample for sample in sampler.step()}
        assert sampler.kv_bytes <= budget
        running.add(sampler.running)
    assert len(done) == 16
    assert 2 <= max(running) < 16
    assert worst_gap(model, requests, done) < 1e-5


def test_a_request_that_can_never_fit_the_budget_is_refused() -> None:
    per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes
    sampler = generate(shared_model("llama"), kv_budget_bytes=40 * per_token)
    sampler.submit([SampleRequest(1, prompt(5), 10, (1,))])
    with pytest.raises(ValueError, match=f"can need {41 * per_token} bytes, more than the budget"):
        sampler.submit([SampleRequest(2, prompt(21), 20, (2,))])
    assert set(drain(sampler)) == {1}


def test_a_group_too_large_for_the_budget_goes_by_parts() -> None:
    per_token = 2 * 2 * 2 * 8 * 4
    sampler = generate(shared_model("llama"), kv_budget_bytes=40 * per_token)
    sampler.submit([SampleRequest(i, prompt(5), 10, (i,)) for i in range(5)])
    sampler.step()
    assert sampler.running == 2
    assert len(drain(sampler)) == 5


def test_nothing_is_released_while_replies_run() -> None:
    sampler = generate(shared_model("mamba"))
    sampler.submit(group_requests([5], 3))
    sampler.step()
    with pytest.raises(RuntimeError, match="3 replies are running"):
        sampler.release()
    drain(sampler)
    sampler.release()
    assert sampler.kv_bytes == 0


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, intermediate_size=16),
            "brings no cache",
        ),
        (
            RecurrentGemmaConfig(
                vocab_size=64,
                hidden_size=16,
                intermediate_size=48,
                num_hidden_layers=3,
                num_attention_heads=2,
                lru_width=16,
                attention_window_size=8,
            ),
            "brings no cache",
        ),
    ],
    ids=["rwkv", "recurrent_gemma"],
)
def test_models_that_keep_their_state_elsewhere_are_refused(config: Any, why: str) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=why):
        generate(model)


class _Forgetful(MambaForCausalLM):
    """Decodes as if every batch were the last one it saw."""

    last: Any = None

    def forward(self, input_ids=None, cache=None, **kwargs):
        out = super().forward(input_ids=input_ids, cache=cache and self.last, **kwargs)
        self.last = out.cache
        return out


def test_a_model_that_mixes_batches_up_is_refused() -> None:
    torch.manual_seed(0)
    model = _Forgetful(tiny_config("mamba")).eval()
    with pytest.raises(ValueError, match=r"with the plain sampler's cache|with a cache of its own"):
        generate(model)


@pytest.mark.parametrize(
    "arguments",
    [{"slots": 0}, {"max_context": 1}, {"eos_ids": (VOCABULARY,)}, {"eos_ids": (-1,)}],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"slots|end id"):
        generate(shared_model("mamba"), **arguments)


def test_both_samplers_sample_the_same_ids() -> None:
    model = shared_model("llama", torch.float64)
    requests = group_requests([5, 9, 9], 3)
    replies = []
    for sampler in (generate(model), RaggedSampler(model, slots=8, eos_ids=(), max_context=128)):
        sampler.submit(requests)
        replies.append({i: s.token_ids for i, s in drain(sampler).items()})
    assert replies[0] == replies[1]


@pytest.mark.parametrize("family", [*FAMILIES, *OWN_CACHE, *IMAGE_TEXT_FULL])
def test_the_catalog_says_from_the_file_alone_which_sampler_takes_a_model(
    family: str, tmp_path: Path
) -> None:
    model = shared_model(family)
    model.config.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    kind = sampler_kind(stated)
    assert kind == ("generate" if family in OWN_CACHE else "ragged")
    assert packs(model.config, 128) == (kind == "ragged")
    sampler = {"ragged": RaggedSampler, "generate": GenerateSampler}[kind]
    sampler(model, slots=2, eos_ids=(), max_context=128)
    if kind == "generate":
        with pytest.raises(ValueError, match="the ragged sampler cannot hold"):
            RaggedSampler(model, slots=2, eos_ids=(), max_context=128)
