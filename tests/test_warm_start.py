"""A run from a registered adapter: KL is taken to where it began, and stays so through resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judged import judged, shake, tiny_policy
from test_loop import make_loop, same, through_json
from tiny_models import tiny_model

from nbtrain.rollout.admission import AS_GRADED
from nbtrain.training.loop import Loop
from nbtrain.training.update import Updater, UpdateSettings


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    return folder


def warm_loop(folder: Path, *, warm: bool = True, **changes: Any) -> tuple[Loop, Any]:
    """A loop whose adapter has been trained before, by a shake, and whose KL counts."""
    loop, records = make_loop(folder, rules=AS_GRADED, val_interval=0, **changes)
    shake(loop.policy, 0.3, seed=5)
    loop._updater.settings = replace(loop._updater.settings, kl_beta=0.1)
    if warm:
        loop._updater.refer_to()
    return loop, records


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kl_begins_at_exactly_zero_and_counts_from_the_start(
    model_folder: Path, dtype: torch.dtype
) -> None:
    loop, records = warm_loop(model_folder, dtype=dtype)
    loop.advance()
    loop.advance()
    first, second = [row["metrics"]["kl"] for row in records.steps]
    assert first == 0.0
    assert second > 0.0
    cold, records = warm_loop(model_folder, warm=False, dtype=dtype)
    cold.advance()
    assert records.steps[0]["metrics"]["kl"] > 0.0, "to the base it is far away already"


def test_kl_pulls_back_to_the_warm_start(model_folder: Path) -> None:
    """Ties have no gradient but that of KL: on a fixed batch it leads back to the start."""
    policy = tiny_policy(model_folder, dtype=torch.float32)
    settings = UpdateSettings("token", 0.2, 0.2, 0.5, 1.0, 1.0)
    updater = Updater(policy, settings, weight_decay=0.0)
    updater.refer_to()
    shake(policy, 0.1, seed=9)
    batch = [judged(n, [0.5] * 4) for n in range(3)]
    away = [updater.update(batch, 5e-3, version=0).metrics["kl"] for _ in range(40)]
    assert away[-1] < away[0] / 20
    base = Updater(policy, settings, weight_decay=0.0)
    assert base.update(batch, 0.0, version=0).metrics["kl"] > 10 * away[-1], "not to the base"


def test_a_resumed_run_keeps_its_reference(model_folder: Path) -> None:
    straight, rows = warm_loop(model_folder)
    for _ in range(2):
        straight.advance()
    state = through_json(straight.state_dict())
    straight.advance()
    other, records = warm_loop(model_folder, warm=False)  # told by the state alone
    other.load_state_dict(state)
    other.advance()
    assert same(other.state_dict().adapter, straight.state_dict().adapter)
    assert same(other.state_dict().optimizer, straight.state_dict().optimizer)
    assert records.steps[0]["metrics"]["kl"] == rows.steps[2]["metrics"]["kl"] > 0


def test_scoring_the_reference_leaves_the_weights_alone(model_folder: Path) -> None:
    loop, _ = warm_loop(model_folder)
    loop.advance()
    before = loop.policy.adapter_state()
    reference = loop._updater.reference
    assert reference is not None
    with reference.using(0):
        assert not same(loop.policy.adapter_state(), before)
    assert same(loop.policy.adapter_state(), before)
