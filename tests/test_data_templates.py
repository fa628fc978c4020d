"""What is trained under the chat templates of real model families, value by value."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from masked import ENDS, family, masked, refusals, said, trained

CHAT = said("one?", "uno", "two?", "dos")
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup_zip",
        "description": "Finds a code",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "description": "Where"}},
        },
    },
}
CALL = {"id": "c12345678", "type": "function"}
CALL_OF = {"name": "lookup_zip", "arguments": {"town": "Ulm"}}
CALLS = {
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": "Zip of Ulm?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL | {"function": CALL_OF}]},
        {"role": "tool", "tool_call_id": "c12345678", "name": "lookup_zip", "content": "89073!"},
        {"role": "assistant", "content": "It is 89073"},
    ],
}


def thinking(row: dict[str, Any]) -> dict[str, Any]:
    """The row with reasoning in a field of its assistant messages."""
    row = copy.deepcopy(row)
    for message in row["messages"]:
        if message["role"] == "assistant":
            message["reasoning_content"] = f"hm {message['content']}"
    return row


QWEN_CALL = (
    '<tool_call>\n{"name": "lookup_zip", "arguments": {"town": "Ulm"}}\n</tool_call><|im_end|>'
)
XML_CALL = (
    "<tool_call>\n<function=lookup_zip>\n<parameter=town>\nUlm\n</parameter>\n</function>\n"
    "</tool_call>"
)
NO_END = "the chat template writes no end-of-turn token after an assistant message that is trained"

# template: the earlier turn, the last turn
CHATS = {
    "qwen2_5": ("uno<|im_end|>", "dos<|im_end|>"),
    # The empty thought of the last turn is the template's, and the model has to write it.
    "qwen3": ("uno<|im_end|>", "<think>\n\n</think>\n\ndos<|im_end|>"),
    # Here the generation prompt opens the thought, so that its opening is not trained.
    "qwen3_5_think": ("uno<|im_end|>", "\n</think>\n\ndos<|im_end|>"),
    "qwen3_instruct_2507": ("uno<|im_end|>", "dos<|im_end|>"),
    "nemotron_3_nano": ("</think>uno<|im_end|>", "</think>dos<|im_end|>"),
    "llama3": ("uno<|eot_id|>", "dos<|eot_id|>"),
    "llama3_1": ("uno<|eot_id|>", "dos<|eot_id|>"),
    "llama3_2": ("uno<|eot_id|>", "dos<|eot_id|>"),
    "mistral": (" uno</s>", " dos</s>"),
    "gemma": ("uno<end_of_turn>", "dos<end_of_turn>"),
    "gemma3": ("uno<end_of_turn>", "dos<end_of_turn>"),
    "gemma4_v5": ("uno<turn|>", "dos<turn|>"),
    # The prompt opens a thought that the whole rendering leaves out.
    "deepseekv3": ("uno<｜end▁of▁sentence｜>", "dos<｜end▁of▁sentence｜>"),
    "deepseek_r1_distill": ("uno<｜end▁of▁sentence｜>", "dos<｜end▁of▁sentence｜>"),
    "phi3": ("uno<|end|>", "dos<|end|>"),
    "phi3_5": ("uno<|end|>", "dos<|end|>"),
    "cohere": ("uno<|END_OF_TURN_TOKEN|>", "dos<|END_OF_TURN_TOKEN|>"),
    "lfm2": ("uno<|im_end|>", "dos<|im_end|>"),
    "lfm2_v2": ("uno<|im_end|>", "dos<|im_end|>"),
    "smolvlm": (" uno<end_of_utterance>", " dos<end_of_utterance>"),
    "idefics3": (" uno<end_of_utterance>", " dos<end_of_utterance>"),
    "llava_next": (" uno</s>", " dos</s>"),
    "muse_glimmer": (" to=user<|message|>uno<|eot|>", " to=user<|message|>dos<|eot|>"),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_trained_turn_is_what_the_model_writes_through_its_end_token(name: str) -> None:
    earlier, last = CHATS[name]
    assert trained(family(name), CHAT, "last") == [last]
    assert trained(family(name), CHAT, "all") == [earlier, last]


@pytest.mark.parametrize("name", ENDS)
def test_ids_are_exactly_those_of_the_tokenizers_template(name: str) -> None:
    renderer = family(name)
    messages = CHAT["messages"]
    if renderer.habits.parts:
        messages = [
            message | {"content": [{"type": "text", "text": message["content"]}]}
            for message in messages
        ]
    expected = renderer.tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    assert renderer.render(CHAT).ids == expected


def test_a_template_without_an_end_for_earlier_turns_trains_the_last_alone() -> None:
    # gpt-oss ends earlier turns with a token that ends no reply.
    renderer = family("gptoss")
    assert trained(renderer, CHAT, "last") == ["<|channel|>final<|message|>dos<|return|>"]
    assert refusals(renderer, CHAT, "all") == [NO_END]


def test_a_template_that_never_ends_the_last_turn_is_refused() -> None:
    # GLM ends a reply by opening the next message, which after the last one does not come.
    renderer = family("glm4moe")
    assert refusals(renderer, CHAT, "last") == [NO_END]
    row = CHAT | {"mask": [0, 1, 0, 0]}
    assert trained(renderer, row, mask_column="mask") == ["\n<think></think>\nuno<|user|>"]


THOUGHTS = {
    "qwen3": "<think>\nhm dos\n</think>\n\ndos<|im_end|>",
    "qwen3_5_think": "hm dos\n</think>\n\ndos<|im_end|>",
    "nemotron_3_nano": "hm dos\n</think>\ndos<|im_end|>",
    "gemma4_v5": "<|channel>thought\nhm dos\n<channel|>dos<turn|>",
    "gptoss": (
        "<|channel|>analysis<|message|>hm dos<|end|><|start|>assistant"
        "<|channel|>final<|message|>dos<|return|>"
    ),
    "muse_glimmer": (
        " to=self<|message|>hm dos<|eom|><|start|>assistant to=user<|message|>dos<|eot|>"
    ),
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning_of_the_last_turn_is_trained_where_the_template_keeps_it(name: str) -> None:
    assert trained(family(name), thinking(CHAT), "last") == [THOUGHTS[name]]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "nemotron_3_nano", "gemma4_v5"])
def test_reasoning_taken_out_of_an_earlier_trained_turn_refuses_the_row(name: str) -> None:
    expected = "reasoning removed from 1 of 2 trained turns"
    assert refusals(family(name), thinking(CHAT), "all") == [expected]


def test_reasoning_is_trained_in_every_turn_where_the_template_keeps_it_everywhere() -> None:
    earlier = " to=self<|message|>hm uno<|eom|><|start|>assistant to=user<|message|>uno<|eot|>"
    found = trained(family("muse_glimmer"), thinking(CHAT), "all")
    assert found == [earlier, THOUGHTS["muse_glimmer"]]


@pytest.mark.parametrize("name", ["llama3", "qwen2_5", "mistral", "deepseekv3", "phi3", "cohere"])
def test_reasoning_that_a_template_does_not_know_refuses_the_row(name: str) -> None:
    expected = "reasoning removed from 1 of 1 trained turns"
    assert refusals(family(name), thinking(CHAT), "last") == [expected]


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_reasoning_in_the_text_that_the_template_cuts_off_refuses_the_row(name: str) -> None:
    row = said("one?", "<think>hm</think>uno")
    expected = "reasoning removed from 1 of 1 trained turns"
    assert refusals(family(name), row, "last") == [expected]


def test_reasoning_in_the_text_is_kept_by_templates_that_write_it_anew() -> None:
    row = said("one?", "<think>hm</think>uno")
    assert trained(family("qwen3"), row) == ["<think>\nhm\n</think>\n\nuno<|im_end|>"]
    assert trained(family("qwen2_5"), row) == ["<think>hm</think>uno<|im_end|>"]


# template: the call, its result, the answer
TOOLS = {
    "qwen2_5": (QWEN_CALL, "89073!", "It is 89073<|im_end|>"),
    "qwen3": (QWEN_CALL, "89073!", "<think>\n\n</think>\n\nIt is 89073<|im_end|>"),
    "qwen3_instruct_2507": (QWEN_CALL, "89073!", "It is 89073<|im_end|>"),
    "qwen3_5_think": (
        f"\n</think>\n\n{XML_CALL}<|im_end|>",
        "89073!",
        "\n</think>\n\nIt is 89073<|im_end|>",
    ),
    "nemotron_3_nano": (
        f"</think>\n{XML_CALL}\n<|im_end|>",
        "89073!",
        "</think>It is 89073<|im_end|>",
    ),
    "llama3_1": (
        '{"name": "lookup_zip", "parameters": {"town": "Ulm"}}<|eot_id|>',
        "89073!",
        "It is 89073<|eot_id|>",
    ),
    "llama3_2": (
        '{"name": "lookup_zip", "parameters": {"town": "Ulm"}}<|eot_id|>',
        "89073!",
        "It is 89073<|eot_id|>",
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "lookup_zip", "arguments": {"town": "Ulm"}, '
        '"id": "c12345678"}]</s>',
        "89073!",
        " It is 89073</s>",
    ),
    "gptoss": (
        ' to=functions.lookup_zip<|channel|>commentary json<|message|>{"town": "Ulm"}<|call|>',
        "89073!",
        "<|channel|>final<|message|>It is 89073<|return|>",
    ),
    "lfm2_v2": (
        "<|tool_call_start|>[lookup_zip(town='Ulm')]<|tool_call_end|><|im_end|>",
        "89073!",
        "It is 89073<|im_end|>",
    ),
}


@pytest.mark.parametrize("name", TOOLS)
def test_calls_and_results_count_as_the_rules_say(name: str) -> None:
    renderer, (call, result, answer) = family(name), TOOLS[name]
    assert trained(renderer, CALLS, "last") == [answer]
    assert trained(renderer, CALLS, "all") == [call, answer]
    assert trained(renderer, CALLS, "all", tool_results=True) == [call, result, answer]
    assert trained(renderer, CALLS, "all", tool_calls=False) == [answer]


@pytest.mark.parametrize("name", TOOLS)
def test_arguments_as_text_and_as_an_object_give_the_same_ids(name: str) -> None:
    spelt = copy.deepcopy(CALLS)
    spelt["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"town":"Ulm"}'
    assert masked(family(name), spelt).ids == masked(family(name), CALLS).ids


def test_arguments_are_text_where_the_template_takes_nothing_else() -> None:
    renderer = family("deepseekv3")
    assert renderer.habits.arguments == "text"
    row = {"messages": CALLS["messages"]}
    call, answer = trained(renderer, row, "all")
    assert call == (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>lookup_zip\n```json\n"
        '{"town": "Ulm"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
    )
    assert answer == "It is 89073<｜end▁of▁sentence｜>"


IGNORED = "the chat template ignores the tools of this row"
LEFT_OUT = "the chat template leaves out tool calls"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3", [IGNORED, LEFT_OUT]),
        ("deepseekv3", [IGNORED]),
        ("deepseek_r1_distill", [IGNORED, LEFT_OUT]),
        ("phi3", [IGNORED, LEFT_OUT, "the chat template leaves out a tool message"]),
        ("lfm2", [LEFT_OUT]),
        ("smolvlm", [IGNORED, LEFT_OUT]),
        ("gemma", ["the chat template does not render this conversation"]),
        ("cohere", ["the chat template does not render this conversation"]),
    ],
)
def test_a_template_that_does_not_know_tools_refuses_the_row(
    name: str, expected: list[str]
) -> None:
    assert refusals(family(name), CALLS, "last") == expected


def test_text_beside_a_call_is_trained_without_the_call() -> None:
    row = copy.deepcopy(CALLS)
    row["messages"][1]["content"] = "Let me look."
    renderer = family("qwen2_5")
    call = f"Let me look.\n{QWEN_CALL}"
    assert trained(renderer, row, "all")[0] == call
    assert trained(renderer, row, "all", tool_calls=False) == [
        "Let me look.",
        "<|im_end|>",
        "It is 89073<|im_end|>",
    ]
    # Llama 3.1 writes the call in place of the text.
    assert refusals(family("llama3_1"), row, "all") == ["text removed from 1 of 2 trained turns"]


def test_several_calls_in_one_message() -> None:
    row = copy.deepcopy(CALLS)
    second = CALL | {"function": {"name": "lookup_area", "arguments": {"town": "Bonn"}}}
    row["messages"][1]["tool_calls"].append(second)
    (call, _) = trained(family("qwen2_5"), row, "all")
    assert call.count("<tool_call>") == 2
    # gpt-oss writes the first one only.
    assert refusals(family("gptoss"), row, "last") == [LEFT_OUT]
    assert refusals(family("llama3_1"), row, "last") == [
        "the chat template does not render this conversation"
    ]


def test_a_call_that_ends_its_row_is_trained_as_the_last_message() -> None:
    row = CALLS | {"messages": CALLS["messages"][:2]}
    assert trained(family("qwen2_5"), row, "last") == [QWEN_CALL]
    assert refusals(family("qwen2_5"), row, "last", tool_calls=False) == [
        "no token of this row is trained"
    ]


def test_a_system_message_that_moves_to_the_last_user_message_stays_untrained() -> None:
    row = {"messages": [{"role": "system", "content": "Rules</s>"}, *CHAT["messages"]]}
    assert trained(family("mistral"), row, "all") == [" uno</s>", " dos</s>"]


@pytest.mark.parametrize("name", ["gemma", "cohere"])
def test_users_twice_in_a_row_are_refused_with_the_roles(name: str) -> None:
    row = said("a", "b", "c", "d")
    row["messages"][3]["role"] = "user"
    with pytest.raises(Exception, match="user, assistant, user, user") as caught:
        masked(family(name), row)
    assert "needs user and assistant to alternate" in str(caught.value)


def test_a_system_message_is_refused_where_the_template_takes_none() -> None:
    row = {"messages": [{"role": "system", "content": "rules"}, *CHAT["messages"]]}
    assert refusals(family("gemma"), row) == [
        "the model's chat template does not take the system message of this row"
    ]
