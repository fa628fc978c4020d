"""What ``%load_ext nbtrain`` brings: the magics, live panels, and the thread behind both."""

from __future__ import annotations

from typing import Any

__all__ = ["load", "unload"]


def load(shell: Any) -> None:
    """Register ``%%train`` and ``%train``; outputs from before an ``unload`` go on."""
    from nbtrain.client import fronts, waiting
    from nbtrain.notebook import completion
    from nbtrain.notebook.live import bring_up_to_date, panel, poller, show_ends
    from nbtrain.notebook.magics import TrainMagics

    shell.register_magics(TrainMagics)
    completion.install(shell)
    if bring_up_to_date not in waiting.observers:
        waiting.observers.append(bring_up_to_date)
    if getattr(shell, "kernel", None) is not None and panel not in fronts.panels:
        fronts.panels.append(panel)
    if _with_a_body not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(_with_a_body)
    if show_ends not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", show_ends)
    poller.resume()


def unload(shell: Any) -> None:
    """Take the magics and the thread away again; runs go on, and their outputs stay as they are."""
    from nbtrain.client import fronts, waiting
    from nbtrain.notebook import completion
    from nbtrain.notebook.live import bring_up_to_date, panel, poller, show_ends

    poller.stop()
    completion.remove(shell)
    if panel in fronts.panels:
        fronts.panels.remove(panel)
    if bring_up_to_date in waiting.observers:
        waiting.observers.remove(bring_up_to_date)
    if _with_a_body in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(_with_a_body)
    if show_ends in shell.events.callbacks["post_run_cell"]:
        shell.events.unregister("post_run_cell", show_ends)
    for kind in ("cell", "line"):
        shell.magics_manager.magics[kind].pop("train", None)


def _with_a_body(lines: list[str]) -> list[str]:
    """Give a ``%%train`` cell of one line an empty body: IPython refuses one without any."""
    if len(lines) == 1 and lines[0].startswith(("%%train ", "%%train\n")):
        return [*lines, "\n"]
    return lines
