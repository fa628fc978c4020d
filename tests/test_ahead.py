"""Collection ahead of training: what stays in flight, what becomes stale, that it adds up."""

from __future__ import annotations

import json
import pickle
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedRewards, ScriptedSampler
from test_collector import SAMPLING, random_script, score, tasks

from nbtrain.rollout.admission import AdmissionRules, GroupOutcome
from nbtrain.rollout.budgets import Budgets
from nbtrain.rollout.collector import Batch, Collector, CollectorSettings
from nbtrain.rollout.draws import Draws
from nbtrain.rollout.flight import Flight
from nbtrain.rollout.ledger import Changes, Ledger
from nbtrain.rollout.types import Finish, SampleRequest, TerminationReason


def ahead(
    *,
    count: int = 7,
    script: Any = random_script,
    reward: Any = score,
    order: random.Random | None = None,
    budgets: Budgets | None = None,
    token_budgets: tuple[int, ...] = (),
    burst: int = 1,
    tick: Any = lambda: None,
    ranks: Any = None,
    clock: Any = lambda: 0.0,
    **changes: Any,
) -> tuple[Collector, Flight, ScriptedSampler]:
    values: dict[str, Any] = {
        "batch_size": 3,
        "group_size": 4,
        "max_in_flight": 24,
        "batch_timeout": 100.0,
        "seed": 1,
        "rules": AdmissionRules(2),
        "sampling": SAMPLING,
        "max_staleness": 2,
        "budgets": token_budgets,
    }
    pick = (lambda n: order.randrange(n)) if order else (lambda n: 0)
    sampler = ScriptedSampler(script, pick, burst)
    flight = Flight(
        sampler,
        ScriptedRewards(reward, pick, burst),
        lambda ids: "".join(map(str, ids)),
        chat=True,
        budgets=budgets,
        tick=tick,
        clock=clock,
    )
    made = CollectorSettings(**(values | changes))
    collector = Collector(tasks(count), flight, made, ranks=ranks, clock=clock)
    return collector, flight, sampler


