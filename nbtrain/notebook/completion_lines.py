"""What completion offers on the lines of ``%%train`` and ``%train``."""

from __future__ import annotations

from collections.abc import Sequence

from nbtrain.notebook.completion_place import LinePlace
from nbtrain.notebook.completion_world import Offer, Words, World, matching, type_of
from nbtrain.notebook.flags import TRAIN
from nbtrain.notebook.line import Flag
from nbtrain.notebook.verbs import VERBS
from nbtrain.plan.as_cell import line_word
from nbtrain.plan.descriptor.table import METHODS
from nbtrain.plan.options import OPTIONS

__all__ = ["of_cell", "of_line", "on_a_line", "unquoted"]


def of_cell(at: LinePlace, world: World) -> Words:
    """The words of a cell's first line."""
    pending = next((f for f in TRAIN if f.name == at.pending and f.metavar), None)
    if pending is not None:
        return _value_of(pending.name, world)
    return () if at.flag is not None else _flags(TRAIN, at)


def of_line(at: LinePlace, world: World) -> Words:
    """The words of a line of ``%train``."""
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


def _of_kind(kind: str, world: World) -> list[tuple[str, str]]:
    if kind == "verb":
        return [(verb.name, "verb") for verb in VERBS.values()]
    if kind == "option or base model":
        found = list(world.of("base model"))
        return [*found, *((o.name, type_of(o)) for o in OPTIONS.values())]
    return [*world.variables(kind), *world.of(kind)]


def _flags(flags: Sequence[Flag], at: LinePlace) -> list[tuple[str, str]]:
    given = {word.flag for word in at.words}
    return [(flag.name, "flag") for flag in flags if flag.name not in given]


def _value_of(flag: str, world: World, metavar: str | None = None) -> list[tuple[str, str]]:
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


def on_a_line(typed: str, words: Words, after: str) -> list[Offer]:
    """The words that fit, written as a line needs them; ``after`` stands behind the cursor."""
    quote = _quote(typed)
    closed = quote and after.startswith(quote)

    def written(word: str) -> str:
        if not quote:
            return word if word.startswith("--") else line_word(word)
        inner = quote + word.replace(quote, quote * 2)
        return inner if closed else inner + quote

    return [Offer(written(word), told) for word, told in matching(unquoted(typed), words)]


def unquoted(typed: str) -> str:
    """What is typed of a word, as it is meant."""
    quote = _quote(typed)
    return typed[1:].replace(quote * 2, quote) if quote else typed


def _quote(typed: str) -> str:
    return typed[:1] if typed[:1] in ("'", '"') else ""
