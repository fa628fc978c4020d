"""What completion offers at a place: words of the tables, registered names, variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nbtrain.notebook.completion_place import (
    BodyPlace,
    LinePlace,
    body_place,
    cell_head,
    line_place,
    statement,
)
from nbtrain.notebook.flags import TRAIN
from nbtrain.notebook.line import Flag, split
from nbtrain.notebook.verbs import VERBS
from nbtrain.plan.as_cell import line_word, yaml_text
from nbtrain.plan.descriptor.document import FLAT
from nbtrain.plan.descriptor.table import FIELDS, METHODS, Field
from nbtrain.plan.descriptor.terms import NAME, TERMS, WEIGHT
from nbtrain.plan.fields import Option, as_python, show
from nbtrain.plan.graders import DEFAULT_GRADER
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.statements import BODY_KEYS

if TYPE_CHECKING:
    from nbtrain.client.known import Known

__all__ = ["LONGEST", "MOST", "Offer", "offers"]

MOST = 100
"""Offers at one place."""
LONGEST = 16
"""Characters of an offer's type: a front end prints it in a narrow column beside the offer."""

Words = Iterable[tuple[str, str]]
"""Words with their types."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A text that replaces what is typed, and its type in a word or two."""

    text: str
    type: str


_NOTHING: tuple[str, list[Offer]] = ("", [])


@dataclass(frozen=True, slots=True)
class _World:
    """What names come from: the client's cheap lists and the user's variables."""

    known: Callable[[], Known]
    names: Mapping[str, object]

    def of(self, kind: str) -> Iterator[tuple[str, str]]:
        """What can be named as a thing of this kind."""
        if kind == "run":
            yield from self.known().runs()
        elif kind == "checkpoint":
            yield from self.known().checkpoints()
        elif kind == "run or checkpoint":
            yield from self.known().runs()
            yield from self.known().checkpoints()
        elif kind == "grader":
            yield DEFAULT_GRADER, "grader"
            for name, _ in self.known().names("bundle"):
                yield f"bundle:{name}#", "grader"
        elif kind in _CLASSES:
            yield from self.known().names(kind)  # type: ignore[arg-type]

    def variables(self, kind: str) -> Iterator[tuple[str, str]]:
        """The user's variables that hold a thing of this kind, as ``$name``."""
        for name in self.names:
            value = self.names[name]
            if _fits(value, kind):
                yield f"${name}", type(value).__name__


_CLASSES = {
    "run": ("Run",), "checkpoint": ("Checkpoint",), "run or checkpoint": ("Run", "Checkpoint"),
    "workload": ("WorkloadItem",), "dataset": ("DatasetItem",), "base model": ("BaseModelItem",),
    "model": ("ModelItem",), "bundle": ("BundleItem",),
}  # fmt: skip
"""The client's classes by kind; not imported, since a variable's own class tells its name."""

_NAMED = {
    "workload": "workload", "base_model_slug": "base model", "parent_checkpoint_id": "checkpoint",
    "dataset": "dataset", "validation_dataset": "dataset", "display_name": "run name",
    "baseModel": "base model", "config.dataset": "dataset", "warmStartModelId": "model",
    "config.data.validationDataset": "dataset", "grader": "grader", "bundle": "bundle",
}  # fmt: skip
"""Keys of a body, and fields of a descriptor, whose value names something."""

_TYPES = {
    "workload": "workload", "base_model_slug": "base model", "parent_checkpoint_id": "checkpoint",
    "display_name": "text", "load_weights_only": "boolean",
}  # fmt: skip
_GROUPS = ("config.reward", "config.reward.terms")


def _fits(value: object, kind: str) -> bool:
    if kind in _CLASSES:
        whose = type(value)
        return whose.__module__.startswith("nbtrain.") and whose.__name__ in _CLASSES[kind]
    value = as_python(value)
    if kind == "boolean" or isinstance(value, bool):
        return kind == "boolean" and isinstance(value, bool)
    if kind in ("integer", "number"):
        return isinstance(value, int | float)
    return kind in ("text", "run name") and isinstance(value, str)