class Book:
    """The rows of a run, as a store would hold them after every change."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.rows: dict[int, dict[str, Any]] = {}

    def take(self, collect: Collector, batch: Batch) -> None:
        started, in_flight = collect.totals()
        self.rows[batch.step] = self.ledger.step(batch, started=started, in_flight=in_flight)
        self.change(self.ledger.changes(batch.changed))
        collect.recorded()

    def change(self, changes: Changes) -> None:
        for step, values in changes.steps.items():
            metrics = self.rows[step]["metrics"] | values["metrics"]
            self.rows[step] |= values | {"metrics": metrics}

    def check(self) -> None:
        """Both equations of every row, whatever step the run is at."""
        over = 0
        for row in self.rows.values():
            places = (
                row["used_groups"]
                + row["metrics"]["no_signal_not_trained"]
                + row["filtered_groups"]
                + row["too_small_groups"]
                + row["discarded_groups"]
                + row["pending_groups"]
            )
            assert places == row["completed_groups"]
            assert row["settled"] == (row["pending_groups"] == 0)
            over += row["completed_groups"] + row["cancelled_groups"]
        last = self.rows[max(self.rows)]
        assert last["started_groups"] == last["in_flight_groups"] + over


def advance(collect: Collector, step: int, version: int) -> Batch:
    """A step whose update is applied."""
    batch = collect.collect(step)
    collect.new_policy(version + 1)
    collect.expire(batch)
    return batch


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_ledger_adds_up_at_every_step(data: st.DataObject) -> None:
    """Whatever replies, grades, filters and skipped updates do, and however far it runs ahead."""
    order = random.Random(data.draw(st.integers(0, 10_000)))
    flags = [data.draw(st.booleans()) for _ in range(6)]
    collect, _, _ = ahead(
        order=order,
        rules=AdmissionRules(data.draw(st.integers(1, 4)), *flags),
        max_staleness=data.draw(st.integers(1, 3)),
        max_in_flight=data.draw(st.integers(1, 60)),
        batch_size=data.draw(st.integers(1, 4)),
        token_budgets=data.draw(st.sampled_from([(), (1, 2, 3)])),
        burst=data.draw(st.sampled_from([1, 7, 30])),
    )
    book, version = Book(), 0
    used: Counter[int] = Counter()
    for step in range(1, 12):
        batch = collect.collect(step)
        if batch.used and data.draw(st.booleans()):  # else the update was skipped
            version += 1
            collect.new_policy(version)
            collect.expire(batch)
        used.update(judged.group.group_id for judged in batch.used)
        book.take(collect, batch)
        book.check()
    closing = collect.close()
    book.change(book.ledger.closing(closing))
    book.check()
    assert all(row["settled"] for row in book.rows.values())
    assert book.rows[11]["in_flight_groups"] == 0
    assert set(used.values()) <= {1}, "no group trains twice"


class Stop(BaseException):
    """As a cancel comes: in the middle of anything."""


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.integers(1, 400), st.integers(0, 1000), st.sampled_from([1, 9]))
def test_the_ledger_adds_up_wherever_a_run_is_stopped(
    staleness: int, at: int, shuffle: int, burst: int
) -> None:
    """Groups of the step that never got its row are accounted for as well."""
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == at:
            raise Stop

    order = random.Random(shuffle)
    collect, _, sampler = ahead(
        order=order, max_staleness=staleness, count=50, max_in_flight=40, burst=burst, tick=tick
    )
    book, step = Book(), 0
    used: Counter[int] = Counter()
    try:
        for step in range(1, 8):
            batch = advance(collect, step, step - 1)
            book.take(collect, batch)
            used.update(judged.group.group_id for judged in batch.used)
    except Stop:
        pass
    closing = collect.close()
    changes = book.ledger.closing(closing)
    book.change(changes)
    assert sampler.pending == 0
    if not book.rows:
        return
    book.check()
    assert all(row["settled"] for row in book.rows.values())
    assert book.rows[max(book.rows)]["in_flight_groups"] == 0
    trained = sum(row["used_groups"] for row in book.rows.values())
    assert trained == len(used), "nothing that an unrecorded step chose counts as trained on"


def test_trajectories_run_on_across_updates() -> None:
    """With room for two batches, a second one is in flight while the first is trained on."""
    collect, _, sampler = ahead(reward=lambda text: float(len(text) % 2))
    advance(collect, 1, 0)
    assert sampler.pending > 0
    _, in_flight = collect.totals()
    assert in_flight > 0
    assert sampler.most_in_flight == 24


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_nothing_trains_that_began_too_many_updates_ago(staleness: int) -> None:
    order = random.Random(staleness)
    collect, _, _ = ahead(
        order=order, max_staleness=staleness, max_in_flight=80, count=53, burst=17
    )
    seen: Counter[int] = Counter()
    stale = cancelled = 0
    for step in range(1, 40):
        version = step - 1
        batch = advance(collect, step, version)
        assert len(batch.used) == 3
        for judged in batch.used:
            for t, a in zip(judged.group.trajectories, judged.admissions, strict=True):
                if a.eligible:
                    assert t.started_version is not None
                    seen[version - t.started_version] += 1
        late = [j for j in batch.changed if j.outcome is GroupOutcome.DISCARDED]
        stale += len(late)
        assert all("stale" in judged.why for judged in late)
        cancelled += len(batch.cancelled)
        assert all(
            t.reason is TerminationReason.STALE for g in batch.cancelled for t in g.trajectories
        )
    assert max(seen) == staleness, "what is just young enough does train"
    assert stale + cancelled > 0, "five batches in flight are too many"


def test_a_discarded_group_keeps_its_recorded_rewards() -> None:
    collect, _, _ = ahead(max_staleness=1, max_in_flight=60, count=50, burst=60)
    first = advance(collect, 1, 0)
    waiting = [j for j in first.groups if j.outcome is GroupOutcome.PENDING]
    assert len(waiting) > 3
    before = [[t.reward for t in j.group.trajectories] for j in waiting]
    changed = []
    for step in range(2, 6):
        changed += advance(collect, step, step - 1).changed
    after = {j.group.group_id: j for j in changed}
    outcomes = [after[j.group.group_id].outcome for j in waiting]
    assert outcomes[:3] == [GroupOutcome.USED] * 3
    assert set(outcomes[3:]) == {GroupOutcome.DISCARDED}
    kept = [[t.reward for t in after[j.group.group_id].group.trajectories] for j in waiting]
    assert kept == before


def test_the_oldest_policy_is_used_first() -> None:
    order = random.Random(3)
    collect, _, _ = ahead(order=order, max_in_flight=48, max_staleness=3, count=50, burst=9)
    for step in range(1, 10):
        batch = advance(collect, step, step - 1)
        versions = [judged.started_version for judged in batch.used]
        assert versions == sorted(versions)
        left = [judged.started_version for judged in collect._pending]
        assert not left or max(versions) <= min(left)


def test_a_resume_uses_what_waited_and_starts_again_what_was_unfinished() -> None:
    collect, _, _ = ahead(order=random.Random(5), max_in_flight=64, count=50, burst=20)
    for step in range(1, 4):
        advance(collect, step, step - 1)
    state = json.loads(json.dumps(collect.state_dict()))
    waiting = [judged.group.group_id for judged in collect._pending]
    unfinished = state["unfinished"][0]
    assert waiting
    assert unfinished
    second, _, sampler = ahead(order=random.Random(6), max_in_flight=48, count=50)
    second.load_state_dict(state)
    second.new_policy(3)
    batch = second.collect(4)
    assert {j.group.group_id for j in batch.groups} >= set(waiting)
    # the first streams asked for are those of the unfinished draws, in order
    asked = list(dict.fromkeys(r.stream[:4] for r in sampler.requests))
    draws = Draws(tasks(50), seed=1, group_size=4, budgets=())
    again = [draws.at(position).groups[0][1][0][:4] for position, _ in unfinished]
    assert asked[: len(again)] == again
    book = Book()
    book.take(second, batch)
    book.check()


def test_a_resume_on_policy_discards_what_older_policies_left() -> None:
    collect, _, _ = ahead(order=random.Random(5), max_in_flight=64, count=50, burst=20)
    for step in range(1, 4):
        advance(collect, step, step - 1)
    state = json.loads(json.dumps(collect.state_dict()))
    waiting = {judged.group.group_id for judged in collect._pending}
    assert waiting
    second, _, _ = ahead(max_staleness=0, count=50)
    second.load_state_dict(state)
    second.new_policy(3)
    batch = second.collect(4)
    carried = [j for j in batch.groups if j.group.group_id in waiting]
    assert {j.outcome for j in carried} == {GroupOutcome.DISCARDED}
    assert all(
        t.started_version == 3 for j in batch.used for t in j.group.trajectories if t.token_ids
    )


@pytest.mark.parametrize(
    "changes", [{}, {"group_size": 2}, {"token_budgets": ()}, {"max_staleness": 0}]
)
def test_a_resume_under_budgets_samples_no_group_twice(changes: dict[str, Any]) -> None:
    """Of a draw, only the groups that were not finished start again; ids stay unique."""
    before, seen = {"token_budgets": (1, 2, 3), "max_in_flight": 64, "burst": 20}, Counter[int]()
    collect, _, _ = ahead(order=random.Random(5), count=50, **before)
    for step in range(1, 4):
        seen.update(j.group.group_id for j in advance(collect, step, step - 1).groups)
    state = json.loads(json.dumps(collect.state_dict()))
    assert state["pending"]
    second, _, _ = ahead(order=random.Random(6), count=50, **(before | changes))
    second.load_state_dict(state)
    second.new_policy(3)
    again: Counter[int] = Counter()
    numbers: Counter[int] = Counter()
    for step in range(4, 9):
        batch = advance(second, step, step - 1)
        again.update(j.group.group_id for j in batch.groups)
        numbers.update(t.trajectory_id for j in batch.groups for t in j.group.trajectories)
    assert set(again.values()) == {1}
    assert set(numbers.values()) == {1}
    if changes in ({}, {"max_staleness": 0}):
        carried = {one["group_id"] for one in state["pending"]}
        assert {g for g in again if g in seen} == carried


class Meeting:
    """Ranks in threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = pickle.dumps(value)
        self._barrier.wait(10)
        found = [pickle.loads(one) for one in self._values]
        self._barrier.wait(10)
        return found


