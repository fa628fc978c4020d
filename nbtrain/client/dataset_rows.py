"""Rows of a dataset as a notebook shows them: one page, by position and physical line."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbtrain.client.listing import Listing

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DatasetRow", "RowPage"]

_CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0;white-space:pre-wrap"
_SHORT = 200
_COLUMNS = ("index", "line", "messages", "tokens", "trained_tokens", "duplicates", "refused")


@dataclass(frozen=True)
class DatasetRow:
    """One row. ``index`` counts from 0, ``line`` is its physical line in the registered file.

    ``row`` holds the values as they are. With a model, ``tokens`` counts the row's tokens,
    ``trained_tokens`` those in the loss, and ``marked`` is the text that the model reads, what is
    trained between ``[[`` and ``]]``; ``refused`` is why the row cannot be trained on.
    ``duplicates`` are the positions of other rows with the same messages.
    """

    index: int
    line: int
    row: Mapping[str, Any]
    duplicates: tuple[int, ...] = ()
    tokens: int | None = None
    trained_tokens: int | None = None
    marked: str | None = None
    refused: str | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The row's messages."""
        return list(self.row["messages"])

    def to_row(self) -> dict[str, Any]:
        """The row as one row of a table, its other columns behind."""
        known = {name: getattr(self, name) for name in _COLUMNS}
        return {**known, **{k: v for k, v in self.row.items() if k not in known}}

    def text(self) -> str:
        """What is shown of it: the marked text, else its messages by role."""
        if self.marked is not None:
            return self.marked
        told = [f"{message.get('role')}: {_content(message)}" for message in self.messages]
        return "\n".join(told)

    def _head(self) -> str:
        told = [f"row {self.index:,} (line {self.line:,})"]
        if self.tokens is not None:
            told.append(f"{self.tokens:,} tokens, {self.trained_tokens or 0:,} trained")
        if self.duplicates:
            same = ", ".join(f"{index:,}" for index in self.duplicates[:5])
            told.append(f"same messages as row {same}")
        return " · ".join(told)

    def __repr__(self) -> str:
        refused = f"\nrefused: {self.refused}" if self.refused else ""
        return f"{self._head()}\n{self.text()}{refused}"

    def _line(self) -> str:
        text = " ".join(self.text().split())
        return f"{self._head()}: {text if len(text) <= _SHORT else text[: _SHORT - 1] + '…'}"


class RowPage(Listing[DatasetRow]):
    """A page of rows; ``offset`` is where it begins and ``total`` how many rows there are."""

    def __init__(self, rows: list[DatasetRow], title: str) -> None:
        super().__init__(rows, _COLUMNS)
        self._title = title

    def to_frame(self) -> pd.DataFrame:
        """One row per row of the dataset."""
        from nbtrain.client.frames import frame

        rows = [row.to_row() for row in self.items]
        return frame(rows) if rows else frame([], _COLUMNS)

    def __repr__(self) -> str:
        return "\n".join([self._title, *(f"  {row._line()}" for row in self.items)])

    def _repr_html_(self) -> str:
        body = "".join(_html_row(row) for row in self.items)
        return (
            '<div style="font-family:sans-serif;font-size:13px">'
            f"<div>{html.escape(self._title)}</div>"
            '<table style="border-collapse:collapse;font-size:inherit;color:inherit">'
            f"<tbody>{body}</tbody></table></div>"
        )


def _html_row(row: DatasetRow) -> str:
    refused = f"<div>refused: {html.escape(row.refused)}</div>" if row.refused else ""
    return (
        f'<tr><td style="{_CELL}">{html.escape(row._head())}</td>'
        f'<td style="{_CELL}">{html.escape(row.text())}{refused}</td></tr>'
    )


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    told = [content] if isinstance(content, str) else []
    if isinstance(content, Sequence) and not isinstance(content, str):
        told = [part.get("text") or f"[{part.get('type')}]" for part in content]
    for name in ("reasoning_content", "thinking"):
        if isinstance(message.get(name), str):
            told.insert(0, f"({message[name]})")
    for call in message.get("tool_calls") or ():
        told.append(json.dumps(call.get("function", call), ensure_ascii=False))
    return " ".join(told)
