"""The collector: assembles one step's batch of eligible groups.

At ``max_staleness`` 0 collection follows a logical clock (``_waves``). Waves of whole groups are
drawn in task order; a wave is graded completely before the next is drawn; the batch is the first
``batch_size`` eligible groups in the order they were drawn. Nothing is decided by the time at
which a grade arrives, so a run repeats, and resumes, bit for bit. A wave draws exactly the groups
that are missing: what is eligible beyond the batch could never be used. As graded there is one
wave of ``batch_size`` groups, from one epoch on into the next, and nothing is drawn in place of
what was not graded.

Above 0, trajectories stay in flight across updates (``_ahead``): groups are used as they
complete, those that began under the oldest policy first; surplus eligible ones wait as pending.
After an update, what began more than ``max_staleness`` updates ago is cancelled in flight and
discarded when it is complete.

Several ranks draw positions r modulo W. What each round brought is gathered, so that every rank
knows every group, takes the same decisions, and trains on the groups that it sampled itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbtrain.rollout.admission import AdmissionRules, GroupOutcome
from nbtrain.rollout.draws import Draws
from nbtrain.rollout.flight import Flight
from nbtrain.rollout.judging import JudgedGroup, judged_group, rejudged
from nbtrain.rollout.lane import Spent
from nbtrain.rollout.limits import Sampling, under_budget
from nbtrain.rollout.pending import group_from_json, group_to_json
from nbtrain.rollout.ranks import Alone, Ranks
from nbtrain.rollout.types import Group, TaskView, TerminationReason

__all__ = ["Batch", "Closing", "Collector", "CollectorSettings", "JudgedGroup"]

_ROUND_SECONDS = 0.1
"""How long several ranks sample before they tell each other what came of it."""

_LEAST_JUDGED = 8
"""Groups without a single grade that are needed before graders are said to be down."""

_GROUPS_NAMED = 5
"""Groups that a sentence names before it only counts."""

_OVER = (TerminationReason.STALE, TerminationReason.CANCELLED)


@dataclass(slots=True)
class Batch:
    """What one collection brought.

    ``groups`` completed in this step, ``used`` are those to train on, which may have completed
    earlier; ``cancelled`` never completed. ``changed`` completed in earlier steps and found their
    place in this one. ``cut_short`` says why collection ended before ``batch_size`` eligible
    groups; ``barren`` is true when a full pass over the tasks, or as graded the whole step, ended
    without one, ``grading_failed`` when that was because grades did not come, ``ended`` names the
    budget that ends the run.
    """

    step: int
    groups: list[JudgedGroup] = field(default_factory=list)
    used: list[JudgedGroup] = field(default_factory=list)
    changed: list[JudgedGroup] = field(default_factory=list)
    cancelled: list[Group] = field(default_factory=list)
    cut_short: str | None = None
    barren: bool = False
    grading_failed: bool = False
    ended: str | None = None
    seconds: float = 0.0
    spent: Spent = field(default_factory=Spent)


@dataclass(frozen=True, slots=True)
class Closing:
    """What a run leaves behind at its end: groups in flight, and pending ones, now discarded."""

    cancelled: list[Group]
    discarded: list[JudgedGroup]
    started: int = 0
    """Groups started over the run."""


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """What the collector needs of the plan. Timeouts in seconds.

    ``budgets`` are the output-token budgets of density-aware training, empty without it.
    ``most_ungraded`` groups may wait for their grades at a time.
    """

    batch_size: int
    group_size: int
    max_in_flight: int
    batch_timeout: float
    seed: int
    rules: AdmissionRules
    sampling: Sampling
    max_staleness: int = 0
    budgets: tuple[int, ...] = ()
    most_ungraded: int = 512


class Collector:
    """Draws tasks, has them sampled and graded, and admits groups until the batch is full."""

    def __init__(
        self,
        tasks: Sequence[TaskView],
        flight: Flight,
        settings: CollectorSettings,
        *,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flight = flight
        self._settings = settings
        self._ranks = ranks or Alone()
        self._clock = clock
        self._count = len(tasks)
        self._draws = Draws(
            tasks,
            seed=settings.seed,
            group_size=settings.group_size,
            budgets=settings.budgets,
        )
        self._lane = flight.lane(
            max_in_flight=max(1, settings.max_in_flight // self._ranks.size),
            most_ungraded=settings.most_ungraded,
        )
        self._cursor = 0  # the next position of the whole run, in waves
        self._own = 0  # draws of this rank
        self._redo: dict[int, set[int]] = {}  # draws to take up again, and which of their groups
        self._under_way: dict[int, int] = {}  # position by group id
        self._pending: list[JudgedGroup] = []
        self._carried: list[tuple[Group, int]] = []
        self._started = 0
        self._oldest = 0
        self._barren: set[int] = set()  # tasks tried since the last eligible group
        self._fruitful: int | None = None  # the task of that group
        self._deadline = float("inf")
        self._current: Batch | None = None  # collected, or being so, and not recorded yet

    # --- what a resume goes on from --------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON: positions, and finished groups that wait; unfinished ones start again.

        Every rank makes the call; all get the same.
        """
        unfinished = {position: set(numbers) for position, numbers in self._redo.items()}
        for group_id, position in self._under_way.items():
            unfinished.setdefault(position, set()).add(self._draws.number_in_draw(group_id))
        own = (self._own, [[at, sorted(unfinished[at])] for at in sorted(unfinished)])
        everyone = self._ranks.gather(own)
        return {
            "tasks": self._count,
            "ranks": self._ranks.size,
            "groups_each": self._draws.groups_each,
            "group_size": self._settings.group_size,
            "draws": [one[0] for one in everyone],
            "unfinished": [one[1] for one in everyone],
            "pending": [group_to_json(j.group, owner=j.owner) for j in self._pending],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Groups of another size, or of other budgets, are not taken along: their tasks are drawn
        again. Raises ``ValueError`` for other tasks or another number of ranks.
        """
        for what, now in (("tasks", self._count), ("ranks", self._ranks.size)):
            if state[what] != now:
                msg = f"the state was saved over {state[what]} {what}, there are {now}"
                raise ValueError(msg)
        rank, size = self._ranks.rank, self._ranks.size
        self._own = state["draws"][rank]
        self._cursor = max((n - 1) * size + r + 1 if n else 0 for r, n in enumerate(state["draws"]))
        again = {at: set(numbers) for one in state["unfinished"] for at, numbers in one}
        each, here = state["groups_each"], self._draws.groups_each
        if (each, state["group_size"]) == (here, self._settings.group_size):
            self._carried = [group_from_json(one) for one in state["pending"]]
        else:
            again |= {(one["group_id"] - 1) // each: set() for one in state["pending"]}
            again = {at: set(range(here)) for at in again}
        in_waves = self._settings.max_staleness == 0
        if in_waves:  # all ranks go on from the furthest: what the others had before them is next
            behind = [r + size * n for r, own in enumerate(state["draws"]) for n in range(own)]
            again |= {at: set(range(here)) for at in set(range(self._cursor)) - set(behind)}
        self._redo = {at: again[at] for at in sorted(again) if in_waves or at % size == rank}

    def new_policy(self, version: int) -> None:
        """The weights are those of ``version``."""
        self._flight.new_policy(version)
        self._oldest = version - self._settings.max_staleness

    def activity(self) -> str:
        """How far the batch is, and what is under way."""
        ready = f"{len(self._pending)} of {self._settings.batch_size} groups are ready to train on"
        return f"{ready}; {self._flight.activity()}"

    def exhausted(self) -> str | None:
        """The budget that keeps another group from starting, in a sentence, ``None`` if none."""
        self._flight.budgets.share(self._ranks)
        if self._pending or self._anything_open():
            return self._flight.budgets.exhausted(0)
        return self._cap()

    def totals(self) -> tuple[int, int]:
        """Groups started over this run, and those in flight now, of all ranks."""
        in_flight = len(self._lane.open) + len(self._lane.done)
        everyone = self._ranks.gather((self._started, in_flight))
        return sum(one[0] for one in everyone), sum(one[1] for one in everyone)

    # --- collecting ------------------------------------------------------------------------------

    def collect(self, step: int) -> Batch:
        """Assemble the batch of global step ``step`` under the current policy."""
        began = self._clock()
        self._flight.take_spent()  # of validation
        self._flight.budgets.share(self._ranks)
        self._deadline = began + self._settings.batch_timeout
        self._barren.clear()
        self._fruitful = None
        batch = self._current = Batch(step)
        self._take_carried(batch)
        if self._settings.max_staleness == 0:
            self._waves(batch)
        else:
            self._ahead(batch)
        self._choose(batch)
        batch.seconds = self._clock() - began
        batch.spent = self._flight.take_spent()
        return batch

    def expire(self, batch: Batch) -> None:
        """After an update: cancel and discard what has become too old, into ``batch``."""
        cancelled = self._lane.cancel_older(self._oldest)
        for groups in self._ranks.gather(cancelled):
            batch.cancelled += self._over(groups)
        kept = []
        for judged in self._pending:
            again = rejudged(judged, self._settings.rules, oldest=self._oldest)
            if again.outcome is GroupOutcome.PENDING:
                kept.append(again)
            self._replace(batch, judged, again)
        self._pending = kept

    def recorded(self) -> None:
        """The step whose batch was collected last stands in the run's rows."""
        self._current = None

    def close(self) -> Closing:
        """End of the run: nothing in flight or pending will be trained on any more.

        In the middle of a step, what completed in it counts as cancelled, as it has no row.
        """
        mine = [*self._lane.take(), *self._lane.abandon()]
        cancelled = [g for groups in self._ranks.gather(mine) for g in self._over(groups)]
        waiting, self._pending = self._pending, []
        if (batch := self._current) is not None:
            cancelled += [*batch.cancelled, *(judged.group for judged in batch.groups)]
            waiting += [*batch.used, *batch.changed]
        discarded = {j.group.group_id: j for j in waiting if batch is None or j.step != batch.step}
        for judged in discarded.values():
            if judged.outcome in (GroupOutcome.PENDING, GroupOutcome.USED):
                judged.outcome, judged.consumed_step = GroupOutcome.DISCARDED, None
                judged.why = "not needed before the run ended"
        return Closing(cancelled, list(discarded.values()), self.totals()[0])

    def _waves(self, batch: Batch) -> None:
        size = self._settings.batch_size
        as_graded = self._settings.rules.as_graded
        while len(self._pending) < size and batch.cut_short is None:
            # Whole draws; no task twice in a search for one eligible group
            each = self._draws.groups_each
            missing = -(-(size - len(self._pending)) // each)
            left = missing if as_graded else self._count - len(self._barren)
            count = self._affordable(min(missing, left))
            if count == 0:
                batch.ended = batch.cut_short = self._cap() or "a budget was reached"
                break
            for position in self._wave(count):
                if position % self._ranks.size == self._ranks.rank:
                    self._launch(position)
            stopped = self._finish_wave()
            self._take_round(batch, stopped, final=True)
            if as_graded:
                break

    def _wave(self, count: int) -> list[int]:
        """The next positions of all ranks; first those that a run before left unfinished."""
        again = list(self._redo)[:count]
        first, self._cursor = self._cursor, self._cursor + count - len(again)
        self._own = -(-(self._cursor - self._ranks.rank) // self._ranks.size)
        return [*again, *range(first, self._cursor)]

    def _finish_wave(self) -> str | None:
        """Sample and grade all that was launched; why it was stopped before that."""
        while self._lane.open:
            self._flight.advance()
            reason = self._flight.budgets.spent_up()
            if reason is not None or self._clock() > self._deadline:
                return reason or ""
        return None

    def _ahead(self, batch: Batch) -> None:
        while len(self._pending) < self._settings.batch_size and batch.cut_short is None:
            over = self._fill()
            stopped: str | None = None
            until = self._clock() + _ROUND_SECONDS
            while stopped is None:
                self._flight.advance()
                stopped = self._flight.budgets.spent_up()
                if (over and not self._lane.open) or self._clock() > self._deadline:
                    break
                if self._lane.done if self._ranks.size == 1 else self._clock() > until:
                    break
                if not over and self._lane.free >= self._settings.group_size:
                    over = self._fill()
            self._take_round(batch, stopped, final=False)

    def _fill(self) -> bool:
        """Start whole groups while there is room; whether the budget allows no more."""
        size = self._settings.group_size * self._draws.groups_each
        while self._lane.free >= self._settings.group_size or not self._lane.open:
            if not self._flight.budgets.fits(self._lane_debt() + size):
                return True
            self._launch(self._next_position())
        return False

    def _next_position(self) -> int:
        if self._redo:
            return next(iter(self._redo))
        position = self._own * self._ranks.size + self._ranks.rank
        self._own += 1
        return position

    def _lane_debt(self) -> int:
        """Trajectories launched that have not started, and so are not counted as spent yet."""
        return len(self._lane.waiting)

    def _affordable(self, count: int) -> int:
        """Of ``count`` draws, how many the budgets allow; all ranks say the same."""
        each = self._settings.group_size * self._draws.groups_each
        while count and self._flight.budgets.exhausted(count * each):
            count -= 1
        return count

    def _cap(self) -> str | None:
        """The budget that keeps a draw from starting, in a sentence; all ranks say the same.

        Ahead of training every rank draws for itself, so each must be able to.
        """
        draws = 1 if self._settings.max_staleness == 0 else self._ranks.size
        each = self._settings.group_size * self._draws.groups_each
        return self._flight.budgets.exhausted(draws * each)

    def _launch(self, position: int) -> None:
        wanted = self._redo.pop(position, None)
        draw = self._draws.at(position)
        for number, (group, streams) in enumerate(draw.groups):
            if wanted is not None and number not in wanted:
                continue  # of a draw that is taken up again, done before
            self._under_way[group.group_id] = position
            self._started += 1
            sampling = under_budget(self._settings.sampling, group.budget)
            self._lane.launch(group, draw.task, streams, sampling)

    def _take_round(self, batch: Batch, stopped: str | None, *, final: bool) -> None:
        """Share what a round brought with all ranks, judge it, and see whether to go on.

        ``stopped`` names a budget that is used up, or is empty when time ran out. ``final`` says
        that nothing may stay in flight.
        """
        late = self._clock() > self._deadline
        rest = self._lane.abandon() if stopped or (final and stopped is not None) else []
        brought = (self._lane.take(), rest, stopped, late)
        everyone = self._ranks.gather(brought)
        self._flight.budgets.share(self._ranks)
        arrived = [
            (group, owner) for owner, one in enumerate(everyone) for group in [*one[0], *one[1]]
        ]
        for group, owner in sorted(arrived, key=lambda pair: pair[0].group_id):
            self._arrived(batch, group, owner)
        names = [one[2] for one in everyone if one[2]]
        if len(self._pending) >= self._settings.batch_size:
            return
        self._look(batch, names[0] if names else None, late=any(one[3] for one in everyone))

    def _look(self, batch: Batch, budget: str | None, *, late: bool) -> None:
        """Say why collection ends, if it does, with the batch not full."""
        at_hand = f"{len(self._pending)} of {self._settings.batch_size} eligible groups"
        if budget is None and not self._anything_open():
            budget = self._cap()
        if budget is not None:
            batch.ended = batch.cut_short = budget
        elif late:
            batch.cut_short = (
                f"batch_timeout_seconds ({self._settings.batch_timeout:g}) passed with {at_hand}"
                f"{self._unfinished(batch)}"
            )
        elif self._settings.rules.as_graded:
            if not self._pending:
                batch.cut_short = _not_graded(batch.groups)
                batch.barren = batch.grading_failed = True
        elif (ungraded := self._ungraded(batch)) is not None:
            batch.cut_short = ungraded
            batch.grading_failed = not self._pending
        elif len(self._barren) == self._count:
            batch.cut_short = f"a full pass over the {self._count} tasks brought no eligible group"
            batch.barren = not self._pending

    def _unfinished(self, batch: Batch) -> str:
        """Names the groups of all ranks that time ran out on."""
        mine = [(g.group_id, g.task_id) for g in (one.group for one in self._lane.open.values())]
        waited = [one for groups in self._ranks.gather(mine) for one in groups]
        waited += [(group.group_id, group.task_id) for group in batch.cancelled]
        if not waited:
            return ""
        names = [f"{group} (task {task[:12]})" for group, task in sorted(waited)[:_GROUPS_NAMED]]
        rest = len(waited) - len(names)
        return f"; not complete: group {', '.join(names)}{f' and {rest} more' if rest else ''}"

    def _anything_open(self) -> bool:
        return any(self._ranks.gather(bool(self._lane.open)))

    def _arrived(self, batch: Batch, group: Group, owner: int) -> None:
        self._under_way.pop(group.group_id, None)
        self._draws.number(group)
        if all(trajectory.reason in _OVER for trajectory in group.trajectories):
            batch.cancelled.append(group)
            return
        judged = judged_group(
            group, self._settings.rules, oldest=self._oldest, step=batch.step, owner=owner
        )
        batch.groups.append(judged)
        if judged.outcome is GroupOutcome.PENDING:
            self._pending.append(judged)
            self._barren.clear()
            self._fruitful = group.task_index
        elif not self._settings.budgets or group.task_index != self._fruitful:
            self._barren.add(group.task_index)

    def _take_carried(self, batch: Batch) -> None:
        """Groups that the run before left pending: to this run they complete in its first step."""
        for group, owner in self._carried:
            self._arrived(batch, group, owner)
        if self._ranks.rank == 0:
            self._started += len(self._carried)
        self._carried = []

    def _choose(self, batch: Batch) -> None:
        """Take the batch from what is pending, the oldest policy first."""
        ordered = sorted(self._pending, key=lambda j: (j.started_version, j.group.group_id))
        batch.used = ordered[: self._settings.batch_size]
        self._pending = ordered[self._settings.batch_size :]
        for judged in batch.used:
            judged.outcome, judged.consumed_step = GroupOutcome.USED, batch.step
            if judged.step != batch.step:
                batch.changed.append(judged)
        if self._settings.max_staleness == 0:
            for judged in self._pending:
                judged.outcome = GroupOutcome.DISCARDED
                judged.why = "beyond the batch: its policy is gone after the update"
            self._pending = []

    def _replace(self, batch: Batch, before: JudgedGroup, after: JudgedGroup) -> None:
        if before is after:
            return
        if before.step == batch.step:
            batch.groups = [after if one is before else one for one in batch.groups]
        else:
            batch.changed.append(after)

    def _over(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            self._under_way.pop(group.group_id, None)
            self._draws.number(group)
        return groups

    def _ungraded(self, batch: Batch) -> str | None:
        """A sentence when none of the newest groups' trajectories is graded, and they are many.

        A grader that is down would otherwise cost a full pass over the tasks.
        """
        enough = min(max(2 * self._settings.batch_size, _LEAST_JUDGED), self._count)
        newest = batch.groups[-enough:]
        graded = any(t.reward is not None for one in newest for t in one.group.trajectories)
        return None if graded or len(newest) < enough else _not_graded(newest)


def _not_graded(groups: Sequence[JudgedGroup]) -> str:
    """That no trajectory of ``groups`` was graded, and what was said most often about it."""
    trajectories = [t for judged in groups for t in judged.group.trajectories]
    errors = Counter(t.error.strip().splitlines()[0] for t in trajectories if t.error)
    text = f"{len(trajectories)} of {len(trajectories)} trajectories were not graded"
    return f"{text}, most often: {errors.most_common(1)[0][0]}" if errors else text