class Rank:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.gather(self.rank, value)

    def sum(self, tensors: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "caps",
    [{}, {"max_trajectories": 61}, {"max_tokens": 150}],
    ids=["free", "trajectories", "tokens"],
)
def test_ranks_decide_alike_and_keep_to_one_budget(
    ranks: int, staleness: int, caps: dict[str, int]
) -> None:
    meeting = Meeting(ranks)
    books = [Book() for _ in range(ranks)]
    budgets = [Budgets(**caps) for _ in range(ranks)]
    ended: list[Any] = [None] * ranks
    used: list[list[int]] = [[] for _ in range(ranks)]

    def work(rank: int) -> None:
        collect, _, _ = ahead(
            script=half,
            reward=lambda text: float(text or 0),
            order=random.Random(rank),
            max_staleness=staleness,
            budgets=budgets[rank],
            count=50,
            ranks=Rank(meeting, rank),
            clock=time.monotonic,
        )
        for step in range(1, 7):
            ended[rank] = collect.exhausted()
            if ended[rank] is not None:
                break
            batch = collect.collect(step)
            if batch.used:
                collect.new_policy(step)
                collect.expire(batch)
            used[rank] += [j.group.group_id for j in batch.used]
            books[rank].take(collect, batch)
            books[rank].check()
            ended[rank] = batch.ended
            if ended[rank] is not None:
                break
        books[rank].change(books[rank].ledger.closing(collect.close()))
        books[rank].check()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({str(one) for one in ended}) == 1
    assert all(one == used[0] for one in used)
    assert all(len(book.rows) == len(books[0].rows) > 0 for book in books)
    if "max_trajectories" in caps:
        assert sum(b.trajectories for b in budgets) <= 61
        assert "max_total_trajectories (61)" in str(ended[0])
    elif caps:
        # one step's tokens of what each rank has in flight may come on top
        assert sum(b.tokens for b in budgets) <= 150 + 24
        assert "max_total_output_tokens (150)" in str(ended[0])
    else:
        assert len(used[0]) == 6 * 3


