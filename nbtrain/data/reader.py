"""Reading rows strictly, one at a time: a JSONL file by physical lines, a DataFrame, a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from nbtrain.catalog.rows import UnusableError, plain
from nbtrain.data.findings import Findings
from nbtrain.data.formats import (
    LEADING,
    Unreadable,
    array_file,
    by_leading_bytes,
    pretty_file,
    runs_over_lines,
)
from nbtrain.data.rows import Row, decode, encode, shape

__all__ = ["MOST_BYTES", "Progress", "read_jsonl", "read_table"]

MOST_BYTES = 64 * 2**20
"""Longest line of a file, in bytes."""

Progress = Callable[[int, int, int], None]
"""Called with the rows read, and the bytes (of a table: rows) done and in all."""

Lines = Iterator[tuple[int, Row, bytes]]

_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"
_EVERY = 1000  # rows between two calls of the progress
_PEEK = 2**20  # bytes read ahead to tell an object over several lines


def read_jsonl(path: Path, findings: Findings, progress: Progress | None = None) -> Lines:
    """The rows of a file as ``(physical line from 1, row, the row as one compact line)``.

    Lines end with LF or CRLF; a byte order mark at the beginning and blank lines are no rows. A
    row that is none goes to ``findings`` and reading goes on. Raises :class:`Unreadable` when the
    file as a whole is something else or cannot be read.
    """
    try:
        with path.open("rb") as file:
            yield from _lines(path, file, findings, progress)
    except OSError as error:
        message = f"{path.name} cannot be read: {error.strerror or error}"
        raise Unreadable(message) from error


def _lines(path: Path, file: BinaryIO, findings: Findings, progress: Progress | None) -> Lines:
    total = path.stat().st_size
    head = file.read(LEADING)
    unreadable = by_leading_bytes(path, head)
    if unreadable is not None:
        raise unreadable
    file.seek(len(_BOM) if head.startswith(_BOM) else 0)
    done, rows = file.tell(), 0
    for number, line in enumerate(_physical_lines(file), 1):
        done += len(line)
        if not line.strip(_BLANK):
            continue
        if not rows:
            _check_first(path, file, line)
        rows += 1
        if progress is not None and not rows % _EVERY:
            progress(rows, min(done, total), total)
        found = _row(line, number, findings)
        if found is not None:
            yield number, *found
    if progress is not None:
        progress(rows, total, total)


def _physical_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines with their ends; of one that is too long only the beginning, which is one byte more
    than a line may have.
    """
    while line := file.readline(MOST_BYTES + 1):
        yield line
        while len(line) > MOST_BYTES and not line.endswith(b"\n"):
            line = file.readline(MOST_BYTES + 1)


def _row(line: bytes, number: int, findings: Findings) -> tuple[Row, bytes] | None:
    if len(line) > MOST_BYTES:
        message = f"the row has more than {MOST_BYTES // 2**20} MiB"
        findings.add("long", number, "row", message, f"at most {MOST_BYTES // 2**20} MiB")
        return None
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        byte, found = error.start + 1, f"0x{line[error.start]:02x}"
        message = f"byte {byte} of the line is not UTF-8 ({found})"
        hint = "Save the file as UTF-8"
        findings.add("utf-8", number, "row", message, "UTF-8", found=found, hint=hint)
        return None
    row = decode(text, number, findings)
    data = None if row is None else encode(row, number, findings)
    return None if row is None or data is None else (row, data)


def _check_first(path: Path, file: BinaryIO, line: bytes) -> None:
    """Tell by the first row that no line of the file is one. Leaves the file where it was."""
    begins = line.lstrip(_BLANK)
    if begins[:1] not in b"[{":
        return
    here = file.tell()
    ahead = file.read(_PEEK)
    file.seek(here)
    if begins.startswith(b"["):
        whole = decode("[" + line.decode(errors="replace") + "]", 1, probe := Findings())
        complete = whole is None and probe.refusals[0].code == "row"
        if not complete or not ahead.strip(_BLANK):
            raise array_file(path)
        return
    probe = Findings()
    decode(line.decode(errors="replace"), 1, probe)
    cut_off = probe.refusals and probe.refusals[0].code == "cut-off"
    if cut_off and ahead and runs_over_lines((line + ahead).decode(errors="ignore")):
        raise pretty_file(path)


def read_table(table: object, findings: Findings, progress: Progress | None = None) -> Lines:
    """The rows of a DataFrame or an iterable of dicts, counted from 1, as :func:`read_jsonl`.

    NumPy scalars and arrays become Python values, tuples become lists, a missing cell of a
    nullable or text column becomes null; NaN among numbers is refused. Raises
    :class:`Unreadable` for anything else.
    """
    records, total = _records(table)
    number = 0
    for number, record in enumerate(records, 1):
        if progress is not None and not number % _EVERY:
            progress(number, number, total)
        if not isinstance(record, Mapping):
            message = f"the row is {shape(record)}"
            findings.add("row", number, "row", message, "a dict", found=shape(record))
            continue
        row = _plain_row(record, number, findings)
        data = None if row is None else encode(row, number, findings)
        if row is not None and data is not None:
            yield number, row, data
    if progress is not None:
        progress(number, number, total)


def _records(table: object) -> tuple[Iterable[Any], int]:
    columns, places = getattr(table, "columns", None), getattr(table, "iloc", None)
    if columns is not None and places is not None:
        names = [str(name) for name in columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            message = f"columns of the same name: {', '.join(twice)}"
            raise Unreadable(message, "Each column needs a name of its own")
        return _frame_records(table), len(table)  # type: ignore[arg-type]
    if isinstance(table, (str, bytes, Mapping)) or not isinstance(table, Iterable):
        message = f"source is a {type(table).__name__}; allowed: a path, a DataFrame, a list of "
        raise Unreadable(message + "dicts")
    rows = table if isinstance(table, (list, tuple)) else list(table)
    return rows, len(rows)


def _frame_records(frame: Any) -> Iterator[Any]:
    texts = [name for name, kind in frame.dtypes.items() if type(kind).__name__ == "StringDtype"]
    # In pieces: a frame is not copied as a whole into Python objects.
    for start in range(0, len(frame), _EVERY):
        records = frame.iloc[start : start + _EVERY].to_dict("records")
        for record in records:
            # pandas keeps a missing text as NaN, which no text column can hold otherwise.
            record.update({name: None for name in texts if isinstance(record[name], float)})
        yield from records


def _plain_row(record: Mapping[Any, Any], number: int, findings: Findings) -> Row | None:
    row: Row = {}
    whole = True
    for name, value in record.items():
        if not isinstance(name, str):
            found = repr(name)[:40]
            findings.add("column", number, "row", f"a column is named {found}", "text", found=found)
            whole = False
            continue
        try:
            row[name] = None if type(value).__name__ == "NAType" else plain(value)
        except (UnusableError, RecursionError) as error:
            why = "a value inside itself" if isinstance(error, RecursionError) else str(error)
            missing = "None or pd.NA stands for a missing value" if "NaN" in why else None
            message = f"{name} holds {why}"
            findings.add("value", number, name, message, "a JSON value", found=why, hint=missing)
            whole = False
    return row if whole else None
