"""Files that are not one JSON object a line: recognised, named, and how to convert them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

__all__ = [
    "Unreadable",
    "array_file",
    "by_leading_bytes",
    "is_cut_off",
    "pretty_file",
    "runs_over_lines",
]

_OUT = "rows.jsonl"

# (leading bytes, what it is, the command that makes rows of it; {} is the file)
_KINDS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "a gzip file", "gunzip -c {} > rows.jsonl"),
    (b"PK\x03\x04", "a zip file", "unzip -p {} > rows.jsonl"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "zstd -dc {} > rows.jsonl"),
    (b"BZh", "a bzip2 file", "bunzip2 -c {} > rows.jsonl"),
    (b"\xfd7zXZ\x00", "an xz file", "xz -dc {} > rows.jsonl"),
    (
        b"PAR1",
        "a Parquet file",
        'python -c "import pandas, sys; pandas.read_parquet(sys.argv[1])'
        ".to_json('rows.jsonl', orient='records', lines=True)\" {}",
    ),
    (
        b"ARROW1",
        "an Arrow file",
        'python -c "import pandas, sys; pandas.read_feather(sys.argv[1])'
        ".to_json('rows.jsonl', orient='records', lines=True)\" {}",
    ),
    # Of two marks that begin alike the longer one stands first.
    *(
        (mark, f"a {code[:6]} text", f"iconv -f {code} -t UTF-8 {{}} > rows.jsonl")
        for mark, code in (
            (b"\xff\xfe\x00\x00", "UTF-32"),
            (b"\x00\x00\xfe\xff", "UTF-32"),
            (b"{\x00\x00\x00", "UTF-32LE"),
            (b"\x00\x00\x00{", "UTF-32BE"),
            (b"\xff\xfe", "UTF-16"),
            (b"\xfe\xff", "UTF-16"),
            (b"{\x00", "UTF-16LE"),
            (b"\x00{", "UTF-16BE"),
        )
    ),
    (b"version https://git-lfs", "a pointer to large-file storage, not the rows", "git lfs pull"),
    (b"\x80\x02", "a pickle, which is not loaded", ""),
    (b"\x80\x04", "a pickle, which is not loaded", ""),
    (b"\x80\x05", "a pickle, which is not loaded", ""),
    (b"\x89HDF", "an HDF5 file", ""),
    (b"SQLite format 3", "an SQLite database", ""),
)
LEADING = max(len(mark) for mark, _, _ in _KINDS)
"""Bytes that :func:`by_leading_bytes` looks at."""


class Unreadable(Exception):
    """The file as a whole is no rows: ``message`` says what it is, ``hint`` how to convert it."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(message)


def by_leading_bytes(path: Path, head: bytes) -> Unreadable | None:
    """What the file is by its first bytes, or ``None`` when it may be rows."""
    for mark, kind, command in _KINDS:
        if head.startswith(mark):
            hint = f"This makes rows of it: {command.format(shlex.quote(str(path)))}"
            message = f"{path.name} is {kind}; one JSON object a line is read"
            return Unreadable(message, hint if command else None)
    return None


def array_file(path: Path) -> Unreadable:
    """The refusal of a file that is one JSON array."""
    message = f"{path.name} is a JSON array (first character [); one JSON object a line is read"
    command = (
        'python -c "import json, sys; [print(json.dumps(row)) for row in '
        f"json.load(open(sys.argv[1], encoding='utf-8'))]\" {shlex.quote(str(path))} > {_OUT}"
    )
    return Unreadable(message, f"This makes rows of it: {command}")


def pretty_file(path: Path) -> Unreadable:
    """The refusal of a file whose objects run over several lines."""
    message = (
        f"{path.name} holds an object that runs over several lines; one JSON object a line is read"
    )
    command = f"jq -c . {shlex.quote(str(path))} > {_OUT}"
    return Unreadable(message, f"This makes rows of it: {command}")


def is_cut_off(text: str, error: json.JSONDecodeError) -> bool:
    """Whether the text ends in the middle of a value, so that more of it could mend it."""
    at_end = error.pos >= len(text.rstrip(" \t\r\n"))
    return at_end or error.msg.startswith("Unterminated string")


def runs_over_lines(block: str) -> bool:
    """Whether ``block``, several lines long, is the beginning of one object over several lines."""
    text = block.lstrip(" \t\r\n")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text.rstrip(" \t\r\n"))
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]
