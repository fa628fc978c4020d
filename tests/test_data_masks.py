"""Loss masks: which tokens of a row are trained on, and which rows are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masked import (
    case_renderer,
    case_rows,
    chatml,
    family,
    masked,
    refusals,
    renderer_with,
    said,
    trained,
)

from nbtrain.data.masks import LossRules, cut, mask_row
from nbtrain.data.rendering import RowRefused

END = "<|im_end|>"


# --- cases


def test_the_end_token_is_trained_also_where_it_pads() -> None:
    renderer = chatml()
    renderer.tokenizer.pad_token = END
    for row in case_rows("TM-01"):
        found = masked(renderer, row, "last")
        last = max(place for place, one in enumerate(found.trained) if one)
        assert found.ids[last] == renderer.tokenizer.eos_token_id


def test_a_template_without_generation_markers_trains_the_answer_and_its_end() -> None:
    (row,) = case_rows("TM-03")
    assert trained(case_renderer("TM-03", END), row, "last") == ["Lima.<|im_end|>"]


def test_answers_at_the_very_beginning_and_with_white_space_at_their_end() -> None:
    expected = [
        ["K<|im_end|>", "Done.<|im_end|>"],
        ["trailing   <|im_end|>"],
        ["newline\n<|im_end|>", "ok<|im_end|>"],
    ]
    assert [trained(chatml(), row) for row in case_rows("TM-04")] == expected


def test_an_answer_that_is_the_first_character_of_the_text() -> None:
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    renderer = renderer_with(template, [END])
    row = case_rows("TM-04")[0]
    found = masked(renderer, row)
    assert found.spans[0].start == 0
    assert found.trained_texts == ["K<|im_end|>", "Done.<|im_end|>"]


def test_thoughts_that_the_template_cuts_out_of_earlier_turns_refuse_the_row() -> None:
    (row,) = case_rows("TM-06")
    renderer = case_renderer("TM-06", END)
    with pytest.raises(RowRefused) as caught:
        masked(renderer, row, "all")
    (problem,) = caught.value.problems
    assert problem.message == "reasoning removed from 1 of 2 trained turns"
    assert problem.field == "messages[1]"
    assert trained(renderer, row, "last") == ["<think>four by three</think>12<|im_end|>"]


def test_a_thought_that_equals_its_answer_is_missed_too() -> None:
    row = said("2+2?", "<think>4</think>4", "so?", "4")
    renderer = case_renderer("TM-06", END)
    assert refusals(renderer, row) == ["reasoning removed from 1 of 2 trained turns"]


def test_markers_that_are_single_tokens_are_not_searched_for() -> None:
    (row,) = case_rows("TM-12")
    renderer = case_renderer("TM-12", "</s>")
    renderer.tokenizer.add_special_tokens({"additional_special_tokens": ["[I]", "[/I]"]})
    assert trained(renderer, row) == ["uno</s>", "dos</s>"]


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "mistral", "deepseekv3", "qwen3"])
def test_answers_that_repeat_and_stand_in_the_users_text_too(name: str) -> None:
    (row,) = case_rows("TM-13")
    found = trained(family(name), row)
    assert len(found) == 3
    assert all("yes" in text and text.count("yes") == 1 for text in found)


def test_tools_calls_and_results_reach_the_text() -> None:
    (row,) = case_rows("TM-15")
    text = masked(family("qwen2_5"), row).text
    assert text.count("lookup_zip") == 2
    assert '"town": "Ulm"' in text
    # This template writes none of them.
    assert "the chat template ignores the tools of this row" in refusals(chatml(), row)


@pytest.mark.parametrize("place", [0, 1])
def test_missing_content_beside_a_call_is_masked_as_empty(place: int) -> None:
    row = case_rows("TM-16")[place]
    call, answer = trained(family("qwen2_5"), row)
    expected = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>'
    assert (call, answer) == (expected, "Noon.<|im_end|>")


# --- properties

PIECES = st.sampled_from(
    [
        "<|im_start|>assistant\n",
        END,
        "</s>",
        "<s>",
        "[INST]",
        "[/INST]",
        "yes",
        "a",
        " ",
        "\n",
        "🙂",
        "é",
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
        "Aq7zX",
        "Bw3kY",
        "<think>\n",
        "<|eot_id|>",
    ]
)
TEXT = st.lists(PIECES, min_size=1, max_size=6).map("".join).filter(str.strip)
REPLY = TEXT.filter(lambda text: "<think>" not in text)
TURNS = st.lists(st.tuples(TEXT, REPLY), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("name", "before", "after", "trimmed"),
    [
        ("qwen2_5", "", END, False),
        ("llama3", "", "<|eot_id|>", True),
        ("gemma", "", "<end_of_turn>", True),
        ("mistral", " ", "</s>", False),
        ("deepseekv3", "", "<｜end▁of▁sentence｜>", False),
        ("phi3", "", "<|end|>", False),
    ],
)
@settings(max_examples=25, deadline=None)
@given(turns=TURNS, system=st.one_of(st.none(), TEXT))
def test_exactly_the_replies_are_trained_whatever_anybody_writes(
    name: str, before: str, after: str, trimmed: bool, turns: list[tuple[str, str]], system: Any
) -> None:
    row = said(*(text for turn in turns for text in turn))
    if system is not None and name != "gemma":
        row["messages"].insert(0, {"role": "system", "content": system})
    replies = [reply.strip() if trimmed else reply for _, reply in turns]
    expected = [f"{before}{reply}{after}" for reply in replies]
    assert trained(family(name), row, "all") == expected
    assert trained(family(name), row, "last") == expected[-1:]


@settings(max_examples=25, deadline=None)
@given(turns=TURNS)
def test_a_template_that_begins_with_any_reply(turns: list[tuple[str, str]]) -> None:
    row = said(*(text for turn in turns for text in turn))
    row["messages"] = row["messages"][1:]
    assert trained(chatml(), row) == [f"{reply}{END}" for _, reply in turns]


# --- templates that nobody has, but somebody could


def test_a_template_that_repeats_the_system_text_after_every_reply() -> None:
    template = (
        "{% set rules = messages[0].content %}{% for m in messages[1:] %}<{{ m.role }}>"
        "{{ m.content }}{% if m.role == 'assistant' %}{{ rules }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    row = said("a", "b", "c", "d")
    row["messages"].insert(0, {"role": "system", "content": "rules"})
    assert "the chat template mixes an assistant message with the text of another one" in refusals(
        renderer_with(template, [END]), row
    )


def test_replies_that_the_template_runs_together_are_refused() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}{% endfor %}"
    )
    row = said("a", "b")
    row["messages"].append({"role": "assistant", "content": "c"})
    (message,) = refusals(renderer_with(template, [END]), row)
    assert "writes no end-of-turn token" in message


def test_an_end_that_no_reply_ends_with_is_refused() -> None:
    renderer = renderer_with(chatml().tokenizer.chat_template, ["</s>"])
    (message,) = refusals(renderer, said("a", "b"))
    assert "writes no end-of-turn token" in message


def test_a_user_message_that_the_template_leaves_out_is_refused() -> None:
    template = (
        "{% for m in messages %}{% if loop.index0 != 2 %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    expected = ["the chat template leaves out a user message"]
    for gone in ("no", "a", "assistant", "a text that is longer than most"):
        row = said("a", "b", gone, "d")
        assert refusals(renderer_with(template, [END]), row, "last") == expected


def test_a_token_across_the_prompts_end_is_not_trained() -> None:
    # Two line ends are one token here: one of them is the template's.
    renderer = renderer_with(chatml().tokenizer.chat_template, [END])
    renderer.tokenizer.add_tokens(["\n\n"])
    found = masked(renderer, said("a", "\nb"))
    kept = [token for token, one in zip(found.ids, found.trained, strict=True) if one]
    assert renderer.tokenizer.decode(kept) == "b<|im_end|>"


# --- rules


def test_a_mask_column_is_the_mask_as_given() -> None:
    row = said("a", "b", "c", "d") | {"keep": [False, True, False, False]}
    assert trained(chatml(), row, "last", mask_column="keep") == ["b<|im_end|>"]
    # Numbers are as good, and a row without the column follows the rules.
    row["keep"] = [0, 1, 0, 1]
    assert trained(chatml(), row, "last", mask_column="keep") == ["b<|im_end|>", "d<|im_end|>"]
    del row["keep"]
    assert trained(chatml(), row, "last", mask_column="keep") == ["d<|im_end|>"]
    row["keep"] = None
    assert trained(chatml(), row, "last", mask_column="keep") == ["d<|im_end|>"]


def test_a_mask_column_trains_calls_and_results_whatever_the_rules_say() -> None:
    (row,) = case_rows("TM-15")
    row["keep"] = [0, 1, 1, 0]
    call, result = trained(family("qwen2_5"), row, "last", tool_calls=False, mask_column="keep")
    assert call.startswith("<tool_call>")
    assert result == "89073"


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([True, True], "the mask column keep trains on a user message, which is never trained"),
        ([False], "the mask column keep has not one value per message"),
        ([0, 2], "the mask column keep is no list of booleans"),
        ([0, 1.5], "the mask column keep is no list of booleans"),
        ([None, 1], "the mask column keep is no list of booleans"),
        ("01", "the mask column keep is no list of booleans"),
        (True, "the mask column keep is no list of booleans"),
        ([False, False], "no token of this row is trained"),
    ],
)
def test_a_mask_column_that_cannot_be_followed_is_refused(mask: object, expected: str) -> None:
    assert refusals(chatml(), said("a", "b") | {"keep": mask}, mask_column="keep") == [expected]


CALLS = [
    {"id": f"call{n:05}", "type": "function", "function": {"name": "look", "arguments": {"k": n}}}
    for n in range(2)
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}]


@pytest.mark.parametrize(
    ("name", "thought", "expected"),
    [
        ("gemma4_v2", None, ["Say this<turn|>"]),
        ("gemma4_v5", None, ["Say this<|tool_response>"]),
        ("gemma4_v5", "hmm", ["<|channel>thought\nhmm", "Say this<|tool_response>"]),
        ("qwen2_5", None, ["Say this", END]),
        ("lfm2_v2", None, ["Say this", END]),
    ],
)
def test_without_calls_the_text_and_its_end_are_trained_whichever_comes_first(
    name: str, thought: str | None, expected: list[str]
) -> None:
    reply = {"role": "assistant", "content": "Say this", "tool_calls": CALLS}
    reply |= {"reasoning_content": thought} if thought else {}
    row = {"messages": [{"role": "user", "content": "Why?"}, reply], "tools": TOOLS}
    assert trained(family(name), row, "last", tool_calls=False) == expected
    (whole,) = trained(family(name), row, "last")
    assert whole.endswith(expected[-1])
    assert all(one in whole for one in ("look", "Say this"))


def test_a_text_that_the_template_writes_into_a_call_refuses_the_row() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.tool_calls %}call({{ m.tool_calls[0].function.arguments }}{{ m.content }}"
        "{{ m.tool_calls[0].function.arguments }})look{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    reply = {"role": "assistant", "content": "Say this", "tool_calls": CALLS[:1]}
    row = {"messages": [{"role": "user", "content": "Why?"}, reply]}
    renderer = renderer_with(template, [END])
    assert len(trained(renderer, row, "last")) == 1
    (said_why,) = refusals(renderer, row, "last", tool_calls=False)
    assert said_why.startswith("the chat template writes text into a tool call")


def test_a_row_without_an_assistant_message_is_refused() -> None:
    row = {"messages": [{"role": "user", "content": "a"}]}
    assert refusals(chatml(), row) == ["no token of this row is trained"]


def test_everything_that_is_wrong_with_a_row_is_told_at_once() -> None:
    (row,) = case_rows("TM-15")
    row["messages"][3]["reasoning_content"] = "it says so"
    found = refusals(chatml(), row, "last")
    assert found == [
        "the chat template ignores the tools of this row",
        "the chat template leaves out tool calls",
        "reasoning removed from 1 of 1 trained turns",
    ]


# --- cutting


def test_a_row_of_just_the_length_is_not_cut() -> None:
    found = masked(chatml(), said("a", "b"))
    assert cut(found, len(found.ids), "error") is found
    assert cut(found, len(found.ids), "right") is found


def test_cutting_drops_what_is_not_trained_and_nothing_else() -> None:
    # The line end after the last end token.
    found = masked(chatml(), said("a", "b"))
    shorter = cut(found, len(found.ids) - 1, "right")
    assert shorter.ids == found.ids[:-1]
    assert shorter.trained_tokens == found.trained_tokens
    assert len(shorter.offsets) == len(shorter.trained) == len(shorter.ids)
    with pytest.raises(RowRefused, match="would drop trained tokens"):
        cut(found, len(found.ids) - 2, "right")
    with pytest.raises(RowRefused, match="longer than maxSeqLength"):
        cut(found, len(found.ids) - 1, "error")


def test_the_rules_default_to_the_last_turn_with_its_calls() -> None:
    assert LossRules() == LossRules("last", tool_calls=True, tool_results=False, mask_column=None)
    found = mask_row(chatml(), said("a", "b", "c", "d"), LossRules())
    assert found.trained_texts == ["d<|im_end|>"]
    assert found.trained_tokens == 2
