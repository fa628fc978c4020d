"""The loop in process, with a real model and sampler: exact state, endings, what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import ScriptedRewards
from tiny_models import tiny_model

from nbtrain.rollout.admission import AdmissionRules
from nbtrain.rollout.collector import Collector, CollectorSettings
from nbtrain.rollout.flight import Flight
from nbtrain.rollout.limits import Sampling
from nbtrain.rollout.ragged import RaggedSampler
from nbtrain.rollout.types import TaskView
from nbtrain.training.history import AdapterHistory
from nbtrain.training.loop import Loop, LoopSettings, LoopState
from nbtrain.training.policy import Policy
from nbtrain.training.update import Updater, UpdateSettings
from nbtrain.training.validation import ValidationSettings, Validator

EMBEDDED = Path(__file__).parent.parent / "nbtrain" / "catalog" / "embedded" / "tiny"
SAMPLING = Sampling(max_new_tokens=6, max_trajectory_tokens=32, max_context=32)


class Records:
    """Keeps what a loop records."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.rounds: list[dict[str, Any]] = []
        self.saved: list[tuple[int, str, LoopState]] = []

    def step(self, row: Any, groups: Any, trajectories: Any, changes: Any) -> None:
        self.steps.append(row)
        self._apply(changes)

    def closing(self, step: int, trajectories: Any, changes: Any) -> None:
        self._apply(changes)

    def _apply(self, changes: Any) -> None:
        for step, values in changes.steps.items():
            row = next(row for row in self.steps if row["step"] == step)
            metrics = row["metrics"] | values["metrics"]
            row |= values | {"metrics": metrics}

    def validation(self, row: Any, trajectories: Any) -> None:
        self.rounds.append(row)

    def checkpoint(self, step: int, reason: str, state: LoopState) -> None:
        self.saved.append((step, reason, state))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    return folder


def length(text: str) -> float | None:
    """Longer replies with an even id are better: real contrast within every group."""
    return sum(int(part) % 2 for part in text.split()) / 6


def tasks(count: int, first: int = 0) -> list[TaskView]:
    return [
        TaskView(f"{n:016x}", (10 + n % 40, 11, 12), f"task {n}", {})
        for n in range(first, first + count)
    ]


def make_loop(
    folder: Path,
    *,
    total: int = 6,
    start: int = 0,
    reward: Any = length,
    slots: int = 64,
    dtype: torch.dtype = torch.float32,
    staleness: int = 0,
    **changes: Any,
) -> tuple[Loop, Records]:
    policy = Policy.load(
        folder,
        precision="fp32",
        lora_rank=4,
        lora_alpha=8,
        target_modules="default",
        seed=7,
        device=torch.device("cpu"),
    )
    policy.model.to(dtype)
    sampler = RaggedSampler(policy.model, slots=slots, eos_ids=range(100), pad_id=0, max_context=32)
    flight = Flight(
        sampler, ScriptedRewards(reward), lambda ids: " ".join(map(str, ids)), chat=False
    )
    rules = AdmissionRules(2, train_on_truncation=False)
    collector = Collector(
        tasks(9),
        flight,
        CollectorSettings(
            3,
            4,
            slots,
            1e9,
            7,
            changes.pop("rules", rules),
            SAMPLING,
            max_staleness=staleness,
        ),
    )
    history = AdapterHistory(policy.trainable, staleness + 1) if staleness else None
    held_out = ValidationSettings(4, 2, 8, 7, SAMPLING)
    records = Records()
    settings = LoopSettings(
        start_step=start,
        total_steps=total,
        learning_rate=1e-2,
        lr_warmup_steps=2,
        lr_hold_steps=2,
        lr_min_ratio=0.1,
        val_enabled=True,
        val_interval=changes.pop("val_interval", 2),
        checkpoint_interval=2,
    )
    loop = Loop(
        settings,
        policy=policy,
        updater=Updater(
            policy,
            UpdateSettings("sequence", 3e-4, 4e-4, 0.0, 1.0, 1.0),
            weight_decay=0.01,
            history=history,
        ),
        collector=collector,
        validator=Validator(tasks(5, 100), flight, held_out),
        recorder=records,
        tasks=tasks(9),
    )
    return loop, records


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def through_json(state: LoopState) -> LoopState:
    return LoopState(json.loads(json.dumps(state.plain)), state.adapter, state.optimizer)


