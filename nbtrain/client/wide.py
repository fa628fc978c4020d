"""A frame whose sentences show in full; pandas is loaded by importing it."""

from __future__ import annotations

from typing import Any

import pandas as pd

__all__ = ["WideFrame"]


class WideFrame(pd.DataFrame):
    """A plain frame, but for how it shows itself: no column and no text in it is cut.

    What is made of it (a part, a copy, a result) is a plain frame again.
    """

    def __repr__(self) -> str:
        with _whole():
            return super().__repr__()

    def _repr_html_(self) -> str | None:
        with _whole():
            shown: str | None = super()._repr_html_()  # type: ignore[misc]
            return shown


def _whole() -> Any:
    return pd.option_context("display.max_colwidth", None, "display.max_columns", None)
