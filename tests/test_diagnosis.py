"""Diagnosis: every rule speaks where it should, with the right figures, and else is silent."""

from __future__ import annotations

import math
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import stored
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.client import Client, Run
from nbtrain.client.diagnosis import Facts, Finding, diagnose
from nbtrain.client.diagnosis.learning import trend
from nbtrain.plan.options import OPTIONS
from nbtrain.report.findings import Diagnosis

STEPS = 100
SET = {
    "batch_size": 8, "group_size": 8, "learning_rate": 1e-4, "lr_warmup_steps": 15,
    "lr_hold_steps": 35, "max_output_tokens_per_turn": 200, "max_turns_per_trajectory": 5,
    "max_output_tokens_per_trajectory": 400, "trajectory_timeout_seconds": 60, "max_staleness": 3,
    "max_concurrent_trajectories": 128, "min_trajectories_per_group": 4, "max_grad_norm": 1.0,
    "clip_low": 0.02, "clip_high": 0.02, "val_interval_steps": 5, "val_num_tasks": 50,
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
        rewards=[(n, n / 150 + noise.gauss(0, 0.05)) for n in range(1, STEPS + 1)],
        steps=[step(n) for n in range(1, STEPS + 1)],
        rounds=[
            {"step": n, "held_out_reward": n / 160, "round_completed": True,
             "expected_samples": 50}
            for n in range(0, STEPS + 1, 5)
        ],
        groups=[
            {"step": n, "group_id": n, "task_id": "t", "task_index": n % 7, "epoch": 1,
             "outcome": "used", "size": 8, "reward_mean": 0.5}
            for n in range(1, STEPS + 1)
        ],
        trajectories=[
            {"id": n, "ref": f"r-{n}", "step": STEPS, "group_id": n // 8, "reason": "ENV_DONE",
             "reward": n % 2, "eligible": True, "verdict": "", "output_tokens": 50,
             "error": None}
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
    return {"trajectories": [r | change if r["id"] < share * 80 else r for r in rows]}


def rounds(*held: float) -> list[dict[str, Any]]:
    every = STEPS // (len(held) - 1)
    return [
        {"step": n * every, "held_out_reward": value, "round_completed": True,
         "expected_samples": 200}
        for n, value in enumerate(held)
    ]  # fmt: skip


def options(**more: Any) -> dict[str, Any]:
    return {"options": SET | more}


NONE = {"completed_steps": 0, "rewards": [], "steps": [], "rounds": [], "groups": [],
        "trajectories": [], "texts": [], "updates_applied": 0}  # fmt: skip
TIED = [g | {"outcome": "no_signal"} for g in healthy().groups]

CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("failed", "problem", {"phase": "FAILED", "failure": "CUDA is out"}, "after 100 of 150 steps: CUDA is out"),
    ("unresponsive", "problem", {"unresponsive": "rank busy since 12:00"}, "rank busy since 12:00"),
    ("paused", "hint", {"phase": "PAUSED"}, "until it is resumed"),
    ("waiting", "hint", {"phase": "AWAITING_CAPACITY", "now": 40.0, "waits_for": "slot taken"}, "AWAITING_CAPACITY for 40 s: slot taken"),
    ("waiting", "problem", {"phase": "QUEUED", "now": 4000.0}, "QUEUED for 1 h 06 min"),
    ("no step yet", "hint", {**NONE, "now": 30.0}, "No step is complete after 30 s"),
    ("no weight changed", "problem", {"phase": "COMPLETED", "updates_applied": 0, "ended": "all tied"}, "single update, so no weight changed: all tied"),
    ("ended early", "hint", {"phase": "COMPLETED", "ended": "max_total_trajectories reached"}, "100 of 150 steps: max_total"),
    ("no-signal groups", "problem", {**with_steps(no_signal_groups=8, all_success_groups=6), "groups": TIED}, "160 of the 200 groups of the last 20 steps have identical rewards and teach nothing: 120 all succeeded, 20 all failed, 20 tied in between. Most of them come from 7 tasks"),
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
    ("staleness", "problem", with_steps(discarded_groups=6), "60% of what was sampled lately went stale: 120 groups discarded"),
    ("staleness", "hint", with_steps(stale_trajectories=24), "30% of what"),
    ("few tasks", "hint", {"train_tasks": 20, "groups": [g | {"epoch": 11} for g in healthy().groups]}, "The 20 training tasks have been gone through 11 times"),
    ("ungraded", "problem", lost(0.5, "KeyError: 'answer'\nTraceback"), "40 of the last 80 finished trajectories have no grade; 40 of them say: KeyError: 'answer'"),
    ("ungraded", "hint", lost(0.05, None), "4 of the last 80"),
    ("silent term", "problem", with_steps(terms={"exact": 0.0}), "exact is 0 on average in every one of 100 steps"),
    ("silent term", "hint", with_steps(terms={"exact": 0.5, "cited": 0.0}), "The reward term cited is 0"),
    ("silent term", "hint", with_steps(terms={"exact": 0.5, "judge": None}), "judge gave no score in 100 steps"),
    ("one term dominates", "hint", moving("terms", {"exact": 0.6, "polite": 0.1}, {"exact": 0.3, "polite": 0.9}), "polite 0.10 → 0.90, exact 0.60 → 0.30"),
    ("length drift", "hint", moving("tokens_mean", 50.0, 90.0), "Replies became longer: 50 → 90 tokens"),
    ("length drift", "hint", moving("tokens_mean", 50.0, 20.0), "Replies became shorter: 50 → 20"),
    ("duplicates", "hint", {"texts": [(n // 8, f"r-{n}", "one and the same long answer, over and over") for n in range(64)]}, "64 of the 64 long replies"),
    ("length at limit", "hint", with_steps(tokens_mean=195.0), "195 tokens long on average, of 200 allowed"),
    ("train–held-out gap", "problem", {"rounds": rounds(*[0.4] * 10, *[0.3] * 10)}, "while held-out reward moved by -0.10"),
    ("flat reward", "hint", {"rewards": [(n, 0.3 + n % 3 / 10) for n in range(100)]}, "does not move beyond its noise: 0.395 → 0.400"),
    ("flat reward", "hint", {"rewards": [(n, 0.0) for n in range(100)]}, "0.000 → 0.000"),
    ("reward falls", "problem", {"rewards": [(n, 0.9 - n / 150) for n in range(100)]}, "The reward falls: 0.837 → 0.303"),
    ("too few steps", "problem", {"total_steps": 5, **options(lr_warmup_steps=15)}, "All 5 steps lie within the warm-up of 15: the learning rate ends at 33% of 0.0001"),
    ("warming up", "hint", {"completed_steps": 5, **with_steps(learning_rate=4e-5)}, "4e-05 after step 5 of 15, 40% of 0.0001"),
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
    (ties,) = (f for f in diagnose(healthy(**CASES[8][2])) if f.rule != "learning")
    assert ties.groups == (96, 97, 98, 99, 100)
    (errors,) = (f for f in diagnose(healthy(**lost(0.5, "no"))) if f.rule != "learning")
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
    assert diagnose(Facts(**NONE, phase="RESOLVING_DATASET")).rules == ["waiting"]
    assert diagnose(Facts(phase="CANCELLED")).rules == []


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


# --- from the store ---------------------------------------------------------------------------


@pytest.fixture
def run(home: Path) -> Run:
    return stored.create(Client(), num_steps=40)


def test_a_run_is_diagnosed_at_every_stage(run: Run) -> None:
    assert run.diagnose().rules == ["waiting"]
    stored.train(run)
    assert run.diagnose().rules == ["no step yet"]
    for number in range(1, 31):
        stored.step(
            run, number, number / 40, rewards=(0.0, None, None, 1.0),
            errors=(None, "boom\nTraceback", "boom", None), terms={"exact": number / 40},
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
