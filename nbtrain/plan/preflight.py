"""What can be known of a run before anything is spent: trajectories, tokens, memory and time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nbtrain.plan.defaults import budgets, validation_on
from nbtrain.plan.fields import show
from nbtrain.plan.memory import (
    PROMPT_TOKENS,
    Memory,
    memory_of,
    memory_problem,
    ranks_of,
    size,
)
from nbtrain.plan.rates import Measured, Ranges, Rate, Spent
from nbtrain.plan.registry import BaseModelInfo
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.plan.rules import validation_rounds
from nbtrain.plan.told import Told

__all__ = ["Estimate", "about", "duration", "estimate", "longest_reply"]

_UNKNOWN = "no earlier run of this model here"


@dataclass(frozen=True, slots=True, repr=False)
class Estimate(Told):
    """What a run will take, as figures and as sentences.

    Trajectories of training are those that updates use; groups that teach nothing are sampled on
    top, but for a run ``as_graded``. ``max_output_tokens`` is a bound without those. What is
    expected goes by earlier runs and is ``None`` without any: ``sampled`` counts every trajectory
    of training and validation, and each of the three has a range (least, most) over those runs
    where none was of this workload. ``memory`` (bytes of one rank) is ``None`` where the model's
    headers tell too little. ``ends_early`` are the budgets that would end the run before its last
    step; what is told is told up to there.
    """

    steps: int
    trajectories_per_step: int
    trajectories: int
    in_flight: int
    max_staleness: int
    ranks: int
    validation_rounds: int
    trajectories_per_round: int
    validation_trajectories: int
    max_output_tokens: int
    sampled: int | None
    expected_output_tokens: int | None
    seconds: float | None
    memory: Memory | None
    free_bytes: int | None
    measured: Measured | None
    ends_early: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    ranges: Ranges | None = None
    as_graded: bool = False
    """Every sampled group is the step's, whether it teaches or not."""

    @property
    def _trained(self) -> str:
        if self.as_graded:
            return "in all, of which groups with equal scores teach nothing"
        return "to train on, and more where groups teach nothing"

    @property
    def all_trajectories(self) -> int:
        """Those of training and of validation together."""
        return self.trajectories + self.validation_trajectories

    def figures(self) -> dict[str, Any]:
        """Every figure by name, as JSON."""
        return asdict(self)

    @property
    def line(self) -> str:
        """All of it in one line."""
        what = "trajectories" + ("" if self.as_graded else " to train on")
        parts = [f"about {show(about(self.trajectories))} {what}"]
        if self.validation_rounds:
            parts.append(
                f"about {show(about(self.validation_trajectories))} in {self.validation_rounds} "
                "validation rounds"
            )
        if (sampled := self._all_sampled) is not None:
            parts.append(f"{sampled} sampled in all")
        if self.expected_output_tokens is None:
            those = "" if self.as_graded else " for these"
            parts.append(f"at most {show(about(self.max_output_tokens))} output tokens{those}")
        else:
            parts.append(f"{self._expected_tokens} output tokens")
        if self.seconds is not None:
            parts.append(self._expected_time)
        known = f" ({self.measured.told})" if self.measured else ""
        return "expected: " + ", ".join(parts) + known

    def sentences(self) -> list[str]:
        """What is known, a sentence each."""
        stale = (
            f"none begun more than {self.max_staleness} updates ago"
            if self.max_staleness
            else "each step sampled by the policy that it updates"
        )
        told = [
            f"{show(self.steps)} steps of {show(self.trajectories_per_step)} trajectories: "
            f"{show(self.trajectories)} {self._trained}",
            f"up to {show(self.in_flight)} trajectories in flight, {stale}",
            self._of_validation(),
            *self._of_sampling(),
            self._of_tokens(),
            self._of_memory(),
            self._of_time(),
        ]
        return [*told, *self.ends_early, *(f"hint: {warning}" for warning in self.warnings)]

    def _of_validation(self) -> str:
        if not self.validation_rounds:
            return "no validation"
        return (
            f"{show(self.validation_rounds)} validation rounds of "
            f"{show(self.trajectories_per_round)} trajectories: "
            f"{show(self.validation_trajectories)}"
        )

    def _span(self, figure: str) -> tuple[float, float] | None:
        span: tuple[float, float] | None = getattr(self.ranges, figure, None)
        return span

    @property
    def _all_sampled(self) -> str | None:
        """``None`` where no group is left out: then what is trained on is all there is."""
        if self.sampled is None or self.as_graded:
            return None
        return _between(self.sampled, self._span("sampled"), _count)

    @property
    def _expected_tokens(self) -> str:
        return _between(self.expected_output_tokens or 0, self._span("output_tokens"), _count)

    @property
    def _expected_time(self) -> str:
        return _between(self.seconds or 0, self._span("seconds"), duration)

    def _of_sampling(self) -> list[str]:
        if self.measured is None or (sampled := self._all_sampled) is None:
            return []
        return [f"{sampled} trajectories sampled in all, {self.measured.told}"]

    def _of_tokens(self) -> str:
        most = f"at most {show(self.max_output_tokens)} output tokens"
        if self.expected_output_tokens is None or self.measured is None:
            return f"{most}; how many is unknown: {_UNKNOWN}"
        return (
            f"{self._expected_tokens} output tokens, {self.measured.told}; {most} of those "
            "trained on and validated"
        )

    def _of_memory(self) -> str:
        memory, each = self.memory, " in each rank" if self.ranks > 1 else ""
        if memory is None:
            return "memory unknown: the model's headers do not tell its dimensions"
        free = "" if self.free_bytes is None else f", {size(self.free_bytes)} free now"
        return (
            f"about {size(memory.peak(self.free_bytes))} of memory{each} with the longest replies "
            f"({size(memory.weights)} base model, {size(memory.adapter)} adapter and optimizer, "
            f"{size(memory.loss)} loss, {size(memory.kv_one)} keys and values for each of up to "
            f"{show(self.in_flight)} replies){free}"
        )

    def _of_time(self) -> str:
        if self.seconds is None or self.measured is None:
            return f"time unknown until the first step: {_UNKNOWN}"
        return f"{self._expected_time}, {self.measured.told} on this machine"


