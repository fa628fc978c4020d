"""Tables as files: Parquet, CSV and Excel, written piece by piece.

A table is columns of a kind and pieces of rows. Whatever reads them gets the same: a missing
number is empty, a time is UTC, a text is text even where a spreadsheet would calculate with it.
"""

from __future__ import annotations

import csv
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FORMATS", "Column", "TableWriter", "Written", "kind_of", "writer_for"]

Kind = Literal["text", "integer", "number", "flag", "time", "json"]
FORMATS = ("parquet", "csv", "xlsx")

CELL_LIMIT = 32_767
"""Characters that a cell of Excel holds."""
ROW_LIMIT = 1_048_575
"""Rows that a sheet of Excel holds below the names of its columns."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_SURROGATES = re.compile("[\ud800-\udfff]")
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""What XML 1.0, and so a workbook, cannot hold."""
_STANDS_FOR = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, its kind and what it means."""

    name: str
    kind: Kind
    meaning: str = ""

    @property
    def title(self) -> str:
        """The name as a file can hold it."""
        return _SURROGATES.sub(_STANDS_FOR, self.name)


@dataclass(slots=True)
class Written:
    """What became of a table: its file, its rows, and in words what a format could not hold."""

    path: Path
    rows: int = 0
    said: list[str] | None = None


def kind_of(values: Iterable[Any]) -> Kind:
    """The kind that holds all of the values; what is no plain value is JSON."""
    kinds = {_kind(value) for value in values if value is not None}
    if not kinds:
        return "text"
    if len(kinds) == 1:
        return kinds.pop()
    return "number" if kinds == {"integer", "number"} else "json"


def _kind(value: Any) -> Kind:
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "text" if isinstance(value, str) else "json"


def plain(value: Any, kind: Kind) -> Any:
    """A value as every format takes it: ``None`` for nothing and for what is no number."""
    found = _given(value, kind)
    return _SURROGATES.sub(_STANDS_FOR, found) if isinstance(found, str) else found


def _given(value: Any, kind: Kind) -> Any:
    """The same with every character that a text has."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if kind == "json":
        value = json.dumps(value, ensure_ascii=False)
    if kind in ("json", "text"):
        return str(value)
    if kind == "time":
        return datetime.fromtimestamp(value, UTC)
    if kind == "integer":
        return int(value)
    return float(value) if kind == "number" else bool(value)


class TableWriter(ABC):
    """Writes tables into one folder; leave its ``with`` block to have them whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def finish(self) -> None:  # noqa: B027 - most formats have nothing to do
        """Write what is only written at the end."""

    @abstractmethod
    def write(
        self, name: str, columns: Sequence[Column], pieces: Iterable[Sequence[Mapping[str, Any]]]
    ) -> Written:
        """Write one table from pieces of rows."""


def writer_for(form: str, folder: Path) -> TableWriter:
    """The writer of one of :data:`FORMATS`."""
    kinds: dict[str, type[TableWriter]] = {"parquet": _Parquet, "csv": _Csv, "xlsx": _Excel}
    return kinds[form](folder)


def _values(
    columns: Sequence[Column],
    pieces: Iterable[Sequence[Mapping[str, Any]]],
    read: Callable[[Any, Kind], Any] = plain,
) -> Iterator[list[Any]]:
    for rows in pieces:
        for row in rows:
            yield [read(row.get(column.name), column.kind) for column in columns]


class _Parquet(TableWriter):
    def write(
        self, name: str, columns: Sequence[Column], pieces: Iterable[Sequence[Mapping[str, Any]]]
    ) -> Written:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = _schema(columns)
        written = Written(self.folder / f"{name}.parquet")
        with pq.ParquetWriter(written.path, schema, compression="zstd") as file:
            for rows in pieces:
                arrays = [
                    pa.array([plain(row.get(c.name), c.kind) for row in rows], field.type)
                    for c, field in zip(columns, schema, strict=True)
                ]
                file.write_table(pa.Table.from_arrays(arrays, schema=schema))
                written.rows += len(rows)
        return written


def _schema(columns: Sequence[Column]) -> pa.Schema:
    import pyarrow as pa

    types = {
        "text": pa.string(), "json": pa.string(), "integer": pa.int64(), "number": pa.float64(),
        "flag": pa.bool_(), "time": pa.timestamp("ms", tz="UTC"),
    }  # fmt: skip
    return pa.schema(
        [pa.field(c.title, types[c.kind], metadata={"meaning": c.meaning}) for c in columns]
    )


class _Csv(TableWriter):
    def write(
        self, name: str, columns: Sequence[Column], pieces: Iterable[Sequence[Mapping[str, Any]]]
    ) -> Written:
        written = Written(self.folder / f"{name}.csv")
        told = [column.kind in ("text", "json") for column in columns]
        with written.path.open("w", encoding="utf-8", newline="") as file:
            out = csv.writer(file)
            out.writerow([_inert(column.title) for column in columns])
            for values in _values(columns, pieces):
                out.writerow(
                    [
                        _inert(v) if is_text else _spelled(v)
                        for v, is_text in zip(values, told, strict=True)
                    ]
                )
                written.rows += 1
        return written


def _inert(text: str | None) -> str:
    """A text that no spreadsheet takes for a formula: an apostrophe stands before it."""
    if text is None:
        return ""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _spelled(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return repr(value)


class _Excel(TableWriter):
    """One workbook with a sheet for each table."""

    def __init__(self, folder: Path) -> None:
        from openpyxl import Workbook

        super().__init__(folder)
        self._book = Workbook(write_only=True)

    def finish(self) -> None:
        # Also what was only begun, as its temporary files go with it
        if self._book.worksheets:
            self._book.save(self.folder / "tables.xlsx")

    def write(
        self, name: str, columns: Sequence[Column], pieces: Iterable[Sequence[Mapping[str, Any]]]
    ) -> Written:
        sheet = self._book.create_sheet(name)
        sheet.freeze_panes = "A2"
        sheet.append([_cell(sheet, column.title)[0] for column in columns])
        written = Written(self.folder / "tables.xlsx", said=[])
        cut = odd = left_off = 0
        for values in _values(columns, pieces, _given):
            if written.rows == ROW_LIMIT:
                left_off += 1
                continue
            cells = []
            for value in values:
                cell, was_cut, was_odd = _cell(sheet, value)
                cells.append(cell)
                cut += was_cut
                odd += was_odd
            sheet.append(cells)
            written.rows += 1
        counted = (
            (cut, f"texts cut to {CELL_LIMIT:,} characters, the most that a cell holds"),
            (odd, f"texts with characters that no workbook holds, each replaced by {_STANDS_FOR}"),
            (left_off, f"rows left off, as a sheet holds {ROW_LIMIT + 1:,}"),
        )
        written.said = [f"{count:,} {what}" for count, what in counted if count]
        return written


def _cell(sheet: Any, value: Any) -> tuple[Any, bool, bool]:
    """A cell, whether its text was cut, and whether characters of it were replaced."""
    if isinstance(value, datetime):
        return value.replace(tzinfo=None), False, False
    if not isinstance(value, str):
        return value, False, False
    from openpyxl.cell import WriteOnlyCell

    told, odd = _NOT_XML.subn(_STANDS_FOR, value)
    long = len(told) > CELL_LIMIT
    cell = WriteOnlyCell(sheet)
    cell.value = told[:CELL_LIMIT]
    # Text, whatever it begins with, and still text once somebody has edited the cell
    cell.data_type = "s"
    cell.quotePrefix = told.startswith(_FORMULA)
    return cell, long, bool(odd)
