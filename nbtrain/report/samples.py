"""Sampled replies, and those of two checkpoints side by side, as text and static HTML.

As in :mod:`nbtrain.report.static`: inline styles and neutral colours only, every text escaped.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbtrain.report.turns import as_turns, turns_html

__all__ = [
    "PairView",
    "ReplyView",
    "SamplesView",
    "SideBySideView",
    "samples_html",
    "samples_text",
    "side_by_side_html",
    "side_by_side_text",
]

_BOX = "font-family:sans-serif;font-size:13px;line-height:1.45;max-width:{width}px"
_MUTED = "opacity:0.75"
_LINE = "border-bottom:1px solid rgba(128,128,128,0.3)"
_REPLY = "white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0"
_QUOTED = "border-left:3px solid rgba(128,128,128,0.5);padding-left:8px;margin:4px 0 4px 8px"
_CELL = f"padding:4px 10px 4px 0;text-align:left;vertical-align:top;{_LINE}"


@dataclass(frozen=True, slots=True)
class ReplyView:
    """A reply: a text, or messages where an environment spoke too; ``told`` says how it ended."""

    completion: Any
    told: str


@dataclass(frozen=True, slots=True)
class SamplesView:
    """Prompts with their replies. ``settings`` is one line, ``notes`` a line each."""

    title: str
    settings: str
    prompts: Sequence[tuple[Any, Sequence[ReplyView]]]
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PairView:
    """One task; ``left`` and ``right`` are the replies of the two, ``told`` is what is said of
    it (its rewards), and ``reference`` the expected answer where there is one.
    """

    prompt: Any
    left: Sequence[ReplyView]
    right: Sequence[ReplyView]
    told: str = ""
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class SideBySideView:
    """Two checkpoints on the same tasks. ``summary`` and ``notes`` hold a sentence each."""

    title: str
    names: tuple[str, str]
    pairs: Sequence[PairView]
    summary: Sequence[str] = ()
    notes: Sequence[str] = ()


# --- as text ---------------------------------------------------------------------------------


def samples_text(view: SamplesView) -> str:
    """Each prompt once, its replies below it."""
    lines = [view.title, view.settings, *view.notes]
    for prompt, replies in view.prompts:
        lines += ["", *_indented("prompt", as_turns(prompt), "")]
        for number, reply in enumerate(replies, 1):
            head = f"reply {number}" if len(replies) > 1 else "reply"
            lines += _indented(f"{head}, {reply.told}", as_turns(reply.completion), "  ")
    return "\n".join(lines)


def side_by_side_text(view: SideBySideView) -> str:
    """Each task with the replies of both, one below the other."""
    lines = [view.title, *view.summary, *view.notes]
    for pair in view.pairs:
        lines += ["", *_indented("prompt", as_turns(pair.prompt), "")]
        if pair.told:
            lines.append(f"  {pair.told}")
        if pair.reference is not None:
            lines += _indented("expected", pair.reference, "  ")
        for name, replies in zip(view.names, (pair.left, pair.right), strict=True):
            for reply in replies:
                lines += _indented(f"{name}, {reply.told}", as_turns(reply.completion), "  ")
    return "\n".join(lines)


def _indented(head: str, said: object, indent: str) -> list[str]:
    text = "" if said is None else str(said)
    return [f"{indent}{head}:", *(f"{indent}  {line}" for line in text.splitlines() or [""])]


# --- as HTML ---------------------------------------------------------------------------------


def samples_html(view: SamplesView) -> str:
    """The same as static HTML."""
    rows = [_head(view.title), *_muted([view.settings, *view.notes])]
    for prompt, replies in view.prompts:
        rows.append(f'<div style="margin-top:8px">{turns_html(prompt)}</div>')
        rows += [f'<div style="{_QUOTED}">{_reply(reply)}</div>' for reply in replies]
    return _boxed("nbtrain-samples", rows, 720)


def side_by_side_html(view: SideBySideView) -> str:
    """The same as a static table: a row for each task, a column for each of the two."""
    rows = [_head(view.title), *(f"<div>{html.escape(line)}</div>" for line in view.summary)]
    rows += _muted(view.notes)
    names = ("task", *view.names)
    head = "".join(f'<th style="{_CELL}">{html.escape(name)}</th>' for name in names)
    body = "".join(f"<tr>{_pair(pair)}</tr>" for pair in view.pairs)
    if view.pairs:
        rows.append(
            '<table style="border-collapse:collapse;margin-top:4px;font-size:inherit;'
            f'color:inherit;width:100%;table-layout:fixed"><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table>"
        )
    return _boxed("nbtrain-comparison", rows, 1000)


def _pair(pair: PairView) -> str:
    task = [turns_html(pair.prompt)]
    if pair.reference is not None:
        expected = html.escape(pair.reference)
        task.append(f'<div style="{_REPLY}"><b>expected</b> {expected}</div>')
    if pair.told:
        task.append(f'<div style="{_MUTED}">{html.escape(pair.told)}</div>')
    cells = ["".join(task)]
    for replies in (pair.left, pair.right):
        cells.append("".join(_reply(reply) for reply in replies) or "–")
    return "".join(f'<td style="{_CELL};overflow-wrap:anywhere">{cell}</td>' for cell in cells)


def _reply(reply: ReplyView) -> str:
    if isinstance(reply.completion, list):
        said = turns_html(reply.completion)
    else:
        said = f'<div style="{_REPLY}">{html.escape(str(reply.completion))}</div>'
    return f'{said}<div style="{_MUTED}">{html.escape(reply.told)}</div>'


def _head(title: str) -> str:
    return f"<div><b>{html.escape(title)}</b></div>"


def _muted(lines: Sequence[str]) -> list[str]:
    return [f'<div style="{_MUTED}">{html.escape(line)}</div>' for line in lines if line]


def _boxed(name: str, rows: Sequence[str], width: int) -> str:
    inner = "\n".join(rows)
    return f'<div class="{name}" style="{_BOX.format(width=width)}">\n{inner}\n</div>'
