"""The collector: what is drawn, when it ends, and that time decides nothing."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedRewards, ScriptedSampler

from nbtrain.rollout.admission import AdmissionRules, GroupOutcome
from nbtrain.rollout.collector import Batch, Collector, CollectorSettings
from nbtrain.rollout.draws import task_order
from nbtrain.rollout.flight import Flight
from nbtrain.rollout.ledger import Ledger, group_row, trajectory_rows
from nbtrain.rollout.limits import Sampling
from nbtrain.rollout.types import Finish, Group, SampleRequest, TaskView, TerminationReason

SAMPLING = Sampling(max_new_tokens=8, max_trajectory_tokens=64, max_context=64)


def tasks(count: int) -> list[TaskView]:
    return [TaskView(f"{n:016x}", (n + 1, 2), f"task {n}", {"n": n}) for n in range(count)]


def random_script(request: SampleRequest) -> tuple[list[int], Finish]:
    """A reply that depends on the request's stream alone, as a sampler's must."""
    rng = random.Random(str(request.stream))
    ids = [rng.randrange(5) for _ in range(rng.randrange(1, 6))]
    return ids, Finish.LENGTH if rng.random() < 0.1 else Finish.STOP


def score(text: str) -> float | None:
    value = sum(map(int, text)) % 4
    return None if value == 3 else value / 2


def collector(
    *,
    count: int = 7,
    script: Any = random_script,
    reward: Any = score,
    pick: Any = lambda n: 0,
    clock: Any = lambda: 0.0,
    rules: AdmissionRules | None = None,
    **changes: Any,
) -> tuple[Collector, ScriptedSampler]:
    values: dict[str, Any] = {
        "batch_size": 3,
        "group_size": 4,
        "max_in_flight": 100,
        "batch_timeout": 100.0,
        "seed": 1,
    }
    sampler = ScriptedSampler(script, pick)
    flight = Flight(
        sampler,
        ScriptedRewards(reward, pick),
        lambda ids: "".join(map(str, ids)),
        chat=True,
        clock=clock,
    )
    made = CollectorSettings(
        **({"sampling": SAMPLING} | values | changes), rules=rules or AdmissionRules(2)
    )
    return Collector(tasks(count), flight, made, clock=clock), sampler


def content(batch: Batch) -> list[Any]:
    return [
        (
            j.group.group_id,
            j.group.task_id,
            j.group.epoch,
            j.outcome,
            [(t.trajectory_id, t.token_ids, t.reward, t.reason) for t in j.group.trajectories],
            j.advantages,
        )
        for j in batch.groups
    ]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(0, 10_000))
def test_nothing_depends_on_timing_or_concurrency(in_flight: int, shuffle: int) -> None:
    """The same groups come out whatever the order of replies and grades, and the concurrency."""
    straight, _ = collector()
    order = random.Random(shuffle)
    mixed, sampler = collector(pick=lambda n: order.randrange(n), max_in_flight=in_flight)
    for step in range(1, 5):
        assert content(straight.collect(step)) == content(mixed.collect(step))
    assert sampler.most_in_flight <= in_flight


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_ledger_adds_up(data: st.DataObject) -> None:
    flags = [data.draw(st.booleans()) for _ in range(6)]
    rules = AdmissionRules(data.draw(st.integers(1, 4)), *flags)
    collect, _ = collector(rules=rules, seed=data.draw(st.integers(0, 99)))
    over = 0
    ledger = Ledger()
    for step in range(1, 4):
        batch = collect.collect(step)
        started, in_flight = collect.totals()
        row = ledger.step(batch, started=started, in_flight=in_flight)
        completed = (
            row["used_groups"]
            + row["metrics"]["no_signal_not_trained"]
            + row["filtered_groups"]
            + row["too_small_groups"]
            + row["discarded_groups"]
            + row["pending_groups"]
        )
        assert completed == row["completed_groups"]
        over += row["cancelled_groups"] + row["completed_groups"]
        assert row["started_groups"] == row["in_flight_groups"] + over
        assert row["no_signal_groups"] >= row["metrics"]["no_signal_not_trained"]
        metrics = row["metrics"]
        assert (
            metrics["correct"] + metrics["partial"] + metrics["incorrect"]
            == metrics["graded_trajectories"]
        )
        assert sum(metrics["termination_reasons"].values()) == metrics["completed_trajectories"]
        graded = metrics["graded_trajectories"]
        assert (
            metrics["attempted_trajectories"] == graded + metrics["error"] + metrics["incomplete"]
        )
        assert (
            metrics["all_success_groups"] + metrics["all_failed_groups"] <= row["no_signal_groups"]
        )
        for judged in batch.groups:
            line = group_row(judged)
            used = judged.outcome is GroupOutcome.USED
            assert (line["consumed_step"] == step) == used
            rows = trajectory_rows(judged, prompt="p")
            assert all((r["consumed_step"] == step) == (used and r["eligible"]) for r in rows)
            assert all(r["verdict"] for r in rows)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_saved_collector_goes_on_where_it_was(at: int) -> None:
    straight, _ = collector()
    batches = [content(straight.collect(step)) for step in range(1, 6)]
    first, _ = collector()
    for step in range(1, at + 1):
        first.collect(step)
    second, _ = collector()
    second.load_state_dict(first.state_dict())
    assert [content(second.collect(s)) for s in range(at + 1, 6)] == batches[at:]


def test_a_collector_refuses_the_state_of_other_tasks() -> None:
    first, _ = collector(count=7)
    second, _ = collector(count=8)
    with pytest.raises(ValueError, match="7 tasks, there are 8"):
        second.load_state_dict(first.state_dict())


def test_backfill_draws_until_the_batch_is_full() -> None:
    """Tasks 0 to 3 tie; the batch is made of the first eligible groups in task order."""
    tied = {(n + 1, 2) for n in range(4)}

    def script(request: SampleRequest) -> tuple[list[int], Finish]:
        return [0 if request.prompt_ids in tied else request.stream[-1] % 2], Finish.STOP

    collect, _ = collector(script=script, reward=lambda text: float(int(text)), batch_size=3)
    batch = collect.collect(1)
    assert len(batch.used) == 3
    drawn = [j.group.task_id for j in batch.groups]
    order = [f"{n:016x}" for n in task_order(1, 0, 7)]
    assert drawn[: len(order)] == order[: len(drawn)]
    assert Counter(j.outcome for j in batch.groups)[GroupOutcome.NO_SIGNAL] == len(drawn) - 3


def test_every_epoch_visits_every_task_once_in_its_own_order() -> None:
    orders = [task_order(5, epoch, 20) for epoch in range(3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] == task_order(5, 0, 20)


def test_a_full_pass_without_an_eligible_group_ends_the_collection() -> None:
    collect, sampler = collector(script=lambda r: ([0], Finish.STOP), reward=lambda text: 0.0)
    batch = collect.collect(1)
    assert batch.barren
    assert batch.used == []
    assert "full pass over the 7 tasks" in str(batch.cut_short)
    assert len(sampler.requests) == 7 * 4


def test_what_a_pass_brought_is_trained_on() -> None:
    """One task of seven has signal, and the batch wants three groups: it is trained on again."""

    def script(request: SampleRequest) -> tuple[list[int], Finish]:
        return [request.stream[-1] % 2 if request.prompt_ids[0] == 1 else 0], Finish.STOP

    collect, _ = collector(script=script, reward=lambda text: float(int(text)))
    batch = collect.collect(1)
    assert [j.group.task_index for j in batch.used] == [0, 0, 0]
    assert not batch.barren
    assert batch.cut_short is None


def test_the_batch_timeout_trains_on_what_is_there() -> None:
    now = [0.0]

    def script(request: SampleRequest) -> tuple[list[int], Finish]:
        now[0] += 1.0
        return [request.stream[-1] % 2], Finish.STOP

    collect, sampler = collector(
        script=script,
        reward=lambda text: float(int(text)),
        clock=lambda: now[0],
        batch_timeout=9.5,
    )
    batch = collect.collect(1)
    assert len(batch.used) == 2  # eight replies were in time
    assert "batch_timeout_seconds" in str(batch.cut_short)
    assert len(batch.cancelled) == 1
    assert sampler.pending == 0
    assert collect.totals() == (3, 0)


def test_a_trajectory_over_its_time_ends_for_timeout() -> None:
    """The scripted sampler ends one reply a second: the fourth of the first group is overdue."""
    now = [0.0]

    def script(request: SampleRequest) -> tuple[list[int], Finish]:
        now[0] += 1.0
        return [request.stream[-1] % 2], Finish.STOP

    collect, sampler = collector(
        script=script,
        reward=lambda text: float(int(text or "0")),
        clock=lambda: now[0],
        sampling=replace(SAMPLING, timeout=2.5),
        batch_size=1,
        rules=AdmissionRules(2, train_on_timeout=True),
    )
    judged = collect.collect(1).groups[0]
    assert [t.reason for t in judged.group.trajectories] == [
        TerminationReason.ENV_DONE,
        TerminationReason.ENV_DONE,
        TerminationReason.ENV_DONE,
        TerminationReason.TIMEOUT,
    ]
    assert sampler.pending == 0
    assert [a.reward for a in judged.admissions] == [0.0, 1.0, 0.0, 0.0]


def test_requests_of_an_earlier_rollout_do_not_count_against_the_time_limit() -> None:
    """A group sampled without grading leaves its admissions behind; nothing is overdue for them."""
    now = [0.0]
    cancelled: list[int] = []
    sampler = ScriptedSampler(random_script)
    cancel = sampler.cancel

    def watched(ids: Any) -> Any:
        listed = list(ids)
        cancelled.extend(listed)
        return cancel(listed)

    sampler.cancel = watched  # type: ignore[method-assign]
    flight = Flight(
        sampler,
        ScriptedRewards(score),
        lambda ids: "".join(map(str, ids)),
        chat=True,
        clock=lambda: now[0],
    )
    limited = replace(SAMPLING, timeout=0.5)
    lane = flight.lane(max_in_flight=2, grading=False)
    lane.launch(Group(0, 0, "0" * 16, 0), tasks(1)[0], [(1,), (2,)], limited)
    while lane.open:
        flight.advance()
    assert len(lane.requests) == 1
    take = sampler.step

    def slowly() -> Any:
        now[0] += 0.2
        return take()

    sampler.step = slowly  # type: ignore[method-assign]
    lane = flight.lane(max_in_flight=1)
    for n in range(6):
        lane.launch(Group(n, n, "0" * 16, 0), tasks(1)[0], [(n,)], limited)
    while lane.open:
        flight.advance()
    assert cancelled == []


def test_equal_tasks_sample_different_replies() -> None:
    from nbtrain.training.start_checks import view_tasks

    rows = [TaskView("a" * 16, (1,), "same", {}), TaskView("b" * 16, (1,), "other", {})] * 2
    views, problems = view_tasks(rows, lambda prompt: (1, 2), max_context=64, side="training")
    assert problems == []
    assert [view.occurrence for view in views] == [0, 0, 1, 1]
    assert len({view.key for view in views}) == 4
    assert views[0].key == int("a" * 16, 16)


def test_slow_grades_hold_sampling_still() -> None:
    """At most 512 groups wait for their grades, however many a rollout has."""
    sampler = ScriptedSampler(random_script)
    rewards = ScriptedRewards(score)
    most = [0]
    take = rewards.finished

    def slowly(block: float | None = None) -> Any:
        most[0] = max(most[0], rewards.pending)
        return take() if sampler.pending == 0 else []

    rewards.finished = slowly  # type: ignore[method-assign]
    flight = Flight(sampler, rewards, lambda ids: "".join(map(str, ids)), chat=True)
    lane = flight.lane(max_in_flight=8)
    groups = [Group(n, n, "0" * 16, 0) for n in range(2000)]
    for n, group in enumerate(groups):
        lane.launch(group, tasks(1)[0], [(n,)], SAMPLING)
    while lane.open:
        flight.advance()
    assert most[0] <= 512 + 8
    assert all(len(group.trajectories) == 1 for group in groups)


def test_replies_cut_by_length_keep_their_grade_and_are_left_out() -> None:
    collect, _ = collector(
        script=lambda r: ([r.stream[-1] % 2], Finish.LENGTH if r.stream[-1] == 0 else Finish.STOP),
        reward=lambda text: float(int(text)),
    )
    judged = collect.collect(1).groups[0]
    first = judged.group.trajectories[0]
    assert first.reason is TerminationReason.TRUNCATION
    assert first.reward == 0.0
    assert not judged.admissions[0].eligible


def test_an_excluded_trajectory_equals_one_never_sampled() -> None:
    """The advantages of the others are those of the smaller group."""
    from nbtrain.rollout.admission import advantages

    def script(request: SampleRequest) -> tuple[list[int], Finish]:
        sample = request.stream[-1]
        return [sample], Finish.LENGTH if sample == 0 else Finish.STOP

    collect, _ = collector(script=script, reward=lambda text: int(text) / 3)
    judged = collect.collect(1).groups[0]
    assert judged.advantages == [0.0, *advantages([1 / 3, 2 / 3, 1.0])]
