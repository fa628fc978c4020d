"""Tasks and how they divide: by the content of their prompts, never by a seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Split", "Task", "split_tasks"]

# Part of the hash that decides the side, so that it has nothing to do with other hashes.
_SALT = b"nbtrain held-out\n"


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt with its columns.

    ``task_id`` is the beginning (16 hex digits) of the SHA-256 of prompt and columns: equal
    tasks have equal ids. ``prompt`` is a list of chat messages or a text.
    """

    task_id: str
    prompt: list[dict[str, Any]] | str
    columns: dict[str, Any]

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Task:
        """The task of a checked row."""
        columns = {name: value for name, value in row.items() if name != "prompt"}
        digest = hashlib.sha256(_canonical({"prompt": row["prompt"], "columns": columns}))
        return cls(digest.hexdigest()[:16], row["prompt"], columns)

    @property
    def prompt_key(self) -> bytes:
        """Equal for equal prompts, whatever their columns."""
        return hashlib.sha256(_SALT + _canonical(self.prompt)).digest()


@dataclass(frozen=True, slots=True)
class Split:
    """The two sides, how they came about, and the SHA-256 over the ids of the train side."""

    train_tasks: list[Task] = field(repr=False)
    held_out_tasks: list[Task] = field(repr=False)
    description: str
    train_digest: str

    @property
    def train(self) -> int:
        """Number of tasks that train."""
        return len(self.train_tasks)

    @property
    def held_out(self) -> int:
        """Number of held-out tasks."""
        return len(self.held_out_tasks)


def split_tasks(
    tasks: Sequence[Task],
    stated: Sequence[Task],
    fraction: float | None,
    *,
    validation: bool,
) -> Split:
    """Divide ``tasks``.

    With ``stated`` held-out tasks (``fraction`` is ``None``) every task whose prompt is among
    them is moved out. Otherwise, with ``validation`` on, a prompt is held out when its hash, read
    as a number from 0 to 1, is below ``fraction``: adding tasks does not move those that were
    there. Only of two or more prompts, the lowest hash is always held out and the highest always
    trains, so that neither side is empty.
    """
    if fraction is None:
        return _with_stated(tasks, stated)
    if not validation:
        return _split(tasks, [], "all tasks train; none is held out, as validation is off")
    if fraction == 0:
        return _split(tasks, [], "all tasks train; the workload holds none out")
    keys = [task.prompt_key for task in tasks]
    held_out = _below(fraction, set(keys))
    if not held_out:
        return _split(tasks, [], "all tasks train; with one distinct prompt none can be held out")
    keyed = list(zip(tasks, keys, strict=True))
    train = [task for task, key in keyed if key not in held_out]
    out = [task for task, key in keyed if key in held_out]
    share = f"{fraction:.0%}" if round(fraction * 100) == fraction * 100 else f"{fraction:g}"
    text = f"{len(out)} of {len(tasks)} tasks held out by the hash of their prompts (aim {share})"
    return _split(train, out, text)


def _below(fraction: float, prompts: set[bytes]) -> set[bytes]:
    if len(prompts) < 2:
        return set()
    ordered = sorted(prompts)
    held_out = {key for key in ordered if int.from_bytes(key[:8]) < fraction * 2**64}
    # Small sets: the lowest hash is always out, the highest always trains.
    return (held_out | {ordered[0]}) - {ordered[-1]}


def _with_stated(tasks: Sequence[Task], stated: Sequence[Task]) -> Split:
    out = {task.prompt_key for task in stated}
    train = [task for task in tasks if task.prompt_key not in out]
    text = f"{len(stated)} held-out tasks as stated"
    moved = len(tasks) - len(train)
    if moved:
        text += (
            f"; {moved} of {len(tasks)} tasks have the prompt of a held-out one and do not train"
        )
    return _split(train, stated, text)


def _split(train: Sequence[Task], held_out: Sequence[Task], description: str) -> Split:
    ids = "\n".join(task.task_id for task in train)
    digest = hashlib.sha256(ids.encode()).hexdigest()
    return Split(list(train), list(held_out), description, digest)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode()
