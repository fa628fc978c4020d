"""What completion offers in the body of a ``%%train`` cell: keys and their values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nbtrain.notebook.completion_place import BodyPlace
from nbtrain.notebook.completion_world import NAMED, Offer, Words, World, matching, type_of
from nbtrain.notebook.flags import TRAIN
from nbtrain.plan.as_cell import yaml_text
from nbtrain.plan.descriptor.document import FLAT
from nbtrain.plan.descriptor.table import FIELDS, METHODS, Field
from nbtrain.plan.descriptor.terms import NAME, TERMS, WEIGHT
from nbtrain.plan.fields import Option, show
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.statements import BODY_KEYS

__all__ = ["in_body"]

_TYPES = {
    "workload": "workload", "base_model_slug": "base model", "parent_checkpoint_id": "checkpoint",
    "display_name": "text", "load_weights_only": "boolean",
}  # fmt: skip


def in_body(
    place: BodyPlace, lines: Sequence[str], flags: Mapping[str, str], after: str, world: World
) -> tuple[str, list[Offer]]:
    """The offers in a body; ``flags`` are those of the cell's line."""
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


def _named(kind: str, world: World) -> Words:
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
                yield name, _TYPES.get(name) or type_of(table[name])
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
        return option, NAMED.get(key)


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
                yield option.name, type_of(option)
            return
        if path == ("config", "reward"):
            yield "terms", "list"
        prefix = "".join(f"{key}." for key in path)
        found: dict[str, str] = {}
        for one in self._fields():
            if one.path.startswith(prefix):
                key, _, deeper = one.path[len(prefix) :].partition(".")
                found.setdefault(key, "group" if deeper else type_of(one.option))
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
            return known.get(key, WEIGHT if key == "weight" else None), NAMED.get(key)
        full = ".".join((*path, key))
        one = FIELDS.get(full)
        return None if one is None else one.option, NAMED.get(full)


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
    for word, told in matching(place.typed.removeprefix('"'), absent):
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
    return [Offer(written(word, told), told) for word, told in matching(plain, words)]


def yaml_escaped(text: str) -> str:
    """Text as it stands between double quotes, in YAML and in JSON."""
    return text.replace("\\", "\\\\").replace('"', '\\"')