def offers(
    text: str, row: int, column: int, *, known: Callable[[], Known], names: Mapping[str, object]
) -> tuple[str, list[Offer]] | None:
    """What is typed at the cursor and what could stand there, best first, at most :data:`MOST`.

    ``row`` and ``column`` count from 0 in ``text``, a whole cell. ``None`` where the cursor is not
    in a cell or on a line of theirs.
    """
    world, lines = _World(known, names), text.split("\n")
    head, line = cell_head(lines), lines[row]
    cell = head is not None
    if head is not None and row > head:
        below = lines[head + 1 :]
        flags = _stated(lines[head][len("%%train") :])
        place = body_place(below, row - head - 1, column)
        return _NOTHING if place is None else _in_body(place, below, flags, line[column:], world)
    begin = statement(line, cell)
    if begin is None or column <= begin:
        return None
    at = line_place(line[begin:column])
    if at is None:
        return _NOTHING
    words = _of_cell(at, world) if cell else _of_line(at, world)
    return at.typed, _on_a_line(at.typed, words, line[column:])


def _stated(line: str) -> dict[str, str]:
    """The flags that a cell's line has, with their values."""
    found: dict[str, str] = {}
    words, _ = split(line)
    for number, word in enumerate(words):
        if word.flag is not None and word.value:
            found[word.flag] = word.text
        elif word.flag is not None:
            found[word.flag] = next((w.text for w in words[number + 1 :][:1] if not w.flag), "")
    return found


# --- lines


def _of_cell(at: LinePlace, world: _World) -> Words:
    pending = next((f for f in TRAIN if f.name == at.pending and f.metavar), None)
    if pending is not None:
        return _value_of(pending.name, world)
    return () if at.flag is not None else _flags(TRAIN, at)


def _of_line(at: LinePlace, world: _World) -> Words:
    flags = {flag.name: flag for verb in VERBS.values() for flag in verb.flags}
    rest = []
    taken = False
    for word in at.words:
        if word.flag is None and not taken:
            rest.append(word.text)
        # a word behind a flag is that flag's value
        taken = word.flag in flags and not word.value
    if at.pending in flags:
        return _value_of(at.pending, world, flags[at.pending].metavar)
    if at.flag is not None:
        return ()
    if not rest:
        return [(verb.name, "verb") for verb in VERBS.values()]
    verb = VERBS.get(rest[0])
    if verb is None:
        return ()
    if at.typed.startswith("-"):
        return _flags(verb.flags, at)
    kind = verb.kind(len(rest) - 1)
    words = [] if kind is None else _of_kind(kind, world)
    return [*words, *(_flags(verb.flags, at) if not at.typed else ())]


def _of_kind(kind: str, world: _World) -> list[tuple[str, str]]:
    if kind == "verb":
        return [(verb.name, "verb") for verb in VERBS.values()]
    if kind == "option or base model":
        found = list(world.of("base model"))
        return [*found, *((o.name, _of_option(o)) for o in OPTIONS.values())]
    return [*world.variables(kind), *world.of(kind)]


def _flags(flags: Sequence[Flag], at: LinePlace) -> list[tuple[str, str]]:
    given = {word.flag for word in at.words}
    return [(flag.name, "flag") for flag in flags if flag.name not in given]


def _value_of(flag: str, world: _World, metavar: str | None = None) -> list[tuple[str, str]]:
    if flag == "--into":
        runs = [name.removeprefix("$") for name, _ in world.variables("run")]
        return [(name, "variable") for name in dict.fromkeys([*runs, "run"])]
    if flag == "--method":
        return [(method, "value") for method in METHODS]
    kind = _FLAG_KINDS.get(flag)
    if kind is not None:
        return [*world.variables(kind), *world.of("run" if kind == "run name" else kind)]
    choices = (metavar or "").split("|")
    return [(word, "value") for word in choices] if len(choices) > 1 else []


_FLAG_KINDS = {
    "--workload": "workload", "--model": "base model", "--from": "checkpoint",
    "--name": "run name",
}  # fmt: skip


