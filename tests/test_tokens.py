"""Prompts, end ids and replies between text and token ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_tokenizer
from transformers import GenerationConfig

from nbtrain.rollout.tokens import decode_completion, end_ids, render_prompt

TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}:{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)
PLAIN = byte_tokenizer()
CHAT = byte_tokenizer(TEMPLATE)
END = PLAIN.convert_tokens_to_ids("<|end|>")
TURN = PLAIN.convert_tokens_to_ids("<|turn|>")
PAD = PLAIN.convert_tokens_to_ids("<|pad|>")


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (None, (END,)),
        (7, (7, END)),
        ([9, 7], (7, 9, END)),
        ([END, END], (END,)),
    ],
)
def test_end_ids_are_those_of_the_generation_config_and_the_tokenizer(declared, expected) -> None:
    assert end_ids(GenerationConfig(eos_token_id=declared), PLAIN) == expected


def test_end_ids_without_any_declared() -> None:
    assert end_ids(None, None) == ()


def test_messages_go_through_the_chat_template_up_to_the_assistants_turn() -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = render_prompt(CHAT, prompt)
    text = "<|turn|>system:Be brief.<|end|><|turn|>user:Hi<|end|><|turn|>assistant:"
    assert CHAT.decode(ids) == text
    assert ids.count(TURN) == 3
    assert all(type(token) is int for token in ids)


def test_text_is_a_user_turn_where_there_is_a_template_and_plain_otherwise() -> None:
    turn = render_prompt(CHAT, [{"role": "user", "content": "Hi"}])
    assert render_prompt(CHAT, "Hi") == turn
    assert render_prompt(CHAT, "Hi", raw=True) == tuple(CHAT("Hi")["input_ids"])
    assert render_prompt(PLAIN, "Hi") == tuple(PLAIN("Hi")["input_ids"])


@pytest.mark.parametrize(
    ("tokenizer", "raw", "why"), [(PLAIN, False, "no chat template"), (CHAT, True, "is raw")]
)
def test_messages_that_cannot_be_rendered_are_refused(tokenizer, raw, why) -> None:
    with pytest.raises(ValueError, match=why):
        render_prompt(tokenizer, [{"role": "user", "content": "Hi"}], raw=raw)


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_text_round_trips_with_and_without_an_end_id(text: str) -> None:
    ids = PLAIN(text, add_special_tokens=False)["input_ids"]
    if {END, TURN, PAD} & set(ids):
        return
    assert decode_completion(PLAIN, ids, (END,)) == text
    assert decode_completion(PLAIN, [*ids, END], (END,)) == text


def test_only_the_last_id_is_taken_as_the_end_and_other_special_tokens_are_left_out() -> None:
    hello, end_like = PLAIN("hello")["input_ids"], PLAIN("!")["input_ids"][0]
    assert decode_completion(PLAIN, [*hello, TURN, *hello, END], (END,)) == "hellohello"
    # An ordinary token can be an end id: it is cut at the end and kept elsewhere.
    assert decode_completion(PLAIN, [end_like, *hello, end_like], (end_like,)) == "!hello"
    assert decode_completion(PLAIN, [END], (END,)) == ""
    assert decode_completion(PLAIN, [], (END,)) == ""


def test_spaces_before_punctuation_are_kept() -> None:
    ids = PLAIN("a , b .")["input_ids"]
    assert decode_completion(PLAIN, ids, ()) == "a , b ."
