"""What of vLLM's use is decided before vLLM is imported; needs no vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from nbtrain.errors import StartChecksFailed
from nbtrain.rollout.types import SampleRequest
from nbtrain.rollout.vllm_engine import VllmEngine, prepare_process
from nbtrain.rollout.vllm_scoring import Scoring


def draw(temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1) -> SampleRequest:
    return SampleRequest(1, (1,), 1, (1,), temperature, top_p, top_k)


@pytest.mark.parametrize(
    ("drawings", "architecture", "expected"),
    [
        ([draw()], "Qwen3ForCausalLM", Scoring("processed_logprobs")),
        ([draw(0.7), draw(0.3), draw(0)], "Qwen3ForCausalLM", Scoring("processed_logprobs")),
        # Greedy takes the most likely token whatever is cut.
        ([draw(0.7), draw(0, 0.9, 50)], "Qwen3ForCausalLM", Scoring("processed_logprobs")),
        ([draw(1, 0.9), draw(0)], "Qwen3ForCausalLM", Scoring("raw_logprobs")),
        ([draw(1, 1, 50), draw(1, 0.5)], "Qwen3ForCausalLM", Scoring("raw_logprobs")),
        ([draw(0.7, 0.9), draw(0.7)], "LlamaForCausalLM", Scoring("raw_logprobs", 0.7)),
    ],
)
def test_the_scoring_is_right_for_all_settings(drawings, architecture, expected) -> None:
    assert Scoring.of(drawings, architecture) == expected
    assert all(expected.refusal(drawing) is None for drawing in drawings)


@pytest.mark.parametrize(
    ("drawings", "architecture", "field", "said"),
    [
        ([draw(0.7, 0.9)], "Qwen3ForCausalLM", "sampler", "temperature 0.7 with top_p 0.9"),
        ([draw(0.7, 0.9), draw(1)], "LlamaForCausalLM", "sampler", "temperature 1 with top_p 1"),
        ([draw(0.7, 0.9), draw(0)], "LlamaForCausalLM", "sampler", "val_"),
        ([draw(0.005)], "LlamaForCausalLM", "temperature", "too low"),
    ],
)
def test_settings_without_a_scoring_are_refused_by_name(
    drawings, architecture, field, said
) -> None:
    with pytest.raises(StartChecksFailed) as caught:
        Scoring.of(drawings, architecture)
    (problem,) = caught.value.problems
    assert problem.field == field
    assert said in str(problem)
    assert problem.allowed


@pytest.mark.parametrize(
    ("scoring", "drawing", "said"),
    [
        (Scoring("processed_logprobs"), draw(1, 0.9), "top_p is 0.9"),
        (Scoring("processed_logprobs"), draw(0.7, 1, 20), "top_k 20"),
        (Scoring("processed_logprobs"), draw(0.001), "at least 0.01"),
        (Scoring("raw_logprobs"), draw(0.7), "samples at 0 or 1"),
        (Scoring("raw_logprobs", 0.7), draw(1.0), "samples at 0.7"),
        (Scoring("raw_logprobs", 0.7), draw(0), "samples at 0.7"),
    ],
)
def test_a_request_of_another_kind_is_refused(scoring, drawing, said) -> None:
    assert said in str(scoring.refusal(drawing))


def start(folder: Path, **changes: object) -> None:
    """What an engine refuses here comes before vLLM is looked for."""
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    settings = {
        "dtype": "float32",
        "slots": 1,
        "max_context": 8,
        "kv_budget_bytes": 1,
        "lora_rank": 1,
        "max_versions": 1,
        "drawings": [draw()],
        "seed": 0,
        "eager": True,
    }
    VllmEngine(folder, **settings | changes)


def test_one_of_several_ranks_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(StartChecksFailed, match="2 ranks") as caught:
            start(tmp_path)
    finally:
        torch.distributed.destroy_process_group()
    assert [problem.field for problem in caught.value.problems] == ["gpus"]


def test_a_rank_above_vllms_largest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartChecksFailed, match="lora_rank 513 is too high"):
        start(tmp_path, lora_rank=513)


def test_the_process_is_prepared_and_our_memory_budget_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"VLLM_CPU_KVCACHE_SPACE": "40"})
    prepare_process(cpu=True)
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
