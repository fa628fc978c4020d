"""How an estimate shows itself: as its sentences."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod

__all__ = ["Told"]


class Told(ABC):
    """What a run is expected to take, a sentence for each thing."""

    __slots__ = ()

    @abstractmethod
    def sentences(self) -> list[str]:
        """What is expected, a sentence for each thing."""

    def __repr__(self) -> str:
        return "\n".join(["expected of this run", *(f"  {each}" for each in self.sentences())])

    def _repr_html_(self) -> str:
        rows = "".join(f"<li>{html.escape(each)}</li>" for each in self.sentences())
        return (
            '<div style="font-family:sans-serif;font-size:13px">expected of this run'
            f'<ul style="margin:2px 0 0 0">{rows}</ul></div>'
        )
