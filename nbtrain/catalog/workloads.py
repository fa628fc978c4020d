"""Workloads: tasks, how they divide into training and held-out ones, and packed rewards.

A workload is identified by its content and never changes; a name points at one and may be moved.
Its folder holds ``workload.json``, ``tasks.jsonl``, ``held_out.jsonl`` (the stated held-out
tasks), ``rewards.pkl`` and, where it has an environment, ``environment.pkl``. A bare workload has
no tasks and only the first of these: descriptors name it and bring a dataset of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from nbtrain.catalog.base_models import BaseModel
from nbtrain.catalog.rows import PROMPT, Row, read_rows
from nbtrain.catalog.splitting import Split, Task, content, split_tasks
from nbtrain.errors import NotFound, Problem, Refused
from nbtrain.store import name_problems

__all__ = [
    "DatasetName",
    "Workload",
    "WorkloadSpec",
    "bare_workload",
    "build_workload",
    "load_workload",
]

VERSION = 2


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A checked workload, not yet registered.

    ``held_out`` is the fraction to split off, or ``None`` when ``held_out_rows`` states the
    held-out tasks. ``rewards`` are the packed functions, ``reward_identity`` what they hash to;
    ``environment`` and ``environment_identity`` likewise, ``None`` where there is none.
    ``environment_form`` is ``tools`` or ``step``, ``None`` where that shows only when it runs.
    """

    workload_id: str
    name: str
    rows: tuple[Row, ...] = field(repr=False)
    held_out: float | None
    held_out_rows: tuple[Row, ...] = field(repr=False)
    rewards: bytes = field(repr=False)
    reward_identity: tuple[dict[str, Any], ...] = field(repr=False)
    base_model: str | None
    raw: bool
    environment: bytes | None = field(default=None, repr=False)
    environment_identity: dict[str, Any] | None = field(default=None, repr=False)
    environment_form: str | None = None
    dataset: DatasetName | None = None
    grader: str | None = None


@dataclass(frozen=True, slots=True)
class DatasetName:
    """The registered dataset of a workload: its content hash, and the name it was stated by."""

    dataset_id: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class SplitNumbers:
    """How many tasks train and are held out, how that came about, and the digests of both."""

    train: int
    held_out: int
    description: str
    train_digest: str
    held_out_digest: str


def told_split(split: Split) -> dict[str, Any]:
    """What ``workload.json`` says of a split."""
    return {name: getattr(split, name) for name in SplitNumbers.__slots__}


def side_of(validation: bool) -> str:
    """Under which key it says it."""
    return "with validation" if validation else "without validation"


