"""What ``$name`` may stand for: everything the namespace has; only the user's own is suggested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Names"]

_MISSING = object()


class Names(Mapping[str, object]):
    """A shell's namespace. Iterating gives the names that the user made, as ``%who`` does.

    Looked up, every name is found; what IPython itself put there (``In``, ``open``, ``_12``) is
    never among the names that a misspelt one might have been.
    """

    def __init__(self, shell: Any) -> None:
        self._all: Mapping[str, object] = shell.user_ns
        self._hidden: Mapping[str, object] = getattr(shell, "user_ns_hidden", {})

    def __getitem__(self, name: str) -> object:
        return self._all[name]

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def __iter__(self) -> Iterator[str]:
        for name, value in self._all.items():
            if not name.startswith("_") and self._hidden.get(name, _MISSING) is not value:
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)
