"""What a reward is: terms with weights, what a call is given, what a grade says.

A reward is the sum of weight × score over its terms. A grade is a finite number or nothing:
exceptions, ``None``, NaN and time-outs are reasons for being ungraded, never numbers.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nbtrain.errors import Problem, Refused
from nbtrain.rewards.forms import ALLOWED_FORMS, Form, Signature, read_signature

__all__ = [
    "Grade",
    "GradeRequest",
    "GroupGrades",
    "Kind",
    "Outcome",
    "RewardTerm",
    "TermInfo",
    "as_terms",
    "check_columns",
    "combine",
    "with_unique_names",
]

Kind = Literal["ok", "exception", "nonfinite", "missing", "timeout", "died", "length", "type"]

LARGEST_REWARD = 1e100
"""Rewards beyond it would overflow the spread of their group."""

_NAME_LIMIT = 64
_RESERVED = ("prompts", "completions", "completion_ids", "environments")


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One term of a reward: its name, unique among the terms, its weight and its function."""

    name: str
    weight: float
    function: Any
    signature: Signature

    @property
    def form(self) -> Form:
        """How the function is called."""
        return self.signature.form


@dataclass(frozen=True, slots=True)
class TermInfo:
    """What the parent of the workers knows of a term; the function itself stays in the workers."""

    name: str
    weight: float
    form: Form


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """One group to grade: a task's prompt and columns, and the completions sampled for it.

    ``completions`` are texts or, where there are environments, lists of messages. ``raw`` says
    that the prompt is plain text, not chat: TRL's form then gets texts. ``task_id`` names the
    task in error messages. ``environments`` holds each one's public plain state after its end,
    as long as ``completions``; ``None`` where there are none.
    """

    prompt: Any
    completions: Sequence[str | Sequence[Mapping[str, Any]]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    raw: bool = False
    task_id: str = ""
    environments: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A term's answer for one completion: a score, or why there is none.

    The first line of ``error`` is a sentence; a traceback follows where there is one.
    """

    kind: Kind
    score: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Grade:
    """A completion's grade.

    ``reward`` is None when it is ungraded; ``kind`` and ``error`` then say why. ``terms`` holds
    each term's unweighted score by name, ``failures`` the full error of each term without one, of
    those with weight 0 as well, which never make a completion ungraded.
    """

    reward: float | None
    terms: dict[str, float | None]
    error: str | None = None
    kind: Kind = "ok"
    failures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupGrades:
    """The grades of a group, in the order of its completions, and the seconds workers spent."""

    grades: tuple[Grade, ...]
    seconds: float = 0.0

    def __iter__(self) -> Iterator[Grade]:
        return iter(self.grades)

    def __len__(self) -> int:
        return len(self.grades)

    def __getitem__(self, index: int) -> Grade:
        return self.grades[index]


def combine(terms: Sequence[TermInfo], outcomes: Sequence[Outcome | None]) -> Grade:
    """The grade of one completion from its terms' outcomes (None: the term was not asked)."""
    scores: dict[str, float | None] = {}
    failures: dict[str, str] = {}
    failed: Outcome | None = None
    parts = []
    for term, outcome in zip(terms, outcomes, strict=True):
        if outcome is None:
            continue
        scores[term.name] = outcome.score
        if outcome.score is None:
            failures[term.name] = outcome.error or ""
            if term.weight != 0:
                failed = failed or outcome
        else:
            parts.append(term.weight * outcome.score)
    if failed is not None:
        return Grade(None, scores, failed.error, failed.kind, failures)
    reward = math.fsum(parts) if all(map(math.isfinite, parts)) else math.inf
    if not abs(reward) <= LARGEST_REWARD:
        error = f"the weighted sum of the terms is not finite, or beyond {LARGEST_REWARD:g}"
        return Grade(None, scores, error, "nonfinite", failures)
    return Grade(reward, scores, failures=failures)


# --- terms -----------------------------------------------------------------------------------


def as_terms(rewards: Any) -> list[RewardTerm]:
    """Terms from a reward or a list of ``reward`` (weight 1) and ``(reward, weight)``.

    A term is named by its function (its ``name`` if it has one); a second of the same name gets
    ``#2``. Raises :class:`~nbtrain.errors.Refused` with everything that is wrong at once.
    """
    items = list(rewards) if isinstance(rewards, list) else [rewards]
    problems: list[Problem] = []
    terms: list[RewardTerm] = []
    for number, item in enumerate(items, 1):
        term = _term(item, f"rewards[{number}]", problems)
        if term is not None:
            terms.append(term)
    if not items:
        problems.append(
            Problem("rewards", "rewards is empty", found=[], allowed="at least one reward function")
        )
    if not problems and all(term.weight == 0 for term in terms):
        message = (
            "rewards: every weight is 0, so every reward would be 0 and nothing could be learned"
        )
        problems.append(Problem("rewards", message, allowed="at least one weight other than 0"))
    if problems:
        raise Refused(problems)
    return with_unique_names(terms)


def check_columns(
    terms: Sequence[RewardTerm], columns: Sequence[str], *, environment: bool = False
) -> list[Problem]:
    """Problems between the rewards and the tasks' columns: needed ones missing, names taken.

    Without an ``environment`` a reward that cannot do without one is a problem too.
    """
    problems = [
        Problem(
            "rewards",
            f"reward {term.name!r} reads the environment, and the workload has none",
            hint="Hand it over as environment=…",
        )
        for term in terms
        if term.signature.needs_environment and not environment
    ]
    for term in terms:
        needed = {*term.signature.missing(columns), *_own_needs(term.function, columns)}
        problems += [
            Problem(
                "rewards",
                f"reward {term.name!r} reads the column {name!r}, which the tasks do not have",
                found=name,
                allowed=", ".join(columns) or "the tasks have no columns besides their prompt",
            )
            for name in sorted(needed)
        ]
    if any(term.form is Form.GROUP for term in terms):
        problems += [
            Problem(
                "tasks", f"a column is named {name!r}, which is a parameter of rewards", found=name
            )
            for name in _RESERVED
            if name in columns
        ]
    return problems


def _own_needs(function: Any, columns: Sequence[str]) -> set[str]:
    column = getattr(function, "column", None)
    return {column} - set(columns) if isinstance(column, str) else set()


def _term(item: Any, where: str, problems: list[Problem]) -> RewardTerm | None:
    if isinstance(item, RewardTerm):
        return item
    function, weight = item if isinstance(item, tuple) and len(item) == 2 else (item, 1.0)
    before = len(problems)
    if (
        isinstance(weight, bool)
        or not isinstance(weight, numbers.Real)
        or not math.isfinite(float(weight))
    ):
        message = f"{where}: the weight is {weight!r}"
        problems.append(Problem(where, message, found=weight, allowed="a finite number"))
    signature = read_signature(function)
    if isinstance(signature, str):
        problems.append(
            Problem(
                where,
                f"{where}: {_label(function)} {signature}",
                found=function,
                allowed=ALLOWED_FORMS,
                hint=_hint(function),
            )
        )
        return None
    if len(problems) > before:
        return None
    return RewardTerm(_name(function), float(weight), function, signature)


def _hint(function: Any) -> str | None:
    module = getattr(function, "__module__", "")
    if module in ("nbtrain.rewards.builtins", "nbtrain.rewards.labels") and inspect.isfunction(
        function
    ):
        return (
            f"Call it, for example nbtrain.rewards.{function.__name__}(…), and pass what it returns"
        )
    if isinstance(function, str):
        return 'Rewards are functions; a built-in one is nbtrain.rewards.exact("answer")'
    if isinstance(function, tuple):
        return "A pair is (reward, weight)"
    return None


def _label(function: Any) -> str:
    return repr(function)[:80] if not callable(function) else f"{_name(function)!r}"


def _name(function: Any) -> str:
    name = getattr(function, "name", None)
    while not isinstance(name, str) or not name:
        name = getattr(function, "__name__", None)
        if name is None and not hasattr(function, "func"):
            name = type(function).__name__
        function = getattr(function, "func", function)
    return name.strip("<>")[:_NAME_LIMIT]


def with_unique_names(terms: Sequence[RewardTerm]) -> list[RewardTerm]:
    """The same terms; a second one of a name gets ``#2``."""
    taken: set[str] = set()
    unique = []
    for term in terms:
        name, number = term.name, 1
        while name in taken:
            number += 1
            name = f"{term.name}#{number}"
        taken.add(name)
        unique.append(RewardTerm(name, term.weight, term.function, term.signature))
    return unique