def _on_a_line(typed: str, words: Words, after: str) -> list[Offer]:
    quote = typed[:1] if typed[:1] in ("'", '"') else ""
    closed = quote and after.startswith(quote)
    plain = typed[1:].replace(quote * 2, quote) if quote else typed

    def written(word: str) -> str:
        if not quote:
            return word if word.startswith("--") else line_word(word)
        inner = quote + word.replace(quote, quote * 2)
        return inner if closed else inner + quote

    return [Offer(written(word), told) for word, told in _matching(plain, words)]


# --- bodies


def _in_body(
    place: BodyPlace, lines: Sequence[str], flags: Mapping[str, str], after: str, world: _World
) -> tuple[str, list[Offer]]:
    body = "\n".join(lines)
    descriptor = re.search(r'^\s*"?kind"?\s*:', body, re.MULTILINE) is not None
    if place.path and place.path[0] in ("config", "execution", "smoke"):
        descriptor = True
    of = _Descriptor(body, flags) if descriptor else _Options(body, flags)
    if place.what == "key":
        return place.typed, _keys(place, of.keys(place.path), after)
    option, kind = of.value(place.path, place.key)
    words = [] if option is None or kind is not None else _values(option)
    named = [] if kind is None else [*world.variables(kind), *_named(kind, world)]
    if option is not None and kind in (None, "run name"):
        words = [*words, *world.variables(option.type)]
    return place.typed, _in_text(place, [*named, *words], after)


def _named(kind: str, world: _World) -> Words:
    return world.of("run" if kind == "run name" else kind)


class _Options:
    """The keys of a body of options, a reinforcement run's or a supervised one's."""

    def __init__(self, body: str, flags: Mapping[str, str]) -> None:
        stated = re.search(r'^\s*"?algorithm"?\s*:\s*"?(\w+)', body, re.MULTILINE)
        self._method = stated[1] if stated else flags.get("--method", "")
        self._on_the_line = {flag.field for flag in TRAIN if flag.name in flags}

    def keys(self, path: tuple[str, ...]) -> Words:
        if path:
            return
        if self._method == "sft":
            table = {name: one.option for name, one in FLAT.items()}
            names = [*table, "parent_checkpoint_id", "display_name", "load_weights_only"]
        else:
            table, names = dict(OPTIONS), list(BODY_KEYS)
        for name in names:
            if name not in self._on_the_line:
                yield name, _TYPES.get(name) or _of_option(table[name])
        if not self._method:
            yield "kind", "descriptor"

    def value(self, path: tuple[str, ...], key: str) -> tuple[Option | None, str | None]:
        if path:
            return None, None
        if key == "kind":
            return FIELDS["kind"].option, None
        if key == "algorithm":
            default = OPTIONS[key].default
            return replace(FIELDS["config.method"].option, default=default), None
        one = FLAT.get(key) if self._method == "sft" else None
        option = one.option if one is not None else OPTIONS.get(key)
        return option, _NAMED.get(key)


