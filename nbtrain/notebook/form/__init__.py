"""``nbtrain.panel()``: a form for a run's configuration, made of the table of its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbtrain.notebook.form.form import Form

__all__ = ["panel"]


def panel(
    workload: object = None,
    model: object = None,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    parent: object = None,
    name: str | None = None,
) -> Form:
    """A form that states, checks and launches a run; what is given here stands in it already.

    It has a field for every option of the method: those of the option table for gspo and grpo, the
    descriptor's supervised fields under their flat names for sft. An empty field is not stated;
    beside it stands the value that the plan takes instead, and where that comes from. Everything
    that is refused is shown beside its field as it is typed. It states flat options only: a
    reinforcement run by a descriptor is written as a ``%%train`` cell.

    ``form.set(batch_size=8)``, ``form.plan``, ``form.problems``, ``form.cell`` and
    ``form.launch()`` do the same from a cell or a script. Raises
    :class:`~nbtrain.errors.Refused` for a name that has no field.
    """
    from nbtrain.client import default_client
    from nbtrain.notebook.form.draft import Draft
    from nbtrain.notebook.form.form import Form
    from nbtrain.notebook.form.outcome import method_of

    client = default_client()
    given = {"workload": workload, "model": model, "method": method, "parent": parent, "name": name}
    stated = {key: value for key, value in given.items() if value is not None}
    draft = Draft().stating({**stated, **(options or {})}, lambda d: method_of(client, d))
    return Form(client, draft)
