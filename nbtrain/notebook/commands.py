"""The subcommands of ``%train``."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from nbtrain.client import Run, default_client
from nbtrain.errors import Problem, Refused
from nbtrain.notebook import live
from nbtrain.notebook.cell import CellText, refused, value_of
from nbtrain.notebook.flags import NOT_YET
from nbtrain.notebook.line import Flag, ParsedLine, Word, parse

__all__ = ["run_command"]

_USE = (
    "a run is started by a cell that begins with %%train; "
    "%train list | show | watch | wait | cancel | checkpoints | options"
)


def run_command(shell: Any, text: CellText) -> Any:
    """Do what the line says and return what the cell should show or assign."""
    bare = parse(text.line, _ALL_FLAGS, offset=len(text.magic), positional=True)
    if not bare.rest and not bare.problems and not bare.values:
        print(_USE)
        return None
    if bare.problems:
        raise refused(text, bare.problems)
    word, *rest = bare.rest or [Word("", len(text.magic) + 1)]
    if word.text not in _COMMANDS:
        raise refused(text, [_unknown(word)])
    flags, least, most, command = _COMMANDS[word.text]
    known = {flag.name for flag in flags}
    problems = [
        Problem(name, f"%train {word.text} has no flag {name}", where=given.where)
        for name, given in bare.values.items()
        if name not in known
    ]
    if not least <= len(rest) <= most:
        needed = "a run: a name, an id or a prefix" if least else "no more words"
        told = f"%train {word.text} takes {needed}, found {len(rest)} words"
        problems.append(Problem("line", told, where=(rest[-1] if rest else word).where))
    values = [value_of(item, shell.user_ns, problems) for item in rest]
    if problems:
        raise refused(text, problems)
    return command(shell, values, bare)


def _unknown(word: Word) -> Problem:
    if word.text in NOT_YET:
        told = f"%train {word.text} is not built yet in this version"
        return Problem(word.text, told, found=word.text, where=word.where)
    near = difflib.get_close_matches(word.text, [*_COMMANDS, *NOT_YET], n=1)
    told = f"%train has no {word.text!r}" + (f", did you mean {near[0]!r}?" if near else "")
    return Problem(word.text, told, word.text, ", ".join(_COMMANDS), word.where)


def _run(ref: Any) -> Run:
    return default_client().training.runs.get(ref)


def _list(_: Any, __: list[Any], line: ParsedLine) -> Any:
    limit = _number(line, "--limit")
    return default_client().training.runs.list(None if limit is None else int(limit)).to_frame()


def _show(_: Any, refs: list[Any], __: ParsedLine) -> Any:
    return _run(refs[0])


def _watch(shell: Any, refs: list[Any], _: ParsedLine) -> None:
    live.show(shell, _run(refs[0]))


def _wait(shell: Any, refs: list[Any], line: ParsedLine) -> None:
    timeout = _number(line, "--timeout")
    run = _run(refs[0])
    shown = live.show(shell, run)
    try:
        run.wait(timeout)
    finally:
        live.poller.look_now(shown)


def _cancel(_: Any, refs: list[Any], __: ParsedLine) -> None:
    run = _run(refs[0])
    if run.is_over:
        print(f"{run.title} is over already: {run.status}")
        return
    run.cancel()
    print(f"{run.title} was asked to stop; its checkpoints stay")


def _checkpoints(_: Any, refs: list[Any], __: ParsedLine) -> Any:
    return _run(refs[0]).checkpoints


def _options(_: Any, models: list[Any], line: ParsedLine) -> Any:
    client = default_client()
    mode = line.text("--mode") or "training"
    if mode not in ("training", "evaluation"):
        given = line.values["--mode"]
        told = f"--mode is {mode!r}"
        raise Refused([Problem("--mode", told, mode, "training, evaluation", given.where)])
    slug = client.base_models.get(models[0]).slug if models else None
    table = client.training.list_options(mode=mode).to_frame()  # type: ignore[arg-type]
    if slug is None:
        slug = table["base_model_slug"].iloc[0]
    chosen = table[table["base_model_slug"] == slug]
    return chosen.drop(columns=["base_model_slug"]).reset_index(drop=True)


def _number(line: ParsedLine, flag: str) -> float | None:
    text = line.text(flag)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        told = f"{flag} needs a number, found {text!r}"
        raise Refused([Problem(flag, told, text, "0 or more", line.values[flag].where)])
    return value


_LIMIT = Flag("--limit", "N", "how many runs at most")
_TIMEOUT = Flag("--timeout", "SECONDS", "how long to wait at most")
_MODE = Flag("--mode", "MODE", "training or evaluation")
_ALL_FLAGS = (_LIMIT, _TIMEOUT, _MODE)

_Command = Callable[[Any, list[Any], ParsedLine], Any]
# name: (its flags, fewest and most words behind it, what it does)
_COMMANDS: dict[str, tuple[tuple[Flag, ...], int, int, _Command]] = {
    "list": ((_LIMIT,), 0, 0, _list),
    "show": ((), 1, 1, _show),
    "watch": ((), 1, 1, _watch),
    "wait": ((_TIMEOUT,), 1, 1, _wait),
    "cancel": ((), 1, 1, _cancel),
    "checkpoints": ((), 1, 1, _checkpoints),
    "options": ((_MODE,), 0, 1, _options),
}
