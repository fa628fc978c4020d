"""Whole supervised jobs in this process: phases, checks, records, checkpoints, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from supervised_world import World, chats, write_jsonl
from tiny_models import byte_tokenizer, tiny_model
from transformers import AutoModelForCausalLM

from nbtrain.errors import NbtrainError, StartChecksFailed
from nbtrain.plan.phases import Phase
from nbtrain.plan.schedule import schedule_of, trace
from nbtrain.store import open_store
from nbtrain.training import base_job
from nbtrain.training.adapted import AdaptedModel
from nbtrain.training.control import Cancelled, Control
from nbtrain.training.supervised import preparing
from nbtrain.training.supervised.job import SupervisedJob
from nbtrain.training.supervised.loop import SupervisedLoop
from nbtrain.training.supervised.rates import rates_of

CHAT = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@pytest.fixture
def world(home: Path) -> Iterator[World]:
    with open_store() as store:
        yield World(store)


def said(error: pytest.ExceptionInfo[StartChecksFailed]) -> str:
    return str(error.value)


def test_a_run_learns_and_its_record_adds_up(world: World) -> None:
    plan = world.plan(
        chats(10),
        validation=chats(3),
        epochs=4,
        gradient_accumulation=2,
        save_every=5,
        validation_frequency_steps=6,
        learning_rate=5e-3,
    )
    run, ending = world.train(plan)
    assert (ending.failure, ending.ended) == (None, None)
    assert (run.phase, run.completed_steps, run.updates_applied) == (Phase.RECORDING, 12, 12)
    assert run.total_steps == 12
    steps = world.steps(run)
    assert [s["step"] for s in steps] == list(range(1, 13))
    assert all(s["update_applied"] for s in steps)
    assert steps[-1]["loss"] < 0.6 * steps[0]["loss"]
    metrics = [s["metrics"] for s in steps]
    for epoch in range(4):
        rows = [row for m in metrics[epoch * 3 : epoch * 3 + 3] for row in m["row_ids"]]
        assert sorted(rows) == list(range(10))
    assert [m["sequences"] for m in metrics[:3]] == [4, 4, 2]
    assert all(0 < m["trained_tokens"] < m["tokens"] for m in metrics)
    assert all(math.isfinite(m["grad_norm"]) for m in metrics)
    assert steps[0]["learning_rate"] > steps[-1]["learning_rate"] > 0
    rounds = world.store.validation_rounds(run.key)
    assert [r["step"] for r in rounds] == [0, 6, 12]
    assert all(r["round_completed"] and r["completed_samples"] == 3 for r in rounds)
    assert rounds[-1]["loss"] < rounds[0]["loss"]
    assert math.isclose(rounds[0]["perplexity"], math.exp(rounds[0]["loss"]))
    saved = world.store.checkpoints(run.key)
    assert [(c.step, c.reason) for c in saved] == [(5, "interval"), (10, "interval"), (12, "final")]
    names = [check["name"] for check in run.checks]
    assert names[:3] == ["trained_tokens", "end_token", "template_round_trip"]
    assert {"memory", "adapter_targets", "validation.trained_tokens"} <= set(names)
    assert {check["verdict"] for check in run.checks} == {"passed"}
    phases = {p["phase"]: p["message"] for p in world.store.phases(run.key)}
    assert phases["PREPARING"] == "reading the dataset"
    assert "10 rows tokenised at" in phases["TRAINING"]
    folder = world.store.run_folder(run.run_id)
    assert not list((folder / "attempts" / "1").iterdir())  # no rows, nothing of the trainer's


def test_unsaved_a_run_has_one_checkpoint_that_plain_peft_loads(world: World) -> None:
    run, _ = world.train(world.plan(chats(6), precision="fp32", max_steps=4))
    (saved,) = world.store.checkpoints(run.key)
    assert (saved.step, saved.reason) == (4, "final")
    location = world.plan(chats(6)).base_model.location
    base: Any = AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, saved.path).eval()
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        adapted = loaded(ids).logits
        with loaded.disable_adapter():
            plain = loaded(ids).logits
    assert not torch.allclose(adapted, plain, atol=1e-3)
    assert float((adapted - logits_of_job(world, saved.path, ids)).abs().max()) == 0.0


def logits_of_job(world: World, path: str, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the model as a job puts it together and goes on from ``path``."""
    from safetensors.torch import load_file

    from nbtrain.training.supervised.model import load_model

    plan = world.plan(chats(6), precision="fp32")
    model: AdaptedModel = load_model(plan, Path(plan.base_model.location), torch.device("cpu"))
    model.load_adapter_state(load_file(Path(path) / "adapter_model.safetensors"))
    model.model.eval()
    with torch.no_grad():
        found: torch.Tensor = model.model(ids).logits
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "int4"},
        {"gradient_checkpointing": True, "lora_dropout": 0.1},
        {"attention_implementation": "eager", "packing": True},
        {"micro_batch_sequences": 1, "scheduler_kind": "constant", "lora_target_modules": ".*q_.*"},
        {"truncation": "right", "assistant_turns": "all", "shuffle": False},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_way_of_training_learns(changes: dict[str, Any], world: World) -> None:
    plan = world.plan(chats(6), epochs=8, learning_rate=5e-3, max_seq_length=60, **changes)
    run, ending = world.train(plan)
    assert ending.failure is None
    losses = [step["loss"] for step in world.steps(run)]
    assert losses[-1] < 0.8 * losses[0]
    adapter = AdaptedAdapter(Path(world.store.checkpoints(run.key)[-1].path))
    assert adapter.dtypes == {torch.float32}
    if not plan["shuffle"]:
        assert world.steps(run)[0]["metrics"]["row_ids"] == [0, 1]


