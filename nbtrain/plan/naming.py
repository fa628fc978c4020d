"""What may be a name or a label: one short line, and for a name nothing that looks like an id."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["ONE_LINE", "is_id_shaped", "not_one_line"]

_MOST = 200
ONE_LINE = f"one line of 1 to {_MOST} characters"
"""What :func:`not_one_line` allows, for refusals."""

_ID_SHAPED = re.compile(r"[0-9a-f]{12,64}")
_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def is_id_shaped(text: str) -> bool:
    """Whether it looks like an id or its beginning as it is shown: 12 to 64 hex digits."""
    return _ID_SHAPED.fullmatch(text) is not None


def not_one_line(text: str) -> str | None:
    """What keeps ``text`` from being one printable line; ``None`` when nothing does."""
    if not text.strip():
        return "is blank" if text else "is empty"
    if len(text) > _MOST:
        return f"has {len(text):,} characters, {_MOST} at most"
    at = next((at for at, letter in enumerate(text) if not letter.isprintable()), None)
    return None if at is None else f"has {_told(text[at])} as character {at + 1}"


def _told(letter: str) -> str:
    """A character that cannot be printed, in words."""
    if letter in _BREAKS:
        return "a line break"
    name = unicodedata.name(letter, "a control character" if letter < "\xa0" else "not printable")
    return f"U+{ord(letter):04X} ({name})"
