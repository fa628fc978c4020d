"""The subcommands of ``%train``."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbtrain.client import Run, default_client
from nbtrain.errors import NotFound, Problem, Refused
from nbtrain.notebook import live
from nbtrain.notebook.cell import CellText, value_of
from nbtrain.notebook.flags import NOT_YET
from nbtrain.notebook.line import Flag, ParsedLine, Word, parse
from nbtrain.notebook.names import Names
from nbtrain.notebook.option_table import OptionTable
from nbtrain.notebook.refusals import CellRefused
from nbtrain.plan.descriptor.table import METHODS
from nbtrain.plan.fields import Mode
from nbtrain.plan.listing import model_options
from nbtrain.plan.source import in_order

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["run_command", "wrong_line"]

_IDS = ["run_id", "checkpoint_id", "config_hash", "dataset_id", "model_id", "workload_id"]
_OWN_ID = ["dataset_id", "model_id", "workload_id", "run_id"]
"""The column that identifies a row of a table: the first of these that it has."""
_USE = (
    "a run is started by a cell that begins with %%train; "
    "%train list | show | watch | wait | cancel | checkpoints | options | datasets | models | "
    "workloads | help"
)


def run_command(shell: Any, text: CellText) -> Any:
    """Do what the line says and return what the cell should show or assign."""
    names = Names(shell)
    bare = parse(text.line, _ALL_FLAGS, offset=len(text.magic), positional=True)
    if not bare.rest and not bare.problems and not bare.values:
        print(_USE)
        return None
    if bare.problems:
        raise wrong_line(text, bare.problems)
    word, *rest = bare.rest or [Word("", len(text.magic) + 1)]
    if word.text not in _COMMANDS:
        raise wrong_line(text, [_unknown(word)])
    flags, least, most, command = _COMMANDS[word.text]
    known = {flag.name for flag in flags}
    problems = [
        Problem(name, f"%train {word.text} has no flag {name}", where=given.where)
        for name, given in bare.values.items()
        if name not in known
    ]
    if not least <= len(rest) <= most:
        needed = "a run: a name, an id or a prefix"
        if not least and word.text not in _OF_A_RUN:
            needed = "one name at most" if most else "no more words"
        told = f"%train {word.text} takes {needed}, found {len(rest)} words"
        problems.append(Problem("line", told, where=(rest[-1] if rest else word).where))
    values = [_reference(item, names, problems) for item in rest]
    if problems:
        raise wrong_line(text, problems)
    if not values and word.text in _OF_A_RUN:
        values = [_run_at_hand(names)]
    try:
        return command(shell, values, bare)
    except NotFound as error:
        for value in values:
            if isinstance(value, str) and isinstance(names.get(value), Run):
                msg = f"{error}; the variable {value} holds a run: %train {word.text} ${value}"
                raise NotFound(msg) from None
        raise


def wrong_line(text: CellText, problems: list[Problem]) -> CellRefused:
    """The refusal of a line that starts no run anyway."""
    return CellRefused(in_order(problems), text.whole)


def _reference(word: Word, names: Names, problems: list[Problem]) -> Any:
    """The word's value; ``_`` is the run that a cell without ``--into`` leaves there."""
    if word.text != "_":
        return value_of(word, names, problems)
    last = names.get("_")
    if not isinstance(last, Run):
        told = "_ is no run: it is the value of the last cell that had one"
        problems.append(Problem("line", told, found="_", where=word.where))
    return last


def _run_at_hand(names: Names) -> Run:
    """The run of a command that names none: ``_``, else the newest; it says which."""
    last = names.get("_")
    if isinstance(last, Run):
        print(f"{last.title}, the last cell's")
        return last
    newest = default_client().training.runs.list(1).items
    if not newest:
        msg = "there is no run yet: a cell that begins with %%train starts one"
        raise NotFound(msg)
    print(f"{newest[0].title}, the newest")
    return newest[0]


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
    table = default_client().training.runs.list(None if limit is None else int(limit)).to_frame()
    return _for_reading(table, ("name", "status", "completed_steps", "total_steps", "run_id"))


def _for_reading(table: pd.DataFrame, first: tuple[str, ...]) -> pd.DataFrame:
    """The table with ``first`` in front, and ids cut to prefixes, which also stand for names."""
    noted = "note" in table.columns
    first = (first[0], "note", *first[1:]) if noted else first
    rest = [name for name in table.columns if name not in first]
    table = table[[*first, *rest]].copy()
    for name in table.columns.intersection(_IDS):
        table[name] = table[name].astype(object).str[:12]
    own = next(iter(table.columns.intersection(_OWN_ID)), None)
    for name in table.columns.intersection(["name"] if own else []):
        table[name] = table[name].astype(object).fillna(table[own])
    if noted:
        from nbtrain.client.wide import WideFrame

        return WideFrame(table)
    return table


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


