"""Diagnosis: every rule speaks where it should, with the right figures, and else is silent."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import stored
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.client import Client, Run
from nbtrain.client.diagnosis import Facts, Finding, diagnose, gather
from nbtrain.client.diagnosis.errors import alike
from nbtrain.client.diagnosis.learning import trend
from nbtrain.environments.fleet import LATE
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.resolved import ModelRef
from nbtrain.report.findings import Diagnosis

STEPS = 100
SET = {
    "batch_size": 8, "group_size": 8, "learning_rate": 1e-4, "lr_warmup_steps": 15,
    "lr_hold_steps": 35, "max_output_tokens_per_turn": 200, "max_turns_per_trajectory": 5,
    "max_output_tokens_per_trajectory": 400, "trajectory_timeout_seconds": 60, "max_staleness": 3,
    "max_concurrent_trajectories": 128, "min_trajectories_per_group": 4, "max_grad_norm": 1.0,
    "clip_low": 0.02, "clip_high": 0.02, "val_interval_steps": 5, "val_num_tasks": 50,
    "temperature": 1.0,
}  # fmt: skip


def step(n: int, **more: Any) -> dict[str, Any]:
    """A step of a run that learns."""
    metrics = {
        "all_success_groups": 1, "all_failed_groups": 1, "attempted_trajectories": 80,
        "stale_trajectories": 2, "termination_reasons": {"ENV_DONE": 78, "STALE": 2},
        "terms": {"exact": n / 150, "format": 0.5 + n / 300}, "tokens_mean": 50 + n / 10,
        "clipped_share": 0.1, "sampler_gap": 0.004, "kl": 0.02, "entropy": 1.0 - n / 200,
        "grad_norm": 0.4 + n % 3 / 2, "seconds_sampling": 5.0, "seconds_loss": 4.0,
        "seconds_validation": 1.0, "sampler_idle_share": 0.05,
    }  # fmt: skip
    row = {
        "step": n, "learning_rate": 1e-4, "completed_groups": 10, "no_signal_groups": 2,
        "too_small_groups": 0, "filtered_groups": 0, "discarded_groups": 0, "cancelled_groups": 0,
        "update_applied": True, "skip_reason": None, "avg_reward": n / 150,
    }  # fmt: skip
    row |= {name: more.pop(name) for name in list(more) if name in row}
    return {**row, "metrics": metrics | more}


def healthy(**more: Any) -> Facts:
    """A run that learns, in the middle of it; ``more`` replaces facts."""
    noise = random.Random(0)
    facts = Facts(
        phase="TRAINING", options=SET, train_tasks=900, completed_steps=STEPS, total_steps=150,
        updates_applied=STEPS, attempted=8000, graded=7800, now=1000.0, waiting_since=0.0,
        rewards=[(n, abs(n / 150 + noise.gauss(0, 0.05))) for n in range(1, STEPS + 1)],
        steps=[step(n) for n in range(1, STEPS + 1)],
        rounds=[
            {"step": n, "held_out_reward": n / 160, "round_completed": True,
             "expected_samples": 50}
            for n in range(0, STEPS + 1, 5)
        ],
        groups=[
            {"step": n, "group_id": n, "task_id": f"{n % 7:016x}", "task_index": n % 7, "epoch": 1,
             "outcome": "used", "reason": "", "size": 8, "reward_mean": 0.5}
            for n in range(1, STEPS + 1)
        ],
        trajectories=[
            {"id": n, "ref": f"r-{n}", "step": STEPS, "group_id": n // 8, "reason": "ENV_DONE",
             "reward": n % 2, "eligible": True, "verdict": "", "output_tokens": 50,
             "turns": 1, "error": None}
            for n in range(80)
        ],
        texts=[(n // 8, f"r-{n}", f"the answer is number {n}, as one can see by adding") for n in range(64)],
    )  # fmt: skip
    for name, value in more.items():
        setattr(facts, name, value)
    return facts


def with_steps(**figures: Any) -> dict[str, Any]:
    return {"steps": [step(n, **figures) for n in range(1, STEPS + 1)]}


def moving(name: str, first: Any, last: Any) -> dict[str, Any]:
    """Steps in which a figure jumps in the middle of the run."""
    middle = STEPS // 2
    values = ((n, first if n <= middle else last) for n in range(1, STEPS + 1))
    return {"steps": [step(n, **{name: value}) for n, value in values]}


def ended(reason: str, n: int = 8, **more: Any) -> dict[str, Any]:
    rows = [row | {"reason": reason} if row["id"] < 8 else row for row in healthy().trajectories]
    counts = {"ENV_DONE": 20 - n, reason: n}
    return {**with_steps(termination_reasons=counts), "trajectories": rows, **more}


def lost(share: float, error: str | None) -> dict[str, Any]:
    rows = healthy().trajectories
    change = {"reward": None, "error": error, "reason": "ERROR"}
    found = [r | change if r["id"] < share * 80 else r for r in rows]
    raised = [r["ref"] for r in found if r["reward"] is None and "raised" in (error or "")]
    return {"trajectories": found, "tracebacks": raised}


def rounds(*held: float, samples: int = 200) -> list[dict[str, Any]]:
    every = STEPS // (len(held) - 1)
    return [
        {"step": n * every, "held_out_reward": value, "round_completed": True,
         "expected_samples": samples}
        for n, value in enumerate(held)
    ]  # fmt: skip


def held_out(**reasons: int) -> list[dict[str, Any]]:
    told = [reason for reason, n in reasons.items() for _ in range(n)]
    return [
        {"id": n, "ref": f"h-{n}", "step": STEPS, "reason": reason, "reward": 0.0}
        for n, reason in enumerate(told)
    ]


def options(**more: Any) -> dict[str, Any]:
    return {"options": SET | more}


NONE = {"completed_steps": 0, "rewards": [], "steps": [], "rounds": [], "groups": [],
        "trajectories": [], "texts": [], "updates_applied": 0}  # fmt: skip
TIED = [g | {"outcome": "no_signal"} for g in healthy().groups]
FLAT = [(n, 0.3 + n % 3 / 10) for n in range(100)]
FEW_STEPS = {"completed_steps": 12, "rewards": [(n, 0.5) for n in range(12)], "rounds": [],
             "updates_applied": 12, "steps": [step(n, learning_rate=n * 1e-6) for n in range(1, 13)]}  # fmt: skip
STALE = [
    g
    | (
        {"outcome": "discarded", "reason": "stale: 8 of 8 began too many updates ago"}
        if n > 87
        else {}
    )
    for n, g in enumerate(healthy().groups)
]

CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("failed", "problem", {"phase": "FAILED", "failure": "CUDA is out"}, "after 100 of 150 steps: CUDA is out"),
    ("failed", "problem", {"phase": "FAILED", "failure": "start checks failed: KeyError: 1\nTraceback (most recent call last):\n x"}, "steps: start checks failed: KeyError: 1"),
    ("unresponsive", "problem", {"unresponsive": "rank busy since 12:00"}, "rank busy since 12:00"),
    ("paused", "hint", {"phase": "PAUSED"}, "until it is resumed"),
    ("waiting", "hint", {"phase": "AWAITING_CAPACITY", "now": 40.0, "waits_for": "slot taken"}, "AWAITING_CAPACITY for 40 s: slot taken"),
    ("waiting", "problem", {"phase": "QUEUED", "now": 4000.0}, "QUEUED for 1 h 06 min"),
    ("no step yet", "hint", {**NONE, "now": 30.0}, "No step is complete after 30 s"),
    ("no weight changed", "problem", {"phase": "COMPLETED", "updates_applied": 0, "ended": "all tied"}, "single update, so no weight changed: all tied"),
    ("ended early", "hint", {"phase": "COMPLETED", "ended": "max_total_trajectories reached"}, "100 of 150 steps: max_total"),
    ("no-signal groups", "problem", {**with_steps(no_signal_groups=8, all_success_groups=6), "groups": TIED}, "160 of the 200 groups of the last 20 steps have identical rewards and teach nothing: 120 all succeeded, 20 all failed, 20 tied in between. They come from 7 tasks, most often 0000"),
    ("no-signal groups", "hint", with_steps(no_signal_groups=5, all_failed_groups=4), "80 all failed"),
    ("ending TRUNCATION", "problem", ended("TRUNCATION"), "40% of the last trajectories were cut at the token limit of a reply, or by a full context (max_output_tokens_per_turn is 200) and are left out"),
    ("ending TRUNCATION", "hint", ended("TRUNCATION", **options(train_on_truncation=True)), "they train with reward 0"),
    ("ending LIMIT_REACHED", "hint", ended("LIMIT_REACHED", 3), "15% of"),
    ("ending MAX_TURNS", "problem", ended("MAX_TURNS"), "reached the turn limit (max_turns_per_trajectory is 5)"),
    ("ending TIMEOUT", "problem", ended("TIMEOUT"), "ran out of time (trajectory_timeout_seconds is 60)"),
    ("ending ERROR", "problem", ended("ERROR"), "ended in an error and are left out"),
    ("skipped updates", "problem", with_steps(update_applied=False, skip_reason="no eligible group"), "20 of the last 20 updates were skipped, 20 of them because: no eligible group"),
    ("too small groups", "problem", with_steps(too_small_groups=7), "140 of the last 200 groups have fewer eligible trajectories than min_trajectories_per_group (4)"),
    ("filtered groups", "hint", with_steps(filtered_groups=4), "80 of the last 200"),
    ("staleness", "problem", {"groups": STALE}, "60% of what was sampled lately went stale: 40 of 1,600 trajectories began more than max_staleness (3) updates ago, and 12 groups were discarded"),
    ("staleness", "hint", with_steps(stale_trajectories=24), "30% of what"),
    ("batch timeout", "hint", {"steps": [*healthy().steps[:-2], *(step(n, collection_ended="batch_timeout_seconds (60) passed with 3 of 8 eligible groups; not complete: group 5") for n in (99, 100))]}, "In 2 of the last 20 steps the batch was not full in time; in the latest of them batch_timeout_seconds (60) passed with 3 of 8"),
    ("batch timeout", "problem", with_steps(collection_ended="batch_timeout_seconds (60) passed with 0 of 8 eligible groups"), "In 20 of the last 20 steps"),
    ("few tasks", "hint", {"train_tasks": 20, "groups": [g | {"epoch": 11} for g in healthy().groups]}, "The 20 training tasks have been gone through 11 times"),
    ("ungraded", "problem", lost(0.5, "reward 'exact' raised KeyError: 'answer'"), "40 of the last 80 finished trajectories have no grade; 40 of them say: reward 'exact' raised KeyError: 'answer'"),
    ("ungraded", "hint", lost(0.05, None), "4 of the last 80 finished trajectories have no grade; 4 of them say: no grade came"),
    ("environment errors", "problem", lost(0.5, "environment 'Search' raised in step: KeyError: 'q'"), "In 40 of the last 80 trajectories the environment failed; 40 of them say: environment 'Search' raised in step"),
    ("environment errors", "hint", lost(0.05, "environment 'Search' gave no answer: exit code 1"), "In 4 of the last 80"),
    ("template errors", "problem", lost(1, "the chat template refuses a message of the environment: no role tool"), "In 80 of the last 80 trajectories the model's chat template has no way"),
    ("no tool called", "problem", {"tools": ("find", "open")}, "No reply of the last 80 trajectories called a tool, though the tools find, open are offered"),
    ("held-out TRUNCATION", "problem", {**options(val_max_output_tokens_per_turn=64), "held_out": held_out(TRUNCATION=40, ENV_DONE=10)}, "80% of the 50 held-out trajectories of step 100 were cut at the token limit of a reply, or by a full context (val_max_output_tokens_per_turn is 64)"),
    ("held-out TIMEOUT", "problem", {**options(val_trajectory_timeout_seconds=5), "held_out": held_out(TIMEOUT=50)}, "ran out of time (val_trajectory_timeout_seconds is 5)"),
    ("silent term", "problem", with_steps(terms={"exact": 0.0}), "exact is 0 on average in every one of 100 steps"),
    ("silent term", "hint", with_steps(terms={"exact": 0.5, "cited": 0.0}), "The reward term cited is 0"),
    ("silent term", "hint", with_steps(terms={"exact": 0.5, "judge": None}), "judge gave no score in 100 steps"),
    ("one term dominates", "hint", moving("terms", {"exact": 0.6, "polite": 0.1}, {"exact": 0.3, "polite": 0.9}), "polite 0.10 → 0.90, exact 0.60 → 0.30"),
    ("length drift", "hint", moving("tokens_mean", 50.0, 90.0), "Replies became longer: 50 → 90 tokens"),
    ("length drift", "hint", moving("tokens_mean", 50.0, 20.0), "Replies became shorter: 50 → 20"),
    ("duplicates", "hint", {"texts": [(n // 8, f"r-{n}", "one and the same long answer, over and over") for n in range(64)]}, "64 of the 64 long replies"),
    ("length at limit", "hint", with_steps(tokens_mean=195.0), "195 tokens long on average, of 200 allowed"),
    ("train–held-out gap", "problem", {"rounds": rounds(*[0.4] * 10, *[0.3] * 10)}, "while held-out reward moved by -0.10"),
    ("flat reward", "hint", {"rewards": [(n, 0.3 + n % 3 / 10) for n in range(100)]}, "does not move beyond its noise: 0.390 → 0.390 (first and last 10 steps)"),
    ("flat reward", "hint", {"rewards": [(n, 0.0) for n in range(100)]}, "0.000 → 0.000"),
    ("reward falls", "problem", {"rewards": [(n, 0.9 - n / 150) for n in range(100)]}, "The reward falls: 0.870 → 0.270 (first and last 10 steps)"),
    ("too few steps", "hint", {**FEW_STEPS, "total_steps": 12, **options(lr_warmup_steps=100)}, "All steps lie within the warm-up of 100 steps: the learning rate ends at 12% of 0.0001"),
    ("warming up", "hint", {**FEW_STEPS, **options(lr_warmup_steps=100)}, "1.2e-05 after step 12 of 100, 12% of 0.0001"),
    ("small learning rate", "problem", {"rewards": FLAT, **options(learning_rate=1e-7)}, "The reward does not move, and learning_rate is 1e-07, 1,000 times smaller than the default of 0.0001."),
    ("small learning rate", "problem", {"rewards": FLAT, **options(learning_rate=1e-7), **with_steps(update_norm=3e-5)}, "an update moves the weights by 3e-05 in all"),
    ("tiny updates", "hint", {"rewards": FLAT, **with_steps(update_norm=3e-9)}, "moves the weights by 3e-09 in all (update_norm), at a learning_rate of 0.0001"),
    ("no decay", "hint", {"rounds": rounds(0.2, 0.8, 0.6), **options(lr_hold_steps=135)}, "fell from 0.800 at step 50 to 0.600"),
    ("clipped", "problem", with_steps(clipped_share=0.94), "94% of the ratios of the last 20 steps were clipped"),
    ("sampler gap", "problem", with_steps(sampler_gap=0.5), "differ by 0.500 nats"),
    ("entropy collapse", "problem", moving("entropy", 1.0, 0.05), "from 1 to 0.05 nats"),
    ("divergence", "hint", with_steps(kl=1.5), "1.50 nats a token from its reference"),
    ("no gradient", "problem", with_steps(grad_norm=0.0), "the last 20 updates is exactly 0"),
    ("gradient clipped", "hint", with_steps(grad_norm=3.0), "scaled down to 1; their norms were 3 to 3"),
    ("validation cost", "hint", with_steps(seconds_validation=11.0), "55% of the time goes into validation, every 5 steps on 50 tasks"),
    ("bottleneck", "problem", with_steps(sampler_idle_share=0.7, bottleneck="2 reward workers are all busy."), "nothing in 70% of the collection's time: 2 reward workers are all busy."),
]  # fmt: skip
# ruff: noqa: E501 (a case is a line)


def test_a_healthy_run_has_nothing_but_good_news() -> None:
    found = diagnose(healthy())
    assert found.rules == ["learning"]
    assert found.healthy
    assert found[0].sentence.startswith("It is learning: reward 0.0")
    over = diagnose(healthy(phase="COMPLETED", completed_steps=150))
    assert over.rules == ["learning"]


@pytest.mark.parametrize(
    ("rule", "severity", "change", "told"),
    CASES,
    ids=[f"{c[0]}-{c[1]}-{n}" for n, c in enumerate(CASES)],
)
def test_a_rule_speaks_with_its_figures_and_no_other_does(
    rule: str, severity: str, change: dict[str, Any], told: str
) -> None:
    found = [f for f in diagnose(healthy(**change)) if f.rule != "learning"]
    assert [f.rule for f in found] == [rule]
    assert told in found[0].sentence
    assert found[0].severity == severity
    assert set(found[0].options) <= OPTIONS.keys()


def test_the_samples_are_those_the_sentence_speaks_of() -> None:
    (cut,) = (f for f in diagnose(healthy(**ended("TRUNCATION"))) if f.rule != "learning")
    assert cut.trajectories == ("r-3", "r-4", "r-5", "r-6", "r-7")
    (case,) = (c for c in CASES if c[:2] == ("no-signal groups", "problem"))
    (ties,) = (f for f in diagnose(healthy(**case[2])) if f.rule != "learning")
    assert ties.groups == (96, 97, 98, 99, 100)
    (errors,) = (
        f for f in diagnose(healthy(**lost(0.5, "reward 'a' raised no"))) if f.rule != "learning"
    )
    assert errors.trajectories[0] == "r-0"
    assert "r-0" in errors.suggestion


def test_short_replies_that_repeat_are_no_duplicates() -> None:
    assert diagnose(healthy(texts=[(n // 8, f"r-{n}", "12") for n in range(64)])).rules == [
        "learning"
    ]


def test_a_solved_task_has_one_answer_and_no_duplicates() -> None:
    same = [(n // 8, f"r-{n}", "one and the same long answer, over and over") for n in range(64)]
    solved = with_steps(correct=60, completed_trajectories=64)
    assert "duplicates" not in diagnose(healthy(texts=same, **solved)).rules
    struggling = with_steps(correct=30, completed_trajectories=64)
    assert "duplicates" in diagnose(healthy(texts=same, **struggling)).rules


def test_a_run_of_nothing_is_diagnosed_as_well() -> None:
    assert diagnose(Facts(**NONE, phase="RESOLVING_DATASET")).rules == []
    late = Facts(**NONE, phase="RESOLVING_DATASET", waiting_since=0.0, now=31.0)
    assert diagnose(late).rules == ["waiting"]
    assert diagnose(Facts(phase="CANCELLED")).rules == []


def rules(**more: Any) -> list[str]:
    return [rule for rule in diagnose(healthy(**more)).rules if rule != "learning"]


def only(rule: str, **more: Any) -> Finding:
    (found,) = (f for f in diagnose(healthy(**more)) if f.rule == rule)
    return found


# --- what is counted


def test_what_was_cancelled_for_another_reason_is_not_stale() -> None:
    """The run's end, a budget and a batch timeout cancel as well."""
    cut = with_steps(
        cancelled_groups=90, discarded_groups=9, stale_trajectories=0,
        termination_reasons={"ENV_DONE": 10, "CANCELLED": 720},
    )  # fmt: skip
    surplus = {"outcome": "discarded", "reason": "not needed before the run ended"}
    groups = [g | surplus for g in healthy().groups]
    assert rules(**cut, groups=groups) == []