class _Descriptor:
    """The fields of a descriptor, by their paths."""

    def __init__(self, body: str, flags: Mapping[str, str]) -> None:
        stated = re.search(r'"?method"?\s*:\s*"?(\w+)', body)
        method = stated[1] if stated else flags.get("--method", "")
        rl = method in METHODS and method != "sft"
        self._rl = rl or (not method and "rlHyperparams" in body)
        self._method = method if method in METHODS else ("grpo" if self._rl else "sft")

    def _fields(self) -> list[Field]:
        return [f for f in FIELDS.values() if self._method in f.methods and not f.by_verl]

    def keys(self, path: tuple[str, ...]) -> Words:
        if path == ("config", "reward", "terms"):
            yield "kind", "choice"
            known: dict[str, Option] = {o.name: o for term in TERMS.values() for o in term}
            for option in (WEIGHT, NAME, *known.values()):
                yield option.name, _of_option(option)
            return
        if path == ("config", "reward"):
            yield "terms", "list"
        prefix = "".join(f"{key}." for key in path)
        found: dict[str, str] = {}
        for one in self._fields():
            if one.path.startswith(prefix):
                key, _, deeper = one.path[len(prefix) :].partition(".")
                found.setdefault(key, "group" if deeper else _of_option(one.option))
        if path == ("config",) and self._rl:
            found["reward"] = "group"
        if not path and self._method != "sft":
            found.pop("smoke", None)
        yield from found.items()

    def value(self, path: tuple[str, ...], key: str) -> tuple[Option | None, str | None]:
        if path == ("config", "reward", "terms"):
            if key == "kind":
                return Option("kind", "text", "", "run", choices=tuple(TERMS)), None
            known = {o.name: o for term in TERMS.values() for o in term}
            return known.get(key, WEIGHT if key == "weight" else None), _NAMED.get(key)
        full = ".".join((*path, key))
        one = FIELDS.get(full)
        return None if one is None else one.option, _NAMED.get(full)


def _of_option(option: Option) -> str:
    """The type of an option's key."""
    return "choice" if option.choices else option.type


def _short(told: str) -> str:
    """What is told of an offer as its type: one line of at most :data:`LONGEST` characters.

    The first letter of it is what a front end makes a badge of.
    """
    text = " ".join(told.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1].rstrip() + "…"


def _values(option: Option) -> list[tuple[str, str]]:
    """What a value may be, where that is a list; else its default."""
    default = option.default if option.compute is None else None
    if option.type == "boolean":
        words = ["true", "false"]
    elif option.choices is not None:
        words = list(option.choices)
    else:
        words = [] if default is None or default == "" else [_plainly(default)]
    if option.nullable or option.compute is not None:
        words.append("null")
    shown = None if option.default is None else _plainly(option.default)
    computed = "computed" if option.compute is not None else "value"
    types = {"null": computed, shown: "default"}
    return [(word, types.get(word, "value")) for word in words]


def _plainly(value: Any) -> str:
    return show(value).replace(",", "")


def _keys(place: BodyPlace, words: Words, after: str) -> list[Offer]:
    quoted = place.typed[:1] == '"'
    absent = [(word, told) for word, told in words if word not in place.present]
    found = []
    for word, told in _matching(place.typed.removeprefix('"'), absent):
        end = "" if after.lstrip('"').lstrip().startswith(":") else ":"
        if end and told != "group" and word != "terms":
            end = ": "
        if place.json:
            closed = quoted and after.startswith('"')
            text = f'"{word}' if closed else f'"{word}"{end}'
        else:
            text = f"{word}{end}"
        found.append(Offer(text, told))
    return found


def _in_text(place: BodyPlace, words: Words, after: str) -> list[Offer]:
    quote = place.typed[:1] if place.typed[:1] in ("'", '"') else ""
    closed = bool(quote) and after.startswith(quote)
    literal = {"true", "false", "null"}

    def written(word: str, told: str) -> str:
        number = re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?", word) is not None
        if not quote and (word in literal or number or word.startswith("$")):
            return f'"{word}"' if place.json and word.startswith("$") else word
        if not quote and not place.json:
            return yaml_text(word)
        mark = quote or '"'
        inner = word.replace("'", "''") if mark == "'" else yaml_escaped(word)
        return mark + inner + ("" if closed else mark)

    plain = place.typed[len(quote) :]
    return [Offer(written(word, told), told) for word, told in _matching(plain, words)]


def yaml_escaped(text: str) -> str:
    """Text as it stands between double quotes, in YAML and in JSON."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _matching(typed: str, words: Words) -> list[tuple[str, str]]:
    """Words that begin with what is typed, else those that contain it; each once."""
    known = dict(reversed([*words]))
    known = dict(reversed(known.items()))
    found = [item for item in known.items() if item[0].startswith(typed)]
    if not found and len(typed) > 1:
        low = typed.lower()
        found = [item for item in known.items() if low in item[0].lower()]
    return [(word, _short(told)) for word, told in found[:MOST]]
