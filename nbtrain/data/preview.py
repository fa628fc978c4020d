"""A masked row for the eye: which of its tokens are trained on."""

from __future__ import annotations

import html
from collections.abc import Iterator

from nbtrain.data.masks import MaskedRow

__all__ = ["preview_html", "preview_text"]

# Half transparent, so that the page's own background and ink show in light and dark themes.
_TRAINED = "background:rgba(46,160,67,0.28);border-bottom:2px solid #2ea043;color:inherit"
_TEXT = (
    "white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0;padding:6px 8px;"
    "border:1px solid rgba(128,128,128,0.35);border-radius:4px;font-size:12px;line-height:1.6"
)


def preview_text(masked: MaskedRow) -> str:
    """The rendering with every trained stretch between ``[[`` and ``]]``."""
    return "".join(f"[[{text}]]" if trained else text for text, trained in _stretches(masked))


def preview_html(masked: MaskedRow) -> str:
    """The rendering as static HTML, trained text coloured, with a legend. All text is escaped."""
    shown = "".join(
        f'<mark style="{_TRAINED}">{html.escape(text)}</mark>' if trained else html.escape(text)
        for text, trained in _stretches(masked)
    )
    legend = (
        f'<div><mark style="{_TRAINED}">trained</mark> {masked.trained_tokens:,} of '
        f"{len(masked.ids):,} tokens; the rest is read and not trained on</div>"
    )
    return (
        '<div style="font-family:sans-serif;font-size:13px;max-width:860px">'
        f'{legend}<pre style="{_TEXT}">{shown}</pre></div>'
    )


def _stretches(masked: MaskedRow) -> Iterator[tuple[str, bool]]:
    """The text in order, in stretches of which all or none is trained. What was cut is left out."""
    place = 0
    for start, end in _trained_places(masked):
        if start > place:
            yield masked.text[place:start], False
        yield masked.text[start:end], True
        place = end
    last = max((end for _, end in masked.offsets), default=0)
    if last > place:
        yield masked.text[place:last], False


def _trained_places(masked: MaskedRow) -> Iterator[tuple[int, int]]:
    """Start and end of the characters of trained tokens that follow one another."""
    start = end = -1
    for (first, last), trained in zip(masked.offsets, masked.trained, strict=True):
        if trained and first > end:
            if end > start:
                yield start, end
            start = first
        if trained:
            end = max(end, last)
    if end > start:
        yield start, end
