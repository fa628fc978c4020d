"""The contract of samplers on vLLM itself, and what is its own. Runs where vLLM is installed."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sampler_contract import (
    SEVEN,
    SamplerContract,
    drain,
    group_requests,
    prompt,
    recompute,
    shared_model,
    worst_gap,
)
from tiny_models import _COMMON, FAMILIES, VOCABULARY, tiny_model, with_lora
from torch import nn
from transformers import LlamaConfig

from nbtrain.errors import StartChecksFailed
from nbtrain.rollout.types import Finish, Sample, SampleRequest
from nbtrain.rollout.vllm import VllmSampler
from nbtrain.rollout.vllm_engine import VllmEngine, prepare_process

pytest.importorskip("vllm", reason="vLLM has an environment of its own: .ci/vllm")

# vLLM's attention on the CPU takes no heads narrower than 32.
FAMILIES["wide"] = lambda: LlamaConfig(
    **_COMMON | {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
)

PLAIN = SampleRequest(0, (), 1, ())
CUT = SampleRequest(0, (), 1, (), top_p=0.9, top_k=20)
COOL_CUT = SampleRequest(0, (), 1, (), temperature=0.7, top_p=0.9, top_k=20)

TOLERANCE = 1e-3

_ENGINES: dict[tuple[Any, ...], VllmEngine] = {}
_HOME = tempfile.TemporaryDirectory()


def engine(
    drawing: SampleRequest = PLAIN, dtype: torch.dtype = torch.float32, budget: int = 16 << 20
) -> VllmEngine:
    """An engine of the base model for one way of drawing. They must live to the end anyway."""
    key = drawing, dtype, budget
    if key not in _ENGINES:
        prepare_process(cpu=True)
        folder = Path(_HOME.name) / f"base-{len(_ENGINES)}"
        tiny_model("wide", dtype=dtype).save_pretrained(folder)
        _ENGINES[key] = VllmEngine(
            folder,
            dtype=str(dtype).removeprefix("torch."),
            slots=64,
            max_context=256,
            kv_budget_bytes=budget,
            lora_rank=4,
            max_versions=2,
            drawings=[drawing],
            seed=7,
            eager=True,
        )
    return _ENGINES[key]


def adapters() -> Path:
    """A new folder for adapters."""
    return Path(tempfile.mkdtemp(dir=_HOME.name))


def sampler_of(model: nn.Module, drawing: SampleRequest = PLAIN, **limits: Any) -> VllmSampler:
    """A sampler of a model of ``shared_model("wide", …)``."""
    dtype = next(p.dtype for n, p in model.named_parameters() if "lora" not in n)
    if not hasattr(model, "peft_config"):
        model = with_lora(tiny_model("wide", dtype=dtype), scale=0.0)
    return VllmSampler(
        engine(drawing, dtype),
        eos_ids=limits.pop("eos_ids", ()),
        save_adapter=model.save_pretrained,
        adapter_folder=limits.pop("adapter_folder", None) or adapters(),
        **limits,
    )


class TestVllm(SamplerContract):
    families = ("wide",)
    tolerance = TOLERANCE
    exact_streams = False
    exact_dtype = torch.float32
    switches_running = False
    shares_model = False

    drawing = PLAIN

    def make(
        self,
        model: nn.Module,
        *,
        slots: int = 8,
        eos_ids: Sequence[int] = (),
        max_context: int = 128,
    ) -> VllmSampler:
        return sampler_of(
            model, self.drawing, slots=slots, eos_ids=eos_ids, max_context=max_context
        )

    # Cuts, and a temperature with cuts, need engines of their own.

    @pytest.mark.parametrize(
        ("knobs", "drawing"),
        [
            ({}, PLAIN),
            ({"temperature": 0.7}, PLAIN),
            ({"temperature": 0.0}, PLAIN),
            ({"top_p": 0.9, "top_k": 20}, CUT),
            ({"temperature": 0.0}, CUT),
            ({"temperature": 0.7, "top_p": 0.9, "top_k": 20}, COOL_CUT),
        ],
        ids=["plain", "cool", "greedy", "cut", "greedy cut", "cool cut"],
    )
    def test_logprobs_equal_a_full_recompute(
        self, family: str, knobs: dict[str, Any], drawing: SampleRequest
    ) -> None:
        self.drawing = drawing
        super().test_logprobs_equal_a_full_recompute(family, knobs)

    @pytest.mark.parametrize(("knobs", "size"), [({"top_k": 3}, 3), ({"top_p": 0.3}, None)])
    def test_what_is_cut_is_never_sampled(self, knobs: dict[str, Any], size: int | None) -> None:
        self.drawing = CUT
        super().test_what_is_cut_is_never_sampled(knobs, size)


def changed(model: nn.Module, seed: int) -> nn.Module:
    """The model with another policy, far from the first."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def test_three_policies_in_flight_each_score_their_own_tokens() -> None:
    """Versions switch while replies run; each folder goes with its last reply.

    The prompts are longer than a block of vLLM's prefix cache and the same for all policies.
    """
    policies = [changed(shared_model("wide", lora=True), seed) for seed in range(4)]
    newest = policies[:1]
    folder = adapters()
    sampler = VllmSampler(
        engine(),
        eos_ids=(),
        save_adapter=lambda path: newest[0].save_pretrained(path),
        adapter_folder=folder,
    )
    requests = {}
    done: dict[int, Sample] = {}
    for version, newest[0] in enumerate(policies):
        sampler.new_policy(version)
        new = [SampleRequest(10 * version + i, prompt(150, i), 10, (version, i)) for i in range(4)]
        requests |= {request.request_id: request for request in new}
        sampler.submit(new)
        for _ in range(3):
            done |= {sample.request_id: sample for sample in sampler.step()}
        assert len(list(folder.iterdir())) == min(version + 1, 3)
    done |= drain(sampler)
    assert [path.name.split("-")[1] for path in folder.iterdir()] == ["3"]
    for request_id, sample in done.items():
        version = request_id // 10
        assert sample.versions == [version] * 10
        mine = worst_gap(policies[version], [requests[request_id]], done)
        assert mine < TOLERANCE
    others = [
        worst_gap(policies[(i // 10 + 1) % 4], [request], done) for i, request in requests.items()
    ]
    assert min(others) > 0.05


def test_one_version_more_than_the_engine_holds_waits_and_is_right() -> None:
    """The engine here holds three adapters at a time; five run."""
    policies = [changed(shared_model("wide", lora=True), seed) for seed in range(5)]
    newest = policies[:1]
    sampler = VllmSampler(
        engine(),
        eos_ids=(),
        save_adapter=lambda path: newest[0].save_pretrained(path),
        adapter_folder=adapters(),
    )
    requests = [SampleRequest(v, prompt(9, v), 6 + v, (v,)) for v in range(5)]
    done: dict[int, Sample] = {}
    for version, newest[0] in enumerate(policies):
        sampler.new_policy(version)
        sampler.submit([requests[version]])
        done |= {sample.request_id: sample for sample in sampler.step()}
    assert sampler.pending == 5
    done |= drain(sampler)
    for version, policy in enumerate(policies):
        assert done[version].versions == [version] * (6 + version)
        assert worst_gap(policy, [requests[version]], done) < TOLERANCE


def test_a_cancelled_reply_keeps_its_tokens_and_their_log_probs() -> None:
    model = shared_model("wide", lora=True)
    folder = adapters()
    sampler = sampler_of(model, adapter_folder=folder)
    request = SampleRequest(1, prompt(5), 50, (1,))
    sampler.submit([request])
    for _ in range(4):
        sampler.step()
    sampler.new_policy(1)
    (sample,) = sampler.cancel([1])
    assert sample.finish is Finish.CANCELLED
    assert len(sample.token_ids) == 4
    gap = recompute(model, request, sample) - torch.tensor(sample.logprobs)
    assert gap.abs().max() < TOLERANCE
    assert sampler.step() == []
    assert list(folder.iterdir()) == []


def test_equal_streams_draw_alike_and_others_do_not() -> None:
    runs = []
    for _ in range(2):
        sampler = sampler_of(shared_model("wide", lora=True), eos_ids=(SEVEN,))
        sampler.submit(group_requests([8, 3], 4))
        runs.append({i: s.token_ids for i, s in drain(sampler).items()})
    assert runs[0] == runs[1]
    assert len({tuple(ids[:4]) for ids in runs[0].values()}) > 6


def test_a_budget_below_what_runs_makes_replies_wait_and_changes_no_log_prob() -> None:
    """1 MiB holds 16 blocks of 128 tokens here, and every reply needs one."""
    model = shared_model("wide", lora=True)
    sampler = VllmSampler(
        engine(budget=1 << 20),
        eos_ids=(),
        save_adapter=model.save_pretrained,
        adapter_folder=adapters(),
    )
    requests = [SampleRequest(i, prompt(5, i), 6, (i,)) for i in range(20)]
    sampler.submit(requests)
    done = {sample.request_id: sample for sample in sampler.step()}
    first = len(sampler.admitted())
    assert 1 <= first < 20  # all have a slot, but not memory
    done |= drain(sampler)
    assert len(done) == 20
    assert worst_gap(model, requests, done) < TOLERANCE


def test_a_request_whose_log_probs_would_be_wrong_is_refused() -> None:
    sampler = sampler_of(shared_model("wide"))
    with pytest.raises(ValueError, match=r"request 1: top_p is 0\.9 and top_k 20"):
        sampler.submit([SampleRequest(1, prompt(4), 4, (1,), top_p=0.9, top_k=20)])
    assert sampler.pending == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"slots": 0},
        {"slots": 65},
        {"max_context": 1},
        {"max_context": 257},
        {"eos_ids": (-1,)},
        {"eos_ids": (VOCABULARY,)},
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"slots|max_context|end id"):
        sampler_of(shared_model("wide"), **arguments)


def test_an_engine_that_cannot_score_its_drawings_is_never_started(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(StartChecksFailed, match="Qwen3ForCausalLM"):
        VllmEngine(
            tmp_path,
            dtype="float32",
            slots=1,
            max_context=8,
            kv_budget_bytes=1,
            lora_rank=1,
            max_versions=1,
            drawings=[COOL_CUT],
            seed=0,
            eager=True,
        )
