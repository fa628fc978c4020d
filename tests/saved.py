"""What a saved notebook shows where there is no kernel and no widget."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import nbformat

STATE = "application/vnd.jupyter.widget-state+json"
_VIEW = "application/vnd.jupyter.widget-view+json"
_UNSEEN = frozenset(("script", "style", "title"))


class Markup(HTMLParser):
    """The elements of a page with their attributes, its pictures and the words one reads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self._within: list[str] = []
        self._words: list[str] = []
        self.scripts = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag in _UNSEEN:
            self._within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._within:
            self._within.remove(tag)

    def handle_data(self, data: str) -> None:
        if not self._within:
            self._words.append(data)
        else:
            self.scripts += data

    @property
    def words(self) -> str:
        """All text but scripts and style sheets, white space as one blank."""
        return " ".join("".join(self._words).split())

    @property
    def images(self) -> list[str]:
        """The address of each picture, data without line breaks."""
        found = [attrs for tag, attrs in self.elements if tag == "img"]
        return ["".join(attrs.get("src", "").split()) for attrs in found]


def stripped(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy without the state of widgets and without their views."""
    bare = nbformat.reads(nbformat.writes(notebook), 4)
    bare.metadata.pop("widgets", None)
    for cell in bare.cells:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(_VIEW, None)
    return bare


def panel_states(notebook: nbformat.NotebookNode) -> list[dict[str, Any]]:
    """The saved state of each panel."""
    models = notebook.metadata["widgets"][STATE]["state"].values()
    return [model["state"] for model in models if "run_id" in model["state"]]