def test_nothing_is_stale_without_staleness() -> None:
    assert (
        rules(groups=STALE, **options(max_staleness=0), **with_steps(stale_trajectories=70)) == []
    )


def test_what_was_cut_off_is_neither_ungraded_nor_an_ending() -> None:
    cut = {"reward": None, "reason": "CANCELLED", "error": None}
    rows = [t | cut if t["id"] < 60 else t for t in healthy().trajectories]
    reasons = {"ENV_DONE": 95, "TRUNCATION": 5, "CANCELLED": 900}
    assert rules(trajectories=rows, **with_steps(termination_reasons=reasons)) == []
    few = {"ENV_DONE": 5, "TRUNCATION": 5, "CANCELLED": 90}
    assert (
        "50% of the last"
        in only("ending TRUNCATION", **with_steps(termination_reasons=few)).sentence
    )


# --- rewards on another scale


def long_rewards(reward: float) -> dict[str, Any]:
    return {
        "rewards": [(n, reward) for n in range(1, STEPS + 1)],
        "trajectories": [t | {"reward": reward} for t in healthy().trajectories],
        **with_steps(no_signal_groups=10, all_success_groups=10, all_failed_groups=0, correct=64,
                     completed_trajectories=64),
        "groups": TIED,
    }  # fmt: skip


