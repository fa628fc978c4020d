"""What a form states: a plan in the making, without widgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbtrain.errors import Problem, Refused
from nbtrain.notebook.form.entries import entries
from nbtrain.plan.as_cell import as_cell
from nbtrain.plan.descriptor.document import nearest_flat
from nbtrain.plan.descriptor.table import METHODS
from nbtrain.plan.fields import describe
from nbtrain.plan.statements import unknown

__all__ = ["HEAD", "SWITCHES", "Draft"]

HEAD = ("workload", "dataset", "model", "method", "parent", "name")
"""What stands at the top as text; empty is not stated."""

SWITCHES = ("weights_only", "small", "smoke")

_ALIASES = {
    "base_model_slug": "model", "base_model": "model", "bench_id": "workload",
    "algorithm": "method", "parent_checkpoint_id": "parent", "display_name": "name",
    "load_weights_only": "weights_only", "baseModel": "model",
}  # fmt: skip
_IDS = ("checkpoint_id", "workload_id", "dataset_id", "slug")


@dataclass(slots=True)
class Draft:
    """Everything stated, as typed: ``head`` and ``texts`` by name; nothing is empty text there.

    ``texts`` keeps what was typed under another method; only the fields of the method count.
    """

    head: dict[str, str] = field(default_factory=dict)
    switches: dict[str, bool] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def copy(self) -> Draft:
        """Another draft of the same content."""
        return Draft(dict(self.head), dict(self.switches), dict(self.texts))

    def options(self, method: str) -> dict[str, Any]:
        """The options that are stated, by name, as values."""
        known = entries(method)
        return {name: known[name].read(text) for name, text in self.texts.items() if name in known}

    def body(self, method: str, without: frozenset[str] = frozenset()) -> dict[str, Any]:
        """The options of the plan, the dataset of a supervised run among them."""
        dataset = self.head.get("dataset")
        first = {"dataset": dataset} if method == "sft" and dataset else {}
        body = first | self.options(method)
        return {name: value for name, value in body.items() if name not in without}

    def arguments(self, method: str, without: frozenset[str] = frozenset()) -> dict[str, Any]:
        """What stands beside the options, as ``client.training.resolve`` takes it."""
        said = {
            "bench_id": self.head.get("workload"),
            "base_model_slug": self.head.get("model"),
            "algorithm": self._method(method),
            "parent_checkpoint_id": self.head.get("parent"),
            "display_name": self.head.get("name"),
            "load_weights_only": self.switches.get("weights_only") or None,
            "small": self.switches.get("small", False),
            "smoke": method == "sft" and self.switches.get("smoke", False),
        }
        return {key: value for key, value in said.items() if called(key) not in without}

    def cell(self, method: str) -> str:
        """The ``%%train`` cell that states the same. Raises ``ValueError`` as ``as_cell`` does."""
        return as_cell(
            self.body(method),
            workload=self.head.get("workload"),
            model=self.head.get("model"),
            method=self._method(method),
            parent=self.head.get("parent"),
            weights_only=self.switches.get("weights_only", False),
            name=self.head.get("name"),
            smoke=method == "sft" and self.switches.get("smoke", False),
            small=self.switches.get("small", False),
        )

    def _method(self, method: str) -> str | None:
        """What is said of the method: all but what a checkpoint brings."""
        return self.head.get("method") or (None if "parent" in self.head else method)

    def stating(self, values: Mapping[str, object], told: Callable[[Draft], str]) -> Draft:
        """Another draft that states ``values`` too; ``told`` gives the method of a draft.

        What stands at the top goes by any name that a plan has for it; there ``None`` clears.
        Raises :class:`Refused` with every name that has no field and every value that no field
        could hold; whether a value is allowed is for the plan to say.
        """
        made, problems = self.copy(), []
        named = {called(key): value for key, value in values.items()}
        for name in [name for name in named if name in (*HEAD, *SWITCHES)]:
            value = named.pop(name)
            fits = made._head(name, value) if name in HEAD else made._switch(name, value)
            if not fits:
                problems.append(_unfit(name, value))
        method = told(made)
        for name, value in named.items():
            if name not in entries(method):
                problems.append(_no_field(name, method))
            elif not made._option(method, name, value):
                problems.append(_unfit(name, value))
        if problems:
            raise Refused(problems)
        return made

    def _head(self, name: str, value: object) -> bool:
        text = "" if value is None else _reference(value)
        self.typed(name, text)
        return value is None or bool(text)

    def _switch(self, name: str, value: object) -> bool:
        self.switches[name] = bool(value)
        return value is None or isinstance(value, bool)

    def _option(self, method: str, name: str, value: object) -> bool:
        try:
            self.typed(name, entries(method)[name].write(value))
        except TypeError:
            return False
        return True

    def typed(self, name: str, text: str) -> None:
        """Take over the text of a field; an empty one is not stated any more."""
        place = self.head if name in HEAD else self.texts
        place.pop(name, None)
        if text.strip():
            place[name] = text.strip()


def called(name: str) -> str:
    """What the form calls that which a plan may call otherwise."""
    return _ALIASES.get(name, name)


def _reference(value: object) -> str:
    """A registered object by its id, text as it is; empty for what is neither."""
    for name in _IDS:
        if isinstance(found := getattr(value, name, None), str):
            return found
    return value.strip() if isinstance(value, str) else ""


def _unfit(name: str, value: object) -> Problem:
    return Problem(name, f"{name}: a field cannot hold {describe(value)}")


def _no_field(name: str, method: str) -> Problem:
    others = [other for other in METHODS if name in entries(other)]
    if others:
        message = f"{name} is an option of {' and '.join(others)}, and the method is {method}"
        return Problem(name, message, hint=f'Set method="{others[0]}" first')
    if method == "sft":
        near = nearest_flat(name)
        hint = f"Did you mean {near}?" if near else "%train options --method sft lists every option"
        return Problem(name, f"there is no option {name} with algorithm sft", name, hint=hint)
    return unknown({}, name)
