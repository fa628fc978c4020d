"""Colours that people with any colour vision tell apart: Okabe and Ito's, for light and dark.

Figures are drawn in the light ones. On a page each becomes a CSS variable with the light colour
as its fallback, so that one drawing serves both themes and paper.
"""

from __future__ import annotations

import re

__all__ = ["DASHES", "INK", "LINES", "LINES_DARK", "MUTED", "css_variables", "in_variables"]

LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a67400", "#3a9bd9", "#555555")
"""On white: blue, vermilion, green, purple, ochre (orange, darkened), sky, grey."""
LINES_DARK = ("#56b4e9", "#ff8f45", "#2ec49a", "#e19bc4", "#f0c442", "#8fd0ff", "#b5b5b5")
"""The same on near black, lightened where they would be dim."""
DASHES = ("solid", "dashed", "dashdot", "dotted")
"""A second sign beside the colour, for lines that are many or printed in grey."""

INK = "#1b1f24"
MUTED = "#68707a"
GRID = "#dfe2e6"
PAPER = "#fefefe"
_INK_DARK = {INK: "#e8eaed", MUTED: "#a2abb5", GRID: "#363c44", PAPER: "#14171b"}
_NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"} | {
    colour: f"line-{n}" for n, colour in enumerate(LINES)
}
_STATES = {
    "card": ("#ffffff", "#1b1f24"),
    "shade": ("#f3f5f7", "#242930"),
    "good": ("#00694c", "#2ec49a"),
    "bad": ("#a8321a", "#ff8f7a"),
    "doubt": ("#7a5600", "#f0c442"),
    "busy": ("#005a8d", "#56b4e9"),
}
"""What a page has besides, in light and dark."""
_HEX = re.compile("|".join(_NAMES))


def css_variables(*, dark: bool = False) -> str:
    """The declarations of every colour, ``--line-0: #0072b2;`` and so on."""
    values = dict(zip(LINES, LINES_DARK, strict=True)) | _INK_DARK
    drawn = {name: values[colour] if dark else colour for colour, name in _NAMES.items()}
    others = {name: pair[dark] for name, pair in _STATES.items()}
    return "".join(f"--{name}:{colour};" for name, colour in (drawn | others).items())


def in_variables(drawing: str) -> str:
    """An SVG's text with every colour of the palette as a variable with its fallback."""
    return _HEX.sub(lambda found: f"var(--{_NAMES[found[0]]},{found[0]})", drawing)
