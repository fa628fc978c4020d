"""Troubles that people had with supervised training elsewhere, one test each."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from supervised_world import World, chats
from tiny_models import byte_tokenizer, tiny_model

from nbtrain.data.masks import LossRules
from nbtrain.data.rendering import Renderer
from nbtrain.errors import StartChecksFailed
from nbtrain.store import StoredRun, open_store
from nbtrain.training.adapted import AdaptedModel, attach_adapter, load_tokenizer
from nbtrain.training.supervised.checks import packing_check, row_losses
from nbtrain.training.supervised.collate import IGNORED, collate
from nbtrain.training.supervised.rows import TokenizedRows
from nbtrain.training.supervised.scores import RowScores
from nbtrain.training.supervised.tokenizing import tokenize

CASES = Path(__file__).parent / "cases"
CHAT = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@pytest.fixture
def world(home: Path) -> Iterator[World]:
    with open_store() as store:
        yield World(store)


def tokenized(world: World, rows: object, folder: Path) -> tuple[TokenizedRows, Any]:
    """Rows under the embedded model's template."""
    dataset = world.datasets.register("case", rows)
    tokenizer = load_tokenizer(Path(world.plan(chats(1)).base_model.location))
    found = tokenize(
        dataset,
        Renderer(tokenizer),
        LossRules(),
        folder,
        max_tokens=200,
        truncation="error",
        source="case",
    )
    assert found.problems == []
    return TokenizedRows(folder), tokenizer


def test_tm01_the_end_token_is_trained_though_it_is_the_padding(
    world: World, tmp_path: Path
) -> None:
    rows, tokenizer = tokenized(world, CASES / "TM-01.rows.jsonl", tmp_path / "rows")
    end = tokenizer.eos_token_id
    batch = collate(rows, [(0,), (1,)], packed=False, pad_id=end)
    for at, line in enumerate(batch["labels"]):
        length = int(rows.lengths[at])
        trained = (line != IGNORED).nonzero().flatten()
        assert line[trained[-1]] == end
        assert trained[-1] < length
        assert (line[length:] == IGNORED).all()
    assert set(rows.lengths.tolist()) != {batch["labels"].shape[1]}  # there is padding


@pytest.mark.parametrize("truncation", ["error", "right"])
def test_tp01_answers_that_would_be_cut_off_are_refused(truncation: str, world: World) -> None:
    text = "Please read the question with care before you answer. " * 3
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{text}What is {n} + {n}?"},
                {"role": "assistant", "content": str(2 * n)},
            ]
        }
        for n in range(64)
    ]
    with pytest.raises(StartChecksFailed) as caught:
        world.train(world.plan(rows, max_seq_length=16, truncation=truncation))
    assert "alike in 64 rows" in str(caught.value)
    assert "lines 1, 2, 3" in str(caught.value)


def test_tp02_validation_rows_pass_the_same_checks(world: World) -> None:
    plan = world.plan(chats(4), validation=CASES / "TP-02.val.jsonl", max_seq_length=200)
    with pytest.raises(StartChecksFailed) as caught:
        world.train(plan)
    (problem,) = caught.value.problems
    assert "longer than maxSeqLength 200" in problem.message
    assert problem.where is not None
    assert (problem.where.source, problem.where.line) == ("held", 1 + long_row())


def long_row() -> int:
    lines = (CASES / "TP-02.val.jsonl").read_text().splitlines()
    return max(range(len(lines)), key=lambda at: len(lines[at]))


