"""The fields of the form: those of the option table, or the supervised ones of the descriptor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nbtrain.plan.as_cell import as_cell
from nbtrain.plan.descriptor.document import in_flat
from nbtrain.plan.descriptor.table import METHODS, fields_of
from nbtrain.plan.fields import Option, as_python, show
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.syntax import core_scalar

if TYPE_CHECKING:
    from nbtrain.plan.registry import BaseModelInfo

__all__ = ["OPEN", "UNSTATED", "Entry", "entries", "groups"]

UNSTATED = object()
"""What an empty field reads as."""

OPEN = ("optimization", "trajectories", "sampling", "data")
"""Groups that are open when the form is shown; the others are built when they are opened."""

_HEAD = ("algorithm", "load_weights_only", "dataset")
"""Options that stand at the top of the form."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One field: its name in a plan and the option that tells everything else."""

    name: str
    option: Option

    @property
    def words(self) -> tuple[str, ...] | None:
        """What can be picked, where that is a list; an empty pick is not stated."""
        if self.option.type == "boolean":
            return ("true", "false")
        return self.option.choices

    def offered(self, model: BaseModelInfo | None) -> tuple[str, ...]:
        """The words that go with a base model, null among them where it is a value of its own."""
        words = self.option.offered(model) if self.option.choices else self.words
        return (*(words or ()), *(("null",) if self.option.nullable else ()))

    def unstated(self) -> str:
        """What the value is when it is not stated, as far as the table tells."""
        if self.option.compute is not None:
            return f"computed: {self.option.computed}"
        return f"{show(self.option.default)} · default"

    def read(self, text: str) -> Any:
        """The value that a typed text states; :data:`UNSTATED` for an empty one.

        Numbers, booleans and null are read as in a cell; a number in quotes is a text. A text is
        taken as it is, but for null where the option takes it.
        """
        text = text.strip()
        if not text:
            return UNSTATED
        if self.option.type == "text":
            takes_null = self.option.nullable or self.option.compute is not None
            return None if text == "null" and takes_null else text
        if len(text) > 1 and text[0] == text[-1] == '"':
            try:
                return json.loads(text)
            except ValueError:
                return text
        try:
            return core_scalar(text)
        except ValueError:  # more digits than a number may have: refused as a text
            return text

    def write(self, value: object) -> str:
        """The text that reads as ``value``. Raises ``TypeError`` for what no field can state."""
        value = as_python(value)
        if value is UNSTATED or value == "":
            return ""
        if isinstance(value, str):
            plain = self.option.type == "text" or self.read(value) == value
            return value if plain else json.dumps(value)
        if value is None or isinstance(value, bool | int | float):
            return as_cell({"value": value}).split("value: ", 1)[1].rstrip("\n")
        msg = f"{self.name}: a field states a number, a text, true, false or null"
        raise TypeError(msg)


def entries(method: str) -> Mapping[str, Entry]:
    """The fields of a method by name, in the order of its table. Raises ``KeyError``."""
    return _BY_METHOD[method]


def groups(method: str) -> dict[str, list[Entry]]:
    """The fields of a method under the headings of its table."""
    found: dict[str, list[Entry]] = {}
    for entry in entries(method).values():
        found.setdefault(entry.option.group, []).append(entry)
    return found


def _reinforcement() -> dict[str, Entry]:
    return {name: Entry(name, option) for name, option in OPTIONS.items() if name not in _HEAD}


def _supervised() -> dict[str, Entry]:
    found = {}
    for field in fields_of("sft"):
        name, option = field.setting, field.option
        if name is not None and name not in _HEAD:
            group = "data" if option.group == "document" else option.group
            found[name] = Entry(
                name,
                replace(
                    option,
                    name=name,
                    group=group,
                    help=in_flat(option.help),
                    computed=in_flat(option.computed),
                ),
            )
    return found


_BY_METHOD: Mapping[str, Mapping[str, Entry]] = MappingProxyType(
    {method: _supervised() if method == "sft" else _reinforcement() for method in METHODS}
)