def estimate(
    plan: ResolvedPlan,
    model: BaseModelInfo,
    *,
    measured: Measured | None = None,
    free_bytes: int | None = None,
    turns: bool = False,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Estimate:
    """What ``plan`` will take.

    ``turns`` says whether an environment gives trajectories several turns, ``prompt_tokens`` how
    long prompts are, ``free_bytes`` what one rank could use before the model is loaded.
    """
    steps = plan.total_steps - plan.start_step
    per_step = plan["batch_size"] * plan["group_size"]
    rounds, per_round = _validation(plan)
    longest = longest_reply(plan, model, turns=turns)
    train, held_out = steps * per_step, rounds * per_round
    tokens = train * _mean_limit(plan, longest)
    tokens += held_out * longest_reply(plan, model, turns=turns, prefix="val_")
    stale = plan["max_staleness"]
    concurrent = plan["max_concurrent_trajectories"]
    memory = memory_of(plan, model, longest=longest, prompt_tokens=prompt_tokens)
    told = memory_problem(memory, free_bytes)
    spent = None if measured is None else _spent(plan, measured.mean, train, held_out, longest)
    early, share = _early(plan, spent or Spent(train + held_out), held_out)
    if plan["max_total_output_tokens"] is not None:
        tokens = min(tokens, plan["max_total_output_tokens"])
    most = plan["max_total_trajectories"]
    if most is not None and most < train + held_out:
        longer = longest_reply(plan, model, turns=turns, prefix="val_") if held_out else 0
        tokens = min(tokens, most * max(longest, longer))
    expected = seconds = None
    if spent is not None:
        spent = spent.times(share)
        expected, seconds = round(spent.tokens or 0), spent.seconds
    return Estimate(
        steps=steps,
        trajectories_per_step=per_step,
        trajectories=train,
        in_flight=concurrent if stale else min(concurrent, per_step),
        max_staleness=stale,
        ranks=ranks_of(plan),
        validation_rounds=rounds,
        trajectories_per_round=per_round,
        validation_trajectories=held_out,
        max_output_tokens=tokens,
        sampled=None if spent is None else round(spent.sampled),
        expected_output_tokens=expected,
        seconds=seconds,
        memory=memory,
        free_bytes=free_bytes,
        measured=measured,
        ends_early=tuple(early),
        warnings=() if told is None else (told if isinstance(told, str) else str(told),),
        ranges=_ranges(plan, measured, train, held_out, longest),
        as_graded=plan.admission == "as_graded",
    )


def longest_reply(
    plan: ResolvedPlan, model: BaseModelInfo, *, turns: bool, prefix: str = ""
) -> int:
    """Most output tokens that a trajectory can have; without ``turns`` it has one reply."""
    limit: int = min(plan[f"{prefix}max_output_tokens_per_trajectory"], model.max_context)
    return limit if turns else min(limit, plan[f"{prefix}max_output_tokens_per_turn"])


def _mean_limit(plan: ResolvedPlan, longest: int) -> int:
    """Tokens that a training trajectory may have, on average over the budgets, rounded up."""
    if not plan["density_aware_training"]:
        return longest
    given = budgets(plan["max_output_tokens_per_trajectory"])
    return -(-sum(min(budget, longest) for budget in given) // len(given))


def _validation(plan: ResolvedPlan) -> tuple[int, int]:
    """Rounds, and trajectories of each."""
    if not validation_on(plan.options):
        return 0, 0
    rounds = validation_rounds(plan.start_step, plan.total_steps, plan["val_interval_steps"])
    tasks = min(plan["val_num_tasks"], plan.workload.held_out_tasks)
    return rounds, tasks * plan["val_trajectories_per_task"]


def _spent(plan: ResolvedPlan, rate: Rate, train: int, held_out: int, longest: int) -> Spent:
    """At ``rate``; a run that leaves no group out samples none on top, whatever others did."""
    surplus = 1.0 if plan.admission == "as_graded" else rate.surplus
    return Spent.by(replace(rate, surplus=surplus), train, held_out, longest)


def _early(plan: ResolvedPlan, spent: Spent, held_out: int) -> tuple[list[str], float]:
    """The budgets that are used up before the last step, and the share of the run until then."""
    wanted = {
        "max_total_trajectories": spent.sampled,
        "max_total_output_tokens": spent.tokens,
        "max_wall_clock_seconds": spent.seconds,
    }
    told, least = [], 1.0
    for name, count in wanted.items():
        limit = plan[name]
        if limit is not None and count is not None and count > limit:
            steps = int((plan.total_steps - plan.start_step) * limit / count)
            counts = " (validation counts)" if held_out else ""
            told.append(
                f"{name} {show(limit)}{counts} ends the run early, after about {show(steps)} steps"
            )
            least = min(least, limit / count)
    return told, least


def _ranges(
    plan: ResolvedPlan, measured: Measured | None, train: int, held_out: int, longest: int
) -> Ranges | None:
    """Least and most by the single runs; ``None`` where they were of this workload."""
    if measured is None or measured.same_workload:
        return None
    each = [_spent(plan, rate, train, held_out, longest) for rate in measured.rates]
    each = [spent.times(_early(plan, spent, held_out)[1]) for spent in each]

    def span(values: list[float]) -> tuple[float, float]:
        return min(values), max(values)

    return Ranges(
        sampled=span([one.sampled for one in each]),
        output_tokens=span([one.tokens or 0.0 for one in each]),
        seconds=span([one.seconds or 0.0 for one in each]),
    )


def _between(mean: float, span: tuple[float, float] | None, shown: Callable[[float], str]) -> str:
    """``about 75 s``, or ``1 min to 5 min`` where the span's ends differ as they are shown."""
    if span is not None and shown(span[0]) != shown(span[1]):
        return f"{shown(span[0])} to {shown(span[1])}"
    return f"about {shown(mean)}"


def _count(value: float) -> str:
    return show(about(round(value)))


def about(count: int) -> int:
    """``count`` to two significant digits."""
    return round(count, 2 - len(str(abs(count))))


def duration(seconds: float) -> str:
    """Seconds as a person says them: ``40 s``, ``12 min``, ``3.5 h``, ``2.1 days``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"
