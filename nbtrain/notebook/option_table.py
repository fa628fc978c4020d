"""The options of one base model as ``%train options`` shows them: by group."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbtrain.plan.descriptor.document import in_flat
from nbtrain.plan.descriptor.table import Field, fields_of
from nbtrain.plan.fields import show
from nbtrain.plan.listing import OptionInfo
from nbtrain.plan.options import OPTIONS

if TYPE_CHECKING:
    from nbtrain.plan.registry import BaseModelInfo

__all__ = ["OptionTable"]

_HEADS = ("option", "default", "allowed", "what it does")
_WIDTH = 100
_CELL = "text-align:left;vertical-align:top;padding:1px 10px 1px 0"
_GROUP = f"{_CELL};padding-top:8px;font-weight:bold"


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    default: str
    allowed: str
    told: str


class OptionTable:
    """Shown as text and as an HTML table; ``client.training.list_options`` has the raw frame."""

    def __init__(
        self,
        options: Sequence[OptionInfo],
        model: BaseModelInfo,
        mode: str,
        only: Collection[str] = (),
    ) -> None:
        """``only`` narrows the table to the options of these names."""
        self._title = f"options of {model.slug}" + ("" if mode == "training" else f" ({mode})")
        self._groups: dict[str, list[_Line]] = {}
        for info in options:
            if only and info.name not in only:
                continue
            self._groups.setdefault(info.group, []).append(_line(info, model, mode))

    @classmethod
    def supervised(cls, model: BaseModelInfo, only: Collection[str] = ()) -> OptionTable:
        """The options of ``%%train --method sft``; a descriptor's fields under flat names."""
        table = cls((), model, "sft")
        for field in fields_of("sft"):
            if field.setting is not None and (not only or field.setting in only):
                line = _field_line(field, model)
                table._groups.setdefault(field.option.group, []).append(line)
        return table

    def __repr__(self) -> str:
        lines = [line for group in self._groups.values() for line in group]
        wide = max((len(line.name) for line in lines), default=0)
        rows = [self._title]
        for group, members in self._groups.items():
            rows += ["", group]
            for line in members:
                rows += textwrap.wrap(
                    f"{line.default}; allowed: {line.allowed}",
                    _WIDTH,
                    initial_indent=f"  {line.name:<{wide}}  ",
                    subsequent_indent=" " * (wide + 4),
                )
                rows += textwrap.wrap(
                    line.told, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
                )
        return "\n".join(rows)

    def _repr_html_(self) -> str:
        head = "".join(f'<th style="{_CELL}">{name}</th>' for name in _HEADS)
        body = []
        for group, members in self._groups.items():
            body.append(f'<tr><td colspan="4" style="{_GROUP}">{html.escape(group)}</td></tr>')
            for line in members:
                cells = (line.default, line.allowed, line.told)
                body.append(
                    f'<tr><td style="{_CELL}"><code>{html.escape(line.name)}</code></td>'
                    + "".join(f'<td style="{_CELL}">{html.escape(text)}</td>' for text in cells)
                    + "</tr>"
                )
        return (
            '<div style="font-family:sans-serif;font-size:13px">'
            f"<div>{html.escape(self._title)}</div>"
            '<table style="border-collapse:collapse;font-size:inherit;color:inherit">'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        )


def _line(info: OptionInfo, model: Any, mode: str) -> _Line:
    option = OPTIONS[info.name]
    default = show(info.default)
    if info.default_kind == "computed":
        other = option.evaluation_default if mode == "evaluation" else ""
        default = f"computed: {other or option.computed}"
    return _Line(info.name, default, option.allowed(model), option.help)


def _field_line(field: Field, model: Any) -> _Line:
    option = field.option
    default = f"computed: {in_flat(option.computed)}" if option.compute else show(option.default)
    told = f"{in_flat(option.help)} In a descriptor: {field.path}."
    return _Line(field.setting or "", default, option.allowed(model), told)
