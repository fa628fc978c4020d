"""Trying the rewards on one group before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from nbtrain.errors import Problem
from nbtrain.rewards.contract import Grade, GradeRequest

if TYPE_CHECKING:
    from nbtrain.rewards.pool import RewardPool

__all__ = ["Trial", "trial"]


_TICK_SECONDS = 0.5


class Trial(list[Problem]):
    """The problems a trial found, all of them; ``warnings`` are what it only remarks on.

    ``graded`` counts the completions that every term with a weight gave a grade. ``excused`` is
    whether it may be none: what kept them from it need not do so in training. ``ungraded`` is
    whether nothing else is wrong than that there is no grade, which may be this task's fault.
    """

    def __init__(
        self,
        problems: Iterable[Problem] = (),
        warnings: Iterable[str] = (),
        graded: int = 0,
        *,
        excused: bool = False,
    ) -> None:
        super().__init__(problems)
        self.warnings: tuple[str, ...] = tuple(warnings)
        self.graded, self.excused = graded, excused
        self.ungraded = bool(self) and all(problem.hint == _UNGRADED for problem in self)


def trial(
    pool: RewardPool,
    request: GradeRequest,
    *,
    limit: float | None = None,
    tick: Callable[[], object] = lambda: None,
    unrewarded: str | None = None,
) -> Trial:
    """Grade one group in the real workers and return every problem at once.

    A problem is a term with a weight that cannot be loaded, raises, hangs, dies, or returns the
    wrong number of values, a value that is not finite or no number. None is no grade, and a problem
    when for want of one no completion is graded at all; but not where trajectories had no end yet
    at which their environments would give it. Any failure of a term of weight 0 is a warning.
    Takes at most ``timeout_seconds`` for each term, spread over the workers, or
    ``limit`` where that is less: then a call that takes longer is a warning, since training has
    the time. ``tick`` is called all the while. ``unrewarded`` is what is wrong when the
    environments' own reward gave no grade at all. To be called while nothing else is under way
    in the pool.
    """
    tick()
    failure = pool.check_start()
    if failure is not None:
        return Trial([failure])
    for index in range(len(pool.terms)):
        pool.submit(("trial", index), request, terms=[index], retry=False, limit=limit)
    grades: dict[int, tuple[Grade, ...]] = {}
    while len(grades) < len(pool.terms):
        tick()
        grades |= {index: group.grades for (_, index), group in pool.finished(_TICK_SECONDS)}
    hurried = limit is not None and limit < pool.timeout_seconds
    problems: list[Problem] = []
    warnings: list[str] = []
    excused = False
    for index, term in enumerate(pool.terms):
        for kind, error in _failures(term.name, grades[index]).items():
            if term.weight == 0:
                warnings.append(f"{error} (its weight is 0, so it only shows)")
            elif kind == "timeout" and hurried:
                allowed = f"reward_timeout_seconds lets it take {pool.timeout_seconds:g} s"
                warnings.append(f"{error}: the trial waits no longer; {allowed}")
                excused = True
            elif kind != "missing":
                problems.append(Problem("rewards", error, found=kind, hint=_HINTS.get(kind)))
        missing = all(grade.kind == "missing" for grade in grades[index])
        if not missing or term.weight == 0:
            continue
        if term.name != "environment":
            problems.append(_none_graded([(term.name, grades[index])]))
        elif unrewarded is not None:
            problems.append(Problem("environment", unrewarded))
        else:
            text = f"reward {term.name!r} returned None for every completion of the trial"
            warnings.append(f"{text}: such completions are ungraded and teach nothing")
            excused = True
    weighed = [(t.name, grades[n]) for n, t in enumerate(pool.terms) if t.weight != 0]
    each = list(zip(*(found for _, found in weighed), strict=True))
    graded = sum(all(grade.reward is not None for grade in one) for one in each)
    if not graded and each and not problems and not excused:
        problems.append(_none_graded(weighed))
    return Trial(problems, warnings, graded, excused=excused)


def _none_graded(weighed: Sequence[tuple[str, Sequence[Grade]]]) -> Problem:
    first = next(g.failures[name] for name, found in weighed for g in found if name in g.failures)
    message = f"0 of {len(weighed[0][1])} completions of the trial were graded: {first}"
    return Problem("rewards", message, found=0, allowed="at least 1", hint=_UNGRADED)


_UNGRADED = "A completion without a grade teaches nothing"


_HINTS = {
    "timeout": "reward_timeout_seconds is the limit of one call",
    "nonfinite": "Return None where there is no grade",
    "length": "A function of prompts and completions returns one number for each completion",
}


def _failures(name: str, grades: Iterable[Grade]) -> dict[str, str]:
    """The first error of each kind; a term asked alone fails under its own kind."""
    found: dict[str, str] = {}
    for grade in grades:
        if name in grade.failures:
            found.setdefault(grade.kind, grade.failures[name])
    return found