def _help(shell: Any, _: list[Any], __: ParsedLine) -> None:
    print(textwrap.dedent(shell.find_line_magic("train").__doc__).strip())


def _cancel(_: Any, refs: list[Any], __: ParsedLine) -> None:
    run = _run(refs[0])
    if run.is_over:
        print(f"{run.title} is over already: {run.status}")
        return
    run.cancel()
    print(f"{run.title} was asked to stop; its checkpoints stay")
    if refs[0] == run.name:
        for other in default_client().training.runs.still_running(run.name, besides=run):
            print(f"an older {other.title} is still running: %train cancel {other.id[:12]}")


def _checkpoints(_: Any, refs: list[Any], __: ParsedLine) -> Any:
    table = _run(refs[0]).checkpoints
    score = next(name for name in ("held_out_reward", "validation_loss") if name in table)
    return _for_reading(table, ("step_index", score, "round_completed", "kind", "checkpoint_id"))


def _diagnose(_: Any, refs: list[Any], __: ParsedLine) -> Any:
    return _run(refs[0]).diagnose()


def _estimate(_: Any, refs: list[Any], __: ParsedLine) -> Any:
    return default_client().training.estimate_of(refs[0])


def _options(_: Any, models: list[Any], line: ParsedLine) -> Any:
    client = default_client()
    mode: Mode = "training"
    word = line.values.get("--mode")
    if word is not None:
        if word.text not in ("training", "evaluation"):
            told = f"--mode is {word.text!r}"
            raise Refused([Problem("--mode", told, word.text, "training, evaluation", word.where)])
        mode = "training" if word.text == "training" else "evaluation"
    given = models[0] if models else client.base_models.list()[0].slug
    model = client.base_models.get(given)._model
    method = line.values.get("--method")
    if method is not None and method.text not in METHODS:
        told = f"--method is {method.text!r}"
        allowed = ", ".join(METHODS)
        raise Refused([Problem("--method", told, method.text, allowed, method.where)])
    if method is not None and method.text == "sft":
        return OptionTable.supervised(model)
    return OptionTable(model_options(model, mode), model, mode)


def _datasets(_: Any, refs: list[Any], __: ParsedLine) -> Any:
    datasets = default_client().datasets
    if _one(refs):
        return datasets.rows(refs[0], limit=5)
    return _for_reading(datasets.list().to_frame(), ("name", "rows", "columns", "dataset_id"))


def _models(_: Any, refs: list[Any], __: ParsedLine) -> Any:
    models = default_client().models
    if _one(refs):
        return models.get(refs[0])
    first = ("name", "base_model_slug", "method", "step", "model_id")
    return _for_reading(models.list().to_frame(), first)


def _workloads(_: Any, refs: list[Any], __: ParsedLine) -> Any:
    workloads = default_client().workloads
    if _one(refs):
        return workloads.get(refs[0])
    first = ("name", "train", "held_out", "base_model", "workload_id")
    return _for_reading(workloads.list().to_frame(), first)


def _one(refs: list[Any]) -> bool:
    """Whether one thing is asked for; ``list`` says the same as nothing."""
    return bool(refs) and refs[0] != "list"


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
_METHOD = Flag("--method", "METHOD", "whose options: gspo, grpo or sft")
_ALL_FLAGS = (_LIMIT, _TIMEOUT, _MODE, _METHOD)

_OF_A_RUN = frozenset(("show", "watch", "wait", "checkpoints", "diagnose", "estimate"))
"""Commands that without a run take the one at hand."""

_Command = Callable[[Any, list[Any], ParsedLine], Any]
# name: (its flags, fewest and most words behind it, what it does)
_COMMANDS: dict[str, tuple[tuple[Flag, ...], int, int, _Command]] = {
    "list": ((_LIMIT,), 0, 0, _list),
    "show": ((), 0, 1, _show),
    "watch": ((), 0, 1, _watch),
    "wait": ((_TIMEOUT,), 0, 1, _wait),
    "cancel": ((), 1, 1, _cancel),
    "checkpoints": ((), 0, 1, _checkpoints),
    "diagnose": ((), 0, 1, _diagnose),
    "estimate": ((), 0, 1, _estimate),
    "options": ((_MODE, _METHOD), 0, 1, _options),
    "datasets": ((), 0, 1, _datasets),
    "models": ((), 0, 1, _models),
    "workloads": ((), 0, 1, _workloads),
    "help": ((), 0, 0, _help),
}
