"""Start checks as figures: what was measured, from where on it warns, from where on it refuses.

The job measures before its first update; here is only what a measured number means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Check", "Verdict"]

Verdict = Literal["passed", "warned", "refused"]


@dataclass(frozen=True, slots=True)
class Check:
    """One start check.

    ``measured`` is the number and ``unit`` what it counts; above ``warn`` it warns and above
    ``refuse`` it refuses, below them with ``at_least``. A limit that is ``None`` does not exist;
    ``measured`` is ``None`` where there was nothing to measure, and ``said`` tells why.
    """

    name: str
    measured: float | None
    unit: str
    said: str
    warn: float | None = None
    refuse: float | None = None
    at_least: bool = False

    @property
    def verdict(self) -> Verdict:
        """What the number means."""
        if self._beyond(self.refuse):
            return "refused"
        return "warned" if self._beyond(self.warn) else "passed"

    def _beyond(self, limit: float | None) -> bool:
        if limit is None or self.measured is None:
            return False
        if self.measured != self.measured:  # not a number
            return True
        return self.measured < limit if self.at_least else self.measured > limit

    def to_json(self) -> dict[str, Any]:
        """Strict JSON, with the verdict; not a number becomes null and stays refused."""
        finite = self.measured is None or abs(self.measured) < float("inf")
        shown = {name: getattr(self, name) for name in self.__slots__}
        return shown | {"measured": self.measured if finite else None, "verdict": self.verdict}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Check:
        """The check that :meth:`to_json` wrote."""
        return cls(**{name: data[name] for name in cls.__slots__})