def half(request: SampleRequest) -> tuple[list[int], Finish]:
    """Every group has contrast."""
    return [request.stream[-1] % 2], Finish.STOP


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (Budgets(max_trajectories=30), "max_total_trajectories (30)"),
        (Budgets(max_tokens=40), "max_total_output_tokens (40)"),
    ],
)
def test_a_budget_ends_collection_and_is_named(staleness: int, budget: Budgets, said: str) -> None:
    fresh = Budgets(budget.max_trajectories, budget.max_tokens)
    collect, flight, _ = ahead(
        script=half, reward=lambda t: float(t), budgets=fresh, max_staleness=staleness
    )
    ended = None
    for step in range(1, 20):
        ended = collect.exhausted()
        if ended is None:
            ended = advance(collect, step, step - 1).ended
        if ended is not None:
            break
    assert ended is not None
    assert said in ended
    if fresh.max_trajectories is not None:
        assert flight.budgets.trajectories == 28  # seven groups of four; an eighth would not fit
    else:
        # one step's tokens of what is in flight may come on top
        assert 40 <= flight.budgets.tokens <= 40 + 24


def test_density_aware_tasks_are_four_groups_with_budgets_of_their_own() -> None:
    def script(request: SampleRequest) -> tuple[list[int], Finish]:
        want = 1 + request.stream[-1] * 2
        cut = want > request.max_new_tokens
        return [1] * min(want, request.max_new_tokens), Finish.LENGTH if cut else Finish.STOP

    rules = AdmissionRules(2, train_on_truncation=True)
    collect, _, sampler = ahead(
        script=script,
        reward=lambda t: float(len(t) % 3),
        rules=rules,
        token_budgets=(1, 2, 4, 8),
        batch_size=6,
        max_staleness=0,
    )
    batch = collect.collect(1)
    budgets = [judged.group.budget for judged in batch.groups]
    assert budgets[:8] == [1, 2, 4, 8] * 2
    assert len({judged.group.group_id for judged in batch.groups}) == len(batch.groups)
    assert len({r.stream for r in sampler.requests}) == len(sampler.requests)
    for judged in batch.groups:
        for t in judged.group.trajectories:
            assert t.output_tokens <= (judged.group.budget or 0)
            if t.reason is TerminationReason.LIMIT_REACHED:
                assert t.output_tokens == judged.group.budget
    assert len(batch.used) <= 6
