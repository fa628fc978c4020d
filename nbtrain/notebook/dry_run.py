"""``%%train --dry-run``: the plan and what it takes, or its start checks alone."""

from __future__ import annotations

import html
import uuid
from typing import Any

from nbtrain.client import Client
from nbtrain.client.resolved import ResolvedView

__all__ = ["dry_run"]


def dry_run(shell: Any, client: Client, view: ResolvedView, *, check: bool) -> Any:
    """Show what the cell would start and return it: the view, with ``check`` the checks' report."""
    if not check:
        expected = view.estimate
        _publish(
            shell,
            f"{view!r}\n{expected!r}",
            view._repr_html_() + expected._repr_html_(),
        )
        return view
    place = f"nbtrain-{uuid.uuid4().hex}"
    head = f"start checks of config {view.config_hash[:12]}"

    def told(line: str) -> None:
        text = f"{head}: {line.removeprefix('start checks: ')}"
        _publish(shell, text, f"<div>{html.escape(text)}</div>", place)

    _publish(shell, f"{head} …", f"<div>{html.escape(head)} …</div>", place, update=False)
    try:
        report = client.training.check(view, told)
    except BaseException:
        told("stopped; nothing is left running")
        raise
    _publish(shell, repr(report), report._repr_html_(), place)
    return report


def _publish(
    shell: Any, text: str, markup: str, place: str | None = None, *, update: bool = True
) -> None:
    data = {"text/plain": text, "text/html": markup}
    if place is None:
        shell.display_pub.publish(data=data, metadata={})
        return
    shell.display_pub.publish(
        data=data, metadata={}, transient={"display_id": place}, update=update
    )
