"""Refusals and interruptions that the client raises itself."""

from __future__ import annotations

from typing import NoReturn

from nbtrain.errors import Problem, Refused

__all__ = ["Detached", "Later", "NoWeightChanged", "NotBuiltYet", "SubmittedBefore", "refuse"]


class NotBuiltYet(Refused):
    """The thing asked for has a name and a place, but this version does not have it."""

    head = "not built yet"

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class Detached(KeyboardInterrupt):
    """Waiting was interrupted. The run goes on; the message says how to cancel it."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class NoWeightChanged(UserWarning):
    """A run succeeded without a single optimizer update."""


class SubmittedBefore(UserWarning):
    """A submission was started before: no new run was made, and the first one is what you got."""


class Later:
    """A part of the client that has a name already: whatever is asked of it is refused by name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        refuse(f"{self._name}.{name}")

    def __repr__(self) -> str:
        return f"<{self._name}: not built yet>"


def refuse(what: str, hint: str | None = None) -> NoReturn:
    """Refuse ``what`` (e.g. ``"Run.pause"``) by name. Raises :class:`NotBuiltYet`."""
    problem = Problem(field=what, message=f"{what} is not built yet in this version", hint=hint)
    raise NotBuiltYet([problem])