def test_the_whole_state_round_trips_at_every_step(model_folder: Path) -> None:
    """A fresh loop that loads the state after step k ends as the straight one, bit for bit."""
    straight, _ = make_loop(model_folder)
    states = [straight.state_dict()]
    for _ in range(6):
        straight.advance()
        states.append(straight.state_dict())
    assert not same(states[0].adapter, states[-1].adapter)
    for at in range(6):
        other, _ = make_loop(model_folder)
        other.load_state_dict(through_json(states[at]))
        assert same(other.state_dict().adapter, states[at].adapter)
        other.advance()
        after = other.state_dict()
        assert same(after.adapter, states[at + 1].adapter), at
        assert same(after.optimizer, states[at + 1].optimizer), at
        assert after.plain == states[at + 1].plain


def test_a_run_records_its_rounds_checkpoints_and_steps(model_folder: Path) -> None:
    loop, records = make_loop(model_folder, total=5)
    ending = loop.run()
    assert (ending.failure, ending.ended) == (None, None)
    assert [row["step"] for row in records.steps] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in records.rounds] == [0, 2, 4, 5]
    assert [(s, r) for s, r, _ in records.saved] == [
        (0, "start"),
        (2, "interval"),
        (4, "interval"),
        (5, "final"),
    ]
    assert all(row["round_completed"] for row in records.rounds)
    assert [row["policy_version"] for row in records.rounds] == [0, 2, 4, 5]
    rates = [row["learning_rate"] for row in records.steps]
    assert rates[:4] == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2])
    assert rates[4] == pytest.approx(1e-3)
    for row in records.steps:
        assert row["update_applied"]
        assert row["metrics"]["ratio_max"] == 1.0
        assert row["metrics"]["clipped_share"] == 0.0
        assert row["metrics"]["sampler_gap"] < 1e-5


@pytest.mark.parametrize("embedded", [False, True])
def test_the_sampled_ids_do_not_depend_on_concurrency(model_folder: Path, embedded: bool) -> None:
    folder = EMBEDDED if embedded else model_folder

    def first_step(slots: int) -> dict[str, Any]:
        loop, records = make_loop(folder, slots=slots, dtype=torch.float64)
        loop.advance()
        return loop.state_dict().adapter | {"reward": torch.tensor(records.steps[0]["avg_reward"])}

    results = [first_step(slots) for slots in (2, 5, 64)]
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@pytest.mark.parametrize("interval", [1, 2, 7])
def test_nothing_left_to_learn_ends_the_run(model_folder: Path, interval: int) -> None:
    """Signal for two steps, then ties: five barren steps end it, COMPLETED, with a checkpoint.

    The final policy is validated, whatever the interval.
    """
    calls = [0]

    def fades(text: str) -> float | None:
        calls[0] += 1
        return length(text) if calls[0] < 40 else 0.0

    loop, records = make_loop(model_folder, total=50, reward=fades, val_interval=interval)
    ending = loop.run()
    assert ending.failure is None
    assert "nothing left to learn" in str(ending.ended)
    assert loop.updates > 0
    barren = records.steps[-5:]
    assert all(not row["update_applied"] for row in barren)
    assert all("full pass" in row["skip_reason"] for row in barren)
    assert records.saved[-1][1] == "final"
    assert records.rounds[-1]["step"] == records.saved[-1][0]