def scores_of(attention: str, location: str) -> RowScores:
    from nbtrain.training.base_weights import load_base

    base = load_base(
        Path(location), dtype=torch.float32, device=torch.device("cpu"), attention=attention
    )
    model = attach_adapter(base, lora_rank=4, lora_alpha=8, target_modules="default", seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return RowScores(AdaptedModel(model, torch.device("cpu")).model, lean=False)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tp04_packed_rows_do_not_see_each_other(
    attention: str, world: World, tmp_path: Path
) -> None:
    rows, _ = tokenized(world, CASES / "TP-04.rows.jsonl", tmp_path / "rows")
    scores = scores_of(attention, world.plan(chats(1)).base_model.location)
    packed = row_losses(scores, rows, [(0, 1)], packed=True)
    for row in (0, 1):
        (alone,) = row_losses(scores, rows, [(row,)], packed=False).values()
        assert math.isclose(packed[row], alone, rel_tol=1e-4)
    check = packing_check(scores, rows, [(0, 1)], 1)
    assert check.verdict == "passed"


def test_tp04_the_check_refuses_what_mixes_rows(world: World, tmp_path: Path) -> None:
    """A model that does not look at positions sees one long row."""
    rows, _ = tokenized(world, CASES / "TP-04.rows.jsonl", tmp_path / "rows")
    scores = scores_of("sdpa", world.plan(chats(1)).base_model.location)

    def blind(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {k: v for k, v in kwargs.items() if k != "position_ids"}

    scores.model.register_forward_pre_hook(blind, with_kwargs=True)
    check = packing_check(scores, rows, [(0, 1)], 1)
    assert check.verdict == "refused", check


def test_tp05_eager_attention_packs_as_measured(world: World) -> None:
    stated = json.loads((CASES / "TP-05.run.json").read_text())["config"]
    assert stated["data"]["packing"]
    plan = world.plan(
        chats(6),
        packing=True,
        attention_implementation=stated["model"]["attentionImplementation"],
        max_seq_length=60,
        epochs=1,
    )
    run, _ = world.train(plan)
    (check,) = (check for check in run.checks if check["name"] == "packing")
    assert check["verdict"] == "passed"
    assert check["measured"] is not None


def rows_by_step(world: World, run: StoredRun) -> dict[int, list[int]]:
    return {step["step"]: step["metrics"]["row_ids"] for step in world.steps(run)}


def test_rs04_rows_after_a_resume_are_those_of_the_straight_run(world: World) -> None:
    """10 rows, 2 a step, 3 epochs: stopped in the first, at the end and in the last epoch."""
    rate: dict[str, Any] = {"scheduler_kind": "constant"}
    straight, _ = world.train(world.plan(chats(10), **rate))
    expected = rows_by_step(world, straight)
    assert len(expected) == 15
    for step in (2, 5, 13):
        first, _ = world.train(world.plan(chats(10), max_steps=step, **rate))
        rest, _ = world.train(world.plan(chats(10), parent=first, **rate))
        assert rows_by_step(world, first) | rows_by_step(world, rest) == expected, step
        assert min(rows_by_step(world, rest)) == step + 1


def test_a_pad_token_that_is_missing_is_not_needed(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "unpadded"
    tiny_model("llama").save_pretrained(folder)
    tokenizer = byte_tokenizer(CHAT)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    run, ending = world.train(world.plan(chats(5), model=str(folder), precision="fp32", epochs=1))
    assert ending.failure is None
    assert run.updates_applied == 3


def big(path: Path, count: int, size: int) -> Path:
    """``count`` rows of about ``size`` bytes each."""
    filler = "word " * (size // 5)
    with path.open("w") as file:
        for n in range(count):
            messages = [
                {"role": "user", "content": f"{n} {filler}"},
                {"role": "assistant", "content": f"{n}"},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def peak_of(world: World, path: Path, **changes: Any) -> int:
    """Bytes that the process of a job held at most; it must succeed."""
    plan = world.plan(path, max_steps=2, epochs=1, micro_batch_per_gpu=1, **changes)
    run = world.create(plan)
    (rank,) = world.start(run)
    _, status, usage = os.wait4(rank.pid, 0)
    rank.returncode = status
    assert status == 0, (world.store.home / "rank0.log").read_text()[-2000:]
    return usage.ru_maxrss * 1024


@pytest.mark.long
def test_rs04_after_every_step(world: World) -> None:
    rate: dict[str, Any] = {"scheduler_kind": "constant"}
    straight, _ = world.train(world.plan(chats(10), **rate))
    for step in range(1, 15):
        first, _ = world.train(world.plan(chats(10), max_steps=step, **rate))
        rest, _ = world.train(world.plan(chats(10), parent=first, **rate))
        whole = rows_by_step(world, first) | rows_by_step(world, rest)
        assert whole == rows_by_step(world, straight), step


@pytest.mark.long
def test_memory_stays_flat_by_the_number_of_rows(world: World, tmp_path: Path) -> None:
    few = peak_of(world, big(tmp_path / "few.jsonl", 200, 60))
    many = peak_of(world, big(tmp_path / "many.jsonl", 10_000, 60))
    assert many - few < 60e6


@pytest.mark.long
def test_a_hundred_thousand_rows_of_three_hundred_megabytes(world: World, tmp_path: Path) -> None:
    path = big(tmp_path / "rows.jsonl", 100_000, 2900)
    assert path.stat().st_size > 290e6
    assert peak_of(world, path, max_seq_length=4096) < 1.5e9
