"""The words of ``%train``, in one table: dispatch, help, suggestions and completion read it."""

from __future__ import annotations

import difflib
import textwrap
from dataclasses import dataclass
from typing import Any, Literal

from nbtrain.errors import Problem, Refused, Where
from nbtrain.notebook import actions
from nbtrain.notebook.actions import Action
from nbtrain.notebook.line import Flag, ParsedLine

__all__ = ["FLAGS", "NOT_YET", "USE", "VERBS", "Kind", "Verb", "help_of", "overview", "unknown"]

Kind = Literal[
    "run", "checkpoint", "run or checkpoint", "dataset", "workload", "model", "base model",
    "bundle", "option or base model", "verb", "text", "path",
]  # fmt: skip
"""What a word behind a verb is."""


@dataclass(frozen=True, slots=True)
class Verb:
    """One word of ``%train``.

    ``words`` are the kinds of the words behind it, the last one also of all that follow; at
    least ``least`` and at most ``most`` are taken. ``at_hand``: without any, the run at hand is
    meant.
    """

    name: str
    usage: str
    help: str
    do: Action
    words: tuple[Kind, ...] = ()
    least: int = 0
    most: int = 0
    flags: tuple[Flag, ...] = ()
    at_hand: bool = False

    def kind(self, position: int) -> Kind | None:
        """What the word at a position (0 is the first behind the verb) is; ``None`` for none."""
        if not self.words or position >= self.most:
            return None
        return self.words[min(position, len(self.words) - 1)]

    @property
    def needs(self) -> str:
        """What it takes, for a line that has too few or too many words."""
        if self.words == ("run",):
            return "a run: a name, an id or a prefix"
        if self.usage == "[NAME]":
            return "one name at most"
        return self.usage or "no more words"

    @property
    def line(self) -> str:
        """How it is written."""
        flags = [f"[{flag.name} {flag.metavar}]" for flag in self.flags]
        return " ".join(["%train", self.name, *([self.usage] if self.usage else []), *flags])


def _of_run(name: str, text: str, do: Action | None = None, *flags: Flag) -> Verb:
    do = do or actions.attribute(name)
    return Verb(name, "RUN", text, do, ("run",), 0, 1, flags, at_hand=True)


def _registered(name: str, kind: Kind, text: str, do: Action) -> Verb:
    return Verb(name, "[NAME]", text, do, (kind,), 0, 1)


def _help(_: Any, names: list[Any], line: ParsedLine) -> None:
    # As typed: what stands behind a $name is no word of %train
    print(help_of(line.rest[1].text, line) if names else overview())


_MANY = 64

_TABLE = (
    Verb("list", "", "runs, newest first", actions.list_runs,
         flags=(Flag("--limit", "N", "how many runs at most"),)),
    _of_run("show", "one look at a run", actions.show),
    _of_run("watch", "an output that follows it, and its panel", actions.watch),
    _of_run("wait", "an output that follows it, returning when the run is over", actions.wait,
            Flag("--timeout", "SECONDS", "how long to wait at most")),
    Verb("cancel", "RUN", "stop it; its checkpoints stay", actions.cancel, ("run",), 1, 1),
    _of_run("diagnose", "why nothing seems to happen", actions.diagnose),
    _of_run("plan", "what it trains under, each value with its origin"),
    _of_run("log", "the end of the job's log", actions.log,
            Flag("--lines", "N", "how many lines, by default 40")),
    _of_run("metrics", "every figure of every step"),
    _of_run("rewards", "the mean reward of each step"),
    _of_run("losses", "the loss of each step"),
    _of_run("validation", "every validation round"),
    _of_run("groups", "where the groups of each step went"),
    _of_run("trajectories", "single attempts, without their texts"),
    _of_run("texts", "what the model was asked and wrote", actions.texts,
            Flag("--step", "N", "of which step, by default the newest")),
    Verb("annotate", "RUN", "change the notes about a run", actions.annotate, ("run",), 1, 1,
         (Flag("--description", "TEXT", "what the run is about; '' takes it away",
               may_be_empty=True),
          Flag("--config-name", "TEXT", "label of the configuration in tables of scores; or ''",
               may_be_empty=True))),
    _of_run("checkpoints", "its checkpoints, best first, with interval and ties",
            actions.checkpoints),
    Verb("sample", 'CHECKPOINT "PROMPT" …', "what the model at a checkpoint replies",
         actions.sample, ("checkpoint", "text"), 2, _MANY,
         (Flag("--n", "N", "replies to each prompt, by default 1"),
          Flag("--temperature", "T", "sampling temperature; 0 is greedy"),
          Flag("--max-tokens", "N", "tokens of a reply at most"),
          Flag("--seed", "N", "the same seed gives the same replies"))),
    Verb("compare", "A B …", "two checkpoints on the same tasks, or runs side by side",
         actions.compare, ("run or checkpoint",), 2, _MANY,
         (Flag("--tasks", "N", "of checkpoints: on how many tasks, by default 8"),)),
    Verb("report", "RUN [PATH]", "one HTML file about it, by default NAME.html", actions.report,
         ("run", "path"), 0, 2, at_hand=True),
    Verb("export", "RUN|CHECKPOINT FOLDER", "a run's tables, or a checkpoint's adapter",
         actions.export, ("run or checkpoint", "path"), 2, 2,
         (Flag("--format", "parquet|csv|xlsx", "of a run's tables, by default parquet"),)),
    _of_run("estimate", "what a run like this takes; %%train --dry-run tells it of a plan that is "
            "not started", actions.estimate),
    Verb("options", "[MODEL] [OPTION …]", "every option of %%train, or those that are named",
         actions.options, ("option or base model",), 0, _MANY,
         (Flag("--method", "gspo|grpo|sft", "of a supervised run: sft"),
          Flag("--mode", "training|evaluation", "of an evaluation: evaluation"))),
    _registered("workloads", "workload", "what can be trained on", actions.listing(
        "workloads", ("name", "train", "held_out", "base_model", "workload_id"))),
    _registered("datasets", "dataset", "registered datasets, or one and its first rows",
                actions.listing("datasets", ("name", "rows", "columns", "dataset_id"), "rows",
                                limit=5)),
    _registered("bundles", "bundle", "registered bundles of modules that score", actions.listing(
        "bundles", ("name", "modules", "size", "bundle_id"))),
    _registered("base-models", "base model", "what can be trained", actions.listing(
        "base_models", ("base_model_slug", "kind", "max_context"))),
    _registered("models", "model", "adapters that completed runs left", actions.listing(
        "models", ("name", "base_model_slug", "method", "step", "model_id"))),
    Verb("panel", "", "the form that makes a plan and starts it", actions.form),
    Verb("help", "[VERB]", "this text, or all about one word", _help, ("verb",), 0, 1),
)  # fmt: skip

