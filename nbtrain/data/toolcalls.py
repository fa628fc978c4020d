"""What is wrong with tool calls and with lists of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from nbtrain.data.layouts import Say, cut
from nbtrain.data.rows import shape

__all__ = ["A_CALL", "call_complaints", "check_tools"]

A_CALL = '{"id", "type": "function", "function": {"name", "arguments"}}'
A_TOOL = '{"type": "function", "function": {"name", …}}'


def call_complaints(call: Any) -> Iterator[tuple[str, str]]:
    """Where a tool call is not as it should be, and what is there."""
    if type(call) is not dict:
        yield "", shape(call)
        return
    ident, kind, function = call.get("id"), call.get("type"), call.get("function")
    if not isinstance(ident, str) or not ident:
        yield ".id", shape(ident) if "id" in call else "missing"
    if kind != "function":
        yield ".type", cut(kind) if isinstance(kind, str) else _there(call, "type")
    if type(function) is not dict:
        yield ".function", _there(call, "function")
        return
    if not isinstance(function.get("name"), str) or not function["name"]:
        yield ".function.name", _there(function, "name")
    arguments = function.get("arguments")
    if type(arguments) is dict:
        return
    if not isinstance(arguments, str):
        yield ".function.arguments", _there(function, "arguments")
        return
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        yield ".function.arguments", "text that is not JSON"
        return
    if type(read) is not dict:
        yield ".function.arguments", f"the JSON text of {shape(read)}"


def check_tools(tools: Any, say: Say) -> None:
    """Say what is wrong with a row's list of tools."""
    if not isinstance(tools, list):
        found = shape(tools)
        say("tools", "tools", f"tools is {found}", f"a list of {A_TOOL}", found=found)
        return
    for place, tool in enumerate(tools):
        at = f"tools[{place}]"
        function = tool.get("function") if type(tool) is dict else None
        if type(tool) is not dict:
            found = shape(tool)
        elif tool.get("type") != "function" or type(function) is not dict:
            found = "without type 'function' and a function"
        elif not isinstance(function.get("name"), str) or not function["name"]:
            found = "a function without a name"
        elif type(function.get("parameters", {})) is not dict:
            found = f"a function whose parameters are {shape(function['parameters'])}"
        else:
            continue
        say("tools", at, f"{at} is {found}", A_TOOL, found=found)


def _there(mapping: dict[str, Any], key: str) -> str:
    return shape(mapping[key]) if key in mapping else "missing"
