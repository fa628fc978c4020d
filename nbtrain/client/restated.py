"""The plan of a run as it was given, as a cell and as Python that state it again."""

from __future__ import annotations

import pprint
from collections.abc import Mapping
from typing import Any

from nbtrain.plan.as_cell import as_cell

__all__ = ["Restated", "restate"]

_NAMED = {
    "workload": "workload",
    "base_model_slug": "model",
    "algorithm": "method",
    "parent_checkpoint_id": "parent",
    "display_name": "name",
}
_SWITCHED = {"load_weights_only": "weights_only", "small": "small", "smoke": "smoke"}
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
    return Restated(_cell(body, arguments), _python(form, body, arguments), said)


def _cell(body: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    line: dict[str, Any] = {word: arguments.get(name) for name, word in _NAMED.items()}
    line |= {word: bool(arguments.get(name)) for name, word in _SWITCHED.items()}
    return as_cell(body, **line).rstrip("\n")


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
