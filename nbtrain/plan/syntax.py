"""YAML 1.2 and strict JSON, read into one kind of node that knows its line and column.

YAML is composed here from parser events: scalars follow the 1.2 core schema (``1e-4`` is a
number, ``no`` and ``2024-01-01`` are text), and nothing can build an object.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from json import JSONDecodeError
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Literal

MAX_DEPTH = 64
_MAX_DIGITS = 400  # of a whole number; more than any double has

_STARTS = {"ScalarEvent", "SequenceStartEvent", "MappingStartEvent", "AliasEvent"}

_NULL = {"", "~", "null", "Null", "NULL"}
_TRUE = {"true", "True", "TRUE"}
_FALSE = {"false", "False", "FALSE"}
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_JSON_SPACE = re.compile(r"[ \t\r\n]*")
_JSON_WORD = re.compile(r"[^\s,:{}\[\]\"]+")
_JSON_WORDS = {"null": None, "true": True, "false": False}


@dataclass(slots=True)
class Node:
    """A mapping, a list or a scalar, with its 1-based line and column.

    ``value`` is the scalar and ``text`` how it is spelt, ``items`` are the nodes of a list,
    ``pairs`` the key and value nodes of a mapping in the order of the text, duplicates included.
    ``broken`` marks a scalar whose value cannot be told; it has its complaint already.
    """

    kind: Literal["mapping", "list", "scalar"]
    line: int
    column: int
    value: Any = None
    text: str = ""
    items: list[Node] = field(default_factory=list)
    pairs: list[tuple[Node, Node]] = field(default_factory=list)
    broken: bool = False


class BadText(Exception):
    """The text cannot be read on from here."""

    node: Node | None = None
    """What it is about, where the rest can be read."""

    def __init__(self, line: int, column: int, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.line, self.column, self.message, self.hint = line, column, message, hint


def read_yaml(text: str) -> tuple[Node | None, list[BadText]]:
    """The one document in ``text`` (``None`` if there is none) and every complaint about it."""
    reader = _YamlReader(text)
    return reader.read(), reader.complaints


def read_json(text: str) -> tuple[Node | None, list[BadText]]:
    """The one JSON value in ``text`` (``None`` if there is none) and every complaint about it."""
    reader = _JsonReader(text)
    try:
        return reader.read(), reader.complaints
    except BadText as bad:
        return None, [*reader.complaints, bad]


class _YamlReader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.complaints: list[BadText] = []

    def read(self) -> Node | None:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError
        from ruamel.yaml.reader import ReaderError

        node: Node | None = None
        documents = 0
        try:
            self.events: Iterator[Any] = iter(YAML(typ="safe", pure=True).parse(self.text))
            for event in self.events:
                name = type(event).__name__
                if name == "DocumentStartEvent":
                    documents += 1
                    if documents == 2:
                        self._complain(event, "a second document begins here", "Keep one")
                elif name in _STARTS:
                    read = self._node(event, 0)
                    node = node or read
        except MarkedYAMLError as error:
            self.complaints.append(_from_yaml(error, self.text))
        except ReaderError as error:
            line, column = place(self.text, error.position)
            self.complaints.append(
                BadText(line, column, "a character that text may not contain stands here")
            )
        except BadText as bad:
            self.complaints.append(bad)
        return node

    def _complain(
        self, event: Any, message: str, hint: str | None = None, node: Node | None = None
    ) -> None:
        mark = event.start_mark
        bad = BadText(mark.line + 1, mark.column + 1, message, hint)
        bad.node = node
        self.complaints.append(bad)

    def _node(self, event: Any, depth: int) -> Node:
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        if depth > MAX_DEPTH:
            raise BadText(line, column, f"this is nested more than {MAX_DEPTH} levels deep")
        node = Node("scalar", line, column)
        if getattr(event, "anchor", None) is not None:
            hint = "Write the value out"
            self._complain(event, "anchors and aliases are not read", hint, node)
        tag = getattr(event, "tag", None)
        if tag is not None:
            tag = tag.replace("tag:yaml.org,2002:", "!!")[:60]
            hint = "Write plain values, without tags"
            self._complain(event, f"the tag {tag} is not read", hint, node)
        # what a tag or an alias would stand for is unknown; a collection's entries are not
        node.broken = tag is not None
        match type(event).__name__:
            case "ScalarEvent":
                node.text = node.value = event.value
                if event.implicit[0] and event.style is None:
                    try:
                        node.value = core_scalar(event.value)
                    except ValueError as error:
                        self._complain(event, str(error), node=node)
                        node.broken = True
            case "AliasEvent":
                node.broken = True
            case "SequenceStartEvent":
                node.kind, node.broken = "list", False
                node.items = list(self._children("SequenceEndEvent", depth))
            case "MappingStartEvent":
                node.kind, node.broken = "mapping", False
                children = list(self._children("MappingEndEvent", depth))
                node.pairs = list(zip(children[::2], children[1::2], strict=True))
        return node

    def _children(self, end: str, depth: int) -> Iterator[Node]:
        for event in self.events:
            if type(event).__name__ == end:
                return
            yield self._node(event, depth + 1)


def core_scalar(text: str) -> Any:
    """The value of a plain scalar under the YAML 1.2 core schema.

    Raises ``ValueError`` for a number too long, too large or too small to be one.
    """
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _OCTAL.fullmatch(text) or _HEX.fullmatch(text):
        return int(text[2:], 8 if text[1] == "o" else 16)
    if _INT.fullmatch(text):
        return _whole(text)
    if _FLOAT.fullmatch(text):
        return _real(text)
    if _INFINITE.fullmatch(text):
        return float(text.replace(".", "").lower())
    return text


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        msg = f"this number has more than {_MAX_DIGITS} digits"
        raise ValueError(msg)
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        msg = "this number is too large"
        raise ValueError(msg)
    if value == 0 and re.split("[eE]", text)[0].strip("+-0."):
        msg = "this number is too small: it would be read as 0"
        raise ValueError(msg)
    return value


def _from_yaml(error: Any, text: str) -> BadText:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    written = text.rstrip().split("\n")
    if line > len(written):
        # what is missing at the end is missed behind the last thing that stands there
        line, column = len(written), len(written[-1]) + 1
    problem = error.problem or "this is not valid YAML"
    if "'\\t'" in problem:
        return BadText(line, column, "a tab stands where YAML takes only spaces", "Use spaces")
    hint = None
    if "mapping values are not allowed" in problem:
        hint = "Check the indentation, and quote text that contains a colon and a space"
    elif "cannot start any token" in problem:
        hint = "Put the text in quotes"
    return BadText(line, column, f"this is not valid YAML: {problem}", hint)


class _JsonReader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.complaints: list[BadText] = []
        self.lines = [0, *(found.end() for found in re.finditer("\n", text))]

    def read(self) -> Node | None:
        at = self._space(0)
        if at == len(self.text):
            return None
        node, at = self._value(at, 0)
        at = self._space(at)
        if at < len(self.text):
            raise self._bad(at, "text stands after the end of the JSON value")
        return node

    def _bad(self, at: int, message: str, hint: str | None = None) -> BadText:
        return BadText(*self._place(at), message, hint)

    def _place(self, at: int) -> tuple[int, int]:
        line = bisect_right(self.lines, at)
        return line, at - self.lines[line - 1] + 1

    def _space(self, at: int) -> int:
        found = _JSON_SPACE.match(self.text, at)
        return found.end() if found else at

    def _value(self, at: int, depth: int) -> tuple[Node, int]:
        if depth > MAX_DEPTH:
            raise self._bad(at, f"this is nested more than {MAX_DEPTH} levels deep")
        first = self.text[at : at + 1]
        line, column = self._place(at)
        if first == "{":
            return self._object(Node("mapping", line, column), at, depth)
        if first == "[":
            return self._array(Node("list", line, column), at, depth)
        if first == '"':
            text, at = self._string(at)
            return Node("scalar", line, column, text), at
        if number := _JSON_NUMBER.match(self.text, at):
            node = Node("scalar", line, column)
            try:
                whole = number[2] is None and number[3] is None
                node.value = _whole(number[0]) if whole else _real(number[0])
            except ValueError as error:
                bad, node.broken = self._bad(at, str(error)), True
                bad.node = node
                self.complaints.append(bad)
            return node, number.end()
        word = _JSON_WORD.match(self.text, at)
        if word is None:
            found = json.dumps(first) if first else "the end of the text"
            raise self._bad(at, f"this is not valid JSON: a value is needed, found {found}")
        if word[0] not in _JSON_WORDS:
            raise self._bad(at, f"this is not valid JSON: {word[0][:40]} is no value")
        return Node("scalar", line, column, _JSON_WORDS[word[0]]), word.end()

    def _string(self, at: int) -> tuple[str, int]:
        try:
            text, end = scanstring(self.text, at + 1, True)
        except JSONDecodeError as error:
            raise self._bad(error.pos, f"this is not valid JSON: {error.msg}") from None
        return text, end

    def _next(self, at: int, end: str) -> tuple[bool, int]:
        """Step over a comma or the closing bracket; the flag says whether it was the bracket."""
        at = self._space(at)
        found = self.text[at : at + 1]
        if found not in (",", end) or not found:
            shown = json.dumps(found) if found else "the end of the text"
            raise self._bad(at, f'this is not valid JSON: "," or "{end}" is needed, found {shown}')
        return found == end, at + 1

    def _object(self, node: Node, at: int, depth: int) -> tuple[Node, int]:
        at = self._space(at + 1)
        closed = self.text[at : at + 1] == "}"
        at += closed
        while not closed:
            at = self._space(at)
            if self.text[at : at + 1] != '"':
                raise self._bad(at, "this is not valid JSON: a key in double quotes is needed")
            line, column = self._place(at)
            key, at = self._string(at)
            at = self._space(at)
            if self.text[at : at + 1] != ":":
                raise self._bad(
                    at, f'this is not valid JSON: ":" is needed after the key {key[:60]}'
                )
            value, at = self._value(self._space(at + 1), depth + 1)
            node.pairs.append((Node("scalar", line, column, key, key), value))
            closed, at = self._next(at, "}")
        return node, at

    def _array(self, node: Node, at: int, depth: int) -> tuple[Node, int]:
        at = self._space(at + 1)
        closed = self.text[at : at + 1] == "]"
        at += closed
        while not closed:
            value, at = self._value(self._space(at), depth + 1)
            node.items.append(value)
            closed, at = self._next(at, "]")
        return node, at


def place(text: str, at: int) -> tuple[int, int]:
    """The 1-based line and column of an offset."""
    before = text.count("\n", 0, at)
    return before + 1, at - (text.rfind("\n", 0, at) + 1) + 1
