"""The groups of a form: a heading that opens and closes, and the fields below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import ipywidgets as widgets

from nbtrain.notebook.form.entries import OPEN, Entry, groups
from nbtrain.notebook.form.inputs import Inputs, Pair, answered, cells, close_all, offer, put
from nbtrain.notebook.form.page import note

if TYPE_CHECKING:
    from nbtrain.notebook.form.outcome import Outcome
    from nbtrain.plan.registry import BaseModelInfo

__all__ = ["Group", "Groups"]


class Group:
    """Fields under a heading. They are made when the group is first opened."""

    def __init__(
        self, name: str, members: Sequence[Entry], inputs: Inputs, opened: Callable[[Group], None]
    ) -> None:
        self.name = name
        self.members = members
        self.pairs: dict[str, Pair] = {}
        self.heading = widgets.ToggleButton(
            value=False, icon="caret-right", tooltip=f"show or hide the options of {name}",
            layout=widgets.Layout(width="100%"),
        )  # fmt: skip
        self.heading.add_class("nbtrain-group")
        answered(self.heading)
        self.grid = inputs.grid(shown=False)
        self._inputs = inputs
        self._opened = opened
        self.heading.observe(self._toggled, "value")

    @property
    def is_open(self) -> bool:
        """Whether its fields are shown."""
        return bool(self.heading.value)

    def open(self) -> None:
        """Show its fields."""
        self.heading.value = True

    def build(self, texts: Mapping[str, str], model: BaseModelInfo | None) -> None:
        """Make the fields that are not there yet, with what is stated in them."""
        if self.pairs:
            return
        for entry in self.members:
            words = entry.offered(model) if entry.words is not None else None
            self.pairs[entry.name] = self._inputs.of(entry, words, texts.get(entry.name, ""))
        self.grid.children = cells(self.pairs.values())

    def tell(self, outcome: Outcome, texts: Mapping[str, str], model: BaseModelInfo | None) -> None:
        """Bring the heading and, where they are shown, the texts beside the fields up to date."""
        refused = sum(len(outcome.beside.get(entry.name, ())) for entry in self.members)
        stated = sum(entry.name in texts for entry in self.members)
        told = [f"{len(self.members)} options"]
        told += [f"{stated} stated"] if stated else []
        told += [f"{refused} refused"] if refused else []
        self.heading.description = f"{self.name}: {', '.join(told)}"
        if refused:
            self.open()
        for entry in self.members if self.is_open else ():
            pair = self.pairs[entry.name]
            if entry.option.choices_of is not None:
                offer(pair.field, [(word, word) for word in entry.offered(model)])
            markup = note(entry, outcome, model, stated=entry.name in texts)
            pair.tell(markup, bad=entry.name in outcome.beside)

    def put(self, texts: Mapping[str, str]) -> None:
        """Show what is stated in the fields that are there."""
        for name, pair in self.pairs.items():
            put(pair.field, texts.get(name, ""))

    def _toggled(self, change: Mapping[str, bool]) -> None:
        self.heading.icon = "caret-down" if change["new"] else "caret-right"
        if change["new"]:
            self._opened(self)
        self.grid.layout.display = "grid" if change["new"] else "none"


class Groups:
    """The groups of one method."""

    def __init__(self, method: str, inputs: Inputs, opened: Callable[[Group], None]) -> None:
        self.method = method
        self._inputs = inputs
        self._groups = [
            Group(name, members, inputs, opened) for name, members in groups(method).items()
        ]

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    @property
    def widgets(self) -> tuple[widgets.DOMWidget, ...]:
        """Headings and fields in their order."""
        return tuple(w for group in self._groups for w in (group.heading, group.grid))

    def pair(self, name: str) -> Pair | None:
        """The field of an option; ``None`` until its group was opened."""
        return next((g.pairs[name] for g in self._groups if name in g.pairs), None)

    def close(self) -> None:
        """Take every widget away for good."""
        close_all(self.widgets, keep=self._inputs.shared)

    def open_first(self) -> None:
        """Open the groups that tell most."""
        for group in self._groups:
            if group.name in OPEN:
                group.open()
