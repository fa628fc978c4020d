"""What each word of ``%train`` does."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nbtrain.client import Run, default_client
from nbtrain.client.records import Checkpoint
from nbtrain.errors import NbtrainError, NotFound, Problem, Refused
from nbtrain.notebook import live
from nbtrain.notebook.line import ParsedLine, Word
from nbtrain.notebook.option_table import OptionTable
from nbtrain.notebook.told import telling
from nbtrain.plan.descriptor.document import FLAT
from nbtrain.plan.descriptor.table import METHODS
from nbtrain.plan.fields import Mode
from nbtrain.plan.listing import model_options
from nbtrain.plan.options import OPTIONS

if TYPE_CHECKING:
    import pandas as pd

Action = Callable[[Any, list[Any], ParsedLine], Any]
"""Called with the shell, the values of the words behind the verb, and the line."""

_IDS = ["run_id", "checkpoint_id", "config_hash", "dataset_id", "model_id", "workload_id",
        "bundle_id"]  # fmt: skip
_OWN_ID = ["dataset_id", "bundle_id", "model_id", "workload_id", "run_id"]
"""The column that identifies a row of a table: the first of these that it has."""
_LOG_LINES = 40
_TASKS = 8


# Runs


def find_run(ref: Any) -> Run:
    """The run of a name, an id, a prefix or a Run."""
    return default_client().training.runs.get(ref)


def list_runs(_: Any, __: list[Any], line: ParsedLine) -> Any:
    """The runs, newest first."""
    limit = _whole(line, "--limit")
    table = default_client().training.runs.list(limit).to_frame()
    return _for_reading(table, ("name", "status", "completed_steps", "total_steps", "run_id"))


def show(_: Any, refs: list[Any], __: ParsedLine) -> Any:
    """The run itself: its repr is its summary."""
    return find_run(refs[0])


def watch(shell: Any, refs: list[Any], _: ParsedLine) -> None:
    """An output that follows the run."""
    live.show(shell, find_run(refs[0]), with_panel=True)


def wait(shell: Any, refs: list[Any], line: ParsedLine) -> None:
    """The same, until the run is over."""
    timeout = _number(line, "--timeout")
    run = find_run(refs[0])
    shown = live.show(shell, run)
    try:
        run.wait(timeout)
    finally:
        shown.look_now()


def cancel(_: Any, refs: list[Any], __: ParsedLine) -> None:
    """Ask the run to stop."""
    run = find_run(refs[0])
    if run.is_over:
        print(f"{run.title} is over already: {run.status}")
        return
    run.cancel()
    print(f"{run.title} was asked to stop; its checkpoints stay")
    if refs[0] == run.name:
        for other in default_client().training.runs.still_running(run.name, besides=run):
            print(f"an older {other.title} is still running: %train cancel {other.id[:12]}")


def attribute(name: str) -> Action:
    """An action that shows an attribute of the run."""
    return lambda _, refs, __: getattr(find_run(refs[0]), name)


def diagnose(_: Any, refs: list[Any], __: ParsedLine) -> Any:
    """Why nothing seems to happen."""
    return find_run(refs[0]).diagnose()


def texts(_: Any, refs: list[Any], line: ParsedLine) -> Any:
    """What the model wrote in a step."""
    return find_run(refs[0]).texts(step=_whole(line, "--step"))


def log(_: Any, refs: list[Any], line: ParsedLine) -> None:
    """The end of the job's log."""
    lines = _whole(line, "--lines")
    written: Any = find_run(refs[0]).log
    shown = written.shown.rstrip("\n").split("\n")
    most = _LOG_LINES if lines is None else lines
    for told in shown[max(0, len(shown) - most) :]:
        print(told)


def estimate(_: Any, refs: list[Any], __: ParsedLine) -> Any:
    """What a run like this takes."""
    return default_client().training.estimate_of(refs[0])


def annotate(_: Any, refs: list[Any], line: ParsedLine) -> None:
    """Change the notes about a run."""
    given = {"description": line.text("--description"), "config_name": line.text("--config-name")}
    stated = {name: text or None for name, text in given.items() if text is not None}
    if not stated:
        told = "%train annotate needs --description TEXT or --config-name TEXT"
        raise Refused([Problem("line", told, where=line.rest[0].where)])
    run = default_client().training.runs.annotate(refs[0], **stated)
    print(f"{run.title}: {', '.join(stated)} noted")