class AdaptedAdapter:
    """A saved adapter's tensors."""

    def __init__(self, path: Path) -> None:
        from safetensors.torch import load_file

        self.tensors = load_file(path / "adapter_model.safetensors")
        self.dtypes = {tensor.dtype for tensor in self.tensors.values()}


def test_packing_corrects_the_number_of_steps(world: World) -> None:
    plan = world.plan(chats(10), packing=True, max_seq_length=60, micro_batch_per_gpu=1)
    run, _ = world.train(plan)
    assert plan.total_steps == 30
    assert (run.total_steps, run.completed_steps) == (15, 15)  # two rows of 24 tokens a sequence
    assert all(len(s["metrics"]["row_ids"]) == 2 for s in world.steps(run))
    (check,) = (c for c in run.checks if c["name"] == "packing")
    assert check["verdict"] == "passed"
    assert check["measured"] < 0.005


def test_an_image_text_model_trains_its_language_on_text(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "gemma"
    tiny_model("gemma3_image").save_pretrained(folder)
    byte_tokenizer(CHAT).save_pretrained(folder)
    plan = world.plan(chats(6), model=str(folder), precision="fp32", epochs=6, learning_rate=1e-2)
    run, ending = world.train(plan)
    assert ending.failure is None
    losses = [step["loss"] for step in world.steps(run)]
    assert losses[-1] < losses[0]
    names = AdaptedAdapter(Path(world.store.checkpoints(run.key)[-1].path)).tensors
    assert names
    assert not any("vision" in name or "projector" in name for name in names)


def test_what_carries_state_is_not_packed(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "hybrid"
    tiny_model("qwen3_next").save_pretrained(folder)
    byte_tokenizer(CHAT).save_pretrained(folder)
    plan = world.plan(chats(6), model=str(folder), packing=True, precision="fp32")
    with pytest.raises(StartChecksFailed, match="carry one packed row into the next"):
        world.train(plan)


def test_all_that_is_wrong_is_said_at_once(world: World, tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "x " * 90}, *chats(1)[0]["messages"][1:]]}
    rows = [*chats(2), long, *chats(1), long | {"messages": long["messages"][:1]}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows, blank=[1, 2])
    held = write_jsonl(tmp_path / "held.jsonl", [long])
    plan = world.plan(
        path, validation=held, lora_target_modules="no_such_layer", max_seq_length=100
    )
    with pytest.raises(StartChecksFailed) as caught:
        world.train(plan)
    text = said(caught)
    for words in (
        "a row is longer than maxSeqLength 100",
        "line 5",  # of the file, blank lines counted
        "line 7",
        "(held, line 1)",
        "no_such_layer",
        "model.layers.0.self_attn.q_proj",
        "lora.targetModules",
    ):
        assert words in text, text
    assert len(caught.value.problems) >= 4
    (run,) = world.store.runs()
    assert world.store.run(run.key).completed_steps == 0
    verdicts = {c["name"]: c["verdict"] for c in world.store.run(run.key).checks}
    assert verdicts["adapter_targets"] == "refused"


