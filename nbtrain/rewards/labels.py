"""``json-label-match``: the fields of the JSON in an answer against those of the expected one.

The JSON of a text is the last object in it, or the last list where there is no object; code
fences and prose around it do not matter. The fields are the leaves of the expected object, nested
ones by their path; a list or an empty object is one field, compared as a whole. The score is the
share of the expected fields that the answer has with the same value; fields that nobody expected
do not count. Values are the same as JSON has them: 1 and 1.0 are, ``true`` and 1 are not, text
only letter by letter. Braces that begin no JSON take time, and so are not looked at without an end:
see :data:`MOST_EFFORT`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

from nbtrain.rewards.builtins import BuiltIn, checked_column, gold_of

__all__ = ["LabelMatch", "find_json", "json_label_match", "match_labels", "why_unscored"]

_OPENING = re.compile(r"[{\[]")
_NAME = "json-label-match"
_MISSING = object()
_TOO_DEEP = 500
"""Characters to go on by in what is nested too deeply to be read."""
MOST_EFFORT = 20_000_000
"""Characters, about half a second, that a text may cost where no JSON begins at a brace or bracket.

Each such place costs the characters read from there on and :data:`_ONE_TRY` more. Then the search
ends with what it has: after some 30,000 stray braces.
"""
_ONE_TRY = 500


@dataclass(frozen=True, slots=True)
class LabelMatch:
    """How an answer's JSON fits the expected one: ``fields`` by dotted path, in their order.

    A key with a dot in it is quoted. The path of a JSON that is no object, or an empty one, is
    empty.
    """

    fields: Mapping[str, bool]

    @property
    def score(self) -> float:
        """Share of the expected fields that match."""
        return sum(self.fields.values()) / len(self.fields)


@dataclass(frozen=True, slots=True)
class _JsonLabelMatch(BuiltIn):
    column: str
    name: ClassVar[str] = _NAME

    def __call__(self, completion: str, task: Mapping[str, Any]) -> float | None:
        match = match_labels(completion, gold_of(task, self.column))
        if match is None:
            _say_once(f"{self.column!r}: {why_unscored(task[self.column])}")
        return None if match is None else match.score

    def why_ungraded(self, task: Mapping[str, Any]) -> str | None:
        """That the expected answer has no JSON to compare with."""
        reason = why_unscored(task.get(self.column))
        return None if reason is None else f"the column {self.column!r} {reason}"


def json_label_match(column: str = "answer") -> _JsonLabelMatch:
    """The share of the fields of the JSON in the task's ``column`` that the completion matches.

    1 when all of them do, 0 for a completion without JSON. A task whose column is None or holds
    no JSON object or list is left ungraded.
    """
    return _JsonLabelMatch(checked_column(_NAME, column))


def match_labels(answer: str, expected: Any) -> LabelMatch | None:
    """Compare an answer with what was expected, a text or a value; None where that has no JSON."""
    wanted = _expected(expected)
    if wanted is None:
        return None
    found = find_json(answer, type(wanted))
    leaves = dict(_leaves(wanted, ()))
    return LabelMatch(
        {_dotted(path): _same(_at(found, path), value) for path, value in leaves.items()}
    )


def why_unscored(expected: Any) -> str | None:
    """A clause on why no answer could be scored against this one; None where answers can."""
    if expected is None:
        return "is null"
    if _expected(expected) is not None:
        return None
    text = expected if isinstance(expected, str) else json.dumps(expected, default=str)
    return f"holds no JSON object or list: {text[:80]!r}"


def find_json(text: str, kind: type | None = None) -> dict[str, Any] | list[Any] | None:
    """The last JSON object in a text, or the last list where there is none.

    ``kind``, ``dict`` or ``list``, asks for that alone. What stands inside another is not found.
    """
    last: dict[type, Any] = {}
    position, effort = 0, MOST_EFFORT
    while effort > 0 and (opening := _OPENING.search(text, position)) is not None:
        start = opening.start()
        try:
            value, position = _DECODER.raw_decode(text, start)
        except RecursionError:
            # It went this far at least: from each of them it would get as deep again.
            position = start + _TOO_DEEP
            effort -= 20 * _ONE_TRY
        except (ValueError, ArithmeticError) as error:
            position = start + 1
            # Without a place, all of it may have been read. Telling the place counts the lines
            # before it, which is quick but grows with the text.
            reached = getattr(error, "pos", len(text))
            effort -= _ONE_TRY + max(0, reached - start) + reached // 30
        else:
            last[type(value)] = value
    return last.get(kind) if kind is not None else last.get(dict, last.get(list))


def _no_constant(name: str) -> None:
    msg = f"{name} is no JSON"
    raise ValueError(msg)


# Decimals keep what stands there: 0.1 is 0.10, and 1e400 is not infinite.
_DECODER = json.JSONDecoder(parse_float=Decimal, parse_constant=_no_constant)


def _expected(value: Any) -> dict[str, Any] | list[Any] | None:
    if isinstance(value, (dict, list)):
        # as text, so that its numbers are read as those of the answer
        value = json.dumps(value, allow_nan=False)
    return find_json(value) if isinstance(value, str) else None


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for key, item in value.items():
        yield from _leaves(item, (*path, key))


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(json.dumps(key) if {".", '"'} & {*key} else key for key in path)


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return _MISSING
        value = value[key]
    return value


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


_said: set[str] = set()


def _say_once(text: str) -> None:
    """A reason into the log of the rewards, not again for every completion of a task."""
    if text not in _said and len(_said) < 100:
        _said.add(text)
        print(f"{_NAME}: not scored, the column {text}", file=sys.stderr)