class Workload:
    """A registered workload; tasks are read from its folder when first asked for."""

    def __init__(self, folder: Path, about: Mapping[str, Any], name: str | None) -> None:
        self.folder = folder
        self.name = name
        self._about = about

    @property
    def workload_id(self) -> str:
        """Content hash, 64 hex digits."""
        return str(self._about["workload_id"])

    @property
    def raw(self) -> bool:
        """Whether prompts are plain text that no chat template wraps."""
        return bool(self._about["raw"])

    @property
    def base_model(self) -> str | None:
        """Slug used when a plan names no base model."""
        slug = self._about["base_model"]
        return None if slug is None else str(slug)

    @property
    def has_tasks(self) -> bool:
        """Whether it has tasks of its own to train on."""
        return bool(self._about["tasks"])

    @property
    def dataset(self) -> DatasetName | None:
        """The dataset that belongs to it, if any."""
        found = self._about.get("dataset")
        return None if found is None else DatasetName(**found)

    @property
    def grader(self) -> str | None:
        """The grader of its evaluations, which a descriptor's reward defaults to, if any."""
        found = self._about.get("grader")
        return None if found is None else str(found)

    @property
    def held_out(self) -> float | None:
        """Fraction of prompts to split off; ``None`` when the held-out tasks are stated."""
        return None if self._about["held_out"] is None else float(self._about["held_out"])

    @property
    def reward_names(self) -> list[str]:
        """Names of the reward terms, in order."""
        return [str(term["name"]) for term in self.reward_identity]

    @property
    def reward_identity(self) -> list[dict[str, Any]]:
        """What the rewards hash to, one mapping for each term."""
        return list(self._about["rewards"])

    @property
    def columns(self) -> list[str]:
        """Names of the tasks' columns besides the prompt."""
        return [str(name) for name in self._about["columns"]]

    @property
    def rewards_path(self) -> Path:
        """The file that holds the packed rewards."""
        return self.folder / "rewards.pkl"

    @property
    def environment_identity(self) -> dict[str, Any] | None:
        """What the environment hashes to, its ``name`` among it; ``None`` without one."""
        found = self._about.get("environment")
        return None if found is None else dict(found)

    @property
    def environment_form(self) -> Literal["tools", "step", "unknown"] | None:
        """How the environment is talked to; ``None`` without one."""
        if self.environment_identity is None:
            return None
        form: Literal["tools", "step", "unknown"] = self._about.get("environment_form") or "unknown"
        return form

    @property
    def environment_path(self) -> Path | None:
        """The file that holds the packed environment; ``None`` where there is none."""
        return None if self.environment_identity is None else self.folder / "environment.pkl"

    def tasks(self) -> list[Task]:
        """Every task that may train or be split off, in the order given."""
        return list(self._tasks)

    def held_out_tasks(self) -> list[Task]:
        """The stated held-out tasks; empty when there are none."""
        return list(self._held_out_tasks)

    def split(self, *, validation: bool) -> Split:
        """How the tasks divide.

        Stated held-out tasks never train. A fraction is split off by content hash when
        ``validation`` is on; otherwise everything trains. Raises ``NotFound`` when the files are
        gone, damaged, or not those that were registered.
        """
        split = split_tasks(self._tasks, self._held_out_tasks, self.held_out, validation=validation)
        if told_split(split) != self._about["splits"][side_of(validation)]:
            msg = (
                f"the tasks in {self.folder} are not those that were registered; "
                "register the workload again"
            )
            raise NotFound(msg)
        return split

    def split_info(self, *, validation: bool) -> SplitNumbers:
        """Sizes and digests of :meth:`split` as they were registered, without reading a task.

        Raises ``Refused`` for a bare workload.
        """
        if not self.has_tasks:
            raise Refused([self._nothing_to_train_on()])
        return SplitNumbers(**self._about["splits"][side_of(validation)])

    def _nothing_to_train_on(self) -> Problem:
        name = self.name or self.workload_id[:12]
        message = f"workload {name} has no tasks of its own to train on"
        dataset = self.dataset
        stated = "a registered one" if dataset is None else dataset.name or dataset.dataset_id[:12]
        hint = (
            f"Train it by a descriptor (kind: run, workload: {name}) whose config.dataset is "
            f"{stated}, or register the workload with tasks="
        )
        return Problem("workload", message, found=name, hint=hint)

    @cached_property
    def _tasks(self) -> list[Task]:
        if not self.has_tasks:
            return []
        return _read_tasks(self.folder / "tasks.jsonl", self._about["tasks"])

    @cached_property
    def _held_out_tasks(self) -> list[Task]:
        if not self.has_tasks:
            return []
        return _read_tasks(self.folder / "held_out.jsonl", self._about["held_out_tasks"])

    def __repr__(self) -> str:
        called = f"{self.name!r}, " if self.name else ""
        tasks = f"{self._about['tasks']} tasks" if self.has_tasks else "no tasks"
        return f"Workload({called}{self.workload_id[:12]}, {tasks})"


def build_workload(
    name: str,
    *,
    tasks: object,
    rewards: bytes,
    reward_identity: Sequence[Mapping[str, Any]],
    base_model: str | BaseModel | None = None,
    held_out: object = 0.1,
    raw: bool = False,
    environment: bytes | None = None,
    environment_identity: Mapping[str, Any] | None = None,
    environment_form: str | None = None,
    dataset: DatasetName | None = None,
    grader: str | None = None,
) -> WorkloadSpec:
    """Check everything and compute the content hash.

    ``tasks`` is a DataFrame or a list of dicts with a ``prompt`` column; ``held_out`` a fraction
    (0 up to below 1, of the distinct prompts) or rows like ``tasks``. ``rewards`` and
    ``reward_identity`` come from ``nbtrain.rewards.pack``, ``environment`` and its identity from
    ``nbtrain.environments.pack``; ``dataset`` and ``grader`` are checked by the caller. Raises
    ``Refused`` with all problems.
    """
    if isinstance(base_model, BaseModel):
        base_model = base_model.slug
    problems = _option_problems(name, base_model, raw)
    rows, wrong = read_rows(tasks, field="tasks", raw=raw is True)
    fraction, held_out_rows, wrong_held_out = _read_held_out(held_out, raw=raw is True)
    problems += wrong + wrong_held_out
    if not problems:
        problems += _problems_between(rows, held_out_rows)
    if problems:
        raise Refused(problems)
    identity = tuple(dict(term) for term in reward_identity)
    about = None if environment_identity is None else dict(environment_identity)
    head: dict[str, Any] = {"rewards": list(identity), "base_model": base_model, "raw": raw}
    if about is not None:  # absent, not null: other workloads keep their ids
        head["environment"] = about
    head |= _beside_tasks(dataset, grader)
    return WorkloadSpec(
        workload_id=_content_hash(rows, fraction, held_out_rows, head),
        name=name,
        rows=tuple(rows),
        held_out=fraction,
        held_out_rows=tuple(held_out_rows),
        rewards=rewards,
        reward_identity=identity,
        base_model=base_model,
        raw=raw,
        environment=environment,
        environment_identity=about,
        environment_form=environment_form,
        dataset=dataset,
        grader=grader,
    )


