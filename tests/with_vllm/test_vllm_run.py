"""A whole run that samples with vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbtrain import Client
from nbtrain.store import open_store

pytest.importorskip("vllm", reason="vLLM has an environment of its own: .ci/vllm")


def test_three_steps_of_gspo_train_on_what_vllm_samples(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    client = Client()
    client.workloads.sample()
    options = {
        "base_model_slug": "nbtrain/tiny",
        "algorithm": "gspo",
        "sampler": "vllm",
        "precision": "fp32",
        "num_steps": 3,
        "max_staleness": 0,
        "batch_size": 2,
        "group_size": 8,
        "learning_rate": 1e-2,  # so large that an adapter one step old would be told
        "lr_warmup_steps": 0,
        "val_num_tasks": 4,
        "val_temperature": 0.5,
        "max_output_tokens_per_turn": 24,
    }
    run = client.training.create(bench_id="sums", options=options)
    run.wait(timeout=300)
    assert run.status == "succeeded", run.failure
    assert "Initializing a V1 LLM engine" in run.log
    steps = run.metrics
    assert list(steps["step"]) == [1, 2, 3]
    assert steps["update_applied"].sum() >= 2
    # What vLLM said of its tokens against what the trainer says of them.
    gaps = steps["sampler_gap"].dropna()
    assert len(gaps) >= 2
    assert gaps.max() < 1e-3
    trained = run.trajectories[run.trajectories["split"] == "train"]
    assert list(trained.groupby("step")["policy_version"].max()) == list(steps["policy_version"])
    with open_store() as store:
        left = list(store.run_folder(run.id).rglob("policy-*"))
    assert left == []
