"""A run from a registered adapter: KL is taken to where it began, and stays so through resumes."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from described import adapter_of, model_ref, plan_of, run_here, sums
from judged import judged, shake, tiny_policy
from safetensors.torch import load_file
from test_loop import EMBEDDED, make_loop, same, through_json
from tiny_models import tiny_model

from nbtrain.data.datasets import DatasetRegistry
from nbtrain.errors import StartChecksFailed
from nbtrain.plan.resolved import ParentRef
from nbtrain.rollout.admission import AS_GRADED
from nbtrain.store import new_id, open_store
from nbtrain.training.checkpoints import OPTIMIZER
from nbtrain.training.loop import Loop
from nbtrain.training.policy import Policy
from nbtrain.training.setup import load_policy
from nbtrain.training.update import Updater, UpdateSettings
from nbtrain.training.warm_start import load_warm_start

CPU = torch.device("cpu")


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


# --- whole runs -----------------------------------------------------------------------------------


def test_a_run_from_a_registered_model_and_its_resume(home: Path) -> None:
    with open_store() as store:
        dataset = DatasetRegistry(store).register("sums", sums(6))
        first, _ = run_here(store, plan_of(dataset, num_steps=2, kl_beta=0.0))
        (model,) = store.models(first.key)
        warm = plan_of(
            dataset, num_steps=3, warm_start=model_ref(model), checkpoint_interval_steps=1
        )
        run, ending = run_here(store, warm)
        assert ending.failure is None
        start, *_, two, three = store.checkpoints(run.key)
        assert adapter_of(start.path).read_bytes() == adapter_of(model["path"]).read_bytes()
        away = [row["metrics"]["kl"] for row in store.steps(run.key)]
        assert away[0] == 0.0
        assert away[1] > 0.0
        assert max(row["policy_version"] for row in store.trajectories(run.key)) == 2

        shutil.rmtree(model["path"])  # the checkpoint is enough
        parent = ParentRef(two.checkpoint_id, run.run_id, two.step, str(two.path))
        again, _ = run_here(store, replace(warm, parent=parent, start_step=2))
        (last,) = [one for one in store.checkpoints(again.key) if one.step == 3]
        assert adapter_of(last.path).read_bytes() == adapter_of(three.path).read_bytes()
        assert store.steps(again.key)[0]["metrics"]["kl"] == away[2]
        assert (
            load_file(Path(last.path) / OPTIMIZER).keys()
            == load_file(Path(three.path) / OPTIMIZER).keys()
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights_digest": "0" * 64}, "has other weights than were registered"),
        ({"path": "nowhere"}, "cannot be read"),
        ({"lora_alpha": 3}, "was trained with another lora_alpha"),
        ({"lora_rank": 3}, "was trained with another lora_rank"),
        ({"lora_target_modules": ".*q_proj"}, "unknown"),
        ({"base": "1" * 64}, "belongs to nbtrain/tiny, not to nbtrain/tiny as it is now"),
    ],
    ids=["weights", "files", "alpha", "rank", "targets", "base"],
)
def test_an_adapter_that_does_not_fit_is_refused(
    saved: dict[str, Any], home: Path, changes: dict[str, Any], said: str
) -> None:
    with open_store() as store:
        dataset = DatasetRegistry(store).register("sums", sums(2))
        options = {name: v for name, v in changes.items() if name.startswith("lora")}
        model = replace(
            model_ref(saved),
            **{n: v for n, v in changes.items() if n in ("weights_digest", "path")},
        )
        plan = plan_of(dataset, warm_start=model, **options)
        run = store.create_run(new_id(), plan={}, resolved=plan)
        base = changes.get("base", plan.base_model.fingerprint)
        store.put_model(**saved, run=run.key, base_fingerprint=base)
        policy = load_policy(plan, EMBEDDED, CPU)
        before = policy.adapter_state()
        with pytest.raises(StartChecksFailed, match=said) as caught:
            load_warm_start(store, plan, model, policy)
        assert caught.value.problems[0].field == "warmStartModelId"
        assert same(policy.adapter_state(), before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An adapter of rank 16 on the embedded model, and its row but for run and base."""
    folder = tmp_path_factory.mktemp("adapters") / "one"
    policy = Policy.load(
        EMBEDDED,
        precision="fp32",
        lora_rank=16,
        lora_alpha=32,
        target_modules="default",
        seed=3,
        device=CPU,
    )
    policy.save_adapter(folder)
    digest = hashlib.sha256(adapter_of(folder).read_bytes()).hexdigest()
    return {
        "model_id": "ab" * 32,
        "checkpoint_id": "cd" * 32,
        "base_model_slug": "nbtrain/tiny",
        "config_hash": "ef" * 32,
        "workload_id": None,
        "weights_digest": digest,
        "path": str(folder),
        "spec": {},
    }
