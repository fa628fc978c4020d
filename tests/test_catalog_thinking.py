"""Levels of thinking, read from chat templates as model families write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_tokenizer

from nbtrain.catalog.thinking import (
    template_arguments,
    template_in,
    template_kind,
    templates_in,
    thinking,
)
from nbtrain.rollout.tokens import render_prompt

# the forms in which templates read their variables, each cut down to that
SWITCH = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)
SWITCH_WITH_DEFAULT = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{% if thinking %}<think>{% endif %}"
)
SWITCH_BY_FILTER = (
    "{% set enable_thinking = enable_thinking | default(true) %}{{ enable_thinking }}"
)
WRITTEN_OUT = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "{{ 'Reasoning: ' + reasoning_effort }}"
)
COMPARED = (
    "{% set effort = reasoning_effort | default('high') %}{% if effort == 'none' %}0"
    "{% elif effort in ['low', 'high'] %}{{ effort }}{% endif %}"
)
TABLE = "{{ {'minimal': 1, 'xhigh': 9}[reasoning_effort] }}{{ '' if enable_thinking else 'off' }}"
MARKED = (
    "{% generation %}{% for m in messages %}{% break %}{% endfor %}{% endgeneration %}" + SWITCH
)
IN_MESSAGES = "{% for m in messages %}{{ m.thinking }}{{ m['reasoning_effort'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "architecture", "levels"),
    [
        (SWITCH, None, ("off", "on")),
        (SWITCH_WITH_DEFAULT, None, ("off", "on")),
        (SWITCH_BY_FILTER, None, ("off", "on")),
        (MARKED, None, ("off", "on")),
        (WRITTEN_OUT, "gpt_oss", ("low", "medium", "high")),
        (WRITTEN_OUT, "other", ("medium",)),
        (COMPARED, None, ("off", "low", "high")),
        (TABLE, None, ("off", "minimal", "xhigh")),
        (IN_MESSAGES, None, ()),
        ("{{ messages[0].content }}", "gpt_oss", ()),
        ("{% if broken", None, ()),
        ("{{ reasoning_effort }}", None, ()),
        ("", None, ()),
        (None, "gpt_oss", ()),
    ],
)
def test_levels_are_what_the_template_reads(
    template: str | None, architecture: str | None, levels: tuple[str, ...]
) -> None:
    assert thinking(template, architecture).levels == levels
    assert thinking(template, architecture).levels == levels  # analysing changes nothing


@pytest.mark.parametrize(
    ("template", "effort", "given_"),
    [
        (SWITCH, "off", {"enable_thinking": False}),
        (SWITCH, "on", {"enable_thinking": True}),
        (SWITCH_WITH_DEFAULT, "on", {"thinking": True}),
        (COMPARED, "off", {"reasoning_effort": "none"}),
        (COMPARED, "low", {"reasoning_effort": "low"}),
        (TABLE, "off", {"enable_thinking": False}),
        (TABLE, "xhigh", {"enable_thinking": True, "reasoning_effort": "xhigh"}),
        (SWITCH, None, {}),
        (None, None, {}),
        ({"default": SWITCH, "tool_use": COMPARED}, "on", {"enable_thinking": True}),
    ],
)
def test_a_level_becomes_the_template_s_own_variables(
    template: str | dict[str, str] | None, effort: str | None, given_: dict[str, object]
) -> None:
    assert template_arguments(template, effort) == given_


def test_a_level_that_the_template_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match="no level 'high' with this chat template: off, on"):
        template_arguments(SWITCH, "high")
    with pytest.raises(ValueError, match=r"none$"):
        template_arguments(None, "on")


@settings(deadline=None, max_examples=50)
@given(st.text(alphabet="{}%#'\" abreasoning_effort=thinking", max_size=60))
def test_no_text_breaks_the_reader(template: str) -> None:
    found = thinking(template)
    assert all(found.arguments(level) for level in found.levels)


def test_the_template_s_files_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    jinja, config = tmp_path / "chat_template.jinja", tmp_path / "tokenizer_config.json"
    files = {path.name: path for path in (jinja, config)}
    assert template_in({}) is template_in(files) is None
    config.write_text(json.dumps({"chat_template": SWITCH}))
    assert template_in(files) == SWITCH
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": COMPARED}]
    config.write_text(json.dumps({"chat_template": several}))
    assert template_in(files) == COMPARED
    jinja.write_text(WRITTEN_OUT)
    assert template_in(files) == WRITTEN_OUT
    jinja.unlink()
    config.write_text("[not json")
    assert template_in(files) is None


@pytest.mark.parametrize(
    ("templates", "kind"),
    [
        (None, None),
        ({}, "none"),
        ({"default": ""}, None),
        ({"default": SWITCH}, "plain"),
        ({"default": "{% if tools %}{{ tools }}{% endif %}"}, "tools"),
        ({"default": "{% set tools = tools | default([]) %}{{ tools }}"}, "tools"),
        ({"default": "{% for m in messages %}{{ m.tools }}{% endfor %}"}, "plain"),
        ({"default": "{% set tools = [] %}{{ tools }}"}, "plain"),
        ({"default": SWITCH, "tool_use": "{{ tools }}"}, "tools"),
        ({"default": "{{ tools }}", "tool_use": SWITCH}, "plain"),
        ({"tool_use": "{{ tools }}"}, "tools"),
        ({"default": "{% if tools"}, None),
    ],
)
def test_whether_a_template_shows_tools(templates: dict[str, str] | None, kind: str | None) -> None:
    assert template_kind(templates) == kind


def test_files_tell_all_templates_or_that_there_is_none(tmp_path: Path) -> None:
    jinja, config = tmp_path / "chat_template.jinja", tmp_path / "tokenizer_config.json"
    files = {path.name: path for path in (jinja, config)}
    assert templates_in(files) is None
    config.write_text("{}")
    assert templates_in(files) == {}
    config.write_text(json.dumps({"chat_template": [{"name": "tool_use", "template": "x"}]}))
    assert templates_in(files) == {"tool_use": "x"}
    jinja.write_text(SWITCH)
    further = tmp_path / "additional_chat_templates"
    further.mkdir()
    (further / "tool_use.jinja").write_text("y")
    assert templates_in(files) == {"default": SWITCH, "tool_use": "y"}


def test_a_prompt_is_rendered_at_a_level() -> None:
    tokenizer = byte_tokenizer(SWITCH)
    prompt = [{"role": "user", "content": "Hi"}]

    def text(effort: str | None) -> str:
        given_ = template_arguments(tokenizer.chat_template, effort)
        return str(tokenizer.decode(render_prompt(tokenizer, prompt, template=given_)))

    assert text("off") == "Hi<think></think>"
    assert text("on") == text(None) == "Hi"