def report(_: Any, refs: list[Any], line: ParsedLine) -> None:
    """One HTML file about the run."""
    run = find_run(refs[0])
    called = re.sub(r"[^\w.-]+", "-", run.name or "").strip("-.") or run.id[:12]
    path = _path(line, refs[1], 2) if len(refs) > 1 else f"{called}.html"
    print(f"wrote {run.report(path)}")


# Checkpoints


def checkpoints(_: Any, refs: list[Any], __: ParsedLine) -> Any:
    """The run's checkpoints, best first, each with its rank and what it is."""
    from nbtrain.client import tables
    from nbtrain.client.picking import ranked, standings

    run = find_run(refs[0])
    supervised = run.method == "sft"
    score = "validation_loss" if supervised else "held_out_reward"
    between = () if supervised else ("low", "high", "tie")
    found = ranked(run)
    table = tables.checkpoints(found, score)
    table["rank"], table["mark"] = standings(found)
    table["rank"] = table["rank"].astype("Int64")  # none without a complete round
    if not supervised:
        table["tie"] = table["tie"].astype("Int64")  # a step, empty where nothing ties
    figures = ("rank", "step_index", score, "mark", *between)
    first = (*figures, "round_completed", "kind", "checkpoint_id")
    return _for_reading(table, first)


def sample(shell: Any, refs: list[Any], line: ParsedLine) -> Any:
    """What the checkpoint's model replies."""
    settings: dict[str, Any] = {
        "n": _whole(line, "--n"),
        "temperature": _number(line, "--temperature"),
        "max_tokens": _whole(line, "--max-tokens"),
        "seed": _whole(line, "--seed"),
    }
    stated = {name: value for name, value in settings.items() if value is not None}
    first, *more = refs[1:]
    prompts = first if not more and not isinstance(first, str) else [first, *more]
    checkpoint = find_checkpoint(line.rest[1], refs[0])
    with telling(shell, f"replies of checkpoint {checkpoint.checkpoint_id[:12]}") as told:
        return checkpoint.generate(prompts, told=told, **stated)


def export(_: Any, refs: list[Any], line: ParsedLine) -> None:
    """A run's tables, or a checkpoint's adapter."""
    found, folder = _run_or_checkpoint(refs[0]), _path(line, refs[1], 2)
    form = line.values.get("--format")
    if isinstance(found, Checkpoint):
        if form is not None:
            told = "--format is of a run's tables; a checkpoint is exported as its adapter"
            raise Refused([Problem("--format", told, form.text, where=form.where)])
        print(f"wrote the adapter of step {found.step_index:,} into {found.export(folder)}")
        return
    files = found.export(folder) if form is None else found.export(folder, form.text)
    print(f"wrote {len(files)} files into {folder}: {', '.join(path.name for path in files)}")


def compare(shell: Any, refs: list[Any], line: ParsedLine) -> Any:
    """Two checkpoints on the same tasks, or runs side by side."""
    found = [_run_or_checkpoint(ref) for ref in refs]
    words = line.rest[1:]
    training = default_client().training
    tasks = line.values.get("--tasks")
    saved = [isinstance(thing, Checkpoint) for thing in found]
    if not any(saved):
        if tasks is not None:
            told = "--tasks is of two checkpoints; runs are compared by what they recorded"
            raise Refused([Problem("--tasks", told, tasks.text, where=tasks.where)])
        return training.runs.compare(*found)
    if not all(saved):
        odd = words[saved.index(not saved[0])]
        what = "a checkpoint" if saved[0] else "a run"
        told = f"{words[0].text} is {what}, {odd.text} is not: like is compared with like"
        raise Refused([Problem("line", told, found=odd.text, where=odd.where)])
    if len(found) > 2:
        told = f"two checkpoints are compared, found {len(found)}"
        raise Refused([Problem("line", told, where=words[2].where)])
    count = _whole(line, "--tasks")
    first, second = found
    tried = _TASKS if count is None else count
    pair = f"{first.checkpoint_id[:12]} and {second.checkpoint_id[:12]}"
    with telling(shell, f"checkpoints {pair}") as progress:
        return training.checkpoints.compare(first, second, tasks=tried, told=progress)


