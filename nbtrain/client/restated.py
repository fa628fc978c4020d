"""The plan of a run as it was given, as a cell and as Python that state it again."""

from __future__ import annotations

import json
import pprint
from collections.abc import Mapping
from typing import Any

__all__ = ["Restated", "restate"]

_FLAGS = {
    "workload": "--workload",
    "base_model_slug": "--model",
    "algorithm": "--method",
    "parent_checkpoint_id": "--from",
    "display_name": "--name",
}
_CALLED = {"workload": "bench_id"}
_WIDTH = 88


class Restated:
    """``cell`` and ``python`` state the plan again; ``said`` is what to know about them."""

    def __init__(self, cell: str, python: str, said: str) -> None:
        self.cell = cell
        self.python = python
        self.said = said


def restate(given: Mapping[str, Any] | None, workload: str) -> Restated:
    """``given`` is the plan as the run has it; ``workload`` the id of what it trained on."""
    given = given or {}
    form = "descriptor" if "descriptor" in given else "options"
    body = dict(given.get(form) or {})
    arguments = dict(given.get("arguments") or {})
    if not body and not arguments:
        said = (
            "This run was recorded without the plan as it was given: the resolved plan tells all."
        )
        return Restated("", "", said)
    said = (
        "The plan as it was given. What it names (a workload, a dataset, a checkpoint) has to be "
        f"there; a name may mean something else by now, the workload was {workload}."
    )
    return Restated(_cell(form, body, arguments), _python(form, body, arguments), said)


def _cell(form: str, body: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    words = ["%%train"]
    for name, flag in _FLAGS.items():
        if arguments.get(name) is not None:
            words += [flag, _word(str(arguments[name]))]
    if arguments.get("load_weights_only"):
        words.append("--weights-only")
    escaped = _dollars(body)
    if form == "descriptor":
        lines = [json.dumps(escaped, ensure_ascii=False, indent=2)]
    else:
        lines = [f"{name}: {json.dumps(v, ensure_ascii=False)}" for name, v in escaped.items()]
    return "\n".join([" ".join(words), *lines])


def _dollars(value: Any) -> Any:
    """A text that begins with a dollar gets a second one: it would name a Python object."""
    if isinstance(value, Mapping):
        return {key: _dollars(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_dollars(each) for each in value]
    return f"${value}" if isinstance(value, str) and value.startswith("$") else value


def _word(text: str) -> str:
    """A value as a word of the line, in quotes where it needs them."""
    text = f"${text}" if text.startswith("$") else text
    if any(map(str.isspace, text)) or text[:1] in ("", '"', "'", "#", "-"):
        return "'" + text.replace("'", "''") + "'"
    return text


def _python(form: str, body: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    lines = ["from nbtrain import Client", "", "run = Client().training.create("]
    lines.append(_argument(form, body) if body else "")
    lines += [_argument(_CALLED.get(name, name), value) for name, value in arguments.items()]
    return "\n".join([*(line for n, line in enumerate(lines) if line or n == 1), ")"])


def _argument(name: str, value: Any) -> str:
    text = pprint.pformat(value, width=_WIDTH, sort_dicts=False).replace("\n", "\n    ")
    if isinstance(value, dict | list) and "\n" in text:
        pad = " " * (len(name) + 1)
        text = text.replace("\n", f"\n{pad}")
    return f"    {name}={text},"
