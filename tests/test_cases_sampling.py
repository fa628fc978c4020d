"""Troubles that people had elsewhere with what is sampled, and with waiting for it.

Held by the tests of their parts as well:

GN-01  test_tokens::test_end_ids_are_those_of_the_generation_config_and_the_tokenizer,
       sampler_contract::test_every_end_id_stops_a_reply_and_is_its_last_token
GN-02  test_update::test_the_first_ratio_is_exactly_one (a fresh policy, at any temperature)
GN-04  sampler_contract::test_ids_depend_on_stream_and_policy_alone
PR-07  test_collector::test_the_batch_timeout_trains_on_what_is_there
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chain_model import AFTER_LAST, chain_policy
from judged import tiny_policy
from scripted import ScriptedRewards, ScriptedSampler
from test_cases import refusals
from tiny_models import EOS, PAD, byte_tokenizer, tiny_model

from nbtrain.rewards import GroupGrades
from nbtrain.rollout.admission import Admission, AdmissionRules, GroupOutcome, GroupVerdict
from nbtrain.rollout.collector import Collector, CollectorSettings, JudgedGroup
from nbtrain.rollout.flight import Flight
from nbtrain.rollout.generate import GenerateSampler
from nbtrain.rollout.ledger import Ledger
from nbtrain.rollout.limits import Sampling
from nbtrain.rollout.ragged import RaggedSampler
from nbtrain.rollout.tokens import decode_completion, end_ids, render_prompt
from nbtrain.rollout.types import (
    Finish,
    Group,
    Sample,
    SampleRequest,
    TaskView,
    TerminationReason,
    Trajectory,
)
from nbtrain.training.packing import Layout
from nbtrain.training.policy import Policy
from nbtrain.training.update import Updater, UpdateSettings

CASES = Path(__file__).parent / "cases"
SAMPLING = Sampling(max_new_tokens=24, max_trajectory_tokens=64, max_context=64)
SAMPLERS = pytest.mark.parametrize("kind", [RaggedSampler, GenerateSampler])
TOKEN = UpdateSettings("token", 0.2, 0.2, 0.0, 1.0, 1.0)


def sampled(sampler: Any, starts: Iterable[int], sampling: Sampling = SAMPLING) -> list[Trajectory]:
    """A trajectory behind each prompt, all decoded beside each other, none graded."""
    flight = Flight(sampler, ScriptedRewards(lambda text: 1.0), lambda ids: str(ids), chat=True)
    lane = flight.lane(max_in_flight=100, grading=False)
    groups = []
    for number, start in enumerate(starts, 1):
        view = TaskView(f"{number:016x}", (1, start), "", {})
        groups.append(Group(number, number, view.task_id, 0))
        lane.launch(groups[-1], view, [(number,)], sampling)
    while lane.open:
        flight.advance()
    trajectories = [group.trajectories[0] for group in groups]
    for number, trajectory in enumerate(trajectories):
        trajectory.trajectory_id, trajectory.reward = number, 1.0
    return trajectories


def trained(trajectories: Sequence[Trajectory]) -> list[JudgedGroup]:
    """Each in a group of its own, with an advantage of 1."""
    return [
        JudgedGroup(
            Group(t.group_id, 0, "", 0, [t]),
            [Admission(True, 1.0, "")],
            GroupVerdict(True, None, "", False, False, False),
            [1.0],
            GroupOutcome.USED,
            "",
        )
        for t in trajectories
    ]


# --- ends, lengths and masks ----------------------------------------------------------------------


@SAMPLERS
def test_gn01_every_declared_end_id_ends_a_reply_and_nothing_after_it_trains(
    kind: Any, tmp_path: Path
) -> None:
    policy = chain_policy(tmp_path, CASES / "generation_config.json")
    ends = end_ids(policy.model.generation_config, SimpleNamespace(eos_token_id=9))
    assert ends == (7, 9)
    sampler = kind(policy.model, slots=4, eos_ids=ends, pad_id=0, max_context=64)
    first, second, cut = found = sampled(sampler, [3, 30, 10], replace(SAMPLING, max_new_tokens=6))
    assert (first.token_ids, first.reason) == ([4, 5, 6, 7], TerminationReason.ENV_DONE)
    assert (second.token_ids, second.reason) == ([31, 9], TerminationReason.ENV_DONE)
    assert (cut.token_ids, cut.reason) == (list(range(11, 17)), TerminationReason.TRUNCATION)
    shown = SimpleNamespace(decode=lambda ids, **_: ids)
    assert decode_completion(shown, first.token_ids, ends) == [4, 5, 6]
    report = Updater(policy, TOKEN, weight_decay=0.0).update(trained(found), 1e-3, version=0)
    assert report.metrics["trained_tokens"] == 4 + 2 + 6


class Lengths(Updater):
    """Remembers how long the loss takes each trajectory to be."""

    seen: list[int]

    def _loss(self, part: Any, *rest: Any) -> Any:
        parts = super()._loss(part, *rest)
        self.seen += part.lengths.tolist()
        assert len(part.segments) == sum(part.lengths)
        return parts


@SAMPLERS
@pytest.mark.parametrize("layout", [Layout(), Layout(packed_tokens=0), Layout(row_tokens=0)])
def test_gn07_masks_come_from_lengths_when_pad_is_the_end_token(
    kind: Any, layout: Layout, tmp_path: Path
) -> None:
    policy = chain_policy(tmp_path)
    sampler = kind(policy.model, slots=4, eos_ids=[AFTER_LAST], pad_id=AFTER_LAST, max_context=64)
    assert policy.packs
    found = sampled(sampler, [29, 25, 12])
    assert [len(t.token_ids) for t in found] == [3, 7, 20]
    assert [t.token_ids.count(AFTER_LAST) for t in found] == [1, 1, 1]
    updater = Lengths(policy, replace(TOKEN, layout=layout), weight_decay=0.0)
    updater.seen = []
    report = updater.update(trained(found), 1e-3, version=0)
    assert sorted(updater.seen) == [3, 7, 20]
    assert report.metrics["trained_tokens"] == 30
    assert report.loss == pytest.approx(-1.0)  # no row's mean is diluted by another's length


def test_gn05_lengths_are_counted_before_anything_is_left_out() -> None:
    def script(request: SampleRequest) -> tuple[list[int], Finish]:
        sample = request.stream[-1]
        if sample % 2:
            return [5] * 8, Finish.LENGTH
        return [5] * (3 + sample), Finish.STOP

    flight = Flight(
        ScriptedSampler(script), ScriptedRewards(lambda text: len(text) / 99), str, chat=True
    )
    view = TaskView("0" * 16, (1, 2), "", {})
    settings = CollectorSettings(1, 4, 9, 60.0, 1, AdmissionRules(2), SAMPLING)
    batch = Collector([view], flight, settings).collect(1)
    metrics = Ledger().step(batch, started=1, in_flight=0)["metrics"]
    assert [metrics[f"tokens_{part}"] for part in ("min", "mean", "max")] == [3, 6.0, 8]
    assert [metrics[f"finished_tokens_{part}"] for part in ("min", "mean", "max")] == [3, 4.0, 5]
    assert metrics["termination_reasons"] == {"ENV_DONE": 2, "TRUNCATION": 2}
    assert (metrics["completed_trajectories"], metrics["eligible_trajectories"]) == (4, 2)


# --- temperature, padding, stop rules -------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return tiny_policy(tmp_path_factory.mktemp("model"), dtype=torch.float32)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
def test_gn02_both_sides_of_the_ratio_have_the_same_temperature(
    policy: Policy, temperature: float
) -> None:
    """Tokens of an older version with the same weights: their ratio is measured, and it is 1."""
    sampler = RaggedSampler(policy.model, slots=8, eos_ids=[EOS], pad_id=PAD, max_context=64)
    found = sampled(sampler, range(20, 28), replace(SAMPLING, temperature=temperature))

    def ratios(of: float) -> tuple[float, float]:
        before = policy.adapter_state()
        updater = Updater(policy, replace(TOKEN, temperature=of), weight_decay=0.0)
        report = updater.update(trained(found), 1e-3, version=1)
        policy.load_adapter_state(before)
        assert report.metrics["stale_token_share"] == 1.0
        return report.metrics["ratio_mean"], report.metrics["ratio_max"]

    assert ratios(temperature) == pytest.approx((1, 1), abs=0.01)
    # the mean alone shows little: a ratio's expectation under the sampling policy is always 1
    assert ratios(temperature * 1.5)[1] > 1.1


@SAMPLERS
def test_gn04_a_greedy_reply_is_the_same_alone_and_beside_a_longer_prompt(kind: Any) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = "right"
    model = tiny_model("llama")
    prompts = [render_prompt(tokenizer, text, raw=True) for text in ("ab", "a long prompt " * 3)]
    assert [len(prompt) for prompt in prompts] == [2, 42]

    def replies(*numbers: int) -> list[list[int]]:
        sampler = kind(model, slots=4, eos_ids=[EOS], pad_id=PAD, max_context=128)
        sampler.submit([SampleRequest(n, prompts[n], 16, (n,), temperature=0.0) for n in numbers])
        done: dict[int, Sample] = {}
        while sampler.pending:
            done |= {sample.request_id: sample for sample in sampler.step()}
        return [done[n].token_ids for n in numbers]

    assert replies(0, 1) == [*replies(0), *replies(1)]
    assert tokenizer.padding_side == "right"


def test_gn08_stop_rules_that_are_not_there_are_refused_by_name(home: Path) -> None:
    """End ids alone stop a reply; what a reward reads is the whole text, across its tokens."""
    told = refusals("stop: ['</answer>']\nstop_strings: ['</answer>']\nstop_token_ids: [7]")
    assert [line.split(" (")[0] for line in told] == [
        f"there is no option {name}" for name in ("stop", "stop_strings", "stop_token_ids")
    ]
    tokenizer = byte_tokenizer()
    pieces = [tokenizer(piece)["input_ids"] for piece in ("</ans", "wer>", " more")]
    seen: list[str] = []

    def read(text: str) -> float:
        seen.append(text)
        return 1.0

    def script(request: SampleRequest) -> tuple[list[int], Finish]:
        return [*chain(*pieces[: 2 + request.stream[-1]]), EOS], Finish.STOP

    flight = Flight(
        ScriptedSampler(script),
        ScriptedRewards(read),
        lambda ids: decode_completion(tokenizer, ids, [EOS]),
        chat=True,
    )
    lane = flight.lane(max_in_flight=2)
    view = TaskView("0" * 16, (1, 2), "", {})
    lane.launch(Group(1, 0, view.task_id, 0), view, [(0,), (1,)], SAMPLING)
    while lane.open:
        flight.advance()
    assert seen == ["</answer>", "</answer> more"]


# --- a trajectory that is lost --------------------------------------------------------------------


class LosesOne(ScriptedSampler):
    """Every step takes a second; no request from number ``lost`` on ever comes back."""

    def __init__(self, now: list[float], lost: int, *, admits: bool) -> None:
        super().__init__(lambda r: ([r.stream[-1] % 2], Finish.STOP), burst=8)
        self._now = now
        self._lost = lost
        self.lost_until: int | None = None
        self._admits = admits

    def step(self) -> list[Sample]:
        self._now[0] += 1.0
        held = [r for r in self._queue if r.request_id in self._gone()]
        self._queue = [r for r in self._queue if r not in held]
        done = super().step()
        self._queue += held
        return done

    def admitted(self) -> list[int]:
        return [n for n in super().admitted() if self._admits or n not in self._gone()]

    def _gone(self) -> set[int]:
        return {request.request_id for request in self.requests[self._lost : self.lost_until]}


class LosesGrades(ScriptedRewards):
    """Grades of the first group come, and no others."""

    def __init__(self, now: list[float]) -> None:
        super().__init__(float)
        self._now = now
        self._taken: list[Any] = []

    def finished(self, block: float | None = None) -> list[tuple[Any, GroupGrades]]:
        self._now[0] += 0.5
        if self._taken:
            return []
        self._taken = super().finished(block)
        return self._taken


def waiting(now: list[float], sampler: ScriptedSampler, rewards: Any, staleness: int) -> Collector:
    views = [TaskView(f"{n:016x}", (n + 1, 2), "", {}) for n in range(2)]
    flight = Flight(
        sampler, rewards, lambda ids: "".join(map(str, ids)), chat=True, clock=lambda: now[0]
    )
    settings = CollectorSettings(
        *(2, 4, 8, 10.0, 1, AdmissionRules(2)),
        replace(SAMPLING, timeout=5.0),
        max_staleness=staleness,
    )
    return Collector(views, flight, settings, clock=lambda: now[0])


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("lost", ["in the queue", "in grading"])
def test_pr07_a_lost_trajectory_ends_the_wait_and_is_named(lost: str, staleness: int) -> None:
    now = [0.0]
    sampler = (
        LosesOne(now, 7, admits=False)
        if lost == "in the queue"
        else ScriptedSampler(lambda r: ([r.stream[-1] % 2], Finish.STOP), burst=8)
    )
    rewards = LosesGrades(now) if lost == "in grading" else ScriptedRewards(float)
    batch = waiting(now, sampler, rewards, staleness).collect(1)
    assert [judged.group.group_id for judged in batch.used] == [1]
    assert str(batch.cut_short).startswith(
        "batch_timeout_seconds (10) passed with 1 of 2 eligible groups; "
        "not complete: group 2 (task 000000000000)"
    )
    assert len(batch.cancelled) == (0 if staleness else 1)
    assert 10 < now[0] < 14


def test_pr07_what_runs_ahead_does_not_wait_for_a_lost_trajectory() -> None:
    now = [0.0]
    sampler = LosesOne(now, 7, admits=False)
    sampler.lost_until = 8
    batch = waiting(now, sampler, ScriptedRewards(float), 2).collect(1)
    assert batch.cut_short is None
    assert [judged.group.group_id for judged in batch.used] == [1, 3]
    assert now[0] < 10


def test_pr07_a_lost_trajectory_that_runs_ends_by_its_own_time_limit() -> None:
    now = [0.0]
    rewards = ScriptedRewards(lambda text: float(text or 0))
    batch = waiting(now, LosesOne(now, 7, admits=True), rewards, 0).collect(1)
    assert batch.cut_short is None
    assert len(batch.used) == 2
    reasons = [str(t.reason) for judged in batch.used for t in judged.group.trajectories]
    assert sorted(reasons) == ["ENV_DONE"] * 7 + ["TIMEOUT"]
    assert sum(a.eligible for judged in batch.used for a in judged.admissions) == 7
    assert 5 < now[0] < 9
