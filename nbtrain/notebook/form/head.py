"""The top of the form: what is trained, on what, how, from where, and what it is called."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from nbtrain.notebook.form.draft import HEAD, SWITCHES
from nbtrain.notebook.form.inputs import Inputs, Pair, cells, close_all, offer, put
from nbtrain.notebook.form.page import refusals
from nbtrain.plan.descriptor.table import METHODS

if TYPE_CHECKING:
    from nbtrain.notebook.form.draft import Draft
    from nbtrain.notebook.form.lists import Lists
    from nbtrain.notebook.form.outcome import Outcome
    from nbtrain.plan.resolved import ResolvedPlan

__all__ = ["Head"]

_HELP = {
    "method": "How the model learns: gspo and grpo from rewards, sft from answers.",
    "workload": "What is trained on.",
    "model": "The base model: one of the list, a repository or a folder.",
    "dataset": "The registered dataset that a supervised run trains on.",
    "parent": "Go on from a checkpoint; what is not stated is inherited.",
    "name": "The run's name; a name means its newest run.",
    "weights_only": "Its weights, with fresh training state.",
    "small": "A first look: smaller values for what is not stated.",
    "smoke": "Learn the first rows by heart and tell whether that worked.",
}
_LABEL = "118px"
_LABELS = {"weights_only": "weights only", "small": "small", "smoke": "smoke check"}
_CALLED = {"parent": "from checkpoint", "name": "run name"}


class Head:
    """The fields of :data:`HEAD` and the switches below them."""

    def __init__(self, inputs: Inputs, draft: Draft, lists: Lists) -> None:
        def text(name: str) -> str:
            return draft.head.get(name, "")

        self._inputs = inputs = inputs.narrow(_LABEL)
        self._pairs: dict[str, Pair] = {
            "method": inputs.pick("method", [(m, m) for m in METHODS], text("method"),
                                  _HELP["method"]),
            "workload": inputs.pick("workload", lists.workload, text("workload"),
                                    _HELP["workload"]),
            "model": inputs.suggest("model", [value for _, value in lists.model], text("model"),
                                    _HELP["model"]),
            "dataset": inputs.pick("dataset", lists.dataset, text("dataset"), _HELP["dataset"]),
            "parent": inputs.pick("parent", lists.parent, text("parent"), _HELP["parent"]),
            "name": inputs.text("name", text("name"), _HELP["name"]),
        }  # fmt: skip
        for name, label in _CALLED.items():
            self._pairs[name].field.description = label
        for name in SWITCHES:
            on = draft.switches.get(name, False)
            self._pairs[name] = inputs.switch(name, _LABELS[name], _HELP[name], on=on)
        self._shown: tuple[str, ...] = ()
        self.grid = inputs.grid()

    def close(self) -> None:
        """Take every widget away for good, also those of fields that are not shown now."""
        fields = [widget for pair in self._pairs.values() for widget in (pair.field, pair.beside)]
        close_all([self.grid, *fields, *self._inputs.shared])

    def pair(self, name: str) -> Pair | None:
        """The field of that name."""
        return self._pairs.get(name)

    def put(self, draft: Draft) -> None:
        """Show what is stated."""
        for name in HEAD:
            put(self._pairs[name].field, draft.head.get(name, ""))
        for name in SWITCHES:
            put(self._pairs[name].field, str(draft.switches.get(name, False)).lower())

    def offer(self, lists: Lists) -> None:
        """Replace what can be picked."""
        for name in ("workload", "dataset", "model", "parent"):
            offer(self._pairs[name].field, getattr(lists, name))

    def tell(self, outcome: Outcome, draft: Draft) -> None:
        """Bring the texts beside the fields up to date, and show those that matter now."""
        shown = tuple(_of_now(outcome.method, draft))
        if shown != self._shown:
            self._shown = shown
            self.grid.children = cells(self._pairs[name] for name in shown)
        told = _meant(outcome.nearest, outcome.method)
        for name in shown:
            pair, problems = self._pairs[name], outcome.beside.get(name, ())
            value = "" if problems else told.get(name, "")
            stated = name in draft.head or draft.switches.get(name, False)
            whence = "" if stated else "inherited" if "parent" in draft.head else "default"
            pair.tell(_beside(name, value, refusals(problems), whence), bad=bool(problems))


def _of_now(method: str, draft: Draft) -> Iterator[str]:
    """The fields that a plan of this method has."""
    for name in ("method", "workload", "model", "dataset", "parent", "weights_only", "name",
                 "small", "smoke"):  # fmt: skip
        needless = (
            (name in ("dataset", "smoke") and method != "sft")
            or (name == "weights_only" and "parent" not in draft.head)
            or (name == "small" and "parent" in draft.head and not draft.switches.get("small"))
        )
        if not needless:
            yield name


def _meant(plan: ResolvedPlan | None, method: str) -> Mapping[str, str]:
    """What the fields at the top come to."""
    if plan is None:
        return {"method": method}
    workload = plan.workload
    told = {
        "method": method,
        "workload": f"{workload.name or workload.workload_id[:12]} · {workload.train_tasks:,} "
        f"tasks train, {workload.held_out_tasks:,} held out",
        "model": f"{plan.base_model.slug} · context {plan.base_model.max_context:,}",
    }
    if plan.dataset is not None:
        told["workload"] = workload.name or workload.workload_id[:12]
        told["dataset"] = f"{plan.dataset.rows:,} rows train"
    if plan.parent is not None:
        told["parent"] = f"steps {plan.start_step:,} to {plan.total_steps:,}"
    return told


def _beside(name: str, value: str, refused: str, whence: str) -> str:
    shown = f"<div>{html.escape(value)}</div>" if value else ""
    if name == "method" and whence and value:
        shown = f"<div>{html.escape(value)} · {whence}</div>"
    return f'{refused}{shown}<div class="nbtrain-muted">{html.escape(_HELP[name])}</div>'
