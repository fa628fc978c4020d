"""Pieces of a page. Every text that comes in is escaped; only :class:`Markup` goes in as it is."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from nbtrain.report.drawing import Drawing, Key

__all__ = [
    *(
        "Markup",
        "badge",
        "code",
        "details",
        "drawn",
        "facts",
        "grouped_table",
        "joined",
        "mark",
        "paragraphs",
        "section",
    ),
    *("table", "text"),
]

_ODD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """HTML that was made here."""

    __slots__ = ()


def text(value: object) -> Markup:
    """A text for a page: escaped, and what no page may contain replaced by a visible sign."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_ODD.sub("\N{REPLACEMENT CHARACTER}", str(value))))


def mark(name: str, inner: object, **attributes: str) -> Markup:
    """``<name …>inner</name>``; an attribute's underscores stand for dashes."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items()
    )
    return Markup(f"<{name}{said}>{text(inner)}</{name}>")


def joined(parts: Iterable[object]) -> Markup:
    """The pieces one after the other."""
    return Markup("".join(text(part) for part in parts))


def section(ident: str, title: str, *parts: object) -> Markup:
    """A part of the page under a heading of its own; nothing where it has no content."""
    inner = joined(parts)
    if not inner:
        return Markup("")
    heading = mark("h2", title, id=f"{ident}-title")
    return mark("section", Markup(heading + inner), id=ident, aria_labelledby=f"{ident}-title")


def paragraphs(lines: Iterable[object], kind: str = "") -> Markup:
    """Each line in a paragraph of its own."""
    how = {"class_": kind} if kind else {}
    return joined(mark("p", line, **how) for line in lines if line)


def facts(pairs: Iterable[tuple[str, object]]) -> Markup:
    """Names and what they are, as a list of definitions; empty values are left out."""
    rows = [mark("div", joined((mark("dt", name), mark("dd", value)))) for name, value in pairs
            if value not in (None, "")]  # fmt: skip
    return mark("dl", joined(rows), class_="facts") if rows else Markup("")


def table(
    names: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str,
    numbers: Iterable[int] = (),
    hidden: bool = False,
) -> Markup:
    """A table; the first cell of a row names it, ``numbers`` are the columns set right.

    ``caption`` says what it holds; ``hidden``, to who cannot see it alone.
    """
    body = _rows(rows, frozenset(numbers))
    return _table(names, [body] if body else [], caption, frozenset(numbers), hidden=hidden)


def grouped_table(
    names: Sequence[str], groups: Iterable[tuple[str, Iterable[Sequence[object]]]], *, caption: str
) -> Markup:
    """A table whose rows stand in groups, each under its name."""
    width = str(len(names))
    bodies = []
    for name, rows in groups:
        head = mark("tr", mark("th", name, scope="rowgroup", colspan=width)) if name else ""
        bodies.append(joined((head, _rows(rows, frozenset()))))
    return _table(names, bodies, caption, frozenset())


def _kind(n: int, right: frozenset[int]) -> dict[str, str]:
    return {"class_": "number"} if n in right else {}


def _rows(rows: Iterable[Sequence[object]], right: frozenset[int]) -> Markup:
    body = []
    for row in rows:
        first, *rest = row
        cells = [mark("th", first, scope="row", **_kind(0, right))]
        cells += [mark("td", cell, **_kind(n, right)) for n, cell in enumerate(rest, 1)]
        body.append(mark("tr", joined(cells)))
    return joined(body)


def _table(
    names: Sequence[str],
    bodies: Sequence[Markup],
    caption: str,
    right: frozenset[int],
    *,
    hidden: bool = False,
) -> Markup:
    if not bodies:
        return Markup("")
    head = joined(mark("th", name, scope="col", **_kind(n, right)) for n, name in enumerate(names))
    inner = joined((
        mark("caption", caption, **({"class_": "unseen"} if hidden else {})),
        mark("thead", mark("tr", head)), *(mark("tbody", body) for body in bodies),
    ))  # fmt: skip
    # It scrolls by itself where it is too wide, also by keyboard
    return mark(
        "div", mark("table", inner), class_="scroll", tabindex="0", role="group", aria_label=caption
    )


def details(summary: str, *parts: object, is_open: bool = False) -> Markup:
    """What is shown when asked for; nothing without content."""
    inner = joined(parts)
    if not inner:
        return Markup("")
    opening = Markup("<details open>" if is_open else "<details>")
    return joined((opening, mark("summary", summary), inner, Markup("</details>")))


def code(source: str, label: str, kind: str = "code") -> Markup:
    """A block of code or log, as it is; ``label`` says what it is to who cannot see it."""
    inner = mark("code", source)
    return mark("pre", inner, class_=kind, tabindex="0", role="group", aria_label=label)


def badge(words: str, kind: str) -> Markup:
    """A short state in a coloured box; ``kind`` is good, bad, doubtful, busy or plain."""
    return mark("span", words, class_=f"badge {kind}")


def drawn(drawing: Drawing, *, wide: bool = False) -> Markup:
    """A drawing with its title, its legend, and what is seen in it for who does not see it."""
    picture = Markup(drawing.svg)
    if drawing.narrow is not None:
        picture = joined((
            mark("div", picture, class_="broad"), mark("div", Markup(drawing.narrow), class_="slim")
        ))  # fmt: skip
    inner = joined((
        mark("figcaption", joined((mark("b", drawing.title), _legend(drawing.keys)))),
        mark("div", picture, role="img", aria_label=drawing.told),
        mark("p", drawing.told, class_="told"),
    ))  # fmt: skip
    return mark("figure", inner, class_="wide" if wide else "half")


def _legend(keys: Sequence[Key]) -> Markup:
    entries = [
        mark("li", joined((
            mark("span", "", class_=f"sign {key.sign}", style=f"color:var(--line-{key.colour})"),
            key.label,
        )))
        for key in keys
    ]  # fmt: skip
    return mark("ul", joined(entries), class_="legend") if entries else Markup("")
