"""A list of records as a static HTML table; every text is escaped."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nbtrain.plan.fields import counted
from nbtrain.report.summary import clock

__all__ = ["listed_html"]

_BOX = "font-family:sans-serif;font-size:13px;line-height:1.45;overflow-x:auto"
_CELL = (
    "padding:1px 12px 1px 0;text-align:left;border-bottom:1px solid rgba(128,128,128,0.3);"
    "font-variant-numeric:tabular-nums"
)
_LONGEST = 80  # characters of a value
_ID = re.compile(r"[0-9a-f]{64}")


def listed_html(
    names: Sequence[str], rows: Sequence[Mapping[str, Any]], total: int, what: str = "item"
) -> str:
    """The first rows as a table, and how many more there are.

    Ids are shortened to 12 digits, times (columns that end in ``_at``) are UTC, and columns
    without a single value are left out.
    """
    shown = [name for name in names if any(row.get(name) is not None for row in rows)]
    head = "".join(f'<th scope="col" style="{_CELL}">{html.escape(_title(n))}</th>' for n in shown)
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{_CELL}">{_value(name, row.get(name))}</td>' for name in shown)
        + "</tr>"
        for row in rows
    )
    count = counted(total, what)
    left = total - len(rows)
    more = f"<div>… {left:,} more</div>" if left > 0 else ""
    table = (
        '<table style="border-collapse:collapse;margin-top:2px;font-size:inherit;color:inherit">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )
    return (
        f'<div class="nbtrain-list" style="{_BOX}"><div>{count}</div>'
        f"{table if rows else ''}{more}</div>"
    )


def _title(name: str) -> str:
    return name.removesuffix("_at").replace("_", " ")


def _value(name: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if name.endswith("_at") and isinstance(value, int | float):
        return html.escape(clock(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    text = _ID.sub(lambda found: found[0][:12], str(value))
    return html.escape(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")
