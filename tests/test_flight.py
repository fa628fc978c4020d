"""Trajectories of several turns in flight: what becomes part of them, and why they end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted import ScriptedRewards, ScriptedSampler
from test_collector import tasks

from nbtrain.rewards import Grade, GradeRequest, GroupGrades
from nbtrain.rollout.flight import Flight
from nbtrain.rollout.limits import Sampling
from nbtrain.rollout.types import (
    EnvironmentEvent,
    EnvironmentEventKind,
    Finish,
    Group,
    SampleRequest,
    TerminationReason,
    Trajectory,
)

SAMPLING = Sampling(max_new_tokens=8, max_trajectory_tokens=100, max_context=100, max_turns=50)
SEEN = (91, 92)


class Countdown:
    """An environment in process: it says something for ``says`` turns, then it is done."""

    def __init__(self, says: int = 1, fail: str | None = None, seconds: float = 1.0) -> None:
        self._says = says
        self._fail = fail
        self._seconds = seconds
        self._events: list[EnvironmentEvent] = []
        self.left: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        self.limits: list[float] = []

    def open(self, key: int, columns: Mapping[str, Any]) -> None:
        self.calls.append(("open", key))
        self.left[key] = self._says
        self._say(key, EnvironmentEventKind.OPENED, text="!", seconds=99.0)

    def act(self, key: int, reply: Mapping[str, Any], *, limit: float) -> None:
        self.calls.append(("act", key))
        self.limits.append(limit)
        if self._fail is not None:
            timed_out = self._fail == "timeout"
            failed = EnvironmentEventKind.FAILED
            self._say(key, failed, error=f"it failed: {self._fail}", timed_out=timed_out)
            return
        self.left[key] -= 1
        done = self.left[key] < 0
        said = () if done else ({"role": "tool", "content": "seen"},)
        self._say(key, EnvironmentEventKind.OBSERVED, messages=said, done=done)

    def close(self, key: int) -> None:
        self.calls.append(("close", key))
        self._say(key, EnvironmentEventKind.CLOSED, state={"left": self.left.pop(key)})

    def drop(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.calls.append(("drop", key))
            self.left.pop(key, None)
            self._events = [event for event in self._events if event.key != key]

    def events(self, block: float = 0.0) -> list[EnvironmentEvent]:
        new, self._events = self._events, []
        return new

    def _say(self, key: int, kind: EnvironmentEventKind, **more: Any) -> None:
        self._events.append(EnvironmentEvent(key, kind, **({"seconds": self._seconds} | more)))


class Talk:
    """A conversation without a tokenizer."""

    def prompt(self, prompt: Any, addition: str | None) -> tuple[int, ...]:
        return (1, 2, 3) if addition else (1, 2)

    def reply(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"role": "assistant", "content": " ".join(map(str, token_ids))}

    def observation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        assert messages
        return list(SEEN)


class Grader(ScriptedRewards):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(lambda text: 1.0)
        self.requests: list[GradeRequest] = []
        self.limits: list[float | None] = []

    def submit(self, key: Any, request: GradeRequest, *, limit: float | None = None) -> None:
        self.requests.append(request)
        self.limits.append(limit)
        super().submit(key, request, limit=limit)


def play(
    environment: Countdown,
    *,
    script: Any = lambda request: ([5, 6], Finish.STOP),
    sampling: Sampling = SAMPLING,
    size: int = 1,
    clock: Any = lambda: 0.0,
) -> tuple[list[Trajectory], Grader, ScriptedSampler]:
    sampler, grader = ScriptedSampler(script), Grader()
    flight = Flight(
        sampler,
        grader,
        lambda ids: " ".join(map(str, ids)),
        chat=True,
        environments=environment,
        conversation=Talk(),
        clock=clock,
    )
    lane = flight.lane(max_in_flight=64)
    group = Group(1, 0, "0" * 16, 0)
    lane.launch(group, tasks(1)[0], [(7, sample) for sample in range(size)], sampling)
    for _ in range(200):
        if not lane.open:
            break
        flight.advance()
    assert lane.take() == [group]
    assert environment.left == {}, "every environment is closed or dropped"
    assert lane.in_flight == 0
    return group.trajectories, grader, sampler


def test_sampled_ids_stay_and_what_the_environment_says_is_marked() -> None:
    (trajectory,), grader, sampler = play(Countdown(says=2))
    assert trajectory.prompt_ids == (1, 2, 3), "with what reset added"
    assert trajectory.token_ids == [5, 6, *SEEN, 5, 6, *SEEN, 5, 6]
    assert trajectory.observed == [(2, 4), (6, 8)]
    assert trajectory.versions == [0, 0, -1, -1, 0, 0, -1, -1, 0, 0]
    assert trajectory.logprobs == [-1.0, -1.0, 0.0, 0.0, -1.0, -1.0, 0.0, 0.0, -1.0, -1.0]
    assert trajectory.output_tokens == 6
    assert trajectory.started_version == 0
    assert (trajectory.turns, trajectory.reason) == (5, TerminationReason.ENV_DONE)
    assert [message["role"] for message in trajectory.messages or []] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [request.prompt_ids for request in sampler.requests] == [
        (1, 2, 3),
        (1, 2, 3, 5, 6, *SEEN),
        (1, 2, 3, 5, 6, *SEEN, 5, 6, *SEEN),
    ]
    assert [request.stream for request in sampler.requests] == [(7, 0), (7, 0, 1), (7, 0, 2)]
    (request,) = grader.requests
    assert request.environments == [{"left": -1}]
    assert request.completions == [trajectory.messages]


def test_every_trajectory_has_its_own_environment_and_streams() -> None:
    trajectories, _, sampler = play(Countdown(says=1), size=5)
    assert {t.turns for t in trajectories} == {3}
    assert len({request.stream for request in sampler.requests}) == 10


@pytest.mark.parametrize("turn", [0, 1])
def test_a_reply_cut_by_length_never_acts(turn: int) -> None:
    def script(request: SampleRequest) -> tuple[list[int], Finish]:
        last = len(request.stream) == 2 + turn
        return [5], Finish.LENGTH if last else Finish.STOP

    environment = Countdown(says=3)
    (trajectory,), _, _ = play(environment, script=script)
    assert trajectory.reason is TerminationReason.TRUNCATION
    assert [what for what, _ in environment.calls] == ["open", *["act"] * turn, "close"]
    assert trajectory.turns == 1 + 2 * turn


@pytest.mark.parametrize(
    ("changes", "reason", "replies"),
    [
        ({"max_turns": 1}, TerminationReason.MAX_TURNS, 1),
        ({"max_turns": 2}, TerminationReason.MAX_TURNS, 1),
        ({"max_turns": 3}, TerminationReason.MAX_TURNS, 2),
        ({"max_turns": 4}, TerminationReason.MAX_TURNS, 2),
        ({"max_trajectory_tokens": 4}, TerminationReason.LIMIT_REACHED, 2),
        ({"max_context": 7}, TerminationReason.TRUNCATION, 1),
        ({"max_context": 8}, TerminationReason.TRUNCATION, 2),
    ],
)
def test_limits_end_a_trajectory_that_would_go_on(
    changes: dict[str, int], reason: TerminationReason, replies: int
) -> None:
    def script(request: SampleRequest) -> tuple[list[int], Finish]:
        cut = request.max_new_tokens < 2
        return [5, 6][: request.max_new_tokens], Finish.LENGTH if cut else Finish.STOP

    (trajectory,), grader, _ = play(
        Countdown(says=9), script=script, sampling=replace(SAMPLING, **changes)
    )
    assert trajectory.reason is reason
    assert trajectory.turns <= changes.get("max_turns", 99)
    sampled = sum(message["role"] == "assistant" for message in trajectory.messages or [])
    assert sampled == replies
    # nothing was sampled behind the last observation, so it is not part of what trains
    assert not trajectory.observed or trajectory.observed[-1][1] < len(trajectory.token_ids)
    assert grader.requests[0].environments is not None


@pytest.mark.parametrize(
    ("fail", "reason"),
    [("raised", TerminationReason.ERROR), ("timeout", TerminationReason.TIMEOUT)],
)
def test_a_failed_environment_ends_its_trajectory_alone(
    fail: str, reason: TerminationReason
) -> None:
    class Once(Countdown):
        def act(self, key: int, reply: Mapping[str, Any], *, limit: float) -> None:
            self._fail = fail if key == min(k for _, k in self.calls) else None
            super().act(key, reply, limit=limit)
            if self._fail:
                del self.left[key]

    trajectories, _, _ = play(Once(says=1), size=3)
    assert [t.reason for t in trajectories] == [
        reason,
        TerminationReason.ENV_DONE,
        TerminationReason.ENV_DONE,
    ]
    assert trajectories[0].error is not None
    # an error earns no grade by chance; a time-out keeps what it earned
    assert (trajectories[0].reward is None) == (reason is TerminationReason.ERROR)
    assert [t.reward for t in trajectories[1:]] == [1.0, 1.0]


def test_the_clock_of_a_trajectory_runs_while_it_executes_alone() -> None:
    """Opening took 99 s and does not count; each answer of the environment took 1 s."""
    environment = Countdown(says=2, seconds=1.0)
    (trajectory,), grader, _ = play(environment, sampling=replace(SAMPLING, timeout=10.0))
    assert environment.limits == [10.0, 9.0, 8.0]
    assert trajectory.seconds == 3.0
    assert grader.limits == [7.0], "the seconds that are left for its grading"


def test_grading_over_the_trajectorys_own_limit_is_a_time_out() -> None:
    class Late(Grader):
        def finished(self, block: float | None = None) -> list[tuple[Any, GroupGrades]]:
            return [
                (key, GroupGrades(tuple(Grade(None, {}, "late", "timeout") for _ in grades)))
                for key, grades in super().finished(block)
            ]

    for timeout, reason in ((9.0, TerminationReason.TIMEOUT), (99.0, TerminationReason.ERROR)):
        sampler = ScriptedSampler(lambda request: ([5], Finish.STOP))
        flight = Flight(sampler, Late(), lambda ids: "", chat=True, clock=lambda: 0.0)
        lane = flight.lane(max_in_flight=4)
        group = Group(1, 0, "0" * 16, 0)
        lane.launch(group, tasks(1)[0], [(0,), (1,)], replace(SAMPLING, timeout=timeout))
        while lane.open:
            flight.advance()
        assert {t.reason for t in group.trajectories} == {reason}


def test_a_timed_out_trajectory_does_not_take_the_others_time_for_grading() -> None:
    class Hangs(Countdown):
        def act(self, key: int, reply: Mapping[str, Any], *, limit: float) -> None:
            first = key == min(k for _, k in self.calls)
            self._fail, self._seconds = ("timeout", limit) if first else (None, 1.0)
            super().act(key, reply, limit=limit)
            if first:
                del self.left[key]

    sampling = replace(SAMPLING, timeout=10.0)
    trajectories, grader, _ = play(Hangs(says=0), size=3, sampling=sampling)
    over, done = TerminationReason.TIMEOUT, TerminationReason.ENV_DONE
    assert [t.reason for t in trajectories] == [over, done, done]
    assert grader.limits == [9.0]


def test_abandoning_drops_environments_and_keeps_what_was_sampled() -> None:
    environment = Countdown(says=100)
    sampler = ScriptedSampler(lambda request: ([5, 6], Finish.STOP))
    flight = Flight(
        sampler,
        Grader(),
        lambda ids: "",
        chat=True,
        environments=environment,
        conversation=Talk(),
        clock=lambda: 0.0,
    )
    lane = flight.lane(max_in_flight=2)
    group = Group(1, 0, "0" * 16, 0)
    lane.launch(group, tasks(1)[0], [(0,), (1,), (2,)], SAMPLING)
    for _ in range(6):
        flight.advance()
    assert lane.abandon() == [group]
    assert environment.left == {}
    assert (sampler.pending, lane.in_flight, len(lane.open), len(lane.waiting)) == (0, 0, 0, 0)
    assert {t.reason for t in group.trajectories} == {TerminationReason.CANCELLED}
    assert group.trajectories[0].token_ids[:2] == [5, 6]
    assert group.trajectories[2].token_ids == []


def test_no_clock_runs_while_nothing_is_decoded() -> None:
    """An update of 20 s between two rounds is not execution."""
    now = [0.0]

    class Slow(ScriptedSampler):
        def step(self) -> Any:
            now[0] += 0.5
            return super().step() if now[0] > 21 else []

    sampler = Slow(lambda request: ([5], Finish.STOP))
    flight = Flight(sampler, Grader(), lambda ids: "", chat=True, clock=lambda: now[0])
    lane = flight.lane(max_in_flight=4)
    group = Group(1, 0, "0" * 16, 0)
    lane.launch(group, tasks(1)[0], [(0,)], replace(SAMPLING, timeout=10.0))
    flight.advance()
    now[0] += 20
    while lane.open:
        flight.advance()
    (trajectory,) = group.trajectories
    assert trajectory.reason is TerminationReason.ENV_DONE
    assert trajectory.seconds < 3


@pytest.mark.parametrize("where", ["reset", "step"])
def test_what_a_template_refuses_costs_one_trajectory(where: str) -> None:
    class Strict(Talk):
        calls = 0

        def prompt(self, prompt: Any, addition: str | None) -> tuple[int, ...]:
            if where == "reset" and addition:
                raise ValueError("no second user turn")
            return super().prompt(prompt, addition)

        def observation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
            Strict.calls += 1
            if where == "step" and Strict.calls == 1:
                raise TypeError("no lone surrogates")
            return super().observation(messages)

    environment = Countdown(says=1)
    sampler = ScriptedSampler(lambda request: ([5, 6], Finish.STOP))
    flight = Flight(
        sampler,
        Grader(),
        lambda ids: "",
        chat=True,
        environments=environment,
        conversation=Strict(),
        clock=lambda: 0.0,
    )
    lane = flight.lane(max_in_flight=4)
    group = Group(1, 0, "0" * 16, 0)
    lane.launch(group, tasks(1)[0], [(0,), (1,)], SAMPLING)
    while lane.open:
        flight.advance()
    assert environment.left == {}
    reasons = [t.reason for t in group.trajectories]
    assert reasons[0] is TerminationReason.ERROR
    assert "the chat template refuses" in str(group.trajectories[0].error)
    assert (reasons[1] is TerminationReason.ENV_DONE) == (where == "step")


def test_an_observation_beyond_the_context_is_not_even_tokenized() -> None:
    class Flood(Countdown):
        def _say(self, key: int, kind: EnvironmentEventKind, **more: Any) -> None:
            if more.get("messages"):
                more["messages"] = ({"role": "tool", "content": "x" * 100_000},)
            super()._say(key, kind, **more)

    (trajectory,), _, _ = play(Flood(says=3))
    assert trajectory.reason is TerminationReason.TRUNCATION
    assert "100,000 characters long" in str(trajectory.error)
    assert trajectory.token_ids == [5, 6]


def test_an_observation_that_fills_the_context_is_named() -> None:
    (trajectory,), _, _ = play(Countdown(says=3), sampling=replace(SAMPLING, max_context=7))
    assert trajectory.reason is TerminationReason.TRUNCATION
    assert trajectory.error == "what the environment said is 2 tokens long, the context is 7"
