"""A dataset's rows as the tasks of a reinforcement run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from nbtrain.catalog import Split, Task
from nbtrain.data.conversations import text_of
from nbtrain.data.dataset import Dataset
from nbtrain.data.findings import Findings
from nbtrain.data.rows import Row
from nbtrain.errors import Problem, Refused
from nbtrain.plan.descriptor.references import RESERVED

__all__ = ["DatasetTasks", "prompt_and_answer"]


class DatasetTasks:
    """What a job asks of a workload, told by a dataset: every row is a task.

    A row's prompt is what stands before its last message, where that is the assistant's, which
    is then the gold answer; else it is all of its messages. Text parts are joined and arguments
    given as JSON text are read, so that both spellings are the same task. Columns are the row's
    other keys, and where the row has none of that name ``answer`` (the gold text, ``None``
    without one), ``ground_truth`` (the same) and ``data_source`` (the dataset's id). Values stay
    as they are.

    ``rewards_path`` is the file of the packed rewards; ``validation`` is the dataset that is
    validated on. Raises ``Refused`` for columns of the prompt's and the completion's own names.
    """

    raw = False
    held_out: float | None = None
    base_model: str | None = None
    environment_path: Path | None = None
    environment_identity: dict[str, Any] | None = None
    environment_form: Literal["tools", "step", "unknown"] | None = None

    def __init__(
        self, dataset: Dataset, *, rewards_path: Path, validation: Dataset | None = None
    ) -> None:
        self.dataset = dataset
        self.validation = validation
        self.rewards_path = rewards_path
        self.name = dataset.name
        sides = [one for one in (dataset, validation) if one is not None]
        problems = [problem for one in sides for problem in _column_problems(one)]
        if problems:
            raise Refused(problems)

    def tasks(self) -> list[Task]:
        """Every row of the dataset. Raises ``Refused`` naming rows that cannot be prompts."""
        return list(self._tasks)

    def held_out_tasks(self) -> list[Task]:
        """Every row of the validation dataset; empty without one."""
        return list(self._held_out_tasks)

    def split(self, *, validation: bool) -> Split:
        """Every row trains; with ``validation`` the validation dataset's rows are held out.

        The digests are the datasets' ids, and of no rows the digest of nothing. Raises
        ``Refused`` naming rows that cannot be prompts, ``NotFound`` for damaged files.
        """
        called = self.name or self.dataset.dataset_id[:12]
        held_out: list[Task] = []
        digest = hashlib.sha256(b"").hexdigest()
        if validation and self.validation is not None:
            held_out, digest = self.held_out_tasks(), self.validation.dataset_id
        return Split(
            self.tasks(),
            held_out,
            f"every row of dataset {called}",
            self.dataset.dataset_id,
            digest,
        )

    @cached_property
    def _tasks(self) -> list[Task]:
        return _tasks(self.dataset)

    @cached_property
    def _held_out_tasks(self) -> list[Task]:
        return [] if self.validation is None else _tasks(self.validation)


def _column_problems(dataset: Dataset) -> list[Problem]:
    called = dataset.name or dataset.dataset_id[:12]
    return [
        Problem(
            "dataset",
            f"the rows of {called} have a column {name!r}, which rewards get under that name "
            "from the run",
            found=name,
            hint="Give the column another name",
        )
        for name in RESERVED
        if name in dataset.columns
    ]


def _tasks(dataset: Dataset) -> list[Task]:
    findings = Findings()
    found = []
    for place, row in enumerate(dataset.open_rows()):
        prompt, gold = prompt_and_answer(row)
        last = prompt[-1]["role"] if prompt else None
        if last not in ("user", "tool"):
            said = f"the prompt's last message is the {last}'s" if last else "the prompt is empty"
            expected = "a prompt whose last message is the user's or a tool's"
            findings.add("prompt", dataset.line_of(place), "dataset", said, expected, found=last)
            continue
        columns = {name: value for name, value in row.items() if name != "messages"}
        columns.setdefault("answer", gold)
        columns.setdefault("ground_truth", columns["answer"])
        columns.setdefault("data_source", dataset.dataset_id)
        found.append(Task.from_row({"prompt": prompt, **columns}))
    if findings.refused:
        raise Refused(findings.problems(dataset.name or dataset.dataset_id[:12]))
    return found


def prompt_and_answer(row: Row) -> tuple[list[dict[str, Any]], str | None]:
    """The messages before a last one of the assistant's, as a task's prompt has them, and that
    one's text; without such a one all messages and ``None``.
    """
    messages: list[dict[str, Any]] = row["messages"]
    if messages[-1]["role"] != "assistant":
        return [_prompt_message(message) for message in messages], None
    return [_prompt_message(message) for message in messages[:-1]], text_of(messages[-1])


def _prompt_message(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(message)
    content = message.get("content")
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        plain["content"] = "".join(part["text"] for part in content)
    elif content is None:
        plain["content"] = ""
    if message.get("tool_calls"):
        plain["tool_calls"] = [_prompt_call(call) for call in message["tool_calls"]]
    return plain


def _prompt_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}
