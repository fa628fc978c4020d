"""YAML or JSON text into plain values that remember their line and column."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from nbtrain.errors import PlanRefused, Problem, Where
from nbtrain.plan.fields import brief, halved, spelt
from nbtrain.plan.syntax import BadText, Node, read_json, read_yaml

_NAME = re.compile(r"\$([^\W\d]\w*)")
_EXPRESSION = re.compile(r"\$[^\W\d]\w*(\.[^\W\d]\w*|\(.*\)|\[.*\])+", re.DOTALL)
MOST = 2**20
"""Characters that a document may have."""
_KINDS = {"mapping": "a mapping", "list": "a list"}


class Broken:
    """The value of a key whose text already has its refusal; see ``SourcedMapping.problems``."""

    def __repr__(self) -> str:
        return "<broken>"


BROKEN = Broken()


class SourcedMapping(dict[str, Any]):
    """A plain dict that knows where its keys and values stand in the text it came from.

    ``problems`` is empty unless the text was parsed with ``defer``.
    """

    def __init__(
        self,
        entries: Iterable[tuple[str, Any, Where, Where]] = (),
        *,
        where: Where | None = None,
    ) -> None:
        """``entries`` are (key, value, place of the key, place of the value)."""
        super().__init__()
        self.where = where
        self.problems: tuple[Problem, ...] = ()
        self._places: dict[str, tuple[Where, Where]] = {}
        for key, value, key_place, value_place in entries:
            self[key] = value
            self._places[key] = (key_place, value_place)

    def where_key(self, key: str) -> Where | None:
        """The place of a key, or ``None`` for one that did not come from the text."""
        return self._places[key][0] if key in self._places else None

    def where_value(self, key: str) -> Where | None:
        """The place of a key's value, or ``None`` for one that did not come from the text."""
        return self._places[key][1] if key in self._places else None


class SourcedList(list[Any]):
    """A plain list that knows where its items stand in the text it came from."""

    def __init__(
        self, entries: Iterable[tuple[Any, Where]] = (), *, where: Where | None = None
    ) -> None:
        """``entries`` are (item, place)."""
        pairs = list(entries)
        super().__init__(item for item, _ in pairs)
        self.where = where
        self._places = [place for _, place in pairs]

    def where_item(self, index: int) -> Where | None:
        """The place of an item, or ``None`` for one that did not come from the text."""
        return self._places[index] if -len(self._places) <= index < len(self._places) else None


def parse(
    text: str,
    *,
    names: Mapping[str, object] | None = None,
    source: str | None = None,
    offset_lines: int = 0,
    empty_ok: bool = False,
    syntax: Literal["auto", "yaml", "json"] = "auto",
    defer: bool = False,
) -> SourcedMapping:
    """The mapping that ``text`` holds.

    ``names`` are the Python objects that a whole scalar ``$name`` stands for: the object itself
    becomes the value, and a text that begins with ``$$`` loses one ``$``. Without ``names`` a
    dollar is a dollar. ``source`` is the file's name, for messages. ``offset_lines`` is added
    to every line number: 1 for a cell whose first line is the magic's. ``empty_ok`` reads a text
    of nothing but blanks and comments as an empty mapping. ``auto`` reads a ``.json`` source as
    JSON, other text as JSON where it is JSON, else as YAML 1.2, of which JSON is a part.
    ``defer`` keeps what is wrong in the mapping's ``problems``, with :data:`BROKEN` as the value,
    where the rest can be read: resolving then lists these with everything else that is wrong.

    Raises :class:`PlanRefused` with all problems: broken syntax, anything but one mapping,
    duplicate keys at any depth (with both lines), tags, anchors, undefined names.
    """
    text = text.removeprefix("\ufeff")
    if len(text) > MOST:
        name = source or "document"
        message = f"{name} has {len(text):,} characters"
        hint = "Rows belong into a dataset: client.datasets.register"
        raise PlanRefused([Problem(name, message, len(text), f"at most {MOST:,}", hint=hint)])
    node, complaints = _read(text, source, syntax)
    builder = _Builder(names, source, offset_lines)
    mapping = SourcedMapping()
    readable = node is not None and node.kind == "mapping"
    if node is not None and readable:
        mapping = builder.mapping(node, ())
    elif not complaints and not (empty_ok and _is_empty(node)):
        builder.not_a_mapping(node)
    for bad in complaints:
        builder.complain_of(bad)
    problems = tuple(in_order(builder.problems))
    if problems and not (defer and readable):
        raise PlanRefused(problems)
    mapping.problems = problems
    return mapping


def _read(text: str, source: str | None, syntax: str) -> tuple[Node | None, list[BadText]]:
    if syntax == "yaml":
        return read_yaml(text)
    if syntax == "json" or (source or "").lower().endswith(".json"):
        return read_json(text)
    if not text.lstrip().startswith(("{", "[")):
        return read_yaml(text)
    as_json = read_json(text)
    if as_json[0] is not None or not as_json[1]:
        return as_json
    as_yaml = read_yaml(text)
    # broken in both: the author of {"… meant JSON
    meant_json = re.match(r'\s*\{\s*"', text) is not None
    return as_json if as_yaml[1] and meant_json else as_yaml


