"""Troubles that people had elsewhere with the loss and with memory: here they do not happen.

Held by the tests of their parts, so not again here:

RL-05  test_update::test_an_excluded_trajectory_equals_one_never_sampled,
       test_collector::test_an_excluded_trajectory_equals_one_never_sampled,
       test_update::test_a_batch_without_gradient_moves_nothing
SZ-02  test_cases::test_every_rule_of_sizes_has_its_own_message_and_all_are_told
SZ-03  the same, and test_resolve for what is only a hint
SZ-05  the estimate: test_preflight::test_long_replies_over_a_big_vocabulary_are_warned_of_…

Rewards (RW) stand in test_cases_rewards, what is sampled (GN) and collections that wait (PR-07)
in test_cases_sampling.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from described import plan_of, run_here, sums
from scripted import ScriptedRewards, ScriptedSampler
from test_loop import length, make_loop, same
from tiny_models import tiny_model

from nbtrain.data.datasets import DatasetRegistry
from nbtrain.errors import NbtrainError
from nbtrain.plan.memory import Memory
from nbtrain.rollout.admission import AdmissionRules, GroupOutcome, advantages
from nbtrain.rollout.collector import Batch, Collector, CollectorSettings
from nbtrain.rollout.flight import Flight
from nbtrain.rollout.ledger import Ledger
from nbtrain.rollout.limits import Sampling
from nbtrain.rollout.types import Finish, SampleRequest, TaskView
from nbtrain.store import open_store
from nbtrain.training.start_checks import view_tasks
from nbtrain.training.update import Updater

SAMPLING = Sampling(max_new_tokens=8, max_trajectory_tokens=64, max_context=64)
EVERYTHING = AdmissionRules(2, True, True, True, True, True, True)
FINISHED = replace(EVERYTHING, train_on_truncation=False)
"""Admits every group of what ended by itself; a reply that is cut would train with reward 0."""


def tasks(count: int) -> list[TaskView]:
    return [TaskView(f"{n:016x}", (n + 10, 5), f"task {n}", {}) for n in range(count)]


def collect(
    rewards: Any,
    text: Callable[[int, int], str] = lambda task, sample: f"{task} {sample}",
    *,
    rules: AdmissionRules = EVERYTHING,
    sampling: Sampling = SAMPLING,
    rows: list[TaskView] | None = None,
    pick: Callable[[int], int] = lambda n: 0,
    batch_size: int = 4,
    group_size: int = 4,
) -> Batch:
    """One step's collection from scripted replies: ``text`` of a task's row and a sample."""
    rows = tasks(batch_size) if rows is None else rows

    def script(request: SampleRequest) -> tuple[list[int], Finish]:
        return [request.prompt_ids[0], 40 + request.stream[-1]], Finish.STOP

    flight = Flight(
        ScriptedSampler(script, pick),
        rewards,
        lambda ids: text(ids[0] - 10, ids[1] - 40),
        chat=True,
    )
    settings = CollectorSettings(batch_size, group_size, 100, 60.0, 1, rules, sampling)
    return Collector(rows, flight, settings).collect(1)


def ledger(batch: Batch) -> dict[str, Any]:
    return Ledger().step(batch, started=len(batch.groups), in_flight=0)


# --- groups, advantages and the loss --------------------------------------------------------------


def test_rl02_spread_within_groups_is_told_apart_from_spread_over_tasks() -> None:
    batch = collect(
        ScriptedRewards(lambda text: 10.0 if text.startswith("0 ") else 0.0),
        rules=AdmissionRules(2),
        batch_size=2,
        group_size=32,
    )
    row = ledger(batch)
    metrics = row["metrics"]
    assert metrics["reward_std"] == metrics["terms_std"]["scripted"] == pytest.approx(5, abs=0.05)
    assert metrics["reward_std_within_groups"] == 0.0
    assert (row["used_groups"], row["no_signal_groups"]) == (0, 2)
    assert metrics["advantage_max_abs"] is None
    differing = collect(ScriptedRewards(lambda text: float(text[-1]) / 4), batch_size=2)
    metrics = ledger(differing)["metrics"]
    assert metrics["reward_std_within_groups"] == pytest.approx(math.sqrt(5 / 48))
    assert metrics["advantage_max_abs"] == pytest.approx(1.5 / math.sqrt(5 / 3), abs=1e-3)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    return folder


def test_rl03_a_loss_of_zero_is_no_sign_of_anything(model_folder: Path) -> None:
    """On policy the surrogate is zero by construction; the gradient is not."""
    loop, records = make_loop(model_folder, total=3, val_interval=0)
    before = loop.state_dict().adapter
    assert loop.run().failure is None
    assert loop.updates == 3
    for row in records.steps:
        assert row["loss"] == pytest.approx(0, abs=1e-6)
        assert row["metrics"]["grad_norm"] > 1e-3
        assert row["update_applied"]
    assert not same(before, loop.state_dict().adapter)


def test_rl06_tied_groups_do_not_move_the_weights_through_kl(model_folder: Path) -> None:
    scores: list[Callable[[str], float | None]] = [length]
    loop, records = make_loop(model_folder, reward=lambda text: scores[0](text))
    loop._updater.settings = replace(loop._updater.settings, kl_beta=0.04)
    loop.advance()  # the policy is no longer the reference
    before = loop.state_dict()
    scores[0] = lambda text: 0.5
    loop.advance()
    assert same(before.adapter, loop.state_dict().adapter)
    assert same(before.optimizer, loop.state_dict().optimizer)
    row = records.steps[-1]
    assert not row["update_applied"]
    assert "no eligible group" in row["skip_reason"]
    assert row["metrics"].get("kl") is None
    admitted, records = make_loop(model_folder, rules=FINISHED, reward=lambda text: scores[0](text))
    admitted.load_state_dict(before)
    admitted._updater.settings = loop._updater.settings
    admitted.advance()
    assert records.steps[-1]["update_applied"]
    assert records.steps[-1]["metrics"]["kl"] > 0
    assert not same(before.adapter, admitted.state_dict().adapter)


@pytest.mark.parametrize(
    ("rewards", "tied"),
    [
        ([0.3, 0.1 + 0.2], True),
        ([0.1 + 0.2 - 0.3, 0.0], True),
        ([3e6, 3e6 * (1 + 2e-16)], True),
        ([0.0, 1e-9], False),
        ([0.0, 1e-3], False),
    ],
)
def test_rl08_float_noise_is_a_tie_and_small_spreads_stay_small(
    rewards: list[float], tied: bool
) -> None:
    assert rewards[0] != rewards[1]
    batch = collect(
        ScriptedRewards(lambda text: rewards[int(text[-1])]),
        rules=AdmissionRules(2, train_on_all_pass=True, train_on_all_fail=True),
        batch_size=1,
        group_size=2,
    )
    judged = batch.groups[0]
    assert judged.verdict.tied is tied
    assert (judged.outcome is GroupOutcome.NO_SIGNAL) is tied
    if tied:
        assert judged.advantages == [0.0, 0.0]
    else:
        largest = max(map(abs, judged.advantages))
        assert 0 < largest <= abs(rewards[1]) / 2 / 1e-4
        assert ledger(batch)["metrics"]["advantage_max_abs"] == largest < 0.8


def test_rl09_a_run_of_ties_alone_says_that_no_weight_changed(model_folder: Path) -> None:
    loop, records = make_loop(
        model_folder, total=3, rules=FINISHED, reward=lambda text: 1.0, val_interval=0
    )
    before = loop.state_dict().adapter
    ending = loop.run()
    assert loop.updates == 0
    assert str(ending.ended).startswith("no weight changed")
    assert [row["update_applied"] for row in records.steps] == [False] * 3
    assert same(before, loop.state_dict().adapter)


def test_rl11_groups_are_of_rows_whatever_their_text_and_the_order_of_arrival() -> None:
    rows = [
        SimpleNamespace(task_id=f"{len(text):016x}", prompt=text, columns={})
        for text in ("one", "three", "one", "eleven")
    ]
    views, problems = view_tasks(
        rows, lambda prompt: (10 + len(prompt), 5), max_context=64, side="training"
    )
    assert problems == []
    found = []
    for seed in range(4):
        rng = random.Random(seed)

        def shuffled(count: int, rng: random.Random = rng) -> int:
            return rng.randrange(count)

        rewards = ScriptedRewards(lambda text: float(text[-1]) / 3, shuffled)
        batch = collect(rewards, rows=views, pick=shuffled, group_size=3)
        found.append(
            {
                j.group.group_id: (
                    j.group.task_index,
                    [(t.trajectory_id, t.sample, t.reward) for t in j.group.trajectories],
                    j.advantages,
                )
                for j in batch.groups
            }
        )
    assert all(one == found[0] for one in found)
    groups = found[0].values()
    assert sorted(n for _, rows, _ in groups for n, _, _ in rows) == list(range(1, 13))
    assert sorted(index for index, _, _ in groups) == [0, 1, 2, 3]
    for _, trajectories, spread in groups:
        assert [sample for _, sample, _ in trajectories] == [0, 1, 2]
        assert spread == advantages([0.0, 1 / 3, 2 / 3])


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["sampling", "loss"])
def test_sz05_memory_that_runs_out_is_told_with_what_to_lower(
    model_folder: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, records = make_loop(model_folder, total=6, val_interval=0)
    loop._memory = Memory(
        weights=10**9, adapter=10**7, kv=10**8, kv_one=1, loss=10**10, loss_least=1, together=False
    )
    owner, name = {
        "sampling": (loop._collector, "collect"),
        "loss": (loop._updater, "update"),
    }[part]
    healthy = getattr(owner, name)

    def full(*given: Any, **named: Any) -> Any:
        if loop.step == 2:
            msg = "CUDA out of memory. Tried to allocate 2.31 GiB.\nmore"
            raise torch.OutOfMemoryError(msg)
        return healthy(*given, **named)

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(NbtrainError) as caught:
        loop.run()
    told = str(caught.value)
    assert told.startswith(f"out of memory in step 3, in {part}: CUDA out of memory. Tried to")
    assert "more" not in told
    assert "expected were about 11.0 GB" in told
    lower = {"sampling": "max_concurrent_trajectories", "loss": "max_output_tokens_per_turn"}[part]
    assert f"lower {lower}" in told
    assert "the checkpoint of step 2 is there to go on from" in told
    assert records.saved[-1][0] == 2
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("part", "lower"),
    [
        ("sampling", "rlHyperparams.maxCompletionLength, rlHyperparams.groupSize or"),
        ("loss", "execution.microBatchSequences, rlHyperparams.maxCompletionLength or lora.rank"),
    ],
)
def test_sz05_a_descriptors_run_that_runs_out_keeps_its_last_step(
    home: Path, part: str, lower: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What to lower is named as the descriptor names it; no worker of the rewards is left."""
    owner, name = {"sampling": (Collector, "collect"), "loss": (Updater, "update")}[part]
    healthy, calls = getattr(owner, name), itertools.count(1)

    def full(*given: Any, **named: Any) -> Any:
        if next(calls) == 3:
            msg = "CUDA out of memory. Tried to allocate 2.31 GiB."
            raise torch.OutOfMemoryError(msg)
        return healthy(*given, **named)

    monkeypatch.setattr(owner, name, full)
    with open_store() as store:
        dataset = DatasetRegistry(store).register("sums", sums(6))
        plan = plan_of(dataset, num_steps=4, checkpoint_interval_steps=1)
        before = set(psutil.Process().children(recursive=True))
        with pytest.raises(NbtrainError) as caught:
            run_here(store, plan)
        told = str(caught.value)
        assert told.startswith(f"out of memory in step 3, in {part}: CUDA out of memory")
        assert "expected were about" in told
        assert f"lower {lower}" in told
        assert "the checkpoint of step 2 is there to go on from" in told
        (run,) = store.runs()
        saved = store.checkpoints(run.key)
        assert [one.step for one in saved] == [0, 1, 2]
        assert saved[-1].training_state
        assert (Path(saved[-1].path) / "manifest.json").is_file()
        assert run.completed_steps == 2
        assert store.models() == []
        left = set(psutil.Process().children(recursive=True)) - before
        assert all("resource_tracker" in " ".join(child.cmdline()) for child in left)


def test_sz05_other_errors_stay_what_they_are(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, _ = make_loop(model_folder, val_interval=0)

    def broken(*_: Any, **__: Any) -> Any:
        msg = "mat1 and mat2 shapes cannot be multiplied"
        raise RuntimeError(msg)

    monkeypatch.setattr(loop._updater, "update", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        loop.run()
