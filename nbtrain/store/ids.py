"""Ids: 64 hex digits, shown as 12, found again by any unambiguous prefix."""

from __future__ import annotations

import re
import secrets

__all__ = ["MIN_PREFIX", "check_id", "is_prefix", "is_valid", "new_id", "short"]

MIN_PREFIX = 4
"""Fewest digits that are taken for a prefix of an id."""

_ID = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(rf"[0-9a-f]{{{MIN_PREFIX},64}}")


def new_id() -> str:
    """A fresh random id of 64 hex digits."""
    return secrets.token_hex(32)


def short(full_id: str) -> str:
    """The first 12 digits: what people are shown and may type."""
    return full_id[:12]


def check_id(full_id: str) -> str:
    """The id itself; ``ValueError`` unless it is 64 lower-case hex digits.

    Everything that turns an id into a path goes through here first.
    """
    if not isinstance(full_id, str) or not _ID.fullmatch(full_id):
        msg = f"{full_id!r} is not an id: 64 lower-case hex digits are"
        raise ValueError(msg)
    return full_id


def is_valid(text: str) -> bool:
    """Whether it is valid text: with half a surrogate pair it is in no table, nor can be asked."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def is_prefix(ref: str) -> bool:
    """Whether a reference can be the beginning of an id."""
    return _PREFIX.fullmatch(ref) is not None
