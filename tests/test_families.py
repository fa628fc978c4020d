"""Every family of models trains through the whole loop, by both losses, from its folder on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from scripted import ScriptedRewards
from tiny_models import EOS, FAMILIES, PAD, VOCABULARY, byte_tokenizer, tiny_model
from transformers import AutoModelForCausalLM

from nbtrain.rollout.admission import AdmissionRules
from nbtrain.rollout.collector import Collector, CollectorSettings
from nbtrain.rollout.flight import Flight
from nbtrain.rollout.limits import Sampling
from nbtrain.rollout.ragged import RaggedSampler
from nbtrain.rollout.tokens import decode_completion, render_prompt
from nbtrain.rollout.types import TaskView
from nbtrain.training import checkpoints
from nbtrain.training.checkpoints import Identity
from nbtrain.training.loop import Loop, LoopSettings, LoopState
from nbtrain.training.loss import Level
from nbtrain.training.policy import Policy, load_tokenizer
from nbtrain.training.update import Updater, UpdateSettings

CLIP = {"token": (0.2, 0.2), "sequence": (3e-4, 4e-4)}
STOPS = [*range(0, VOCABULARY, 2), EOS]  # every second id: most replies end by themselves
HEAT = 3.0  # some random models are nearly certain of each next id at 1
LIMITS = Sampling(max_new_tokens=6, max_trajectory_tokens=32, max_context=64, temperature=HEAT)


class Recorder:
    """Keeps the steps, and writes checkpoints as a job does."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self.steps: list[dict[str, Any]] = []
        self.saved: list[Path] = []
        self._folder = folder
        self._policy = policy

    def step(self, row: Any, groups: Any, trajectories: Any, changes: Any) -> None:
        self.steps.append(row)

    def validation(self, row: Any, trajectories: Any) -> None:
        raise AssertionError

    def checkpoint(self, step: int, reason: str, state: LoopState) -> None:
        saved = checkpoints.save(
            self._folder,
            Identity("a" * 64, 1, step, "tiny", "f" * 64, "t" * 64, "w" * 64, "c" * 64),
            adapter=state.adapter,
            adapter_config=self._policy.adapter_config(),
            optimizer=state.optimizer,
            state=state.plain,
        )
        self.saved.append(saved.path)


def long(text: str) -> float:
    """Longer replies are better: real contrast within most groups."""
    return len(text) / 6


def loop_of(folder: Path, level: Level) -> tuple[Loop, Recorder]:
    policy = Policy.load(
        folder,
        precision="fp32",
        lora_rank=4,
        lora_alpha=8,
        target_modules="default",
        seed=3,
        device=torch.device("cpu"),
    )
    tokenizer = load_tokenizer(folder)
    sampler = RaggedSampler(policy.model, slots=8, eos_ids=STOPS, pad_id=PAD, max_context=64)
    flight = Flight(
        sampler,
        ScriptedRewards(long),
        lambda ids: decode_completion(tokenizer, ids, STOPS),
        chat=False,
    )
    tasks = [
        TaskView(f"{n:016x}", render_prompt(tokenizer, f"say {n}", raw=True), f"say {n}", {})
        for n in range(6)
    ]
    rules = AdmissionRules(2)
    recorder = Recorder(folder / "checkpoints", policy)
    loop = Loop(
        LoopSettings(0, 2, 1e-2, 0, 0, 1.0, False, 0, 2),
        policy=policy,
        updater=Updater(
            policy, UpdateSettings(level, *CLIP[level], 0.0, HEAT, 1.0), weight_decay=0
        ),
        collector=Collector(tasks, flight, CollectorSettings(2, 4, 8, 1e9, 3, rules, LIMITS)),
        validator=None,
        recorder=recorder,
        tasks=tasks,
    )
    return loop, recorder


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_two_steps_and_its_checkpoint_loads(
    family: str, level: Level, tmp_path: Path
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loop, recorder = loop_of(tmp_path, level)
    ending = loop.run()
    assert (ending.failure, ending.ended) == (None, None)
    assert [row["step"] for row in recorder.steps] == [1, 2]
    for row in recorder.steps:
        assert row["update_applied"], row["skip_reason"]
        metrics = row["metrics"]
        assert 0 < metrics["grad_norm"] < math.inf
        # on-policy: the first ratio is 1, and the sampler's log-probs are those of the loss
        assert metrics["ratio_max"] == 1.0
        assert metrics["sampler_gap"] < 1e-4
    first, last = recorder.saved
    before, after = (load_file(path / "adapter_model.safetensors") for path in (first, last))
    assert before.keys() == after.keys()
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    # every adapted layer was reached by the gradient
    assert {name for name in after if "lora_B" in name} <= set(moved)
    loads_in_peft(tmp_path, last, loop.policy)


def loads_in_peft(base: Path, adapter: Path, trained: Policy) -> None:
    """Plain PEFT makes of the folders the model that was trained."""
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4
    model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True)
    loaded = PeftModel.from_pretrained(model, adapter).eval()
    ids = torch.tensor([[1, 28, 33, 10]])
    with torch.no_grad():
        expected = trained.model(input_ids=ids).logits
        found = loaded(input_ids=ids).logits
        with loaded.disable_adapter():
            bare = loaded(input_ids=ids).logits
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, bare)
