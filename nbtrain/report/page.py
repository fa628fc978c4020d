"""A page as one file: skeleton, looks, and how it gets to the disk.

It needs no script and nothing from outside; its policy forbids both, so that even a text that
slipped through unescaped could neither run nor call home.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from nbtrain.errors import Problem, Refused
from nbtrain.report import palette
from nbtrain.report.markup import Markup, joined, mark, text
from nbtrain.store import usable_path, writing

__all__ = ["is_report", "page", "write_page"]

_STYLES = Path(__file__).with_name("page.css")
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_GENERATOR = "nbtrain report"
_HEAD = 2048  # bytes in which the generator is named


def page(title: str, header: Markup, sections: list[tuple[str, str, Markup]], foot: str) -> str:
    """The whole document. ``sections`` are (anchor, title, content); empty ones are left out."""
    shown = [(ident, name, part) for ident, name, part in sections if part]
    links = joined(mark("li", mark("a", name, href=f"#{ident}")) for ident, name, _ in shown)
    contents = mark("nav", mark("ul", links), aria_label="Contents") if len(shown) > 2 else Markup()
    body = joined((
        mark("header", header), contents, mark("main", joined(part for *_, part in shown)),
        mark("footer", foot),
    ))  # fmt: skip
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="generator" content="{_GENERATOR}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{text(title)}</title>\n<style>{_looks()}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def is_report(path: Path) -> bool:
    """Whether a file is a page that was written here."""
    with path.open("rb") as file:
        return f'name="generator" content="{_GENERATOR}"'.encode() in file.read(_HEAD)


def write_page(given: str | os.PathLike[str], content: str) -> Path:
    """Write the page whole or not at all, and return its absolute path.

    An earlier report is replaced; any other file, a folder, and what is no file stays, unopened
    where opening it could wait. A link stays too: what it leads to is replaced, or made. Raises
    :class:`Refused` for what stays and for no usable path, :class:`~nbtrain.errors.NotWritten`
    (an ``OSError``) where it cannot be written.
    """
    path = usable_path(given, "path")
    with writing(path):
        real = Path(os.path.realpath(path))
        _check(path, real)
        _write(real, content)
    return path


def _write(real: Path, content: str) -> None:
    real.parent.mkdir(parents=True, exist_ok=True)
    # Short whatever the file's name: a file system has a limit for these
    half = real.with_name(f".half-{secrets.token_hex(8)}")
    try:
        with half.open("x", encoding="utf-8", newline="\n") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        half.replace(real)
    except BaseException:
        with suppress(OSError):
            half.unlink(missing_ok=True)
        raise


def _check(path: Path, real: Path) -> None:
    hint = "State another path, or move what is there"
    if path.is_dir():
        message = f"{path} is a folder: a report is one file"
        hint = f"State a file, such as {path / 'report.html'}"
    elif path.exists() and not path.is_file():
        message = f"{path} is a pipe, a socket or a device: a report is a file"
    elif path.exists():
        if is_report(path):
            return
        message = f"{path} exists and is no report of nbtrain: it is not replaced"
    else:
        above = next(folder for folder in real.parents if folder.exists())
        if above.is_dir():
            return
        message = f"{path} lies beneath {above}, which is no folder"
    raise Refused([Problem("path", message, str(path), hint=hint)])


def _looks() -> str:
    """The colours of both themes and the rules that use them; paper is always light."""
    light, dark = palette.css_variables(), palette.css_variables(dark=True)
    return (
        f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
        f"@media print{{:root{{{light}}}}}\n{_STYLES.read_text('utf-8')}"
    )