def test_a_run_that_never_updates_fails(model_folder: Path) -> None:
    loop, records = make_loop(model_folder, total=50, reward=lambda text: 0.0)
    before = loop.state_dict()
    ending = loop.run()
    assert "no update was ever applied" in str(ending.failure)
    assert "9 with identical rewards" in str(ending.failure)
    assert len(records.steps) == 5
    assert same(before.adapter, loop.state_dict().adapter)


def test_a_skipped_update_moves_no_weight_but_the_schedule(model_folder: Path) -> None:
    """Tied groups are admitted here: no gradient, so no decay and no momentum either."""
    rules = AdmissionRules(2, True, True, True, True, True, True)
    scores = [length]
    loop, records = make_loop(model_folder, rules=rules, reward=lambda text: scores[0](text))
    loop.advance()
    before = loop.state_dict()
    scores[0] = lambda text: 0.0
    loop.advance()
    after = loop.state_dict()
    assert same(before.adapter, after.adapter)
    assert same(before.optimizer, after.optimizer)
    assert [row["update_applied"] for row in records.steps] == [True, False]
    assert "every advantage is 0" in records.steps[1]["skip_reason"]
    assert records.steps[1]["learning_rate"] == pytest.approx(1e-2)
    assert loop.version == 1


def test_missing_grades_are_never_zero(model_folder: Path) -> None:
    loop, records = make_loop(model_folder, reward=lambda text: None, total=1)
    ending = loop.run()
    row = records.steps[0]
    assert row["avg_reward"] is None
    assert row["metrics"]["graded_trajectories"] == 0
    # eight groups without a grade say it; they come in waves of three
    assert row["too_small_groups"] == row["completed_groups"] == 9
    assert "32 of 32 trajectories were not graded" in str(ending.failure)


def adds_up(rows: list[dict[str, Any]]) -> None:
    over = 0
    for row in rows:
        places = ("used", "filtered", "too_small", "discarded", "pending")
        placed = sum(row[f"{place}_groups"] for place in places)
        assert placed + row["metrics"]["no_signal_not_trained"] == row["completed_groups"]
        over += row["completed_groups"] + row["cancelled_groups"]
    assert rows[-1]["started_groups"] == rows[-1]["in_flight_groups"] + over


def test_a_run_ahead_of_training_adds_up_and_leaves_nothing_open(model_folder: Path) -> None:
    loop, records = make_loop(model_folder, total=12, staleness=2, slots=24)
    ending = loop.run()
    assert (ending.failure, ending.ended) == (None, None)
    adds_up(records.steps)
    assert all(row["settled"] for row in records.steps)
    assert records.steps[-1]["in_flight_groups"] == 0
    lags = [row["metrics"]["lag_max"] for row in records.steps]
    assert max(lags) > 0, "something was sampled by an older policy"
    assert max(lags) <= 2 + 1, "a trajectory of several tokens may span one update more"
    assert all(round["round_completed"] for round in records.rounds)


def test_a_run_ahead_of_training_goes_on_from_any_step(model_folder: Path) -> None:
    """Not bit for bit: unfinished trajectories start again; but all there was is there."""
    straight, _ = make_loop(model_folder, total=8, staleness=2, slots=24)
    for step in range(1, 6):
        straight.advance()
        state = through_json(straight.state_dict())
        other, records = make_loop(model_folder, total=8, start=step, staleness=2, slots=24)
        other.load_state_dict(state)
        again = other.state_dict()
        assert same(again.adapter, state.adapter)
        assert same(again.optimizer, state.optimizer), "older policies' adapters among them"
        ending = other.run()
        assert ending.failure is None
        assert [row["step"] for row in records.steps] == list(range(step + 1, 9))
        adds_up(records.steps)


def test_a_budget_ends_a_run_with_a_checkpoint(model_folder: Path) -> None:
    loop, records = make_loop(model_folder, total=50)
    loop._collector._flight.budgets.max_trajectories = 60
    ending = loop.run()
    assert ending.failure is None
    assert "max_total_trajectories (60) was reached after step" in str(ending.ended)
    assert records.saved[-1][:2] == (loop.step, "final")
    adds_up(records.steps)
