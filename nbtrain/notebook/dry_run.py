"""``%%train --dry-run``: the plan and what it takes, or its start checks alone."""

from __future__ import annotations

from typing import Any

from nbtrain.client import Client
from nbtrain.client.resolved import ResolvedView
from nbtrain.notebook.told import Told

__all__ = ["dry_run"]

_PREFIX = "start checks: "


def dry_run(shell: Any, client: Client, view: ResolvedView, *, check: bool) -> Any:
    """Show what the cell would start and return it: the view, with ``check`` the checks' report."""
    if not check:
        expected = view.estimate
        markup = view._repr_html_() + expected._repr_html_()
        data = {"text/plain": f"{view!r}\n{expected!r}", "text/html": markup}
        shell.display_pub.publish(data=data, metadata={})
        return view
    told = Told(shell, f"start checks of config {view.config_hash[:12]}")
    told("beginning")
    try:
        report = client.training.check(view, lambda line: told(line.removeprefix(_PREFIX)))
    except BaseException:
        told("stopped; nothing is left running")
        raise
    told.show(repr(report), report._repr_html_())
    return report
