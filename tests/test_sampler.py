"""The contract of samplers, run for real on tiny models of every family; then the ragged one's own.

A new sampler joins by its factory in ``FACTORIES``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import EOS, FAMILIES, PAD, VOCABULARY, tiny_config, tiny_model, with_lora
from torch import nn
from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig

from nbtrain.rollout.ragged import RaggedSampler
from nbtrain.rollout.sampling import UNIFORMS_PER_BLOCK, choose, uniforms
from nbtrain.rollout.types import Finish, Sample, Sampler, SampleRequest

SEVEN = 7  # an ordinary id that the tests declare an end id


class Factory(Protocol):
    def __call__(
        self,
        model: nn.Module,
        *,
        slots: int = 8,
        eos_ids: Sequence[int] = (),
        max_context: int = 128,
    ) -> Sampler: ...


def ragged(model, *, slots=8, eos_ids=(), max_context=128) -> Sampler:
    return RaggedSampler(model, slots=slots, eos_ids=eos_ids, pad_id=PAD, max_context=max_context)


FACTORIES = [pytest.param(ragged, id="ragged")]
contract = pytest.mark.parametrize("factory", FACTORIES)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(8, 256, (length,), generator=generator).tolist())


def group_requests(
    lengths: Sequence[int], group: int, tokens: Sequence[int] = (9, 4, 12, 7), **knobs
) -> list[SampleRequest]:
    """A group of requests for each prompt length, with reply limits of unequal length."""
    return [
        SampleRequest(
            request_id=100 + task * group + sample,
            prompt_ids=prompt(length, task),
            max_new_tokens=tokens[(task + sample) % len(tokens)],
            stream=(42, task, 0, sample),
            **knobs,
        )
        for task, length in enumerate(lengths)
        for sample in range(group)
    ]


def drain(sampler: Sampler) -> dict[int, Sample]:
    done: dict[int, Sample] = {}
    while sampler.pending:
        for sample in sampler.step():
            assert sample.request_id not in done
            done[sample.request_id] = sample
    return done


def recompute(model: nn.Module, request: SampleRequest, sample: Sample) -> torch.Tensor:
    """Log-probs of the reply by one plain forward pass over prompt and reply."""
    ids = torch.tensor([[*request.prompt_ids, *sample.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].float()
    logits = logits / (request.temperature or 1.0)
    reply = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
    return reply.gather(-1, torch.tensor(sample.token_ids)[:, None]).squeeze(-1)


def alone(model: nn.Module, request: SampleRequest, ends: Sequence[int] = ()) -> list[int]:
    """The reply token by token with plain forward passes: what any sampler must give."""
    ids = list(request.prompt_ids)
    reply: list[int] = []
    while len(reply) < request.max_new_tokens and not (reply and reply[-1] in ends):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids + reply])).logits[0, -1:]
        block, place = divmod(len(reply), UNIFORMS_PER_BLOCK)
        uniform = torch.tensor([uniforms(request.stream, block)[place]])
        token, _ = choose(logits, uniform, request.temperature, request.top_p, request.top_k)
        reply.append(int(token))
    return reply


def worst_gap(
    model: nn.Module, requests: Sequence[SampleRequest], done: dict[int, Sample]
) -> float:
    gaps = [
        (recompute(model, request, done[request.request_id])
         - torch.tensor(done[request.request_id].logprobs)).abs().max().item()
        for request in requests
    ]  # fmt: skip
    return max(gaps)


# --- the contract ---------------------------------------------------------------------------


@contract
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "knobs",
    [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}, {"temperature": 0.0}],
    ids=["plain", "cut", "greedy"],
)
def test_logprobs_equal_a_full_recompute(factory: Factory, family: str, knobs) -> None:
    model = with_lora(tiny_model(family))
    requests = group_requests([3, 17, 9, 30], 4, **knobs)
    # Fewer slots than requests: rows are refilled, and prompts of unequal length share steps.
    sampler = factory(model, slots=6)
    sampler.submit(requests)
    done = drain(sampler)
    assert {s.request_id: len(s.token_ids) for s in done.values()} == {
        r.request_id: r.max_new_tokens for r in requests
    }
    assert worst_gap(model, requests, done) < 1e-5


@contract
def test_the_adapter_takes_part_unmerged(factory: Factory) -> None:
    model = with_lora(tiny_model("llama"))
    requests = group_requests([8], 4, tokens=(8,))
    sampler = factory(model)
    sampler.submit(requests)
    done = drain(sampler)
    assert worst_gap(model, requests, done) < 1e-5
    with model.disable_adapter():
        assert worst_gap(model, requests, done) > 1e-2


@contract
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_models_run_and_stay_near_their_own_forward(factory: Factory, family: str) -> None:
    model = with_lora(tiny_model(family, dtype=torch.bfloat16))
    requests = group_requests([3, 17, 9], 3)
    sampler = factory(model, slots=5)
    sampler.submit(requests)
    done = drain(sampler)
    gaps = [
        recompute(model, r, done[r.request_id]) - torch.tensor(done[r.request_id].logprobs)
        for r in requests
    ]
    assert torch.cat(gaps).abs().mean() < 0.06


@contract
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_ids_depend_on_stream_and_policy_alone(factory: Factory, family: str) -> None:
    model = with_lora(tiny_model(family, dtype=torch.float64))
    requests = [
        *group_requests([5, 2, 11], 3),
        SampleRequest(1, prompt(6, 9), 8, (1,), temperature=0.8, top_p=0.8),
        SampleRequest(2, prompt(6, 9), 8, (2,), temperature=0.0),
        SampleRequest(3, prompt(6, 9), 8, (3,), temperature=1.3, top_k=5),
    ]
    expected = {request.request_id: alone(model, request, (SEVEN,)) for request in requests}
    for slots, order in [(1, requests), (5, requests[::-1]), (16, requests)]:
        sampler = factory(model, slots=slots, eos_ids=(SEVEN,))
        sampler.submit(order)
        assert {i: s.token_ids for i, s in drain(sampler).items()} == expected
    # Submitted one by one while others run.
    sampler = factory(model, slots=4, eos_ids=(SEVEN,))
    done: dict[int, Sample] = {}
    for request in requests:
        sampler.submit([request])
        done |= {sample.request_id: sample for sample in sampler.step()}
    done |= drain(sampler)
    assert {i: s.token_ids for i, s in done.items()} == expected


@contract
def test_replies_longer_than_a_block_of_uniforms(factory: Factory) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    requests = [SampleRequest(i, prompt(4), 70 + i, (i,)) for i in range(2)]
    sampler = factory(model)
    sampler.submit(requests)
    done = drain(sampler)
    for request in requests:
        assert done[request.request_id].token_ids == alone(model, request)


@contract
def test_every_end_id_stops_a_reply_and_is_its_last_token(factory: Factory) -> None:
    model = tiny_model("llama")
    # Every even id ends: replies stop after two tokens on average.
    ends = range(0, VOCABULARY, 2)
    requests = group_requests([6], 40, tokens=(12,))
    sampler = factory(model, eos_ids=ends)
    sampler.submit(requests)
    done = drain(sampler)
    seen = set()
    for sample in done.values():
        assert not any(token % 2 == 0 for token in sample.token_ids[:-1])
        stopped = sample.token_ids[-1] % 2 == 0
        assert sample.finish is (Finish.STOP if stopped else Finish.LENGTH)
        assert stopped or len(sample.token_ids) == 12
        seen.add(sample.token_ids[-1])
    assert len(done) == 40
    assert len(seen) > 5


@contract
def test_limits_of_reply_and_context_are_kept(factory: Factory) -> None:
    model = tiny_model("llama")
    requests = [
        SampleRequest(1, prompt(10), 3, (1,)),
        SampleRequest(2, prompt(10), 50, (2,)),
        SampleRequest(3, prompt(19), 50, (3,)),
        SampleRequest(4, prompt(1), 1, (4,)),
    ]
    sampler = factory(model, max_context=20)
    sampler.submit(requests)
    done = drain(sampler)
    assert {i: len(s.token_ids) for i, s in done.items()} == {1: 3, 2: 10, 3: 1, 4: 1}
    assert all(sample.finish is Finish.LENGTH for sample in done.values())
    assert worst_gap(model, requests, done) < 1e-5


@contract
def test_a_step_gives_every_admitted_request_one_token(factory: Factory) -> None:
    sampler = factory(tiny_model("llama"), slots=3)
    sampler.submit([SampleRequest(i, prompt(5 + i), 1 + i, (i,)) for i in range(4)])
    assert sampler.pending == 4
    finished = [sorted(sample.request_id for sample in sampler.step()) for _ in range(5)]
    # Request 3 gets its slot in the second step, when request 0 has left.
    assert finished == [[0], [1], [2], [], [3]]
    assert sampler.pending == 0
    assert sampler.step() == []


@contract
def test_cancelling_returns_what_there_was_and_frees_the_slot(factory: Factory) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    requests = group_requests([5, 9], 3, tokens=(10,))
    sampler = factory(model, slots=4)
    sampler.submit(requests)
    for _ in range(3):
        assert sampler.step() == []
    running, queued, other = 101, 105, 100
    cancelled = {s.request_id: s for s in sampler.cancel([running, queued, 999])}
    assert set(cancelled) == {running, queued}
    assert cancelled[queued].token_ids == []
    assert cancelled[running].token_ids == alone(model, requests[1])[:3]
    assert len(cancelled[running].logprobs) == len(cancelled[running].versions) == 3
    assert all(sample.finish is Finish.CANCELLED for sample in cancelled.values())
    assert sampler.pending == 4
    assert sampler.cancel([running]) == []
    done = drain(sampler)
    # The others go on undisturbed.
    assert set(done) == {100, 102, 103, 104}
    assert done[other].token_ids == alone(model, requests[0])
    assert done[104].token_ids == alone(model, requests[4])


@contract
def test_a_cancelled_id_can_be_used_again(factory: Factory) -> None:
    sampler = factory(tiny_model("llama"))
    request = SampleRequest(1, prompt(5), 6, (1,))
    sampler.submit([request])
    sampler.step()
    sampler.cancel([1])
    sampler.submit([request])
    assert len(drain(sampler)[1].token_ids) == 6


@contract
def test_a_new_policy_changes_only_later_tokens(factory: Factory) -> None:
    model = with_lora(tiny_model("llama"))
    sampler = factory(model, slots=2)
    requests = group_requests([6], 4, tokens=(6,))
    sampler.submit(requests)
    sampler.step()
    sampler.step()
    before = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    sampler.new_policy(3)
    done = drain(sampler)
    for running in (100, 101):
        assert done[running].versions == [0, 0, 3, 3, 3, 3]
        old = recompute(before, requests[running - 100], done[running])
        assert torch.allclose(old[:2], torch.tensor(done[running].logprobs[:2]), atol=1e-5)
    # Replies that were queued are sampled by the new weights alone, their prompt included.
    late = [request for request in requests if request.request_id >= 102]
    assert all(done[r.request_id].versions == [3] * 6 for r in late)
    assert worst_gap(model, late, done) < 1e-5


@contract
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (SampleRequest(5, (), 4, (1,)), "0 tokens"),
        (SampleRequest(5, prompt(20), 4, (1,)), "20 tokens; allowed: 1 to 19"),
        (SampleRequest(5, (3, VOCABULARY), 4, (1,)), str(VOCABULARY)),
        (SampleRequest(5, (3, -1), 4, (1,)), "-1"),
        (SampleRequest(5, (3,), 0, (1,)), "max_new_tokens is 0"),
        (SampleRequest(5, (3,), 4, (1,), temperature=-0.1), "temperature"),
        (SampleRequest(5, (3,), 4, (1,), temperature=float("nan")), "temperature"),
        (SampleRequest(5, (3,), 4, (1,), top_p=0.0), "top_p"),
        (SampleRequest(5, (3,), 4, (1,), top_p=1.5), "top_p"),
        (SampleRequest(5, (3,), 4, (1,), top_k=0), "top_k"),
        (SampleRequest(1, (3,), 4, (1,)), "id 1 is taken"),
        (SampleRequest(4, (3,), 4, (1,)), "id 4 is taken"),
    ],
)
def test_bad_requests_are_refused_and_nothing_is_queued(factory: Factory, bad, why) -> None:
    sampler = factory(tiny_model("llama"), max_context=20)
    sampler.submit([SampleRequest(1, prompt(4), 4, (1,))])
    with pytest.raises(ValueError, match=why):
        sampler.submit([SampleRequest(4, prompt(4), 4, (1,)), bad])
    assert sampler.pending == 1
    assert set(drain(sampler)) == {1}


@contract
def test_training_goes_on_undisturbed(factory: Factory) -> None:
    model = with_lora(tiny_model("llama"))
    model.train()
    model.base_model.model.lm_head.eval()
    modes = [module.training for module in model.modules()]
    sampler = factory(model)
    sampler.submit(group_requests([5, 7], 2))
    drain(sampler)
    assert [module.training for module in model.modules()] == modes
    model(input_ids=torch.tensor([prompt(12)]), labels=torch.tensor([prompt(12)])).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora" in n)


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


def test_two_runs_are_equal_to_the_last_bit() -> None:
    model = with_lora(tiny_model("qwen3"))
    runs = []
    for _ in range(2):
        sampler = RaggedSampler(model, slots=5, eos_ids=(SEVEN,), max_context=128)
        sampler.submit(group_requests([8, 3, 12], 4))
        runs.append(drain(sampler))
    assert runs[0] == runs[1]


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
    with pytest.raises(ValueError, match="sliding window 24 is below max_context 25"):
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
            "'mamba' has layers of type linear_attention",
        ),
        # Its attention bias comes from the attention mask, not from positions.
        (BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2), "cannot be run"),
    ],
    ids=["mamba", "bloom"],
)
def test_models_with_another_kind_of_cache_are_refused(config, why) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=why):
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
