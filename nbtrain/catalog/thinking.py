"""How much a model can be told to think: read from its chat template, without running it.

A template takes variables beside the messages. Those that steer thinking are a switch
(``enable_thinking`` or ``thinking``, true or false) and ``reasoning_effort``, whose levels are
the words that the template compares it with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nbtrain.plan.defaults import EFFORTS
from nbtrain.plan.registry import Template

__all__ = [
    "Thinking",
    "template_arguments",
    "template_in",
    "template_kind",
    "templates_in",
    "thinking",
]

_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_OFF_WORDS = ("off", "none")
# Families whose template writes the level out as it is given, so that it names no choice.
_BY_FAMILY = {"gpt_oss": ("low", "medium", "high")}


@dataclass(frozen=True, slots=True)
class Thinking:
    """The levels of a template, least thinking first, and the variables that set them.

    ``switch`` turns thinking on and off, ``effort`` takes a level's word, and ``off_word`` is the
    word by which ``effort`` turns it off. ``levels`` is empty where nothing can be chosen.
    """

    levels: tuple[str, ...] = ()
    switch: str | None = None
    effort: str | None = None
    off_word: str | None = None

    def arguments(self, level: str | None) -> dict[str, Any]:
        """What the template is rendered with at a level; nothing for ``None``.

        Raises ``ValueError`` for a level that is none of ``levels``.
        """
        if level is None:
            return {}
        if level not in self.levels:
            allowed = ", ".join(self.levels) or "none"
            msg = f"reasoning_effort has no level {level!r} with this chat template: {allowed}"
            raise ValueError(msg)
        given: dict[str, Any] = {}
        if self.switch is not None:
            given[self.switch] = level != "off"
        if self.effort is not None and level == "off":
            given |= {} if self.off_word is None else {self.effort: self.off_word}
        elif self.effort is not None:
            given[self.effort] = level
        return given


@lru_cache(maxsize=64)
def thinking(template: str | None, architecture: str | None = None) -> Thinking:
    """What a chat template lets one choose; what the family is known for where it names nothing.

    A template that jinja2 cannot read lets one choose nothing.
    """
    if not template or not any(name in template for name in (*_SWITCHES, _EFFORT)):
        return Thinking()
    from jinja2 import TemplateError, meta

    try:
        tree = _environment().parse(template)
        words = set(_words(tree, _names_of(tree, _EFFORT)))
        # last: jinja2 folds constants of the tree meanwhile
        free = meta.find_undeclared_variables(tree)
    except TemplateError:
        return Thinking()
    switch = next((name for name in _SWITCHES if name in free), None)
    if _EFFORT not in free:
        return Thinking(("off", "on"), switch) if switch else Thinking()
    off_word = next((word for word in _OFF_WORDS if word in words), None)
    known = words.intersection(EFFORTS) - {"off"}
    if len(known) < 2:
        known |= set(_BY_FAMILY.get(architecture or "", ()))
    if not known:
        return Thinking(("off", "on"), switch) if switch else Thinking()
    off = ["off"] if switch or off_word else []
    levels = (*off, *(level for level in EFFORTS if level in known))
    return Thinking(levels, switch, _EFFORT, off_word)


def template_arguments(
    template: str | Mapping[str, str] | None, effort: str | None, architecture: str | None = None
) -> dict[str, Any]:
    """What ``apply_chat_template`` takes so that the model thinks as ``effort`` says.

    ``template`` is a tokenizer's ``chat_template``, of several the default one; ``effort`` is a
    resolved ``reasoning_effort`` and ``architecture`` the model's type. Empty for ``None``.
    Raises ``ValueError`` for a level that the template does not have.
    """
    if isinstance(template, Mapping):
        template = template.get("default")
    return thinking(template, architecture).arguments(effort)


def template_in(files: Mapping[str, Path]) -> str | None:
    """The chat template among a model's files (by name), as transformers picks it, or ``None``."""
    return (templates_in(files) or {}).get("default")


def templates_in(files: Mapping[str, Path]) -> dict[str, str] | None:
    """The chat templates among a model's files, by name; the usual one is ``default``.

    ``None`` where the files do not tell whether there are any.
    """
    alone = files.get("chat_template.jinja")
    if alone is not None and alone.is_file():
        found = {"default": alone.read_text("utf-8")}
        further = alone.parent / "additional_chat_templates"
        return {**{path.stem: path.read_text("utf-8") for path in further.glob("*.jinja")}, **found}
    beside = files.get("tokenizer_config.json")
    if beside is None or not beside.is_file():
        return None
    try:
        stated = json.loads(beside.read_text("utf-8")).get("chat_template")
    except (ValueError, AttributeError):
        return None
    if isinstance(stated, list):  # several, each with its name
        named = {each.get("name"): each.get("template") for each in stated}
    else:
        named = {"default": stated}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def template_kind(templates: Mapping[str, str] | None) -> Template | None:
    """What the chat templates can do; ``None`` where they are not known or cannot be read.

    With tools transformers picks the one called ``tool_use``, where there is one.
    """
    if templates is None:
        return None
    picked = templates.get("tool_use") or templates.get("default")
    if not picked:
        return None if templates else "none"
    if "tools" not in picked:
        return "plain"
    from jinja2 import TemplateError, meta

    try:
        free = meta.find_undeclared_variables(_environment().parse(picked))
    except TemplateError:
        return None
    return "tools" if "tools" in free else "plain"


def _environment() -> Any:
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        """Training templates mark what the assistant wrote with a tag of transformers' own."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), True)
            return body

    return Environment(extensions=[Generation, loopcontrols], autoescape=False)


def _names_of(tree: Any, variable: str) -> set[str]:
    """The variable and every name that the template sets to something made of it."""
    from jinja2 import nodes

    names, grown = {variable}, True
    assignments = list(tree.find_all(nodes.Assign))
    while grown:
        grown = False
        for each in assignments:
            target = getattr(each.target, "name", None)
            read = {name.name for name in _all(each.node, nodes.Name)}
            if target is not None and target not in names and read & names:
                names.add(target)
                grown = True
    return names


def _words(tree: Any, names: set[str]) -> Iterator[str]:
    """The words that a variable is compared with, defaults to, is set to or selects by."""
    from jinja2 import nodes

    def reads(node: Any) -> bool:
        return any(name.name in names for name in _all(node, nodes.Name))

    for compare in tree.find_all(nodes.Compare):
        if reads(compare):
            yield from _texts(compare)
    for filtered in tree.find_all(nodes.Filter):
        if filtered.name in ("default", "d") and filtered.node is not None and reads(filtered.node):
            yield from _texts(*filtered.args)
    for assign in tree.find_all(nodes.Assign):
        if getattr(assign.target, "name", None) in names and isinstance(assign.node, nodes.Const):
            yield from _texts(assign.node)
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.node, nodes.Dict) and reads(item.arg):
            yield from _texts(*(pair.key for pair in item.node.items))


def _texts(*parts: Any) -> Iterator[str]:
    from jinja2 import nodes

    for part in parts:
        for const in _all(part, nodes.Const):
            if isinstance(const.value, str):
                yield const.value.lower()


def _all(node: Any, kind: Any) -> Iterable[Any]:
    found = node.find_all(kind)
    return [node, *found] if isinstance(node, kind) else found
