"""The embedded model: what it is, what it can do, and that its script makes it."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from nbtrain.catalog import EMBEDDED, Catalog, sums_rows
from nbtrain.catalog.base_models import embedded_folder
from nbtrain.store import open_store
from nbtrain.training.embedded import make
from nbtrain.training.embedded.demonstrations import (
    CLEAN,
    MIXED,
    Quality,
    addition,
    counting,
    reversing,
    single_turn,
    sorting,
    with_calculator,
)

FOLDER = embedded_folder()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def test_the_catalog_knows_it(home: Path) -> None:
    model = Catalog(open_store(home)).base_model(EMBEDDED)
    assert (model.slug, model.kind, model.location) == (EMBEDDED, "embedded", str(FOLDER))
    assert (model.parameters, model.max_context, model.precision) == (675_200, 1024, "fp32")


def test_it_takes_at_most_two_megabytes() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 2_000_000


def test_its_card_names_these_weights() -> None:
    digest = hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
    card = (FOLDER / "README.md").read_text("utf-8")
    assert digest in card
    assert "license: apache-2.0" in card


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_round_trips(text: str) -> None:
    tokenizer = make.build_tokenizer(1024)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_whole_reply_takes_five_tokens(tokenizer: Any) -> None:
    ids = tokenizer.encode("<answer>99</answer><|im_end|>")
    assert len(ids) == 5
    assert ids[-1] == tokenizer.eos_token_id
    assert len(tokenizer) == 276


@pytest.mark.parametrize("conversation", [single_turn, with_calculator])
@pytest.mark.parametrize("quality", [CLEAN, MIXED])
def test_what_it_was_made_of_is_what_its_template_renders(
    tokenizer: Any, conversation: Any, quality: Quality
) -> None:
    rng = Random(0)
    for _ in range(50):
        messages = conversation(quality, rng)
        ids, labels = make.encode(tokenizer, messages)
        rendered = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids == rendered["input_ids"]
        assert [label != -100 for label in labels] == [bool(m) for m in rendered["assistant_masks"]]


def test_no_held_out_sum_was_demonstrated() -> None:
    held_out = {row["prompt"][0]["content"] for row in sums_rows()[1]}
    train = {row["prompt"][0]["content"] for row in sums_rows()[0]}
    rng = Random(1)
    asked = {addition(rng)[0] for _ in range(60_000)}
    asked |= {
        with_calculator(MIXED, rng)[0]["content"].removesuffix(" Use the calculator.")
        for _ in range(60_000)
    }
    assert not asked & held_out
    assert train <= asked  # so many draws show nearly every pair: the absence means something


@pytest.mark.parametrize(
    ("task", "solve"),
    [
        (addition, lambda q: str(sum(int(n) for n in q[8:-1].split(" + ")))),
        (sorting, lambda q: "".join(sorted(q.removeprefix("Sort the digits ")[:-1]))),
        (reversing, lambda q: q.removeprefix("Reverse the letters ")[:-1][::-1]),
        (counting, lambda q: str(q.split(" appear in ")[1].count(q.split()[4]))),
    ],
)
def test_right_answers_are_right(task: Any, solve: Any) -> None:
    rng = Random(2)
    for _ in range(300):
        question, answer = task(rng)
        assert answer == solve(question)


def test_the_mix_has_the_shares_it_states() -> None:
    rng = Random(3)
    tagged = right = 0
    for _ in range(8_000):
        question, reply = single_turn(MIXED, rng)
        if not question["content"].startswith("What is "):
            continue
        a, b = question["content"][8:-1].split(" + ")
        is_tagged = reply["content"].startswith("<answer>")
        tagged += is_tagged
        right += reply["content"] == f"<answer>{int(a) + int(b)}</answer>"
    assert 0.27 < right / 8_000 / (5 / 10.5) < 0.33
    assert 0.52 < tagged / 8_000 / (5 / 10.5) < 0.58


def test_the_skill_is_there_and_only_part_of_the_samples_show_it(
    model: Any, tokenizer: Any
) -> None:
    questions = make.held_out_sums()
    torch.manual_seed(0)
    assert make.share_right(model, tokenizer, questions, greedy=True) >= 0.95
    assert 0.2 <= make.share_right(model, tokenizer, questions, greedy=False) <= 0.4


def test_it_calls_the_calculator_and_reads_its_answer(model: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "What is 51 + 48? Use the calculator."}]

    def reply() -> str:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        out = model.generate(ids, max_new_tokens=20, do_sample=False)
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    assert reply() == "<calc>51+48</calc>"
    messages += [
        {"role": "assistant", "content": "<calc>51+48</calc>"},
        {"role": "tool", "content": "99"},
    ]
    assert reply() == "<answer>99</answer>"


def test_both_end_tokens_stop_it(model: Any, tokenizer: Any) -> None:
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == ends
    assert tokenizer.pad_token_id not in ends


def test_the_script_writes_what_is_embedded_and_repeats_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make, "CLEAN_STEPS", 1)
    monkeypatch.setattr(make, "MIXED_STEPS", 1)
    monkeypatch.setattr(make, "BATCH", 8)
    monkeypatch.setattr(make, "report", lambda *_: None)
    made = []
    for name in ("one", "two"):
        monkeypatch.setattr(sys, "argv", ["make", "--out", str(tmp_path / name)])
        try:
            make.main()
        finally:
            torch.use_deterministic_algorithms(False)
        made.append((tmp_path / name / "model.safetensors").read_bytes())
    assert made[0] == made[1]
    assert len(made[0]) == (FOLDER / "model.safetensors").stat().st_size
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "one" / name).read_bytes() == (FOLDER / name).read_bytes()
    for name in ("config.json", "generation_config.json"):
        ours, its = (json.loads((f / name).read_text()) for f in (tmp_path / "one", FOLDER))
        ours.pop("transformers_version")
        its.pop("transformers_version")
        assert ours == its
