"""A resolved descriptor as a person reads it: grouped as the document, every field with origin."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from nbtrain.client.resolved import ResolvedView
from nbtrain.plan.fields import show

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DescriptorView"]

_COLUMNS = ("path", "value", "origin", "hashed")
_CELL = 'style="text-align:left;padding:1px 10px 1px 0"'
_GROUP = 'style="text-align:left;padding:6px 10px 1px 0;font-weight:bold"'

_ID = re.compile(r"\b[0-9a-f]{64}\b")

Field = tuple[str, Any, str, bool]
"""Full dotted path, value, origin, and whether the config hash covers it."""


class DescriptorView(ResolvedView):
    """What ``client.training.resolve`` returns for a descriptor, and for supervised options.

    ``config`` and ``execution`` are nested and camelCase as the document is, with every default
    filled in; only ``config`` is hashed.
    """

    @property
    def config(self) -> dict[str, Any]:
        """What model is trained, as resolved."""
        return dict(self.plan.config or {})

    @property
    def execution(self) -> dict[str, Any]:
        """How the run is executed, as resolved; not part of the hash."""
        return dict(self.plan.execution or {})

    @property
    def origins(self) -> dict[str, str]:
        """Where each field's value came from, by its dotted path."""
        return dict(self.plan.field_origins or {})

    def to_frame(self) -> pd.DataFrame:
        """One row per field, in the order of the document."""
        from nbtrain.client.frames import frame

        rows = [dict(zip(_COLUMNS, field, strict=True)) for field in self._fields()]
        table = frame(rows, _COLUMNS)
        table["value"] = table["value"].astype(object)
        return table

    def _fields(self) -> Iterator[Field]:
        origins = self.plan.field_origins or {}
        for part, hashed in (("config", True), ("execution", False)):
            for path, value in _leaves(getattr(self.plan, part) or {}, (part,)):
                yield ".".join(path), value, _origin(origins, path), hashed
        for name, value in self._beside().items():
            yield name, value, origins.get(name, "stated"), False

    def _beside(self) -> dict[str, Any]:
        """What stands beside ``config`` and ``execution``, where it is stated."""
        plan = self.plan
        smoke = plan.smoke
        told: dict[str, Any] = {
            "grader": plan.grader,
            "submissionId": plan.submission_id,
            "description": plan.description,
            "configName": plan.config_name,
        }
        if smoke is not None:
            told["smoke.sliceSize"] = smoke.slice_size
            told["smoke.maxSteps"] = smoke.max_steps
            told["smoke.threshold"] = smoke.threshold
        return {name: value for name, value in told.items() if value is not None}

    def _head(self) -> list[str]:
        plan = self.plan
        what = "smoke check" if plan.smoke else "run"
        where = plan.workload.name or plan.workload.workload_id[:12]
        lines = [
            f"{what} {plan.display_name or '(no name)'} · {plan.method} · config "
            f"{plan.config_hash[:12]}",
            f"workload {where} ({plan.workload.workload_id[:12]}) · base model "
            f"{plan.base_model.slug} · step {plan.start_step} to {plan.total_steps}",
        ]
        if plan.dataset is not None:
            lines.append(f"dataset {_dataset(plan.dataset)}")
        if plan.validation_dataset is not None:
            lines.append(f"validation dataset {_dataset(plan.validation_dataset)}")
        if plan.warm_start is not None:
            model = plan.warm_start
            short = model.model_id[:12]
            lines.append(f"starts from model {f'{model.name} ({short})' if model.name else short}")
        if plan.grader is not None:
            lines.append(f"grader {plan.grader}: for evaluations")
        return [*lines, *self._together(), *self.notes]

    def _together(self) -> list[str]:
        """What is only right together: the attention kernel decides what packing may do."""
        options = self.plan.options
        kernel = options.get("attention_implementation")
        if kernel is None:
            return []
        return [f"attention {kernel} · packing {'on' if options.get('packing') else 'off'}"]

    def _groups(self) -> list[tuple[str, list[Field]]]:
        """The fields under the path that they have in common, in the order of the document."""

        def parent(field: Field) -> str:
            return field[0].rpartition(".")[0]

        return [
            (name or "beside these", list(found)) for name, found in groupby(self._fields(), parent)
        ]

    def __repr__(self) -> str:
        lines = list(self._head())
        for name, fields in self._groups():
            lines += ["", name]
            width = max(len(path.rpartition(".")[2]) for path, *_ in fields)
            for path, value, origin, _ in fields:
                lines.append(f"  {path.rpartition('.')[2]:<{width}}  {_shown(value)}  ({origin})")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<div>{html.escape(line)}</div>" for line in self._head())
        body = []
        for name, fields in self._groups():
            body.append(f'<tr><td colspan="3" {_GROUP}>{html.escape(name)}</td></tr>')
            for path, value, origin, _ in fields:
                texts = (path.rpartition(".")[2], _shown(value), origin)
                cells = "".join(f"<td {_CELL}>{html.escape(text)}</td>" for text in texts)
                body.append(f"<tr>{cells}</tr>")
        names = "".join(f"<th {_CELL}>{name}</th>" for name in ("field", "value", "origin"))
        return (
            f'<div style="font-family:sans-serif;font-size:13px">{head}'
            '<table style="border-collapse:collapse;font-size:inherit;color:inherit">'
            f"<thead><tr>{names}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        )


def _leaves(
    mapping: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value that is no mapping, fields of a group before its groups."""
    nested = [key for key, value in mapping.items() if isinstance(value, Mapping) and value]
    for key, value in mapping.items():
        if key not in nested:
            yield (*path, key), value
    for key in nested:
        yield from _leaves(mapping[key], (*path, key))


def _origin(origins: Mapping[str, str], path: tuple[str, ...]) -> str:
    """Of the field, else of the group that was stated as a whole, as the terms of a reward are."""
    while path:
        if found := origins.get(".".join(path)):
            return found
        path = path[:-1]
    return "default"


def _dataset(ref: Any) -> str:
    name = f"{ref.name} ({ref.dataset_id[:12]})" if ref.name else ref.dataset_id[:12]
    return f"{name}: {ref.rows:,} rows"


def _shown(value: Any) -> str:
    """A value in a line; ids are told in full by the frame alone."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else show(value)
    return _ID.sub(lambda found: found[0][:12], text)
