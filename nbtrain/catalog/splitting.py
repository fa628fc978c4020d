"""Tasks and how they divide: by the content of their prompts, never by a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbtrain.plan.identity import canonical

__all__ = ["Split", "Task", "content", "split_tasks"]

# Part of the hash that decides the side, so that it has nothing to do with other hashes.
_SALT = b"nbtrain held-out\n"
_SAFE = 2**53 - 1  # the largest whole number that RFC 8785 writes


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
        digest = hashlib.sha256(content({"prompt": row["prompt"], "columns": columns}))
        return cls(digest.hexdigest()[:16], row["prompt"], columns)

    @property
    def prompt_key(self) -> bytes:
        """Equal for equal prompts, whatever their columns."""
        return hashlib.sha256(_SALT + content(self.prompt)).digest()


@dataclass(frozen=True, slots=True)
class Split:
    """The two sides, how they came about, and the SHA-256 over the ids of each side."""

    train_tasks: list[Task] = field(repr=False)
    held_out_tasks: list[Task] = field(repr=False)
    description: str
    train_digest: str
    held_out_digest: str

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
    return Split(list(train), list(held_out), description, _digest(train), _digest(held_out))


def _digest(tasks: Sequence[Task]) -> str:
    return hashlib.sha256("\n".join(task.task_id for task in tasks).encode()).hexdigest()


def content(value: object) -> bytes:
    """The canonical JSON by which tasks and workloads are identified.

    RFC 8785 knows doubles only: to it 3 and 3.0 are the same, and whole numbers of more than 53
    bits cannot be written. Such numbers are null there, and their digits stand beside it.
    """
    beside: list[list[Any]] = []
    return canonical([_set_aside(value, (), beside), beside])


def _set_aside(value: Any, path: tuple[str | int, ...], beside: list[list[Any]]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _set_aside(inner, (*path, key), beside) for key, inner in sorted(value.items())
        }
    if isinstance(value, list | tuple):
        return [_set_aside(inner, (*path, place), beside) for place, inner in enumerate(value)]
    big = isinstance(value, int) and not -_SAFE <= value <= _SAFE
    if big or (isinstance(value, float) and value.is_integer()):
        beside.append([list(path), repr(value)])
        return None
    return value
