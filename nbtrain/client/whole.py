"""Steps and limits that a caller states: whole numbers from 0 on."""

from __future__ import annotations

from nbtrain.errors import Refused
from nbtrain.plan.fields import Option, check

__all__ = ["LARGEST", "whole_numbers"]

LARGEST = 2**63 - 1
"""What the store can count to; more counts as this: no step is that high, no list that long."""


def whole_numbers(**stated: object) -> tuple[int | None, ...]:
    """The numbers in their order; ``None`` stays, and what is beyond :data:`LARGEST` is that.

    Whole numbers are whole as in a plan: ``8.0`` and NumPy's are, ``True`` and ``"8"`` are not.
    Raises :class:`~nbtrain.errors.Refused` with everything that is none, or below 0.
    """
    found, problems = [], []
    for name, value in stated.items():
        option = Option(name, "integer", "", "sampling", None, min=0, nullable=True)
        number, problem = check(option, value)
        if problem is not None:
            problems.append(problem)
        found.append(None if number is None else min(number, LARGEST))
    if problems:
        raise Refused(problems)
    return tuple(found)