def bare_workload(
    name: str,
    *,
    base_model: str | BaseModel | None = None,
    dataset: DatasetName | None = None,
    grader: str | None = None,
) -> WorkloadSpec:
    """A workload without tasks, which descriptors name; its name is part of what it is.

    Raises ``Refused`` with all problems.
    """
    if isinstance(base_model, BaseModel):
        base_model = base_model.slug
    problems = _option_problems(name, base_model, raw=False)
    if problems:
        raise Refused(problems)
    head = {"version": VERSION, "bare": name, "base_model": base_model}
    return WorkloadSpec(
        workload_id=hashlib.sha256(content(head | _beside_tasks(dataset, grader))).hexdigest(),
        name=name,
        rows=(),
        held_out=None,
        held_out_rows=(),
        rewards=b"",
        reward_identity=(),
        base_model=base_model,
        raw=False,
        dataset=dataset,
        grader=grader,
    )


def _beside_tasks(dataset: DatasetName | None, grader: str | None) -> dict[str, Any]:
    """What is hashed of these; absent, not null: other workloads keep their ids."""
    stated = {"dataset": dataset.dataset_id if dataset else None, "grader": grader}
    return {name: value for name, value in stated.items() if value is not None}


def _option_problems(name: object, base_model: object, raw: object) -> list[Problem]:
    problems = name_problems("workload", name)
    if base_model is not None and not isinstance(base_model, str):
        message = f"base_model is a {type(base_model).__name__}"
        problems.append(Problem("base_model", message, allowed="a base model's name"))
    if not isinstance(raw, bool):
        problems.append(Problem("raw", f"raw is {raw!r}", found=raw, allowed="True or False"))
    return problems


def _read_held_out(held_out: object, *, raw: bool) -> tuple[float | None, list[Row], list[Problem]]:
    if isinstance(held_out, bool) or held_out is None or isinstance(held_out, (int, float)):
        if isinstance(held_out, bool) or held_out is None or not 0 <= held_out < 1:
            message = f"held_out is {held_out!r}"
            allowed = "a fraction from 0 up to below 1, or held-out tasks as rows"
            return None, [], [Problem("held_out", message, found=held_out, allowed=allowed)]
        return float(held_out), [], []
    rows, problems = read_rows(held_out, field="held_out", raw=raw)
    return None, rows, problems


def _problems_between(rows: list[Row], held_out_rows: list[Row]) -> list[Problem]:
    if not held_out_rows:
        return []
    missing = [name for name in rows[0] if name not in held_out_rows[0]]
    problems = [
        Problem(f"held_out.{name}", f"held_out has no column {name!r}, which tasks has")
        for name in missing
    ]
    stated = {content(row[PROMPT]) for row in held_out_rows}
    if all(content(row[PROMPT]) in stated for row in rows):
        message = "every task's prompt is among the held-out ones, so nothing is left to train on"
        problems.append(Problem("held_out", message))
    return problems


def _content_hash(
    rows: Sequence[Row],
    fraction: float | None,
    held_out_rows: Sequence[Row],
    more: Mapping[str, Any],
) -> str:
    # Lines are hashed one by one: a million tasks never stand in memory as one text.
    digest = hashlib.sha256()
    head = {"version": VERSION, "held_out": fraction, "tasks": len(rows), **more}
    digest.update(content(head))
    for row in (*rows, *held_out_rows):
        digest.update(b"\n" + content(row))
    return digest.hexdigest()


def load_workload(folder: Path, name: str | None = None) -> Workload:
    """The workload in ``folder``. Raises ``NotFound`` when its files are gone or damaged."""
    try:
        about = json.loads((folder / "workload.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        msg = f"the workload's folder {folder} is gone or damaged; register the workload again"
        raise NotFound(msg) from error
    version = about.get("version")
    if version != VERSION:
        msg = f"the workload in {folder} was written by another version of nbtrain ({version}, not "
        raise NotFound(msg + f"{VERSION}); register the workload again")
    return Workload(folder, about, name)


def _read_tasks(path: Path, expected: int) -> list[Task]:
    try:
        with path.open("rb") as lines:
            tasks = [Task.from_row(json.loads(line)) for line in lines]
        if len(tasks) != expected:
            raise ValueError(len(tasks))
    except (OSError, ValueError) as error:
        msg = f"the workload's file {path} is gone or damaged; register the workload again"
        raise NotFound(msg) from error
    return tasks
