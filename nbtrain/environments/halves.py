"""Half characters in plain data: text that no tokenizer takes and no file in UTF-8 holds."""

from __future__ import annotations

import re

__all__ = ["half_in"]

_HALF = re.compile("[\ud800-\udfff]")


def half_in(value: object) -> str | None:
    """The first half of a surrogate pair in a text, or in the texts of lists and dicts, as code."""
    level = [value]
    while level:
        deeper: list[object] = []
        for one in level:
            if isinstance(one, str):
                if found := _HALF.search(one):
                    return repr(found.group())
            elif isinstance(one, dict):
                deeper += [*one, *one.values()]
            elif isinstance(one, list | tuple):
                deeper += one
        level = deeper
    return None
