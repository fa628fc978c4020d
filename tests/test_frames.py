"""The DataFrames of a run: columns, types, bounds."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import stored

from nbtrain.client import Client, Run, tables
from nbtrain.client.frames import frame


@pytest.fixture
def run(home: Path) -> Run:
    return stored.create(Client())


@pytest.fixture
def trained(run: Run) -> Run:
    stored.train(run)
    stored.validate(run, 0, 0.1)
    stored.save(run, 0)
    for number in range(1, 5):
        stored.step(run, number, number / 10, rewards=(0.0, 0.5, None), kl=0.01 * number)
        if number % 2 == 0:
            stored.validate(run, number, number / 5, complete=number != 4)
            stored.save(run, number, state=number == 4)
    return run


TABLES = ("metrics", "rewards", "groups", "validation", "trajectories", "checkpoints", "events")


@pytest.mark.parametrize("name", TABLES)
def test_an_empty_frame_has_its_columns(run: Run, trained: Run, name: str) -> None:
    empty = getattr(stored.create(Client(), "empty"), name)
    full = getattr(trained, name)
    assert isinstance(empty, pd.DataFrame)
    assert set(empty.columns) <= set(full.columns)
    if name != "metrics":
        assert list(empty.columns) == list(full.columns)
    assert name == "events" or len(empty) == 0


def test_rewards(trained: Run) -> None:
    assert list(trained.rewards.columns) == ["step", "avg_reward", "used_reward"]
    assert trained.rewards["avg_reward"].tolist() == [0.1, 0.2, 0.3, 0.4]


def test_groups_add_up(trained: Run) -> None:
    groups = trained.groups
    parts = ["used", "no_signal", "filtered", "too_small", "discarded", "pending"]
    total = groups[[f"{part}_groups" for part in parts]].sum(axis=1)
    assert (total == groups["completed_groups"]).all()
    assert groups["settled"].all()


def test_every_group_is_a_row_with_its_budget(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.train(run)
    for number in range(1, 4):
        groups = [{"group_id": 2 * number + n, "budget": 64 << n} for n in (0, 1)]
        stored.writer(run).commit_step({"step": number}, groups)
    assert run.sampled_groups()["group_id"].tolist() == [2, 3, 4, 5, 6, 7]
    assert run.sampled_groups(2)["budget"].tolist() == [64, 128]
    monkeypatch.setattr(tables, "NEWEST", 3)
    newest = run.sampled_groups()
    assert (newest["group_id"].tolist(), newest.attrs["left_off"]) == ([5, 6, 7], 3)


def test_metrics_have_a_column_for_every_figure_of_the_ledger(trained: Run) -> None:
    stored.step(trained, 5, correct=3, turns_mean=1.5)
    metrics = trained.metrics
    assert set(tables.LEDGER_FIGURES) <= set(metrics.columns)
    assert metrics["stale_trajectories"].dtype == "float64"
    assert metrics["correct"].tolist()[-1] == 3
    assert metrics.columns.is_unique


def test_validation(trained: Run) -> None:
    rounds = trained.validation
    assert rounds["step"].tolist() == [0, 2, 4]
    assert rounds["round_completed"].tolist() == [True, True, False]
    assert rounds["completed_samples"].tolist() == [50, 50, 20]


def test_metrics_hold_every_figure(trained: Run) -> None:
    metrics = trained.metrics
    assert metrics["kl"].tolist() == [0.01, 0.02, 0.03, 0.04]
    assert metrics["loss"].dtype == "float64"
    assert str(metrics["created_at"].dtype).startswith("datetime64[")


def test_what_was_not_finite_is_nan_and_named(run: Run) -> None:
    stored.train(run)
    for number, loss in enumerate((0.1, float("nan"), float("inf"), float("-inf"), 0.2), 1):
        stored.step(run, number, loss=loss)
    metrics = run.metrics
    assert metrics["loss"].isna().tolist() == [False, True, True, True, False]
    assert metrics["nonfinite"].tolist()[1:4] == [["loss"]] * 3
    assert metrics["loss"].dtype == "float64"


def test_a_column_of_nothing_is_still_a_column_of_numbers(run: Run) -> None:
    stored.train(run)
    stored.step(run, 1, None, rewards=(None, None))
    assert run.rewards["avg_reward"].dtype == "float64"
    assert run.trajectories["reward"].dtype == "float64"


def test_trajectories_answer_the_question_of_the_tour(trained: Run) -> None:
    best = trained.trajectories.query("step == 3").nlargest(3, "reward")
    assert best["reward"].tolist()[:2] == [0.5, 0.0]
    assert trained.trajectories.attrs["left_off"] == 0
    assert trained.trajectories["trajectory_id"].is_unique


def test_trajectories_hold_the_newest_and_say_what_they_leave_off(
    trained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "NEWEST", 5)
    newest = trained.trajectories
    assert len(newest) == 5
    assert newest.attrs["left_off"] == 7
    assert newest["step"].tolist() == [3, 3, 4, 4, 4]


def test_checkpoints_carry_the_reward_of_their_step(trained: Run) -> None:
    saved = trained.checkpoints
    assert saved["step_index"].tolist() == [0, 2, 4]
    assert saved["held_out_reward"].tolist() == [0.1, 0.4, 0.8]
    assert saved["round_completed"].tolist() == [True, True, False]
    full = "weights + training state"
    assert saved["kind"].tolist() == [full, "weights", full]
    assert saved["checkpoint_id"].str.len().eq(64).all()


def test_events_are_the_phases(trained: Run) -> None:
    assert trained.events["phase"].tolist() == ["RESOLVING_DATASET", "TRAINING"]
    assert (trained.events["at"] > pd.Timestamp("2020-01-01", tz="UTC")).all()


def test_a_committed_step_is_in_the_frame_at_once(run: Run) -> None:
    stored.train(run)
    for number in (1, 2):
        stored.step(run, number)
        assert run.rewards["step"].tolist()[-1] == number


def test_frame_keeps_order_and_fills_what_is_missing() -> None:
    table = frame([{"b": 1, "a": "x"}, {"b": 2, "loss": None}])
    assert list(table.columns) == ["b", "a", "loss"]
    assert table["a"].tolist()[0] == "x"
    assert table["loss"].isna().all()
    assert list(frame([], ("x", "y")).columns) == ["x", "y"]


def test_half_a_character_is_shown_as_the_one_that_stands_for_it(home: Path) -> None:
    """A model's reply, a log or a name may hold one; pandas cannot."""
    table = frame([{"a": "x\ud800y", "\udfff": 1, "c": {"n": 1}}, {"a": None, "c": "\udc00"}])
    assert list(table.columns) == ["a", "\ufffd", "c"]
    assert table["a"].tolist()[0] == "x\ufffdy"
    assert table["a"].isna().tolist() == [False, True]
    run = stored.create(Client())
    text = {"prompt": "\ud800?", "completion": "a\udfff", "terms": {"t": 1.0}, "error": None}
    row = {"trajectory_id": 1, "group_id": 1, "status": "completed", "text": text}
    stored.writer(run).commit_step(
        {"step": 1, "avg_reward": None}, [{"group_id": 1, "size": 1}], [row]
    )
    (told,) = run.texts().to_dict("records")
    assert (told["prompt"], told["completion"]) == ("\ufffd?", "a\ufffd")
    assert "\ufffd" in run.texts()._repr_html_()