def find_checkpoint(word: Word, ref: Any) -> Checkpoint:
    """The checkpoint of an id, a prefix or a Checkpoint; a run is told what is needed."""
    if isinstance(ref, Run):
        told = f"{ref.title} is a run, and one of its checkpoints is needed"
        hint = "run.best() picks one, %train checkpoints lists them"
        raise Refused([Problem("line", told, found=word.text, where=word.where, hint=hint)])
    checkpoints = default_client().training.checkpoints
    try:
        return checkpoints.get(ref)
    except NotFound:
        if not isinstance(ref, str):
            raise
        try:
            run = find_run(ref)
        except NbtrainError:
            run = None
        if run is None:
            raise
        return find_checkpoint(word, run)


def _run_or_checkpoint(ref: Any) -> Any:
    """The run or the checkpoint that is meant; a name is always a run's."""
    if isinstance(ref, Run | Checkpoint):
        return ref
    training = default_client().training
    try:
        return training.runs.get(ref)
    except NotFound as error:
        try:
            return training.checkpoints.get(ref)
        except NotFound:
            msg = f"{error}; nor is it a checkpoint's id"
            raise NotFound(msg) from None


# What runs take and leave


def options(_: Any, names: list[Any], line: ParsedLine) -> Any:
    """Every option of a base model, or those that are named."""
    client = default_client()
    mode: Mode = "training"
    if _choice(line, "--mode", ("training", "evaluation")) == "evaluation":
        mode = "evaluation"
    supervised = _choice(line, "--method", METHODS) == "sft"
    table = FLAT if supervised else OPTIONS
    only = [name for name in names if isinstance(name, str) and name in table]
    model = None
    problems = []
    for word, name in zip(line.rest[1:], names, strict=True):
        if isinstance(name, str) and name in table:
            continue
        why = f", and {model.slug} names the base model" if model is not None else ""
        if model is None:
            try:
                model = client.base_models.get(name)._model
                continue
            except NotFound as error:
                if not isinstance(name, str) or "/" in name:
                    raise
                why = f"; {error}"
        problems.append(_no_option(word, name, table, why))
    if problems:
        raise Refused(problems)
    if model is None:
        model = client.base_models.list()[0]._model
    if supervised:
        return OptionTable.supervised(model, only)
    return OptionTable(model_options(model, mode), model, mode, only)


def _no_option(word: Word, name: Any, table: Iterable[str], why: str) -> Problem:
    """The refusal of a word that is no option: the nearest one, else ``why`` it is nothing else."""
    near = difflib.get_close_matches(name, [*table], n=1) if isinstance(name, str) else []
    told = f"there is no option {word.text}" + (f", did you mean {near[0]!r}?" if near else why)
    return Problem("line", told, word.text, where=word.where)


def listing(name: str, first: Sequence[str], one: str = "get", **how: Any) -> Action:
    """An action that shows one registered thing, or the table of all.

    ``name`` is the client's word for them, ``one`` its method that gives one.
    """

    def action(_: Any, refs: list[Any], __: ParsedLine) -> Any:
        things = getattr(default_client(), name)
        if refs and not (isinstance(refs[0], str) and refs[0] == "list"):
            return getattr(things, one)(refs[0], **how)
        return _for_reading(things.list().to_frame(), tuple(first))

    return action


def form(_: Any, __: list[Any], ___: ParsedLine) -> Any:
    """The configuration form."""
    import nbtrain

    return nbtrain.panel()


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


def _path(line: ParsedLine, value: Any, at: int) -> Any:
    if isinstance(value, str) or hasattr(value, "__fspath__"):
        return value
    word = line.rest[at]
    raise Refused([Problem("line", f"{word.text} is no path", word.text, where=word.where)])


def _choice(line: ParsedLine, flag: str, allowed: Sequence[str]) -> str | None:
    word = line.values.get(flag)
    if word is not None and word.text not in allowed:
        told = f"{flag} is {word.text!r}"
        raise Refused([Problem(flag, told, word.text, ", ".join(allowed), word.where)])
    return None if word is None else word.text


def _whole(line: ParsedLine, flag: str) -> int | None:
    return None if (value := _number(line, flag, whole=True)) is None else int(value)


def _number(line: ParsedLine, flag: str, *, whole: bool = False) -> float | None:
    text = line.text(flag)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (whole and not value.is_integer()):
        told = f"{flag} needs a {'whole ' if whole else ''}number, found {text!r}"
        raise Refused([Problem(flag, told, text, "0 or more", line.values[flag].where)])
    return value