def test_the_flat_form_is_answered_in_its_own_words(world: World) -> None:
    plan = world.plan(chats(2), door="options", lora_target_modules="no_such_layer")
    with pytest.raises(StartChecksFailed, match="lora_target_modules 'no_such_layer'"):
        world.train(plan)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 7}, "seed 42 -> 7"),
        ({"shuffle": False}, "shuffle True -> False"),
        ({"micro_batch_per_gpu": 1}, "sequences per update 2 -> 1"),
        ({"epochs": 1}, "nothing is left to train: the run ends at step 3"),
        ({"max_steps": 6}, "nothing is left to train: the run ends at step 6"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_another_order_or_no_rest_is_no_resume(
    changes: dict[str, Any], words: str, world: World
) -> None:
    run, _ = world.train(world.plan(chats(6), epochs=3, max_steps=6))
    going = world.plan(chats(6), parent=run, **{"epochs": 4} | changes)
    with pytest.raises(StartChecksFailed, match=words):
        world.train(going)


def test_other_rows_are_no_resume_but_may_start_from_the_weights(world: World) -> None:
    run, _ = world.train(world.plan(chats(6), epochs=1))
    with pytest.raises(StartChecksFailed, match="rows in another order: dataset"):
        world.train(world.plan(chats(7), parent=run, epochs=2))
    plan = world.plan(chats(7), parent=run, epochs=1, load_weights_only=True)
    fresh, ending = world.train(plan)
    assert ending.failure is None
    assert [s["step"] for s in world.steps(fresh)] == [1, 2, 3, 4]
    message = next(p["message"] for p in world.store.phases(fresh.key) if p["phase"] == "TRAINING")
    assert "restored weights only" in message


def test_a_longer_run_goes_on_and_says_what_is_new(world: World) -> None:
    run, _ = world.train(world.plan(chats(6), epochs=1))
    plan = world.plan(chats(6), parent=run, epochs=2, learning_rate=1e-3)
    going, _ = world.train(plan)
    assert [s["step"] for s in world.steps(going)] == [4, 5, 6]
    message = next(p["message"] for p in world.store.phases(going.key) if p["phase"] == "TRAINING")
    assert "step 3 to 6, 3 updates, learning rate" in message
    assert "not exact: last step of the schedule 3 -> 6, learning_rate 0.002 -> 0.001" in message


def test_a_job_trains_at_the_rates_that_previews_draw(world: World) -> None:
    plan = world.plan(chats(6), epochs=1, warmup_ratio=0.07)
    rate = rates_of(plan, 100)  # 0.07 x 100 is above 7 in floats
    assert rate(7) == plan["learning_rate"] > rate(6)
    assert [rate(step) for step in range(1, 101)] == trace(schedule_of(plan.options, 100))


def test_a_checkpoint_of_other_devices_is_refused(world: World) -> None:
    run, _ = world.train(world.plan(chats(6), epochs=1))
    plan = world.plan(chats(6), parent=run, epochs=2)
    assert plan.parent is not None
    state = Path(plan.parent.path) / "state.json"
    data = json.loads(state.read_text())
    data["environment"]["ranks"] = 2
    from nbtrain.training.supervised.order import Order
    from nbtrain.training.supervised.packing import unpacked
    from nbtrain.training.supervised.saved import misfits

    order = Order(unpacked(6), seed=42, shuffle=True, per_pass=2, passes=1)
    (problem,) = misfits(data, plan, order, ranks=1)
    assert "saved with 2 devices, this run has 1" in problem.message


def test_cancelled_within_an_update(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = world.plan(chats(8), epochs=50, gradient_accumulation=4)
    run = world.create(plan)
    told: list[str] = []

    class Impatient(Control):
        def __call__(self) -> None:
            told.append(self.activity() or "")
            if len(told) == 30:
                world.store.request(run.key, "cancel")
                self._next_command = 0.0
            super().__call__()

    monkeypatch.setattr(base_job, "Control", Impatient)
    with pytest.raises(Cancelled, match="on request"):
        SupervisedJob(world.store, run, 1).run()
    assert len(told) <= 31
    assert any(text.startswith("tokenising") for text in told)
    assert any(text == "loading the model" for text in told)
    assert any("the update" in text for text in told)


def test_a_run_that_changed_nothing_has_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a, **k: None)
    _, ending = world.train(world.plan(chats(4), epochs=1))
    assert str(ending.failure).startswith("no weight changed: after 2 updates")


def test_out_of_memory_says_what_to_lower(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(self: Any, done: Any) -> bool:
        if done.step == 2:
            raise MemoryError("cannot allocate 9 GB")
        return False

    monkeypatch.setattr(SupervisedLoop, "_after", exhausted)
    with pytest.raises(NbtrainError) as caught:
        world.train(world.plan(chats(6), save_every=1))
    text = str(caught.value)
    assert "out of memory in step 3, in training: cannot allocate 9 GB" in text
    assert "execution.microBatchSequences (now 2; the update stays the same)" in text
    assert "maxSeqLength" in text
    assert "model.gradientCheckpointing: true" in text
    assert "no checkpoint was saved" in text


def test_out_of_memory_before_the_first_update_is_told_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError  # as Python itself raises it, without a word

    monkeypatch.setattr(preparing, "load_model", exhausted)
    told = "out of memory in preparation: MemoryError; expected were about .* lower "
    with pytest.raises(NbtrainError, match=told):
        world.train(world.plan(chats(6)))


def test_the_adapter_may_not_cover_the_output_head(world: World) -> None:
    with pytest.raises(StartChecksFailed, match="covers the output head"):
        world.train(world.plan(chats(2), lora_target_modules=".*(q_proj|lm_head)"))
