"""The rules of a chat row, one by one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from datasets_world import CASES

from nbtrain.data.conversations import Conversations
from nbtrain.data.datasets import DatasetRegistry
from nbtrain.data.findings import Finding, Findings
from nbtrain.store import open_store

USER = {"role": "user", "content": "q"}
DONE = {"role": "assistant", "content": "a"}


def call(ident: str = "c", **more: Any) -> dict[str, Any]:
    return {"id": ident, "type": "function", "function": {"name": "f", "arguments": {}}} | more


def calling(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls) or [call()]} | more


def result(ident: Any = "c", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": ident, "content": "r"} | more


def look(*messages: Any, **columns: Any) -> tuple[Findings, Conversations]:
    findings = Findings()
    rules = Conversations(findings)
    row = {"messages": list(messages), **columns}
    before = copy.deepcopy(row)
    rules.check(row, 7)
    assert row == before  # nothing is repaired
    return findings, rules


def said(findings: Findings) -> list[str]:
    return [found.message for found in findings.refusals]


# --- rows that are right


@pytest.mark.parametrize(
    ("messages", "facts"),
    [
        ([USER, DONE], {}),
        ([{"role": "system", "content": ""}, USER, DONE], {}),
        ([USER, USER, DONE, DONE], {}),
        ([USER], {"unanswered"}),
        ([USER, calling(), result(), DONE], {"tools"}),
        ([USER, calling(call("a"), call("b")), result("b"), result("a"), DONE], {"tools"}),
        ([USER, calling(), result(), calling(), result(), DONE], {"tools"}),
        ([USER, calling()], {"tools"}),
        ([USER, calling(), result()], {"tools", "unanswered"}),
        ([USER, {"role": "assistant", "tool_calls": [call()]}, result(), DONE], {"tools"}),
        ([USER, calling(call(function={"name": "f", "arguments": '{"a": 1}'}))], {"tools"}),
        ([USER, {**DONE, "tool_calls": None, "tool_call_id": None, "name": None}], {}),
        ([{**USER, "tool_calls": []}, {**DONE, "tool_calls": []}], {}),
        ([USER, calling(), result(name="f"), DONE], {"tools"}),
        ([USER, {"role": "assistant", "content": "", "reasoning_content": "hm"}], {}),
        ([USER, {"role": "assistant", "content": "", "thinking": "hm"}], {}),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}, DONE], {}),
        ([{"role": "user", "content": [{"type": "image", "path": "i/x.png"}]}, DONE], {"images"}),
        ([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}, DONE], {"images"}),
        ([USER, calling(), result(content=""), DONE], {"tools"}),
    ],
)
def test_good_rows_have_no_findings(messages: list[Any], facts: set[str]) -> None:
    findings, rules = look(*messages)
    assert said(findings) == []
    assert findings.notes == []
    rules.facts.pop("answers_without_json", None)
    assert rules.facts == dict.fromkeys(facts, (1, 7))


def test_a_tool_list_counts_as_tools() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    findings, rules = look(USER, DONE, tools=[tool])
    assert not findings.refused
    assert rules.facts["tools"] == (1, 7)
    assert rules.columns == {"messages", "tools"}
    assert "tools" not in look(USER, DONE, tools=None)[1].facts


# --- rows that are not


@pytest.mark.parametrize(
    ("messages", "field", "message"),
    [
        ([], "messages", "messages is an empty list"),
        (["x"], "messages[0]", "messages[0] is text"),
        ([{"content": "x"}], "messages[0]", "messages[0] has no role; its keys are: content"),
        ([{"role": 3}], "messages[0].role", "messages[0].role is a number"),
        ([{"role": "gpt"}], "messages[0].role", "messages[0].role is 'gpt'"),
        (
            [USER, {"role": "system", "content": "x"}, DONE],
            "messages[1]",
            "messages[1] is a system message, but not the first",
        ),
        (
            [{"role": "user"}, DONE],
            "messages[0].content",
            "messages[0].content is missing",
        ),
        (
            [USER, {"role": "assistant", "content": None}],
            "messages[1].content",
            "messages[1].content is null",
        ),
        (
            [USER, {"role": "assistant", "content": None, "tool_calls": []}],
            "messages[1].content",
            "messages[1].content is null",
        ),
        ([{"role": "user", "content": " \n"}, DONE], "messages[0].content", None),
        (
            [{"role": "user", "content": [{"type": "text", "text": ""}]}],
            "messages[0].content",
            None,
        ),
        ([USER, {"role": "assistant", "content": ""}], "messages[1].content", None),
        (
            [USER, {**DONE, "thinking": {"a": 1}}],
            "messages[1].thinking",
            "messages[1].thinking is an object",
        ),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", None),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]", None),
        ([{"role": "user", "content": [{"type": "audio"}]}], "messages[0].content[0]", None),
        ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0].path", None),
        ([USER, {"role": "assistant", "content": [{"type": "image", "path": "x"}]}],
         "messages[1].content[0]", None),
        ([{**USER, "tool_calls": [call()]}], "messages[0].tool_calls", None),
        ([USER, {**DONE, "tool_calls": {"a": 1}}], "messages[1].tool_calls", None),
        ([USER, calling("x")], "messages[1].tool_calls[0]", None),
        ([USER, calling(call(id=None))], "messages[1].tool_calls[0].id", None),
        ([USER, calling(call(type="tool"))], "messages[1].tool_calls[0].type", None),
        ([USER, calling(call(function=None))], "messages[1].tool_calls[0].function", None),
        (
            [USER, calling(call(function={"name": "", "arguments": {}}))],
            "messages[1].tool_calls[0].function.name",
            "messages[1].tool_calls[0].function.name is empty text",
        ),
        (
            [USER, calling(call(function={"name": "f"}))],
            "messages[1].tool_calls[0].function.arguments",
            "messages[1].tool_calls[0].function.arguments is missing",
        ),
        (
            [USER, calling(call(function={"name": "f", "arguments": "{a}"}))],
            "messages[1].tool_calls[0].function.arguments",
            "messages[1].tool_calls[0].function.arguments is text that is not JSON",
        ),
        (
            [USER, calling(call(function={"name": "f", "arguments": "[1]"}))],
            "messages[1].tool_calls[0].function.arguments",
            "messages[1].tool_calls[0].function.arguments is the JSON text of a list",
        ),
        ([USER, calling(call("a"), call("a"))], "messages[1].tool_calls[1].id", None),
        (
            [USER, calling(), DONE],
            "messages[1].tool_calls[0]",
            "messages[1].tool_calls[0] has no result before the next turn",
        ),
        ([USER, calling(), USER, DONE], "messages[1].tool_calls[0]", None),
        ([USER, calling(call("a"), call("b")), result("a")], "messages[1].tool_calls[1]", None),
        (
            [USER, result("z"), DONE],
            "messages[1].tool_call_id",
            "messages[1].tool_call_id names no earlier call",
        ),
        (
            [USER, calling(), result(), result(), DONE],
            "messages[3].tool_call_id",
            "messages[3].tool_call_id names a call that has its result",
        ),
        ([USER, calling(), result(None)], "messages[2].tool_call_id", None),
        ([USER, {**DONE, "function_call": {"name": "f"}}], "messages[1].function_call", None),
    ],
)  # fmt: skip
def test_bad_rows_are_named_by_field(messages: list[Any], field: str, message: str | None) -> None:
    findings, _ = look(*messages)
    found = findings.refusals[0]
    assert found.field == field
    assert found.expected
    assert found.lines == [7]
    if message is not None:
        assert found.message == message


@pytest.mark.parametrize("message", [USER, DONE])
@pytest.mark.parametrize(
    ("calls", "found"),
    [({}, "an object"), ("", "empty text"), (0, "a number"), (False, "a truth value")],
)
def test_calls_of_a_wrong_type_are_refused_though_they_are_empty(
    message: dict[str, Any], calls: Any, found: str
) -> None:
    findings, rules = look(USER, {**message, "tool_calls": calls}, DONE)
    assert said(findings) == [f"messages[1].tool_calls is {found}"]
    assert "tools" not in rules.facts


@pytest.mark.parametrize("name", [{"x": 1}, 0, False, []])
@pytest.mark.parametrize("place", [0, 2])
def test_a_name_is_text(place: int, name: Any) -> None:
    messages = [USER, calling(), result(), DONE]
    messages[place] = {**messages[place], "name": name}
    (found,) = look(*messages)[0].refusals
    assert (found.field, found.expected) == (f"messages[{place}].name", "text")


def test_a_name_that_most_templates_leave_out_is_noted() -> None:
    (note,) = look({**USER, "name": "Ann"}, DONE)[0].notes
    assert (note.field, note.found) == ("messages[0].name", "name")
    assert "template" in (note.hint or "")


@pytest.mark.parametrize(
    "path", ["/abs/x.png", "~/x.png", "../x.png", "a/../../x.png", "https://x/y.png", "data:x"]
)
def test_an_image_is_a_relative_path_below_the_rows(path: str) -> None:
    findings, _ = look({"role": "user", "content": [{"type": "image", "path": path}]}, DONE)
    assert [found.field for found in findings.refusals] == ["messages[0].content[0].path"]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("[]", "tools is text"),
        (["f"], "tools[0] is text"),
        ([{"name": "f"}], "tools[0] is without type 'function' and a function"),
        ([{"type": "function", "function": {}}], "tools[0] is a function without a name"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": []}}],
            "tools[0] is a function whose parameters are an empty list",
        ),
    ],
)
def test_tools_are_a_list_of_function_schemas(tools: Any, message: str) -> None:
    assert said(look(USER, DONE, tools=tools)[0]) == [message]


def test_all_that_is_wrong_with_a_row_is_said() -> None:
    findings, _ = look({"role": "gpt", "content": "x"}, {"role": "user", "content": 1}, calling())
    assert [found.field for found in findings.refusals] == [
        "messages[0].role",
        "messages[1].content",
    ]
    assert findings.refusals[0].hint == "'assistant' is nearest"


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"conversations": []}, "'from'"),
        ({"prompt": "a", "completion": "b"}, "'completion' to the assistant's"),
        ({"instruction": "a", "input": "", "output": "b"}, "'output' to the assistant's"),
        ({"text": "a"}, "plain text"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference pairs"),
        ({"message": []}, "'message' is nearest to 'messages'"),
    ],
)
def test_other_layouts_are_recognised(row: dict[str, Any], hint: str) -> None:
    findings = Findings()
    Conversations(findings).check(row, 1)
    (found,) = findings.refusals
    assert hint in (found.hint or "")
    assert found.found == ", ".join(row)


def test_messages_that_are_sharegpts_are_recognised() -> None:
    findings, _ = look({"from": "human", "value": "x"})
    assert findings.refusals[0].hint == "'from' is nearest to 'role', 'value' to 'content'"


# --- cases from the field


@pytest.fixture
def registry(home: Path) -> DatasetRegistry:
    return DatasetRegistry(open_store())


def test_arguments_keep_their_types_and_get_no_keys_of_other_rows(
    registry: DatasetRegistry,
) -> None:
    rows = list(registry.register("d", CASES / "DF-06.args.jsonl").open_rows())
    arguments = [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in rows]
    assert arguments == [{"when": "2025-08-01"}, {"when": 1690876800}, '{"when": 1690876800}']


def test_contents_that_are_no_text_are_named_each_by_its_kind() -> None:
    findings = Findings()
    rules = Conversations(findings)
    for line, kind in enumerate([{"a": 1}, 42, True, [], 43], 1):
        rules.check({"messages": [USER, {"role": "assistant", "content": kind}]}, line)
    assert [(found.message, found.count) for found in findings.refusals] == [
        ("messages[1].content is an object", 1),
        ("messages[1].content is a number", 2),
        ("messages[1].content is a truth value", 1),
        ("messages[1].content is an empty list", 1),
    ]


def test_parts_are_kept_and_an_image_is_a_fact(registry: DatasetRegistry) -> None:
    found = registry.register("d", CASES / "DF-11.parts.jsonl")
    assert found.facts["images"] == (1, 3)
    assert found.page(1, 1)[0]["messages"][0]["content"][1] == {"type": "text", "text": "b"}
    assert found.images == {"x.png": None}


def test_unknown_keys_of_messages_are_kept_and_listed_once(registry: DatasetRegistry) -> None:
    found = registry.register("d", CASES / "DF-12.msgkeys.jsonl")
    assert [(one.severity, one.found, one.count, one.lines) for one in found.findings] == [
        ("note", "loss", 1, [1]),
        ("note", "type", 1, [2]),
    ]
    assert "does not change the loss" in (found.findings[0].hint or "")
    assert next(found.open_rows())["messages"][0]["loss"] is False


def test_null_content_is_right_only_beside_calls(registry: DatasetRegistry) -> None:
    lines = (CASES / "TM-16.rows.jsonl").read_text("utf-8").splitlines()
    findings = Findings()
    rules = Conversations(findings)
    for number, line in enumerate(lines, 1):
        rules.check(json.loads(line), number)
    assert [(found.field, found.lines) for found in findings.refusals] == [
        ("messages[1].content", [3])
    ]


def test_findings_travel_as_plain_values() -> None:
    findings, _ = look(USER, {**DONE, "weight": 0})
    (note,) = findings.notes
    assert Finding.from_json(note.to_json()) == note
