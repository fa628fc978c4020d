"""What every sampler promises, as one test class: subclass it, give ``make`` and the models.

    class TestMine(SamplerContract):
        def make(self, model, *, slots=8, eos_ids=(), max_context=128):
            return MySampler(model, ...)

What a sampler cannot promise is said by the class attributes; each is then held to what remains.
Needs torch, transformers, peft, numpy and pytest, so that it runs in any sampler's environment.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny_model, with_lora
from torch import nn

from nbtrain.rollout.sampling import UNIFORMS_PER_BLOCK, choose, uniforms
from nbtrain.rollout.types import Finish, Sample, Sampler, SampleRequest

SEVEN = 7  # an ordinary id that the tests declare an end id


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random ordinary ids."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(8, 256, (length,), generator=generator).tolist())


def group_requests(
    lengths: Sequence[int], group: int, tokens: Sequence[int] = (9, 4, 12, 7), **knobs: Any
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
    """Step until nothing is pending; every reply comes once."""
    done: dict[int, Sample] = {}
    steps = 0
    while sampler.pending:
        for sample in sampler.step():
            assert sample.request_id not in done
            done[sample.request_id] = sample
        steps += 1
        assert steps < 5000, f"{sampler.pending} requests never finish"
    return done


def recompute(model: nn.Module, request: SampleRequest, sample: Sample) -> torch.Tensor:
    """Log-probs of the reply by one plain forward pass over prompt and reply, no cache."""
    ids = torch.tensor([[*request.prompt_ids, *sample.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    logits = logits / (request.temperature or 1.0)
    reply = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
    return reply.gather(-1, torch.tensor(sample.token_ids)[:, None]).squeeze(-1)


def gaps(
    model: nn.Module, requests: Iterable[SampleRequest], done: dict[int, Sample]
) -> torch.Tensor:
    """|sampler - recompute| of every token of these requests."""
    return torch.cat(
        [
            (recompute(model, r, done[r.request_id]) - torch.tensor(done[r.request_id].logprobs))
            for r in requests
        ]
    ).abs()


def worst_gap(
    model: nn.Module, requests: Iterable[SampleRequest], done: dict[int, Sample]
) -> float:
    """The largest of :func:`gaps`."""
    return gaps(model, requests, done).max().item()


def alone(model: nn.Module, request: SampleRequest, ends: Sequence[int] = ()) -> list[int]:
    """The reply token by token with plain forward passes: what any sampler must give."""
    ids = list(request.prompt_ids)
    reply: list[int] = []
    while len(reply) < request.max_new_tokens and not (reply and reply[-1] in ends):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids + reply]), use_cache=False).logits[0, -1:]
        block, place = divmod(len(reply), UNIFORMS_PER_BLOCK)
        uniform = torch.tensor([uniforms(request.stream, block)[place]])
        token, _ = choose(logits, uniform, request.temperature, request.top_p, request.top_k)
        reply.append(int(token))
    return reply


_MODELS: dict[tuple[str, torch.dtype, bool], nn.Module] = {}


def shared_model(family: str, dtype: torch.dtype = torch.float32, lora: bool = False) -> nn.Module:
    """A tiny model that no test changes, so that making it (or an engine of it) is paid once."""
    key = family, dtype, lora
    if key not in _MODELS:
        model = tiny_model(family, dtype=dtype)
        _MODELS[key] = with_lora(model) if lora else model
    return _MODELS[key]


class SamplerContract:
    """The promises. A subclass sets :attr:`families` and :meth:`make`, and what it cannot keep."""

    families: Sequence[str] = ("llama",)
    """Of ``tiny_models``. The first is the one that bookkeeping is tested on."""
    tolerance = 1e-5
    """Largest error of a log-prob of an fp32 model against a full recompute."""
    bf16_mean = 0.06
    """Mean error of a log-prob of a bf16 model; ``None``: the sampler takes no bf16 models."""
    exact_streams = True
    """The ids are those that the request's own stream and the exact distribution give. Without,
    only greedy replies are held against a recompute, and equal requests need not repeat."""
    exact_dtype = torch.float64
    """Precision in which what else is decoded must not matter to the ids."""
    untruncated = True
    """Log-probs are those before any top-p or top-k cut even at a temperature other than 1."""
    lockstep = True
    """Every step gives every admitted request exactly one token, the first one included."""
    switches_running = True
    """A new policy samples the rest of running replies too; else they finish under their own."""
    shares_model = True
    """The sampler calls the very model that is trained."""

    def make(
        self,
        model: nn.Module,
        *,
        slots: int = 8,
        eos_ids: Sequence[int] = (),
        max_context: int = 128,
    ) -> Sampler:
        """A sampler of ``model``, which may be wrapped by PEFT."""
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """One case of each test that takes ``family`` for each family."""
        super().__init_subclass__(**kwargs)

        @pytest.fixture(params=list(cls.families))
        def family(self: SamplerContract, request: pytest.FixtureRequest) -> str:
            return str(request.param)

        cls.family = family  # type: ignore[attr-defined]

    @property
    def home(self) -> str:
        return self.families[0]

    @property
    def checkable(self) -> dict[str, Any]:
        """Settings under which the ids can be told beforehand."""
        return {} if self.exact_streams else {"temperature": 0.0}

    # --- tokens and log-probs ---

    @pytest.mark.parametrize(
        "knobs",
        [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}, {"temperature": 0.0}],
        ids=["plain", "cut", "greedy"],
    )
    def test_logprobs_equal_a_full_recompute(self, family: str, knobs: dict[str, Any]) -> None:
        if not self.untruncated and "top_p" in knobs:
            knobs = {"temperature": 0.7}
        model = shared_model(family, lora=True)
        requests = group_requests([3, 17, 9, 30], 4, **knobs)
        # Fewer slots than requests: rows are refilled, and unequal prompts share steps.
        sampler = self.make(model, slots=6)
        sampler.submit(requests)
        done = drain(sampler)
        assert {s.request_id: len(s.token_ids) for s in done.values()} == {
            r.request_id: r.max_new_tokens for r in requests
        }
        assert all(s.versions == [0] * len(s.token_ids) for s in done.values())
        assert worst_gap(model, requests, done) < self.tolerance

    def test_the_adapter_takes_part_unmerged(self, family: str) -> None:
        model = shared_model(family, lora=True)
        requests = group_requests([8], 4, tokens=(8,))
        sampler = self.make(model)
        sampler.submit(requests)
        done = drain(sampler)
        assert worst_gap(model, requests, done) < self.tolerance
        with model.disable_adapter():
            assert worst_gap(model, requests, done) > 1e-2

    def test_bf16_models_stay_near_their_own_forward(self, family: str) -> None:
        if self.bf16_mean is None:
            pytest.skip("takes no bf16 models")
        model = shared_model(family, torch.bfloat16, lora=True)
        requests = group_requests([3, 17, 9], 3)
        sampler = self.make(model, slots=5)
        sampler.submit(requests)
        assert gaps(model, requests, drain(sampler)).mean() < self.bf16_mean

    def test_ids_depend_on_stream_and_policy_alone(self, family: str) -> None:
        model = shared_model(family, self.exact_dtype, lora=True)
        requests = [
            *group_requests([5, 2, 11], 3, (5, 2, 6, 4), **self.checkable),
            SampleRequest(2, prompt(6, 9), 5, (2,), temperature=0.0),
        ]
        if self.exact_streams:
            requests += [
                SampleRequest(1, prompt(6, 9), 5, (1,), temperature=0.8, top_p=0.8),
                SampleRequest(3, prompt(6, 9), 5, (3,), temperature=1.3, top_k=5),
            ]
        expected = {request.request_id: alone(model, request, (SEVEN,)) for request in requests}
        for slots, order in [(1, requests), (5, requests[::-1]), (16, requests)]:
            sampler = self.make(model, slots=slots, eos_ids=(SEVEN,))
            sampler.submit(order)
            assert {i: s.token_ids for i, s in drain(sampler).items()} == expected
        # Submitted one by one while others run.
        sampler = self.make(model, slots=4, eos_ids=(SEVEN,))
        done: dict[int, Sample] = {}
        for request in requests:
            sampler.submit([request])
            done |= {sample.request_id: sample for sample in sampler.step()}
        done |= drain(sampler)
        assert {i: s.token_ids for i, s in done.items()} == expected

    def test_two_runs_are_equal_to_the_last_bit(self, family: str) -> None:
        if not self.exact_streams:
            pytest.skip("draws its own random numbers")
        model = shared_model(family, lora=True)
        runs = []
        for _ in range(2):
            sampler = self.make(model, slots=5, eos_ids=(SEVEN,))
            sampler.submit(group_requests([8, 3, 12], 4))
            runs.append(drain(sampler))
        assert runs[0] == runs[1]

    def test_the_samples_of_a_group_differ_and_follow_the_distribution(self) -> None:
        """However a sampler draws: 400 first tokens against their probabilities."""
        model = shared_model(self.home)
        requests = [SampleRequest(i, prompt(5), 1, (9, i)) for i in range(400)]
        sampler = self.make(model, slots=64)
        sampler.submit(requests)
        first = torch.tensor([sample.token_ids[0] for sample in drain(sampler).values()])
        with torch.no_grad():
            chance = model(input_ids=torch.tensor([prompt(5)])).logits[0, -1].double().softmax(-1)
        top = chance.topk(4).indices
        seen = (first[:, None] == top).double().mean(0)
        error = (chance[top] * (1 - chance[top]) / 400).sqrt()
        assert ((seen - chance[top]).abs() < 4.5 * error).all()
        assert len(set(first.tolist())) > 10

    @pytest.mark.parametrize(("knobs", "size"), [({"top_k": 3}, 3), ({"top_p": 0.3}, None)])
    def test_what_is_cut_is_never_sampled(self, knobs: dict[str, Any], size: int | None) -> None:
        model = shared_model(self.home)
        requests = [SampleRequest(i, prompt(5), 1, (9, i), **knobs) for i in range(60)]
        sampler = self.make(model, slots=64)
        sampler.submit(requests)
        seen = {sample.token_ids[0] for sample in drain(sampler).values()}
        with torch.no_grad():
            chance = model(input_ids=torch.tensor([prompt(5)])).logits[0, -1].double().softmax(-1)
        values, order = chance.sort(descending=True)
        allowed = size or int((values.cumsum(-1) - values < 0.3).sum())
        assert allowed > 1, "the model is too sure for this test"
        assert len(seen) > 1
        assert seen <= set(order[:allowed].tolist())

    def test_replies_longer_than_a_block_of_uniforms(self) -> None:
        model = shared_model(self.home, self.exact_dtype)
        requests = [SampleRequest(i, prompt(4), 70 + i, (i,), **self.checkable) for i in range(2)]
        sampler = self.make(model)
        sampler.submit(requests)
        done = drain(sampler)
        for request in requests:
            assert done[request.request_id].token_ids == alone(model, request)

    # --- ends and limits ---

    def test_every_end_id_stops_a_reply_and_is_its_last_token(self) -> None:
        # Every even id ends: replies stop after two tokens on average.
        requests = group_requests([6], 40, tokens=(12,))
        sampler = self.make(shared_model(self.home), eos_ids=range(0, VOCABULARY, 2))
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

    def test_limits_of_reply_and_context_are_kept(self, family: str) -> None:
        model = shared_model(family)
        requests = [
            SampleRequest(1, prompt(10), 3, (1,)),
            SampleRequest(2, prompt(10), 50, (2,)),
            SampleRequest(3, prompt(19), 50, (3,)),
            SampleRequest(4, prompt(1), 1, (4,)),
        ]
        sampler = self.make(model, max_context=20)
        sampler.submit(requests)
        done = drain(sampler)
        assert {i: len(s.token_ids) for i, s in done.items()} == {1: 3, 2: 10, 3: 1, 4: 1}
        assert all(sample.finish is Finish.LENGTH for sample in done.values())
        assert worst_gap(model, requests, done) < self.tolerance

    # --- the queue ---

    def test_a_step_gives_every_admitted_request_one_token(self) -> None:
        sampler = self.make(shared_model(self.home), slots=3)
        sampler.submit([SampleRequest(i, prompt(5 + i), 1 + i, (i,)) for i in range(4)])
        assert sampler.pending == 4
        if not self.lockstep:
            assert set(drain(sampler)) == {0, 1, 2, 3}
        else:
            finished = [sorted(sample.request_id for sample in sampler.step()) for _ in range(5)]
            # Request 3 gets its slot in the second step, when request 0 has left.
            assert finished == [[0], [1], [2], [], [3]]
        assert sampler.pending == 0
        assert sampler.step() == []

    def test_admitted_tells_each_request_once_when_it_leaves_the_queue(self) -> None:
        sampler = self.make(shared_model(self.home), slots=2)
        requests = [SampleRequest(i, prompt(5), 3, (i,)) for i in range(5)]
        sampler.submit(requests)
        assert sampler.admitted() == []
        seen: list[int] = []
        while sampler.pending:
            finished = {sample.request_id for sample in sampler.step()}
            seen += sampler.admitted()
            assert finished <= set(seen)
            assert len(seen) < 5 or sampler.pending <= 2
        assert seen == [0, 1, 2, 3, 4]
        assert sampler.admitted() == []

    def test_cancelling_returns_what_there_was_and_frees_the_slot(self, family: str) -> None:
        model = shared_model(family, self.exact_dtype)
        requests = group_requests([5, 9], 3, tokens=(6,), **self.checkable)
        sampler = self.make(model, slots=4)
        sampler.submit(requests)
        for _ in range(3):
            assert sampler.step() == []
        running, queued, other = 101, 105, 100
        cancelled = {s.request_id: s for s in sampler.cancel([running, queued, 999])}
        assert set(cancelled) == {running, queued}
        assert cancelled[queued].token_ids == []
        sampled = len(cancelled[running].token_ids)
        assert sampled == 3 if self.lockstep else 0 < sampled <= 3
        assert cancelled[running].token_ids == alone(model, requests[1])[:sampled]
        assert len(cancelled[running].logprobs) == len(cancelled[running].versions) == sampled
        assert all(sample.finish is Finish.CANCELLED for sample in cancelled.values())
        assert sampler.pending == 4
        assert sampler.cancel([running]) == []
        done = drain(sampler)
        # The others go on undisturbed.
        assert set(done) == {100, 102, 103, 104}
        assert done[other].token_ids == alone(model, requests[0])
        assert done[104].token_ids == alone(model, requests[4])

    def test_a_cancelled_id_can_be_used_again(self) -> None:
        sampler = self.make(shared_model(self.home))
        request = SampleRequest(1, prompt(5), 6, (1,))
        sampler.submit([request])
        sampler.step()
        sampler.cancel([1])
        assert sampler.pending == 0
        sampler.submit([request])
        assert len(drain(sampler)[1].token_ids) == 6

    # --- policies ---

    def test_a_new_policy_changes_only_later_tokens(self, family: str) -> None:
        model = copy.deepcopy(shared_model(family, lora=True))
        sampler = self.make(model, slots=2)
        requests = group_requests([6], 4, tokens=(6,))
        sampler.submit(requests)
        sampler.step()
        sampler.step()
        before = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        sampler.new_policy(3)
        done = drain(sampler)
        for running in (100, 101):
            sample = done[running]
            old = sample.versions.count(0)
            if self.switches_running:
                assert old == 2 if self.lockstep else 0 < old <= 2
            else:
                assert old == 6
            assert sample.versions == [0] * old + [3] * (6 - old)
            gap = recompute(before, requests[running - 100], sample) - torch.tensor(sample.logprobs)
            assert gap[:old].abs().max() < self.tolerance
        # Replies that were queued are sampled by the new weights alone, their prompt included.
        late = [request for request in requests if request.request_id >= 102]
        assert all(done[r.request_id].versions == [3] * 6 for r in late)
        assert worst_gap(model, late, done) < self.tolerance
        assert worst_gap(before, late, done) > 1e-2

    def test_training_goes_on_undisturbed(self, family: str) -> None:
        if not self.shares_model:
            pytest.skip("has weights of its own")
        model = copy.deepcopy(shared_model(family, lora=True))
        model.train()
        model.get_base_model().get_output_embeddings().eval()
        modes = [module.training for module in model.modules()]
        sampler = self.make(model)
        sampler.submit(group_requests([5, 7], 2))
        drain(sampler)
        assert [module.training for module in model.modules()] == modes
        model.eval()  # image-text models ask for more inputs in training mode
        ids = torch.tensor([prompt(12)])
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert all(p.grad is not None for n, p in model.named_parameters() if "lora" in n)

    # --- refusals ---

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
    def test_bad_requests_are_refused_and_nothing_is_queued(
        self, bad: SampleRequest, why: str
    ) -> None:
        sampler = self.make(shared_model(self.home), max_context=20)
        sampler.submit([SampleRequest(1, prompt(4), 4, (1,))])
        with pytest.raises(ValueError, match=why):
            sampler.submit([SampleRequest(4, prompt(4), 4, (1,)), bad])
        assert sampler.pending == 1
        assert set(drain(sampler)) == {1}
