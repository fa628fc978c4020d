"""Starting a plan from a cell or from the form: once for each submission, name and plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbtrain.client.starting import started_before

if TYPE_CHECKING:
    from nbtrain.client import Client, Run
    from nbtrain.client.resolved import ResolvedView

__all__ = ["start"]


def start(
    client: Client, view: ResolvedView, text: str, *, again: bool, how: str
) -> tuple[Run, tuple[str, ...]]:
    """The run, and what is to be said of it: a new one, or the newest of its name and plan.

    ``text`` is the plan as a cell, kept for the record. ``again`` trains anew in any case but that
    of a submission that was made before; ``how`` is what to do for that, in words.

    Raises :class:`~nbtrain.errors.PlanRefused` as ``client.training.launch`` does.
    """
    training = client.training
    same = None if again else training.find_same(view)
    if same is not None:
        told = (
            f"attached to {same.title}, {same.status}: the newest run of this name has the same "
            f"plan; {how}"
        )
        return same, (told,)
    before = training.find_submission(view)
    if before is not None:
        return before, (started_before(view.plan, before),)
    others = training.runs.still_running(view.plan.display_name)
    notes = [f"another {other.title} is still running" for other in others]
    expected = view.estimate
    notes += [expected.line, *expected.ends_early]
    notes += [f"hint: {warning}" for warning in expected.warnings]
    return training.launch(view, text=text), tuple(notes)