def _is_empty(node: Node | None) -> bool:
    return node is None or (node.kind == "scalar" and node.value is None)


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """``problems`` in the order of the text, those without a place in it last."""

    def place(problem: Problem) -> tuple[bool, int, int]:
        where = problem.where
        if where is None or where.line is None:
            return True, 0, 0
        return False, where.line, where.column or 0

    return sorted(problems, key=place)


def name_in(text: str) -> str | None:
    """The name of a text that is wholly ``$name``, else ``None``."""
    found = _NAME.fullmatch(text)
    return found[1] if found else None


def undefined(text: str, names: Iterable[str]) -> str:
    """The hint for a whole ``$name`` that is not among ``names``."""
    near = difflib.get_close_matches(text[1:], list(names), n=1)
    hint = f"Did you mean ${near[0]}? " if near else ""
    return f"{hint}For the text itself write ${text}"


def expression_in(text: str) -> str | None:
    """The hint for a refused ``$run.best()``, which is text since it is no name; else ``None``."""
    if _EXPRESSION.fullmatch(text) is None:
        return None
    words = re.findall(r"\.([^\W\d]\w*)", re.sub(r"\(.*?\)|\[.*?\]", "", text))
    name = (words or ["value"])[-1]
    return f"$ takes a plain name: write {name} = {brief(text[1:])} first, and ${name} here"


class _Builder:
    """Turns nodes into values and collects what is wrong on the way."""

    def __init__(
        self, names: Mapping[str, object] | None, source: str | None, offset_lines: int
    ) -> None:
        self.names = names
        self.source = source
        self.offset = offset_lines
        self.problems: list[Problem] = []
        self.paths: dict[int, str] = {}

    def place(self, node: Node) -> Where:
        return Where(line=node.line + self.offset, column=node.column, source=self.source)

    def complain(
        self, field: str, message: str, line: int, column: int, hint: str | None = None
    ) -> None:
        where = Where(line=line + self.offset, column=column, source=self.source)
        self.problems.append(Problem(field, message, where=where, hint=hint))

    def complain_of(self, bad: BadText) -> None:
        """A complaint of the reader, of the field that it is about where that is known."""
        field = self.paths.get(id(bad.node))
        message = bad.message if field is None else f"{field}: {bad.message}"
        name = field or self.source or "document"
        self.complain(name, message, bad.line, bad.column, bad.hint)

    def not_a_mapping(self, node: Node | None) -> None:
        found = "nothing"
        if node is not None and not _is_empty(node):
            found = _KINDS.get(node.kind) or _scalar_kind(node.value)
        # the place has no source here: the sentence begins with it
        where = None if node is None else Where(line=node.line + self.offset, column=node.column)
        prefix = f"{self.source}: " if self.source else ""
        self.problems.append(
            Problem(
                self.source or "document",
                f"{prefix}a mapping is needed, found {found}",
                where=where,
                hint="Write one `option: value` a line",
            )
        )

    def value(self, node: Node, path: tuple[str, ...]) -> Any:
        self.paths[id(node)] = ".".join(path)
        if node.broken:
            return BROKEN
        if node.kind == "mapping":
            return self.mapping(node, path)
        if node.kind == "list":
            entries = [
                (self.value(item, (*path, str(n))), self.place(item))
                for n, item in enumerate(node.items)
            ]
            return SourcedList(entries, where=self.place(node))
        return self.named(node, path) if isinstance(node.value, str) else node.value

    def mapping(self, node: Node, path: tuple[str, ...]) -> SourcedMapping:
        first: dict[str, Node] = {}
        entries = []
        for key, value in node.pairs:
            # a key is its own text: `5:` and `no:` name what they spell
            name = key.text
            if key.kind != "scalar" or not name.strip():
                self.complain(".".join(path) or "document", "a key must be text", *_at(key))
                continue
            shown = spelt(name)
            here = (*path, shown)
            self.paths[id(key)] = ".".join(here)
            if name in first:
                one, two = first[name].line + self.offset, key.line + self.offset
                lines = f"line {one}" if one == two else f"lines {one} and {two}"
                message = f"{shown} is written twice, on {lines}"
                self.paths[id(value)] = ".".join(here)
                self.complain(".".join(here), message, *_at(key), "Keep one")
                continue
            first[name] = key
            entries.append((name, self.value(value, here), self.place(key), self.place(value)))
        return SourcedMapping(entries, where=self.place(node))

    def named(self, node: Node, path: tuple[str, ...]) -> Any:
        text: str = node.value
        field = ".".join(path)
        if halved(text):
            self.complain(field, f"the text of {field} holds half a character", *_at(node))
            return BROKEN
        if self.names is None or not text.startswith("$"):
            return text
        if text.startswith("$$"):
            return text[1:]
        name = name_in(text)
        if name is None:
            return text
        if name in self.names:
            return self.names[name]
        hint = undefined(text, self.names)
        self.complain(field, f"{field}: the name {text} is not defined", *_at(node), hint=hint)
        return BROKEN


def _at(node: Node) -> tuple[int, int]:
    return node.line, node.column


def _scalar_kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a number" if isinstance(value, int | float) else "a text"
