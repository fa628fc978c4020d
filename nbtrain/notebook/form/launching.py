"""Starting what the form states, as a ``%%train`` cell does: once for each name and plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbtrain.client import Client, Run
    from nbtrain.client.resolved import ResolvedView

__all__ = ["start"]


def start(
    client: Client, view: ResolvedView, text: str, *, again: bool
) -> tuple[Run, tuple[str, ...]]:
    """The run, and what is to be said of it: a new one, or the newest of its name and plan.

    ``text`` is the same plan as a cell, kept for the record; ``again`` trains anew in any case.
    """
    training = client.training
    same = None if again else training.find_same(view)
    if same is not None:
        told = (
            f"attached to {same.title}, {same.status}: the newest run of this name has the same "
            'plan; tick "train again" to train anew'
        )
        return same, (told,)
    others = training.runs.still_running(view.plan.display_name)
    notes = [f"another {other.title} is still running" for other in others]
    expected = view.estimate
    notes += [expected.line, *expected.ends_early]
    notes += [f"hint: {warning}" for warning in expected.warnings]
    return training.launch(view, text=text), tuple(notes)
