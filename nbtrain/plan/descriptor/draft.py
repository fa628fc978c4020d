"""A descriptor on its way to a resolved plan: every field's value with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nbtrain.errors import Problem, Where
from nbtrain.plan import small
from nbtrain.plan.descriptor.document import Document
from nbtrain.plan.descriptor.sizing import updates
from nbtrain.plan.descriptor.table import Field, named
from nbtrain.plan.fields import as_python, brief, check, plain, show
from nbtrain.plan.registry import (
    AdapterInfo,
    BaseModelInfo,
    CheckpointInfo,
    DatasetInfo,
    MachineInfo,
    WorkloadInfo,
)
from nbtrain.plan.resolved import Origin

__all__ = ["Draft", "Found", "fill"]


@dataclass(slots=True)
class Found:
    """What a descriptor names, looked up; ``None`` where unstated or refused."""

    machine: MachineInfo
    workload: WorkloadInfo | None = None
    base_model: BaseModelInfo | None = None
    dataset: DatasetInfo | None = None
    validation: DatasetInfo | None = None
    warm_start: AdapterInfo | None = None
    parent: CheckpointInfo | None = None


@dataclass(slots=True)
class Draft:
    """The fields of the method by what refusals call them, with values, origins and notes."""

    found: Document
    refs: Found
    fields: dict[str, Field]
    before: Mapping[str, tuple[Any, Origin]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    zeros: list[str] = field(default_factory=list)
    """Fields stated as 0 that have another value: 0 asked for the default."""

    @property
    def supervised(self) -> bool:
        """Whether it is a supervised run."""
        return self.found.method == "sft"

    @property
    def load_weights_only(self) -> bool:
        """Whether a parent gives its weights alone."""
        statement = self.found.load_weights_only
        return statement is not None and statement.value is True

    @property
    def warm_before(self) -> Mapping[str, Any] | None:
        """The model that the run of a restored training state started from, if it did from one."""
        parent = self.refs.parent
        if self.supervised or parent is None or self.load_weights_only:
            return None
        found: Mapping[str, Any] | None = parent.resolved.get("warm_start")
        return found

    @property
    def rows(self) -> int:
        """Rows that train: those of the dataset, or of its slice in a smoke check."""
        rows = self.refs.dataset.rows if self.refs.dataset is not None else 0
        return min(rows, self.values["smoke.sliceSize"]) if self.smoke else rows

    @property
    def smoke(self) -> bool:
        """Whether it is a smoke check."""
        return self.supervised and "smoke" in self.found.groups

    @property
    def validation(self) -> DatasetInfo | None:
        """The dataset that is evaluated on while training: a smoke check evaluates on none."""
        return None if self.smoke else self.refs.validation

    def updates(self, most: int) -> int:
        """Updates of a supervised run that ends after ``most``, where that is not 0."""
        return updates(
            self.rows,
            epochs=self["training.epochs"],
            sequences=self["training.microBatchPerGpu"] * self["training.gradientAccumulation"],
            max_steps=most,
        )

    def __getitem__(self, name: str) -> Any:
        """The value of a field, by what refusals call it."""
        return self.values[name]

    def stated(self, name: str) -> bool:
        """Whether the document states a field, at its default or not."""
        return self.origins[name] == "stated"

    def fine(self, *names: str) -> bool:
        """Whether none of these fields has a problem already."""
        return not self.found.bad & {self.called(name) for name in names}

    def called(self, name: str) -> str:
        """What this document calls a field."""
        one = self.fields.get(name)
        return name if one is None else self.found.called(one)

    def said(self, name: str) -> str:
        """``lora.rank 8``, with its origin where it is not stated."""
        origin: str = self.origins[name]
        if name in self.zeros:
            origin += ", which the stated 0 takes"
        value = self.values[name]
        shown = brief(value) if isinstance(value, str) else show(value)
        told = f"{self.called(name)} {shown}"
        return told if origin == "stated" else f"{told} ({origin})"

    def where(self, *names: str) -> Where | None:
        """The place of the first of these fields that has one."""
        places = (self.found.where(self.fields[name].path) for name in names)
        return next((place for place in places if place is not None), None)

    def problem(
        self,
        name: str,
        message: str,
        allowed: str | None = None,
        hint: str | None = None,
        also: tuple[str, ...] = (),
    ) -> Problem:
        """A refusal of a field; ``message`` is the whole sentence."""
        value = plain(self.values.get(name))
        return Problem(self.called(name), message, value, allowed, self.where(name, *also), hint)


def fill(found: Document, refs: Found, before: Mapping[str, tuple[Any, Origin]]) -> Draft:
    """Every field of the method; a refused value is replaced by its default, so that all go on.

    ``before`` has a parent's values and origins by path: they stand where nothing is stated, but
    for computed ones, which are computed anew.
    """
    draft = Draft(found, refs, named(found.method), before)
    model = refs.base_model
    later: list[Field] = []
    for name, one in draft.fields.items():
        if one.looked_up:
            _looked_up(draft, one, before)
            continue
        value, origin = _stated(draft, one, model), None
        if value is not None:
            origin = "stated"
        elif _hands_down(one, before) and not _asks_for_none(draft, one):
            value, origin = before[one.path][0], "inherited"
        elif one.option.compute is not None:
            later.append(one)
            continue
        else:
            value, origin = _default(draft, one)
        draft.values[name], draft.origins[name] = value, origin  # type: ignore[assignment]
    draft.values["method"] = found.method
    for one in later:
        compute = one.option.compute
        assert compute is not None
        draft.values[one.name] = compute(draft.values, model)
        draft.origins[one.name] = "computed"
    if "config.method" not in found.options and "config.method" in before:
        draft.origins["method"] = "inherited"
    _tell_zeros(draft)
    cap = "training.maxSteps"
    if draft.origins.get(cap) == "small" and draft.updates(0) <= draft[cap]:
        draft.values[cap], draft.origins[cap] = draft.fields[cap].option.default, "default"
        del draft.notes[cap]
    # the usual value of a computed length is its documented default
    if draft["maxSeqLength"] == 2048 and draft.origins["maxSeqLength"] == "computed":
        draft.origins["maxSeqLength"] = "default"
    return draft


def _hands_down(one: Field, before: Mapping[str, tuple[Any, Origin]]) -> bool:
    return one.path in before and before[one.path][1] != "computed" and one.option.inherited


def _asks_for_none(draft: Draft, one: Field) -> bool:
    """Whether null, or a 0 that means it, is stated where null is a value of its own."""
    statement = draft.found.options.get(one.path)
    option = one.option
    null = option.nullable and option.compute is None and option.default is None
    if statement is None or not null or draft.called(one.name) in draft.found.bad:
        return False
    return statement.value is None or one.name in draft.zeros


def _default(draft: Draft, one: Field) -> tuple[Any, Origin]:
    """The fixed default, or what a first look takes; a stated 0 asks for the default.

    A first look leaves alone what changes nothing but the recipe's hash.
    """
    default = one.option.default
    lower = small.of(one.name, default) if draft.found.small else None
    idle = one.name == "training.validationFrequencySteps" and draft.refs.validation is None
    if lower is None or idle or one.name in draft.zeros:
        return default, "default"
    draft.notes[one.name] = small.note(default)
    return lower, "small"


def _tell_zeros(draft: Draft) -> None:
    """What a stated 0 became, and how to state none where that is a value."""
    draft.zeros = [name for name in draft.zeros if draft[name] != 0]
    for name in draft.zeros:
        option, whose = draft.fields[name].option, "default"
        if draft.origins[name] == "inherited":
            whose = "value of the run that it goes on from"
        note = f"0 takes the {whose}"
        if draft[name] is not None:
            note += f", {show(draft[name])}"
        if option.type == "number" and option.min == 0 and not option.above_min:
            note += "; state 1e-12 for none"
        draft.notes[name] = note


def _looked_up(draft: Draft, one: Field, before: Mapping[str, tuple[Any, Origin]]) -> None:
    statement = draft.found.options.get(one.path)
    stated = statement is not None and statement.value is not None
    stated = stated or bool(draft.found.references.get(draft.called(one.name)))
    draft.values[one.name] = statement.value if statement is not None else None
    draft.origins[one.name] = (
        "stated" if stated else ("inherited" if one.path in before else "default")
    )


def _stated(draft: Draft, one: Field, model: BaseModelInfo | None) -> Any:
    """The value that the document states, or ``None`` where it states none or an unsound one."""
    statement = draft.found.options.get(one.path)
    name = draft.called(one.name)
    if statement is None or name in draft.found.bad:
        return None
    value, option = as_python(statement.value), replace(one.option, name=name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if one.option.zero_default and number and value == 0:
        draft.zeros.append(one.name)
        return None
    typed, problem = check(option, value, model=model, where=statement.where)
    if problem is not None:
        draft.found.refuse(problem)
    return typed