def test_identical_rewards_of_another_scale_are_no_success() -> None:
    found = only("no-signal groups", **long_rewards(18.6))
    assert found.severity == "problem"
    assert "succeeded" not in found.sentence
    assert "200 of the 200 groups" in found.sentence
    assert (
        "Every one of the last 80 replies earned 18.6, though most of them differ" in found.sentence
    )
    assert "harder" not in found.suggestion
    same = [(n // 8, f"r-{n}", "12") for n in range(64)]
    found = only("no-signal groups", **long_rewards(18.6), texts=same)
    assert "64 of the last 64 replies are word for word" in found.sentence
    assert found.options == ("temperature",)


def test_a_reward_that_no_reply_earns_may_be_at_fault_itself() -> None:
    lost = with_steps(no_signal_groups=10, all_success_groups=0, all_failed_groups=10)
    found = only("no-signal groups", **long_rewards(0.0) | lost)
    assert "Not one of the last 80 replies earned anything." in found.sentence
    assert "try it by hand" in found.suggestion
    assert "too hard" in found.suggestion
    assert found.options == ("reward",)


def test_tasks_that_all_solve_are_too_easy() -> None:
    found = only("no-signal groups", **long_rewards(1.0))
    assert "200 all succeeded" in found.sentence
    assert found.suggestion == "The tasks are too easy: add harder ones."


@pytest.mark.parametrize(
    ("passed", "lost", "told"),
    [
        (9, 8, "Some tasks are too easy, some too hard: raise temperature or group_size."),
        (8, 9, "Some tasks are too easy, some too hard: raise temperature or group_size."),
        (12, 5, "The tasks are too easy: add harder ones."),
        (5, 12, "Where all fail, the tasks are too hard for the model: raise group_size, give "),
        (5, 5, "The reward takes too few values, or the replies are all alike"),
    ],
)
def test_one_cause_is_told_on_a_clear_majority_only(passed: int, lost: int, told: str) -> None:
    tied = with_steps(
        completed_groups=20, no_signal_groups=17, all_success_groups=passed, all_failed_groups=lost
    )
    found = only("no-signal groups", groups=TIED, **tied)
    assert found.suggestion.startswith(told)
    if told.startswith("Some"):
        by_name = only("no-signal groups", groups=TIED, door="descriptor", **tied)
        assert by_name.suggestion.endswith(
            "raise rlHyperparams.temperature or rlHyperparams.groupSize."
        )


@pytest.mark.parametrize("reward", [0.15, 0.0])
def test_an_adapter_to_start_from_is_advised_where_there_is_none(reward: float) -> None:
    """Groups that all fail beside others that learn: not every reply earns nothing."""
    figures = long_rewards(reward) | with_steps(
        completed_groups=24, no_signal_groups=17, all_success_groups=1, all_failed_groups=16
    )
    if reward:
        figures["trajectories"] = healthy().trajectories
    graded = {**figures, "admission": "as_graded", "door": "descriptor"}
    cold, warm = (only("no-signal groups", **graded, warm=warm) for warm in (False, True))
    named = {"rlHyperparams.groupSize"} if reward else {"reward"}
    assert "begin with easier tasks or from a registered adapter (warm" in cold.suggestion
    assert set(cold.options) == {*named, "warmStartModelId"}
    assert warm.suggestion.endswith("or begin with easier tasks.")
    assert set(warm.options) == named
    assert ("every" in cold.suggestion, "earned anything" in cold.sentence) == (False, not reward)


def test_a_run_that_began_from_an_adapter_or_a_checkpoint_is_known_as_such(home: Path) -> None:
    client = Client()
    run = stored.create(client)
    stored.step(run, 1)
    assert not gather(run._store, *run._look()).warm
    more = stored.create(client, "more", parent=stored.save(run, 1), num_steps=3)
    assert gather(more._store, *more._look()).warm
    model = ModelRef("ab" * 32, "first", "cd" * 32, "ef" * 32, "/adapters/first")
    plan = replace(run.plan, warm_start=model)
    warm = Run(run._store, run._store.create_run("ef" * 32, plan={}, resolved=plan))
    assert gather(warm._store, *warm._look()).warm


@pytest.mark.parametrize(("temperature", "told"), [(0.0, True), (0.2, True), (0.3, False)])
def test_a_low_temperature_is_named_as_the_cause(temperature: float, told: bool) -> None:
    found = only("no-signal groups", **long_rewards(1.0), **options(temperature=temperature))
    assert (f"At temperature {temperature:g} " in found.sentence) is told
    assert (found.options == ("temperature",)) is told


def test_ties_of_a_learned_task_are_a_hint() -> None:
    tied = with_steps(no_signal_groups=9, all_success_groups=9, all_failed_groups=0)
    rose = [(n, min(1.0, 0.2 + n / 50)) for n in range(1, STEPS + 1)]
    assert only("no-signal groups", rewards=rose, **tied).severity == "hint"
    always = [(n, 0.95) for n in range(1, STEPS + 1)]
    assert only("no-signal groups", rewards=always, **tied).severity == "problem"


@pytest.mark.parametrize(("tasks", "told"), [
(100, "They are spread over 20 tasks."), (7, "They come from 7 tasks, most often 00000000000"),
    (1, "All of them come from the task 000000000000 (task_index 0) 20×."),
])  # fmt: skip
def test_tasks_are_named_where_they_come_again(tasks: int, told: str) -> None:
    groups = [
        g | {"task_id": f"{g['step'] % tasks:016x}", "task_index": g["step"] % tasks} for g in TIED
    ]
    assert (
        told in only("no-signal groups", **with_steps(no_signal_groups=9), groups=groups).sentence
    )


def test_of_many_tasks_those_stand_out_that_come_twice_as_often() -> None:
    many = {"step": STEPS, "task_index": None}
    ties = [g | many | {"task_id": f"{n % 25:016x}"} for n, g in enumerate(TIED)]
    tied = with_steps(no_signal_groups=9)
    assert "spread over 25 tasks" in only("no-signal groups", **tied, groups=ties).sentence
    ties += [g | {"task_id": "ab" * 8, "task_index": 3} for g in ties[:12]]
    told = only("no-signal groups", **tied, groups=ties).sentence
    assert told.endswith("They come from 26 tasks, most often abababababab (task_index 3) 12×.")


# --- causes before what follows from them


CONSEQUENCES: dict[str, Any] = {
    "completed_steps": 12, "total_steps": 12, "rounds": [], "rewards": [(n, 0.0) for n in range(12)],
    **options(lr_warmup_steps=100),
    "steps": [
        step(n, too_small_groups=10, update_applied=n < 2, learning_rate=n * 1e-6,
             skip_reason="no eligible group", termination_reasons={"ERROR": 60, "ENV_DONE": 20})
        for n in range(1, 13)
    ],
}  # fmt: skip


@pytest.mark.parametrize(("error", "rule"), [
    ("environment 'Search' raised in reset: OSError: 1", "environment errors"),
    ("reward 'exact' raised KeyError: 1", "ungraded"),
])  # fmt: skip
def test_failures_come_without_what_follows(error: str, rule: str) -> None:
    found = diagnose(healthy(**CONSEQUENCES, **lost(1, error)))
    assert found.rules == [rule]
    assert ("reward" in found[0].suggestion) is (rule == "ungraded")
    over = diagnose(
        healthy(**CONSEQUENCES, **lost(1, error), phase="FAILED", failure="5 steps without a group")
    )
    assert over.rules == ["failed", rule]


def test_a_timeout_comes_before_the_grades_that_it_cost() -> None:
    rows = [
        t | {"reward": None, "error": "reward 'slow' did not answer within 2 s",
             "reason": "TIMEOUT" if t["id"] < 60 else "ERROR"}
        for t in healthy().trajectories
    ]  # fmt: skip
    late = with_steps(termination_reasons={"TIMEOUT": 60, "ERROR": 20}, too_small_groups=10)
    found = diagnose(healthy(trajectories=rows, **late, tracebacks=["r-70"]))
    assert [f.rule for f in found if f.rule != "learning"] == ["ending TIMEOUT", "ungraded"]
    assert "most say: reward 'slow' did not answer within 2 s" in found[0].sentence
    assert "Repair" not in found[1].suggestion
    assert "reward_timeout_seconds" not in found[1].options


@pytest.mark.parametrize("error", [
    "environment 'Search' raised in step: KeyError: 'item-{n}'",
    "reward 'exact' raised ValueError: could not read 0x{n:x} at line {n}",
    "reward 'exact' raised HTTPError: request 7f3a{n:04x}-11 failed after {n}.5 s",
    'reward \'exact\' raised KeyError: "a{n} b"',
])  # fmt: skip
def test_errors_that_differ_by_numbers_and_names_count_together(error: str) -> None:
    rows = [
        t | {"reward": None, "reason": "ERROR", "error": error.format(n=17 * t["id"])}
        for t in healthy().trajectories[:16]
    ]
    (found,) = (f for f in diagnose(healthy(trajectories=rows)) if f.rule != "learning")
    assert "16 of the last 16" in found.sentence
    assert "16 of them say the like of: " + error[:20] in found.sentence


def test_an_environment_that_hangs_is_told_by_class_and_method() -> None:
    for error in (
        f"Search.reset {LATE} 9 s; its process was killed",
        "environment 'S' gave no answer",
    ):
        assert rules(**lost(0.5, error)) == ["environment errors"]
    assert rules(**lost(0.5, f"reward 'a' {LATE} 9 s")) == ["ungraded"]


def test_errors_of_two_kinds_are_told_apart() -> None:
    assert alike("reward 'a' raised KeyError: 'x'") != alike("reward 'b' raised KeyError: 'x'")
    assert alike("reward 'a' raised KeyError: 'x'") != alike("reward 'a' raised TypeError: 'x'")


def test_a_traceback_is_promised_where_there_is_one() -> None:
    assert "traceback" not in only("ungraded", **lost(0.5, "reward 'a' returned None")).suggestion
    assert only("ungraded", **lost(0.5, "reward 'a' raised X")).suggestion == (
        "Repair the reward: client.trajectories.list(…) has the .traceback of r-0."
    )


@pytest.mark.parametrize("change", [
    {"updates_applied": 0}, {"total_steps": 100, "rewards": [(n, n / 30) for n in range(25)]},
    {"steps": FEW_STEPS["steps"][:9]}, {"steps": [*FEW_STEPS["steps"], step(13, learning_rate=2e-5)]},
    {"phase": "FAILED", "failure": "no memory"},
], ids=["no update", "learning", "few steps", "a fifth", "failed"])  # fmt: skip
def test_a_warm_up_that_explains_nothing_is_not_told(change: dict[str, Any]) -> None:
    assert "warming up" in rules(**FEW_STEPS, **options(lr_warmup_steps=100))
    assert "warming up" not in rules(**(FEW_STEPS | options(lr_warmup_steps=100) | change))


# --- held-out reward


@pytest.mark.parametrize(
    ("samples", "last", "told"),
    [(200, 0.3, True), (29, 0.3, False), (30, 0.3, True), (30, 0.7, False)],
)
def test_learning_by_heart_needs_evidence(samples: int, last: float, told: bool) -> None:
    """Training rises by 0.4: the gap grows by 0.5, and by 0.1, where two standard errors of 30
    samples a round are 0.26.
    """
    held = [*[0.4] * 10, *[last] * 10]
    found = diagnose(healthy(rounds=rounds(*held, samples=samples)))
    assert ("train–held-out gap" in found.rules) is told
    assert ("learning" in found.rules) is not told


def test_a_held_out_reward_that_rises_more_slowly_is_no_learning_by_heart() -> None:
    found = diagnose(healthy(rounds=rounds(*[n / 100 for n in range(20)], samples=2000)))
    assert found.rules == ["train–held-out gap", "learning"]
    assert found[0].severity == "hint"
    assert "heart" not in found[0].suggestion


@pytest.mark.parametrize("trained", [20, 0])
def test_a_limit_that_training_shares_is_told_once(trained: int) -> None:
    same = options(val_max_output_tokens_per_turn=SET["max_output_tokens_per_turn"])
    reasons = {"ENV_DONE": 100 - trained, "TRUNCATION": trained}
    found = rules(
        held_out=held_out(TRUNCATION=50), **same, **with_steps(termination_reasons=reasons)
    )
    assert found == ["ending TRUNCATION" if trained else "held-out TRUNCATION"]


def test_a_tool_that_is_called_or_not_needed_is_not_missed() -> None:
    called = [t | {"turns": 3 if t["id"] < 4 else 1} for t in healthy().trajectories]
    assert rules(tools=("find",), trajectories=called) == []
    solved = [t | {"reward": 1.0} for t in healthy().trajectories]
    assert rules(tools=("find",), trajectories=solved) == []
    once = [t | {"turns": 3 if t["id"] < 1 else 1} for t in healthy().trajectories]
    told = only("no tool called", tools=("find",), trajectories=once).sentence
    assert "Only 1 of the last 80 trajectories called a tool, though the tool find is" in told


# --- words


def test_one_is_singular() -> None:
    one = {"steps": [step(1, no_signal_groups=1, completed_groups=1, all_failed_groups=1)]}
    groups = [{**TIED[0], "step": 1}]
    told = only("no-signal groups", **one, groups=groups).sentence
    assert "1 of the 1 group of the last step has identical rewards and teaches nothing" in told
    assert "spread over 1 task." in told
    every = only("validation cost", **with_steps(seconds_validation=11.0),
                 **options(val_interval_steps=1, val_num_tasks=1))  # fmt: skip
    assert "every step on 1 task." in every.sentence


def test_what_the_job_does_now_is_told() -> None:
    doing = "start checks: one group is being tried"
    told = only("waiting", phase="QUEUED", now=40.0, activity=doing, waits_for="x").sentence
    assert told == f"Training has not begun: QUEUED for 40 s: {doing}."
    told = only(
        "no step yet", **NONE, now=40.0, activity="step 1: 3 of 64 trajectories ended"
    ).sentence
    assert told.endswith("Now: step 1: 3 of 64 trajectories ended.")


@pytest.mark.parametrize("phase", ["QUEUED", "STARTING_JOB", "TRAINING"])
def test_half_a_minute_is_no_wait(phase: str) -> None:
    assert diagnose(Facts(**NONE, phase=phase, waiting_since=0.0, now=29.0)).rules == []


@given(st.floats(-1, 1), st.floats(-5, 5), st.integers(3, 60))
def test_a_straight_line_has_its_slope_and_no_error(slope: float, start: float, n: int) -> None:
    found, error = trend([(x, start + slope * x) for x in range(n)])
    assert found == pytest.approx(slope, abs=1e-9)
    assert error < 1e-6


def test_noise_alone_is_rarely_called_learning() -> None:
    """A slope beyond 3 standard errors comes by chance in 0.3 % of runs, also when neighbours are
    alike; the estimate of their likeness is itself noisy, so some more are allowed.
    """
    draw = random.Random(1)
    sure = 0
    for _ in range(300):
        value, points = 0.0, []
        for x in range(100):
            value = 0.5 * value + draw.gauss(0, 1)
            points.append((x, value))
        slope, error = trend(points)
        sure += abs(slope) > 3 * error
    assert sure <= 9


def test_findings_come_by_severity_then_weight() -> None:
    found = Diagnosis(
        "run x",
        [Finding("a", "fine", "A."), Finding("b", "problem", "B.", weight=0.1),
         Finding("c", "problem", "C.", weight=0.9), Finding("d", "hint", "D.", "Do.", steps=(3,))],
    )  # fmt: skip
    assert found.rules == ["c", "b", "d", "a"]
    assert [f.rule for f in found.problems] == ["c", "b"]
    assert repr(found).splitlines()[:2] == ["run x: 2 problems, 1 hint", "- problem: C."]
    assert "  for example steps 3" in repr(found)
    assert found.frame["rule"].tolist() == found.rules
    assert list(Diagnosis("x", []).frame.columns) == list(found.frame.columns)
    assert repr(Diagnosis("x", [])) == "x: nothing to report"
    assert isinstance(found[1:], list)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)


@given(st.text(max_size=40))
def test_no_text_becomes_markup(text: str) -> None:
    shown = []
    for words in (text, "x"):
        finding = Finding("r", "hint", words, words and "y" + words, trajectories=(words,))
        tags = Tags()
        tags.feed(Diagnosis(words, [finding])._repr_html_())
        shown.append(tags.tags[:3])
    assert shown[0] == shown[1]


class Maze:
    """An environment of two tools."""

    reward = 0.0

    def reset(self) -> None:
        """Begin."""

    def go(self, where: str) -> str:
        """Go on.

        Args:
            where: The direction.
        """
        return where

    def look(self) -> str:
        """Look around."""
        return "a wall"


# --- from the store ---------------------------------------------------------------------------


@pytest.fixture
def run(home: Path) -> Run:
    return stored.create(Client(), num_steps=40)


def test_a_run_is_diagnosed_at_every_stage(run: Run) -> None:
    assert run.diagnose().rules == []  # for half a minute
    stored.train(run)
    assert run.diagnose().rules == []
    for number in range(1, 31):
        stored.step(
            run, number, number / 40, rewards=(0.0, None, None, 1.0),
            errors=(None, "boom", "boom", None), terms={"exact": number / 40},
        )  # fmt: skip
    found = run.diagnose()
    assert found[0].rule == "ungraded"
    assert (
        "60 of the last 120 finished trajectories have no grade; 60 of them say: boom"
        in found[0].sentence
    )
    first = found[0].trajectories[0]
    assert first in set(run.trajectories["trajectory_id"])
    assert "learning" in found.rules
    stored.finish(run, stored.Phase.FAILED, failure="the disk is full")
    assert run.diagnose()[0].sentence == "The run failed after 30 of 40 steps: the disk is full"
    assert not math.isnan(found[0].weight)


def test_the_summary_shows_the_worst_in_one_line(run: Run) -> None:
    stored.train(run)
    stored.step(run, 1, completed_groups=10, no_signal_groups=10, all_failed_groups=10)
    assert "problem:" not in repr(run)  # one step says nothing yet
    for number in range(2, 8):
        stored.step(run, number, completed_groups=10, no_signal_groups=10, all_failed_groups=10)
    run._glance = None
    (line,) = [line for line in repr(run).splitlines() if line.startswith("problem:")]
    assert "70 of the 70 groups of the last 7 steps have identical rewards" in line
    assert "run.diagnose()" in line
    assert "problem: 70 of the 70" in run.glance().bundle()["text/html"]


def test_the_summary_and_the_diagnosis_leave_out_what_was_cut_off(run: Run) -> None:
    stored.train(run)
    glance = run.glance()
    error = "environment 'Search' raised in step: KeyError: 'q{}'"
    for number in range(1, 7):
        stored.step(
            run, number, rewards=(0.0, 1.0, None), errors=(None, None, error.format(number))
        )
        cut = {"reason": "CANCELLED", "status": "aborted", "reward": None, "error": "given up"}
        rows = [cut | {"trajectory_id": 900 + n, "group_id": 9, "sample": n} for n in range(3)]
        stored.writer(run).commit_closing(number, rows)
        told = glance.refresh()
        assert (told.cut, told.ungraded, told.mostly_ungraded) == (3 * number, number, False)
    assert "36 trajectories, 12 graded, 18 cut off" in repr(run)
    assert "6 not graded, most often: environment 'Search' raised in step" in repr(run)
    found = run.diagnose()
    assert "6 of the last 18 finished trajectories have no grade" in found[0].sentence


def test_tools_and_tracebacks_come_from_the_store(home: Path) -> None:
    client = Client()
    tasks = [{"prompt": f"where is {n}?"} for n in range(20)]
    maze = client.workloads.create("maze", tasks=tasks, environment=Maze)
    calculator = client.workloads.sample("calculator")  # an environment without tools
    run = stored.create(client)
    row = stored.row_of(run)
    for workload_id, tools in (
        (maze.id, ("go", "look")),
        (calculator.id, ()),
        (row.workload_id, ()),
    ):
        assert gather(run._store, replace(row, workload_id=workload_id)).tools == tools
    stored.train(run)
    told = {"prompt": "1 + 2?", "completion": "3", "terms": {}, "error": "boom\nTraceback: …"}
    rows = [
        {"trajectory_id": n, "group_id": 1, "sample": n, "reason": "ERROR", "error": "boom",
         "text": told | ({"error": "boom"} if n else {})}
        for n in range(2)
    ]  # fmt: skip
    stored.writer(run).commit_step({"step": 1}, (), rows)
    facts = gather(run._store, stored.row_of(run))
    assert facts.tracebacks == {facts.trajectories[0]["ref"]}
