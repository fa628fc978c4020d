"""The environment of the sample workload ``calculator``: a sum, to be worked out by a tool."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["Calculator"]

_CALL = re.compile(r"<calc>(\d{1,9})\+(\d{1,9})</calc>")
_LAST_NUMBER = re.compile(r"(\d+)\D*\Z")


class Calculator:
    """Two turns: a call such as ``<calc>51+48</calc>``, answered by its sum, then the reply.

    The reward is 1 when the calculator was asked for the task's own sum and the last number of the
    reply after it is right, else 0. A first reply that is no call ends the trajectory.
    """

    def reset(self, expression: str, answer: str) -> None:
        """Begin with the sum of a task, ``expression`` as it should be called (``51+48``)."""
        self.expression = expression
        self.answer = answer
        self.called: str | None = None
        self.reward = 0.0

    def step(self, reply: str) -> dict[str, Any] | None:
        """The sum of a call as a message of role tool; anything else is the final reply."""
        call = _CALL.fullmatch(reply.strip())
        if self.called is None and call is not None:
            first, second = map(int, call.groups())
            self.called = f"{first}+{second}"
            return {"role": "tool", "content": str(first + second)}
        said = _LAST_NUMBER.search(reply)
        right = said is not None and said.group(1) == self.answer
        self.reward = float(right and self.called == self.expression)
        return None
