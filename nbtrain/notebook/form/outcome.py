"""What a draft comes to: the resolved plan, or every refusal, each with the field it is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nbtrain.client.earlier import trained_before
from nbtrain.errors import NbtrainError, PlanRefused, Problem, Refused
from nbtrain.notebook.form.draft import HEAD, SWITCHES, Draft, called
from nbtrain.notebook.form.entries import entries
from nbtrain.plan.descriptor.table import METHODS
from nbtrain.plan.fields import show
from nbtrain.plan.options import OPTIONS

if TYPE_CHECKING:
    from nbtrain.client import Client, Run
    from nbtrain.client.resolved import ResolvedView
    from nbtrain.plan.resolved import ResolvedPlan

__all__ = ["Outcome", "come_to"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One resolving of a draft.

    ``nearest`` is the plan; where it is refused, what it would be without what is refused, as far
    as that can be told. ``beside`` has the problems by the field that shows them, ``general``
    those that belong to none.
    """

    method: str
    view: ResolvedView | None = None
    refusal: Refused | None = None
    nearest: ResolvedPlan | None = None
    beside: Mapping[str, tuple[Problem, ...]] = field(default_factory=dict)
    general: tuple[Problem, ...] = ()
    expected: tuple[str, ...] = ()
    earlier: tuple[Run, ...] = ()
    missing: tuple[str, ...] = ()
    """What is merely not stated yet, in an outcome that does not call that refused."""

    def gently(self, draft: Draft) -> Outcome:
        """The same for a form that nobody has touched: nothing is refused for being missing."""
        missing = tuple(name for name in self.beside if name in HEAD and name not in draft.head)
        beside = {name: found for name, found in self.beside.items() if name not in missing}
        return replace(self, beside=beside, missing=missing)

    @property
    def refused(self) -> tuple[Problem, ...]:
        """What is shown as refused."""
        return (*(problem for found in self.beside.values() for problem in found), *self.general)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Every refusal."""
        return () if self.refusal is None else self.refusal.problems


def come_to(client: Client, draft: Draft) -> Outcome:
    """Resolve a draft, and look up what it would take and which runs had the same recipe."""
    method = method_of(client, draft)
    try:
        view = _resolve(client, draft, method)
    except Refused as refusal:
        beside, general = placed(refusal.problems, method)
        nearest = _without(client, draft, method, frozenset(beside))
        return Outcome(method, None, refusal, nearest, beside, general)
    except NbtrainError as error:  # such as a store that cannot be read
        told = Problem("plan", str(error))
        return Outcome(method, None, PlanRefused([told]), general=(told,))
    return Outcome(
        method,
        view,
        nearest=view.plan,
        expected=_expected(view),
        earlier=tuple(trained_before(client, view)),
    )


def method_of(client: Client, draft: Draft) -> str:
    """The method whose fields are shown: the stated one, the parent's, else the default."""
    stated = draft.head.get("method")
    if stated in METHODS:
        return str(stated)
    parent = draft.head.get("parent")
    if stated is None and parent is not None:
        try:
            run = client.training.checkpoints.get(parent).run_id
            return client.training.runs.get(run).method
        except NbtrainError:
            pass  # resolving tells what is wrong with it
    return str(OPTIONS["algorithm"].default)


def _resolve(
    client: Client, draft: Draft, method: str, without: frozenset[str] = frozenset()
) -> ResolvedView:
    arguments = draft.arguments(method, without)
    return client.training.resolve(options=draft.body(method, without), **arguments)


def _without(
    client: Client, draft: Draft, method: str, refused: frozenset[str]
) -> ResolvedPlan | None:
    try:
        return _resolve(client, draft, method, refused).plan
    except NbtrainError:
        return None


def placed(
    problems: Iterable[Problem], method: str
) -> tuple[dict[str, tuple[Problem, ...]], tuple[Problem, ...]]:
    """The problems by the field that shows them, and those that no field shows."""
    beside: dict[str, tuple[Problem, ...]] = {}
    general: list[Problem] = []
    for problem in problems:
        name = called(problem.field)
        if name in HEAD or name in SWITCHES or name in entries(method):
            beside[name] = (*beside.get(name, ()), problem)
        else:
            general.append(problem)
    return beside, tuple(general)


def _expected(view: ResolvedView) -> tuple[str, ...]:
    """What the run takes, and the plan's notes, a sentence each."""
    try:
        told = view.estimate.sentences()
    except (NbtrainError, OSError) as error:
        told = [f"what it takes cannot be told: {error}"]
    return (*told, *view.notes)


def told_value(plan: ResolvedPlan | None, name: str) -> str | None:
    """``1,024 · computed`` and the setting's note; ``None`` where the plan does not tell it."""
    setting = None if plan is None else plan.settings.get(name)
    if setting is None:
        return None
    note = f" ({setting.note})" if setting.note else ""
    return f"{show(setting.value)} · {setting.origin}{note}"
