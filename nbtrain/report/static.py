"""A run at a glance as static HTML.

It uses inline styles and neutral colours only, so it reads in light and dark themes, in a saved
notebook and on pages that strip style sheets and scripts. Every text is escaped.
"""

from __future__ import annotations

import base64
import html

from nbtrain.report import checkpoint_table
from nbtrain.report.checkpoint_table import MUTED
from nbtrain.report.summary import (
    RunSummary,
    counts,
    headline,
    message,
    movement,
    ranked,
    score_of,
)

_BOX = "font-family:sans-serif;font-size:13px;line-height:1.45;max-width:720px"
_DOUBTFUL = "#9a6700"
_STATE = {"succeeded": "#1a7f37", "failed": "#c0392b", "cancelled": "#9a6700", "running": "#1f77b4"}


def as_html(summary: RunSummary, picture: bytes | None = None) -> str:
    """The summary as static HTML; ``picture`` is the curve's PNG, placed inline."""
    esc = html.escape
    colour = _STATE.get(summary.status, "#6e7781")
    if summary.doubtful:
        colour = _DOUBTFUL
    state = headline(summary)
    rows = [
        f'<div><b>{esc(summary.title)}</b> <span style="background:{colour};color:#ffffff;'
        f'border-radius:8px;padding:1px 8px;margin-left:6px">{esc(state)}</span></div>'
    ]
    if summary.activity:
        rows.append(f"<div>now: {esc(summary.activity)}</div>")
    rows += [
        f'<div style="{MUTED}">{esc(line)}</div>'
        for line in (summary.subject, summary.annotation)
        if line
    ]
    rows.append(f"<div>{_bar(summary)}{esc(counts(summary))}</div>")
    rows += [f"<div>{esc(line)}</div>" for line in movement(summary)]
    told = message(summary)
    if told:
        rows.append(
            f'<pre style="white-space:pre-wrap;border-left:3px solid {colour};padding-left:8px;'
            f'margin:4px 0">{esc(told)}</pre>'
        )
    if picture:
        data = base64.b64encode(picture).decode("ascii")
        what = "reward" if summary.supervised is None else "loss"
        rows.append(
            f'<img alt="{what} by step of {esc(summary.title)}" '
            f'src="data:image/png;base64,{data}" style="max-width:100%;background:#ffffff;'
            'margin:6px 0;border-radius:4px">'
        )
    rows.append(_checkpoint_table(summary))
    rows += [f'<div style="{MUTED}">{esc(note)}</div>' for note in summary.notes]
    inner = "\n".join(row for row in rows if row)
    return f'<div class="nbtrain-run" style="{_BOX}">\n{inner}\n</div>'


def _bar(summary: RunSummary) -> str:
    planned = summary.total_steps - summary.start_step
    if planned <= 0:
        return ""
    share = min(1.0, max(0.0, (summary.completed_steps - summary.start_step) / planned))
    return (
        '<span style="display:inline-block;width:120px;height:8px;margin-right:8px;'
        'background:rgba(128,128,128,0.25);border-radius:4px">'
        f'<span style="display:block;width:{share:.0%};height:8px;background:#1f77b4;'
        'border-radius:4px"></span></span>'
    )


def _checkpoint_table(summary: RunSummary) -> str:
    shown, more = ranked(summary)
    if not shown:
        return ""
    rest = f'<div style="{MUTED}">{checkpoint_table.more_told(more)}</div>' if more else ""
    return checkpoint_table.as_html(shown, score_of(summary)[0]) + rest
