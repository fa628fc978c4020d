"""Rows of other layouts: recognised by their keys, and told what is nearest."""

from __future__ import annotations

import difflib
from typing import Any, Protocol

from nbtrain.data.rows import Row, shape

__all__ = ["A_MESSAGE", "Say", "complain_of_messages", "cut"]

A_MESSAGE = '{"role": …, "content": …}'

# Keys by which other layouts are told, and what to make of them.
_LAYOUTS: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"conversations"}),
        "'conversations' with 'from' and 'value' is nearest to 'messages' with 'role' (human is "
        "user, gpt is assistant) and 'content'",
    ),
    (
        frozenset({"chosen", "rejected"}),
        "'chosen' and 'rejected' are preference pairs, which no method here trains on",
    ),
    (
        frozenset({"prompt", "completion"}),
        "'prompt' is nearest to a user's message, 'completion' to the assistant's",
    ),
    (
        frozenset({"instruction", "output"}),
        "'instruction' (with 'input') is nearest to a user's message, 'output' to the assistant's",
    ),
    (
        frozenset({"question", "answer"}),
        "'question' is nearest to a user's message, 'answer' to the assistant's",
    ),
    (frozenset({"text"}), "'text' is plain text; rows here are conversations"),
)


class Say(Protocol):
    """Adds a finding about the row that is being looked at."""

    def __call__(
        self, code: str, field: str, message: str, expected: str | None = None, **more: Any
    ) -> None:
        """Add a finding about the row that is being looked at."""
        ...


def complain_of_messages(row: Row, say: Say) -> None:
    """Say why the row has no conversation, and which layout its keys are nearest to."""
    if "messages" in row:
        found = shape(row["messages"])
        say(
            "messages",
            "messages",
            f"messages is {found}",
            f"a list of {A_MESSAGE}",
            found=found,
        )
        return
    keys = ", ".join(cut(key) for key in list(row)[:8]) or "none"
    keys += " …" if len(row) > 8 else ""
    hint = next((told for marks, told in _LAYOUTS if marks <= row.keys()), None)
    near = difflib.get_close_matches("messages", list(row)[:100], n=1)
    if hint is None and near:
        hint = f"{cut(near[0])!r} is nearest to 'messages'"
    say(
        "keys",
        "messages",
        f"the row has no 'messages'; its keys are: {keys}",
        f"messages: a list of {A_MESSAGE}",
        found=keys,
        hint=hint,
    )


def cut(text: str, most: int = 40) -> str:
    """The text, its end left off beyond ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"