VERBS: dict[str, Verb] = {verb.name: verb for verb in _TABLE}
"""Every word by name, in the order of the help text."""

NOT_YET = ("pause", "resume", "branch", "evaluate", "doctor", "sweep", "pin")
"""Words that are refused by name."""

FLAGS: tuple[Flag, ...] = tuple(
    {flag.name: flag for verb in _TABLE for flag in verb.flags}.values()
)
"""The flags of all words."""

USE = f"a run is started by a cell that begins with %%train; %train {' | '.join(VERBS)}"
"""What ``%train`` alone says."""

_REFERENCES = """\
RUN is a name (its newest run), an id, a prefix of an id, $name of a Run, or _; where it is left
out, _ is meant where that is a run, else the newest one (not by cancel, annotate, export and
compare). CHECKPOINT is an id, a prefix, or $name of a Checkpoint such as run.best(). A run is
started by a cell that begins with %%train; %%train? shows its help. In Python, nbtrain.attach(RUN)
is the run, and what %train shows are its attributes."""


def overview() -> str:
    """Every word with what it does."""
    heads = [f"%train {verb.name} {verb.usage}".rstrip() for verb in _TABLE]
    wide = max(map(len, heads)) + 2
    lines = [
        textwrap.fill(verb.help, 96, initial_indent=f"{head:<{wide}}", subsequent_indent=" " * wide)
        for head, verb in zip(heads, _TABLE, strict=True)
    ]
    return "\n".join([*lines, "", "%train help VERB shows its flags.", "", _REFERENCES])


def help_of(name: str, line: ParsedLine | None = None) -> str:
    """All about one word; ``line`` is where it is asked for.

    Raises :class:`Refused` for a word that is none.
    """
    if name not in VERBS:
        raise Refused([unknown(name, line.rest[1].where if line is not None else None)])
    verb = VERBS[name]
    wide = max((len(f"{flag.name} {flag.metavar}") for flag in verb.flags), default=0) + 2
    flags = [f"    {f'{flag.name} {flag.metavar}':<{wide}}{flag.help}" for flag in verb.flags]
    told = [verb.line, f"    {verb.help}", *flags]
    if verb.at_hand:
        told.append("    without RUN, the run of the last cell, else the newest one")
    return "\n".join(told)


def unknown(name: str, where: Where | None) -> Problem:
    """The refusal of a word that is no verb, with the nearest one."""
    if name in NOT_YET:
        told = f"%train {name} is not built yet in this version"
        return Problem(name, told, found=name, where=where)
    near = difflib.get_close_matches(name, [*VERBS, *NOT_YET], n=1)
    told = f"%train has no {name!r}" + (f", did you mean {near[0]!r}?" if near else "")
    return Problem(name, told, name, None if near else ", ".join(VERBS), where)
