"""The line of a magic, taken exactly as typed: our own splitter and our own flags.

IPython's splitter goes through the shell's rules, which eat backslashes and split
``--opt="a b"`` at the blank. Here words are separated by blanks; a quote opens at the start of a
word or right behind the ``=`` of a flag and ends at the same quote, a doubled quote inside stands
for one (as in YAML); everything else, braces, ``$`` and backslashes included, is literal; a ``#``
at the start or behind a blank begins a comment.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from nbtrain.errors import Problem, Where


@dataclass(frozen=True, slots=True)
class Word:
    """One word of the line; ``column`` is 1-based in the cell's first line."""

    text: str
    column: int
    flag: str | None = None
    """The ``--flag`` this word is, or gives the value of by ``--flag=value``."""
    value: bool = True
    """Whether the word carries a value (false for a flag standing alone)."""

    @property
    def where(self) -> Where:
        """Its place in the cell."""
        return Where(line=1, column=self.column)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a magic. ``metavar`` names its value; a switch has none."""

    name: str
    metavar: str | None
    help: str
    field: str | None = None
    """The option of the body that it stands for, if any."""
    may_be_empty: bool = False
    """Whether an empty value says something."""


@dataclass(slots=True)
class ParsedLine:
    """What a line says: flag values and switches by flag name, the other words in their order."""

    values: dict[str, Word] = field(default_factory=dict)
    switches: dict[str, Word] = field(default_factory=dict)
    rest: list[Word] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Whether the switch was given."""
        return name in self.switches

    def text(self, name: str) -> str | None:
        """The flag's value as typed, ``None`` when it was not given."""
        word = self.values.get(name)
        return word.text if word else None


def split(line: str, offset: int = 0) -> tuple[list[Word], list[Problem]]:
    """The words of ``line``; ``offset`` is the number of characters that stood before it."""
    words: list[Word] = []
    problems: list[Problem] = []
    at, end = 0, len(line)
    while at < end:
        if line[at].isspace():
            at += 1
            continue
        if line[at] == "#":
            break
        start = at
        flag, at = _flag(line, at)
        bare = at == end or line[at].isspace()
        if flag is not None and bare and line[at - 1] != "=":
            words.append(Word(flag, start + offset + 1, flag, value=False))
            continue
        value_at = at
        if at < end and line[at] in "\"'":
            text, at, problem = _quoted(line, at, offset)
            if problem:
                problems.append(problem)
        else:
            while at < end and not line[at].isspace():
                at += 1
            text = line[value_at:at]
        words.append(Word(text, value_at + offset + 1, flag))
    return words, problems


def _flag(line: str, at: int) -> tuple[str | None, int]:
    """The flag that begins at ``at`` and where its value would begin."""
    if not line.startswith("--", at):
        return None, at
    end = at
    while end < len(line) and not line[end].isspace() and line[end] != "=":
        end += 1
    return line[at:end], end + (end < len(line) and line[end] == "=")


def _quoted(line: str, at: int, offset: int) -> tuple[str, int, Problem | None]:
    quote, start = line[at], at
    at += 1
    text: list[str] = []
    while at < len(line):
        if line[at] == quote:
            if line.startswith(quote, at + 1):
                text.append(quote)
                at += 2
                continue
            at += 1
            if at < len(line) and not line[at].isspace():
                where = Where(line=1, column=at + offset + 1)
                told = f"a blank is needed behind the closing {quote}, found {line[at]!r}"
                return "".join(text), at, Problem("line", told, found=line[at], where=where)
            return "".join(text), at, None
        text.append(line[at])
        at += 1
    where = Where(line=1, column=start + offset + 1)
    return "".join(text), at, Problem("line", f"the quote {quote} is never closed", where=where)


def parse(
    line: str,
    flags: Sequence[Flag],
    *,
    offset: int = 0,
    positional: bool = False,
    whose: str = "",
) -> ParsedLine:
    """Read flags and words; everything wrong is collected in ``problems``.

    ``positional`` allows words that belong to no flag. ``whose`` is what has the flags, where
    that is to be told.
    """
    known = {flag.name: flag for flag in flags}
    words, problems = split(line, offset)
    parsed = ParsedLine(problems=problems)
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word.flag is None:
            if positional:
                parsed.rest.append(word)
            else:
                parsed.problems.append(_stray(word))
            continue
        name = word.flag
        if name not in known:
            parsed.problems.append(_unknown(word, list(known), whose))
        elif known[name].metavar is None:
            _switch(parsed, word)
        else:
            _value(parsed, word, known[name], queue)
    return parsed


def _switch(parsed: ParsedLine, word: Word) -> None:
    name = word.flag or ""
    if word.value:
        told = f"{name} takes no value, found {word.text!r}"
        parsed.problems.append(Problem(name, told, found=word.text, where=word.where))
    parsed.switches[name] = word


def _value(parsed: ParsedLine, word: Word, flag: Flag, queue: list[Word]) -> None:
    if flag.name in parsed.values:
        told = f"{flag.name} is given twice"
        parsed.problems.append(Problem(flag.name, told, found=word.text, where=word.where))
    if word.value:
        given = word
    elif queue and queue[0].flag is None:
        given = queue.pop(0)
    else:
        told = f"{flag.name} needs a value: {flag.name} {flag.metavar}"
        parsed.problems.append(Problem(flag.name, told, where=word.where))
        return
    if not given.text and not flag.may_be_empty:
        told = f"{flag.name} needs a value, found an empty one"
        parsed.problems.append(Problem(flag.name, told, where=given.where))
    parsed.values[flag.name] = given


def _unknown(word: Word, known: list[str], whose: str) -> Problem:
    name = word.flag or word.text
    near = difflib.get_close_matches(name, known, n=1)
    told = f"{whose} has no flag {name}" if whose else f"unknown flag {name!r}"
    told += f", did you mean {near[0]!r}?" if near else ""
    allowed = None if near else ", ".join(known) or "no flags"
    return Problem(name, told, found=name, allowed=allowed, where=word.where)


def _stray(word: Word) -> Problem:
    told = f"{word.text!r} belongs to no flag"
    hint = "options stand in the body, one to a line, as 'name: value'"
    return Problem("line", told, found=word.text, where=word.where, hint=hint)
