"""What a person wrote, as matplotlib can draw it."""

from __future__ import annotations

__all__ = ["drawable"]


def drawable(text: str) -> str:
    """The text with a box for each character that the font of figures has no sign for.

    matplotlib would draw a box too, but warn of it from whichever thread draws.
    """
    from matplotlib.font_manager import FontProperties, findfont, get_font

    families = FontProperties().get_family()
    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in families]

    def known(sign: str) -> bool:
        return any(font.get_char_index(ord(sign)) for font in fonts)

    box = next(filter(known, "□?"), " ")
    return "".join(sign if known(sign) else box for sign in text)
