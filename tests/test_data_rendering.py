"""Rows through the tokenizer's own template: shapes, ids and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from masked import CASES, case_renderer, case_rows, chatml, family, said, tokenizer_with
from transformers import AutoTokenizer

from nbtrain.catalog.base_models import embedded_folder
from nbtrain.data.probing import changed_part
from nbtrain.data.rendering import Renderer, RowRefused
from nbtrain.errors import Refused


def problems(renderer: Renderer, row: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(RowRefused) as caught:
        renderer.render(row)
    return [(problem.field, problem.message) for problem in caught.value.problems]


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CASES / name).read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("text", "others", "expected"),
    [
        ("<a>same</a>", ["<a>X</a>", "<a>Yz</a>"], (3, 7)),
        ("<a></a>", ["<a>X</a>", "<a>Y</a>"], (3, 3)),
        # One stand-in shares the text's ends, the other does not.
        ("<a>Xq</a>", ["<a>X</a>", "<a>Y</a>"], (3, 5)),
        ("aaaa", ["aa"], (2, 4)),
        ("", ["x"], (0, 0)),
    ],
)
def test_the_part_that_changes(text: str, others: list[str], expected: tuple[int, int]) -> None:
    assert changed_part(text, others) == expected


def test_offsets_say_which_characters_a_token_covers() -> None:
    found = chatml().render(said("Grüße 🙂", "ok"))
    ordinary = [
        (found.text[start:end], token)
        for token, (start, end) in zip(found.ids, found.offsets, strict=True)
    ]
    assert ("<|im_end|>", chatml().tokenizer.eos_token_id) in ordinary
    # The bytes of one character all cover that character.
    assert [text for text, _ in ordinary].count("🙂") == 4
    assert chatml().tokenizer.decode(found.ids) == found.text


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "qwen3_5_think", "nemotron_3_nano"])
def test_turns_without_reasoning_get_no_thought_that_the_template_does_not_write(
    name: str,
) -> None:
    (row,) = case_rows("TM-07")
    renderer = family(name)
    expected = renderer.tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert renderer.render(row).text == expected
    assert renderer.render(row).ids == renderer.tokenizer.encode(expected, add_special_tokens=False)


def test_the_embedded_models_own_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    row = said("2+3=", "5")
    expected = tokenizer.apply_chat_template(row["messages"], tokenize=True)["input_ids"]
    assert Renderer(tokenizer).render(row).ids == expected


# --- shapes


def test_text_parts_are_joined_where_the_template_takes_a_text() -> None:
    one, two, image = lines("DF-11.parts.jsonl")
    assert chatml().render(one).text.startswith("<|im_start|>user\nhi<|im_end|>")
    assert chatml().render(two).text.startswith("<|im_start|>user\nab<|im_end|>")
    assert problems(chatml(), image) == [
        (
            "messages[0].content",
            "content has a part that is not text; training on it is not built yet",
        )
    ]


def test_texts_become_parts_where_the_template_takes_nothing_else() -> None:
    renderer = family("smolvlm")
    assert renderer.habits.parts
    parts = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": "yo"},
        ]
    }
    expected = "<|im_start|>User: hi<end_of_utterance>\nAssistant: yo<end_of_utterance>\n"
    assert renderer.render(parts).text == renderer.render(said("hi", "yo")).text == expected


def test_both_spellings_of_arguments_give_the_same_tokens_and_keep_their_types() -> None:
    as_text, as_number, as_json = lines("DF-06.args.jsonl")
    renderer = family("qwen3")
    assert renderer.render(as_number).ids == renderer.render(as_json).ids
    assert '{"when": 1690876800}' in renderer.render(as_json).text
    assert '{"when": "2025-08-01"}' in renderer.render(as_text).text
    assert "null" not in renderer.render(as_json).text


def test_missing_content_beside_calls_is_empty_and_never_the_word_none() -> None:
    null, absent, bare = lines("TM-16.rows.jsonl")
    for name in ("qwen2_5", "qwen3", "mistral", "deepseekv3"):
        row, same = (json.loads(json.dumps(one)) for one in (null, absent))
        text = family(name).render(row).text
        assert "None" not in text
        assert text == family(name).render(same).text
    message = "content is missing; only a message with tool calls may have none"
    assert problems(chatml(), bare) == [("messages[1].content", message)]


@pytest.mark.parametrize("arguments", ["[1]", "{", 7, ["a"]])
def test_arguments_that_are_no_object_are_refused(arguments: object) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    row = said("a", "b")
    row["messages"][1]["tool_calls"] = [call]
    assert problems(family("qwen3"), row) == [
        ("messages[1].tool_calls[0]", "the arguments of a tool call are no JSON object")
    ]


def test_empty_lists_of_calls_and_tools_are_none_at_all() -> None:
    row = said("a", "b") | {"tools": []}
    row["messages"][1]["tool_calls"] = []
    assert family("llama3_1").render(row).ids == family("llama3_1").render(said("a", "b")).ids


def test_a_message_of_unknown_keys_is_rendered_as_without_them() -> None:
    row = said("a", "b")
    row["messages"][1]["loss"] = False
    assert chatml().render(row).ids == chatml().render(said("a", "b")).ids


def test_half_a_surrogate_pair_is_refused() -> None:
    assert problems(chatml(), said("a", "\ud83d")) == [
        ("messages", "the tokenizer cannot encode this row")
    ]


# --- refusals


def test_alternation_is_named_with_the_roles() -> None:
    good, bad = case_rows("TM-09")
    assert family("gemma").render(good).ids
    with pytest.raises(RowRefused) as caught:
        family("gemma").render(bad)
    (problem,) = caught.value.problems
    assert problem.message == "the chat template needs user and assistant to alternate"
    assert problem.hint is not None
    assert problem.hint.startswith("Roles: user, assistant, user, user.")


def test_a_system_role_that_the_template_rejects_is_named_and_never_moved() -> None:
    renderer = case_renderer("TM-10", "<end_of_turn>")
    first, second, third = case_rows("TM-10")
    assert renderer.render(first).ids != renderer.render(third).ids
    with pytest.raises(RowRefused) as caught:
        renderer.render(second)
    (problem,) = caught.value.problems
    assert "does not take the system message" in problem.message
    assert "system role is not accepted here" in str(problem)


def test_a_tokenizer_without_a_template_is_refused_once_with_a_hint() -> None:
    with pytest.raises(Refused, match="no chat template") as caught:
        Renderer(tokenizer_with(None, ["<|im_end|>"]))
    assert "instruct version" in str(caught.value.problems[0].hint)


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    tokenizer = tokenizer_with("{{ messages[0].content }}", ["<|im_end|>"])
    tokenizer.eos_token = None
    with pytest.raises(Refused, match="ends a reply"):
        Renderer(tokenizer)


def test_a_tokenizer_that_encodes_the_rendered_text_otherwise_is_refused() -> None:
    class Other(type(chatml().tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, *arguments: Any, **named: Any) -> Any:
            found = super().apply_chat_template(*arguments, **named)
            if named.get("tokenize"):
                found["input_ids"] = [*found["input_ids"][1:], found["input_ids"][0]]
            return found

    tokenizer = tokenizer_with(chatml().tokenizer.chat_template, ["<|im_end|>"])
    tokenizer.__class__ = Other
    message = "the tokenizer gives other ids for the rendered text than its template does"
    assert problems(Renderer(tokenizer), said("a", "b")) == [("messages", message)]
