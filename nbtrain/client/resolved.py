"""The resolved plan as a person reads it: every value with where it came from."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nbtrain.client import lineage
from nbtrain.plan.fields import show
from nbtrain.plan.identity import hashed_options
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.resolved import ResolvedPlan

if TYPE_CHECKING:
    import pandas as pd

    from nbtrain.plan.preflight import Estimate
    from nbtrain.plan.supervised_estimate import SupervisedEstimate

__all__ = ["ResolvedView", "ShownPlan"]


class ResolvedView:
    """What ``client.training.resolve`` returns; nothing was started or stored.

    ``config`` is the recipe (what the config hash covers), ``execution`` everything that does
    not change the trained weights.
    """

    def __init__(
        self,
        plan: ResolvedPlan,
        parent: ResolvedPlan | None = None,
        given: Mapping[str, Any] | None = None,
        *,
        estimate: Callable[[], Estimate | SupervisedEstimate] | None = None,
    ) -> None:
        self.plan = plan
        self.given = dict(given or {})
        """The plan as it was stated, as JSON: the ``options`` and the ``arguments`` beside them."""
        self._parent = parent
        self._how = estimate

    @cached_property
    def estimate(self) -> Estimate | SupervisedEstimate:
        """What the run will take: trajectories, tokens, validation, memory and time."""
        if self._how is None:
            msg = "this plan stands alone: client.training.estimate(...) tells what it takes"
            raise AttributeError(msg)
        return self._how()

    @property
    def config(self) -> dict[str, Any]:
        """The hashed part: options that change the weights, workload, base model and parent."""
        plan = self.plan
        return {
            "workload": plan.workload.name or plan.workload.workload_id,
            "workload_id": plan.workload.workload_id,
            "base_model_slug": plan.base_model.slug,
            "parent_checkpoint_id": plan.parent.checkpoint_id if plan.parent else None,
            **hashed_options(plan.options),
        }

    @property
    def execution(self) -> dict[str, Any]:
        """The options that are not hashed: validation, time limits, budgets, retention."""
        hashed = hashed_options(self.plan.options)
        return {name: v for name, v in self.plan.options.items() if name not in hashed}

    @property
    def config_hash(self) -> str:
        """Identity of the recipe, 64 hex digits."""
        return self.plan.config_hash

    @property
    def origins(self) -> dict[str, str]:
        """Where each option's value came from: stated, default, computed or inherited."""
        return dict(self.plan.origins)

    @property
    def hints(self) -> list[str]:
        """What is allowed but probably not meant."""
        return list(self.plan.hints)

    @property
    def notes(self) -> list[str]:
        """What is taken over from the parent, the certificate, and the hints."""
        return lineage.notes(self.plan, self._parent)

    def to_frame(self) -> pd.DataFrame:
        """One row per option; ``hashed`` tells the recipe from the rest."""
        from nbtrain.client.frames import frame

        hashed = hashed_options(self.plan.options)
        rows = [
            {
                "option": setting.name,
                "value": setting.value,
                "origin": setting.origin,
                "hashed": setting.name in hashed,
                "note": setting.note or "",
            }
            for setting in self.plan.settings.values()
        ]
        table = frame(rows, ("option", "value", "origin", "hashed", "note"))
        table["value"] = table["value"].astype(object)
        return table

    def _head(self) -> list[str]:
        plan = self.plan
        where = plan.workload.name or plan.workload.workload_id[:12]
        return [
            f"plan {plan.display_name or '(no name)'} · config {plan.config_hash[:12]}",
            f"workload {where} ({plan.workload.workload_id[:12]}): "
            f"{plan.workload.train_tasks:,} tasks train, {plan.workload.held_out_tasks:,} held out "
            f"({plan.workload.split})",
            f"base model {plan.base_model.slug} · step {plan.start_step} to {plan.total_steps}",
            *self.notes,
        ]

    def _telling(self) -> list[tuple[str, str, str, str]]:
        """The options worth showing: all but those at their fixed default."""
        return [
            (s.name, show(s.value), s.origin, s.note or "")
            for s in self.plan.settings.values()
            if s.origin != "default" and not (s.origin == "inherited" and _plain(s.name, s.value))
        ]

    def __repr__(self) -> str:
        rows = self._telling()
        width = max((len(name) for name, *_ in rows), default=0)
        lines = [
            f"  {name:<{width}}  {value}  ({origin}{', ' + note if note else ''})"
            for name, value, origin, note in rows
        ]
        rest = len(self.plan.settings) - len(rows)
        return "\n".join([*self._head(), *lines, f"  {rest} options at their defaults"])

    def _repr_html_(self) -> str:
        cell = 'style="text-align:left;padding:1px 10px 1px 0"'
        head = "".join(f"<div>{html.escape(line)}</div>" for line in self._head())
        rows = "".join(
            "<tr>" + "".join(f"<td {cell}>{html.escape(text)}</td>" for text in row) + "</tr>"
            for row in self._telling()
        )
        rest = len(self.plan.settings) - len(self._telling())
        names = "".join(f"<th {cell}>{n}</th>" for n in ("option", "value", "origin", "note"))
        return (
            f'<div style="font-family:sans-serif;font-size:13px">{head}'
            '<table style="border-collapse:collapse;font-size:inherit;color:inherit">'
            f"<thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>"
            f"<div>{rest} options at their defaults</div></div>"
        )


class ShownPlan(ResolvedPlan):
    """A plan that shows itself as :class:`ResolvedView` does."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(self._view())

    def _repr_html_(self) -> str:
        return self._view()._repr_html_()

    def _view(self) -> ResolvedView:
        from nbtrain.client.resolved_descriptor import DescriptorView

        return ResolvedView(self) if self.config is None else DescriptorView(self)


def _plain(name: str, value: Any) -> bool:
    return bool(OPTIONS[name].default == value)
