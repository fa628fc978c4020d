"""Stock widgets for the fields: one input and one text beside it each, styles and layouts shared.

A saved notebook keeps every widget, its layout and its style; hence as few of them as will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import ipywidgets as widgets
from ipywidgets.widgets.widget_bool import CheckboxStyle
from ipywidgets.widgets.widget_description import DescriptionStyle
from ipywidgets.widgets.widget_string import HTMLStyle, TextStyle

from nbtrain.notebook.form.entries import Entry
from nbtrain.notebook.panel.subshells import answer_at_once

__all__ = ["Inputs", "Pair", "Watch", "answered", "close_all", "offer", "put"]

Watch = Callable[[str, str], None]
"""Told the name of a field and its new text."""

_LABEL = "258px"
_COLUMNS = "minmax(390px, 450px) minmax(220px, 1fr)"
_BAD = "nbtrain-bad"


class Pair:
    """A field: the input and the text beside it."""

    def __init__(self, name: str, field: widgets.DOMWidget, beside: widgets.HTML) -> None:
        self.name = name
        self.field = field
        self.beside = beside

    def tell(self, markup: str, *, bad: bool) -> None:
        """Show the text beside the field, and whether something is refused."""
        self.beside.value = markup
        if bad != (_BAD in self.field._dom_classes):
            (self.field.add_class if bad else self.field.remove_class)(_BAD)


class Inputs:
    """Makes the inputs of one form. ``watch`` is told of every change that a person makes."""

    def __init__(self, watch: Watch, label: str = _LABEL) -> None:
        self._watch = watch
        self._wide = widgets.Layout(width="auto", margin="1px 4px")
        self._text_style = TextStyle(description_width=label)
        self._style = DescriptionStyle(description_width=label)
        self._check_style = CheckboxStyle(description_width=label)
        self._html_style = HTMLStyle()
        self._beside = widgets.Layout(width="auto", margin="1px 4px")

    def narrow(self, label: str) -> Inputs:
        """The same with another width of the labels."""
        return Inputs(self._watch, label)

    @property
    def shared(self) -> tuple[widgets.Widget, ...]:
        """The layouts and styles that all inputs share."""
        return (self._wide, self._beside, self._text_style, self._style, self._check_style,
                self._html_style)  # fmt: skip

    def of(self, entry: Entry, words: Sequence[str] | None, text: str) -> Pair:
        """The field of an option; ``words`` can be picked, ``None`` where anything is typed."""
        help_ = entry.option.help
        if words is None:
            return self.text(entry.name, text, help_)
        return self.pick(entry.name, [(word, word) for word in words], text, help_)

    def text(self, name: str, text: str, help_: str, *, at_once: bool = True) -> Pair:
        """A field for any text. Not ``at_once``, it counts when it is left or Enter is pressed."""
        field = widgets.Text(
            value=text, description=name, tooltip=help_, continuous_update=at_once,
            layout=self._wide, style=self._text_style,
        )  # fmt: skip
        return self._pair(name, field)

    def suggest(self, name: str, words: Sequence[str], text: str, help_: str) -> Pair:
        """A field for any text that suggests some."""
        field = widgets.Combobox(
            value=text, options=tuple(words), ensure_option=False, description=name,
            tooltip=help_, continuous_update=False, layout=self._wide, style=self._text_style,
        )  # fmt: skip
        return self._pair(name, field)

    def pick(self, name: str, words: Iterable[tuple[str, str]], text: str, help_: str) -> Pair:
        """A list of labels with their texts; the first, empty one is not stated."""
        field = widgets.Dropdown(
            options=[("", ""), *words], description=name, tooltip=help_, layout=self._wide,
            style=self._style,
        )  # fmt: skip
        put(field, text)
        return self._pair(name, field)

    def switch(self, name: str, label: str, help_: str, *, on: bool) -> Pair:
        """A box to tick."""
        field = widgets.Checkbox(
            value=on, description=label, tooltip=help_, indent=True, layout=self._wide,
            style=self._check_style,
        )  # fmt: skip
        return self._pair(name, field)

    def html(self, text: str = "") -> widgets.HTML:
        """A text without an input."""
        return widgets.HTML(value=text, layout=self._beside, style=self._html_style)

    def grid(self, pairs: Iterable[Pair] = (), *, shown: bool = True) -> widgets.GridBox:
        """The fields in two columns, in the order in which Tab goes through them."""
        layout = widgets.Layout(
            grid_template_columns=_COLUMNS, display="grid" if shown else "none", overflow="visible"
        )
        return widgets.GridBox(children=cells(pairs), layout=layout)

    def _pair(self, name: str, field: widgets.DOMWidget) -> Pair:
        answered(field)
        field.observe(lambda change: self._watch(name, _said(change["new"])), "value")
        return Pair(name, field, self.html())


def answered(widget: widgets.Widget) -> None:
    """Let what a person does with it be handled while a cell runs."""
    answer_at_once(widget.comm)


def cells(pairs: Iterable[Pair]) -> tuple[widgets.DOMWidget, ...]:
    """What a grid has as its children."""
    return tuple(widget for pair in pairs for widget in (pair.field, pair.beside))


def put(field: widgets.DOMWidget, text: str) -> None:
    """Show a text in a field; a list that lacks it gets it, so that it is seen and refused."""
    if isinstance(field, widgets.Checkbox):
        field.value = text == "true"
        return
    if isinstance(field, widgets.Dropdown) and text not in [value for _, value in field.options]:
        field.options = [*field.options, (text, text)]
    field.value = text


def offer(field: widgets.DOMWidget, words: Iterable[tuple[str, str]]) -> None:
    """Replace what can be picked; what is picked stays."""
    if isinstance(field, widgets.Combobox):
        field.options = tuple(value for _, value in words)
        return
    now, listed = field.value, [("", ""), *words]
    if now not in [value for _, value in listed]:
        listed.append((now, now))
    if list(field.options) != listed:
        field.options = listed
        field.value = now


def close_all(these: Iterable[widgets.Widget], keep: Iterable[widgets.Widget] = ()) -> None:
    """Take widgets away for good, with all that stands in them and their layouts and styles.

    What is in ``keep`` stays, with all that is its own.
    """
    left, seen = list(these), set(keep)
    while left:
        widget = left.pop()
        if widget in seen:
            continue
        seen.add(widget)
        for value in widget.trait_values().values():
            parts = value if isinstance(value, tuple) else (value,)
            left += [part for part in parts if isinstance(part, widgets.Widget)]
        widget.close()


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value or "")
