"""What a person sees of a supervised run: tables, picks, the glance, the diagnosis, estimates."""

from __future__ import annotations

import base64
import html
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import stored
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.client import Client, Run
from nbtrain.client.checking import CheckReport
from nbtrain.client.diagnosis import Facts, diagnose, gather
from nbtrain.client.measured import earlier_supervised, estimate_here
from nbtrain.errors import NotFound
from nbtrain.plan.checks import Check
from nbtrain.plan.phases import Phase
from nbtrain.plan.resolved import SmokeRef
from nbtrain.report.supervised import Supervised, Validated, loss_told, lowest, movement
from nbtrain.report.verdict import checks_told, sentences
from nbtrain.store import RunWriter

WARNED = {
    "name": "packed loss", "measured": 0.0081, "unit": "nats", "said": "packed rows differ",
    "warn": 0.005, "refuse": 0.025, "at_least": False, "verdict": "warned",
}  # fmt: skip
PASSED = WARNED | {"name": "rows", "measured": 160, "unit": "rows", "verdict": "passed"}
FAILED_SMOKE = {
    "passed": False, "score": 0.912, "threshold": 0.98, "rows": 8, "updates": 12,
    "layer": "mask", "said": "the end token is not trained in 8 rows",
    "worst": [
        {"row": 6, "line": 7, "score": 0.31,
         "first_difference": {"token": 3, "expected": " yes\n", "got": ""}},
        {"row": 2, "line": 3, "score": 0.55},
    ],
}  # fmt: skip


@pytest.fixture
def client(home: Path) -> Client:
    return Client()


@pytest.fixture
def run(client: Client) -> Run:
    """20 steps, rounds at 5, 10, 15, 20 of which 10 is the lowest, checkpoints at each."""
    run = stored.create_supervised(client)
    stored.train(run)
    for n in range(1, 21):
        stored.loss(run, n, 2.0 - n / 20)
        if n % 5 == 0:
            stored.read(run, n, (1.4, 1.1, 1.1, 1.3)[n // 5 - 1])
            stored.save(run, n)
    return run


# Tables


def test_losses_are_one_row_a_step(run: Run) -> None:
    losses = run.losses
    assert list(losses.columns) == [
        *("step", "loss", "learning_rate", "grad_norm", "epoch", "trained_tokens", "seconds"),
    ]
    last = losses.iloc[-1]
    assert (last["step"], last["loss"], last["epoch"]) == (20, 1.0, 1.0)
    assert (last["trained_tokens"], last["seconds"]) == (400, 1.75)


def test_metrics_have_every_figure_and_nothing_of_groups(run: Run) -> None:
    metrics = run.metrics
    assert {"loss", "grad_norm", "tokens", "sequences", "row_ids", "seconds_loss"} <= set(metrics)
    assert not {"avg_reward", "completed_groups", "reward_std"} & set(metrics)
    assert metrics["row_ids"][0] == list(range(8, 16))


def test_validation_is_a_loss_and_its_perplexity(run: Run) -> None:
    frame = run.validation
    assert list(frame.columns)[:7] == [
        *("step", "loss", "perplexity", "trained_tokens", "round_completed"),
        *("completed_samples", "expected_samples"),
    ]
    assert frame["loss"].tolist() == [1.4, 1.1, 1.1, 1.3]
    assert frame["perplexity"][0] == pytest.approx(math.exp(1.4))


def test_empty_tables_have_their_columns(client: Client) -> None:
    run = stored.create_supervised(client)
    for table, column in (
        *((run.losses, "epoch"), (run.metrics, "loss"), (run.validation, "perplexity")),
        (run.checks, "said"),
    ):
        assert table.empty
        assert column in table
    assert run.losses["epoch"].dtype == "float64"


@pytest.mark.parametrize("what", ["rewards", "groups", "trajectories"])
def test_what_a_supervised_run_has_nothing_of_is_refused(run: Run, what: str) -> None:
    with pytest.raises(LookupError, match=rf"has no {what}: it is supervised.*run\.losses"):
        getattr(run, what)
    with pytest.raises(LookupError, match="samples nothing"):
        run.texts()
    with pytest.raises(LookupError, match="samples nothing"):
        run.sampled_groups()


def test_lists_of_what_a_supervised_run_has_nothing_of_are_refused(
    client: Client, run: Run
) -> None:
    training = client.training
    for ask in (training.rewards.list_history, training.runs.list_step_summaries):
        with pytest.raises(NotFound, match="it is supervised and samples nothing"):
            ask(run)
    assert training.rewards.list_held_out_rewards(run).items


def test_a_run_that_samples_keeps_its_columns(client: Client) -> None:
    run = stored.create(client)
    stored.train(run)
    stored.step(run, 1)
    stored.validate(run, 1, 0.5)
    stored.save(run, 1)
    assert "held_out_reward" in run.validation
    assert not {"loss", "perplexity"} & set(run.validation)
    assert "held_out_reward" in run.checkpoints
    assert "validation_loss" not in run.checkpoints
    assert run.checkpoint_list()[0].validation_loss is None
    assert run.losses["loss"].tolist() == [0.1]
    assert run.losses["trained_tokens"].isna().all()
    assert (run.method, run.model, run.verdict, run.config_name) == ("gspo", None, None, None)


def test_checkpoints_have_the_validation_loss_of_their_step(run: Run) -> None:
    frame = run.checkpoints
    assert frame["validation_loss"].tolist() == [1.4, 1.1, 1.1, 1.3]
    assert "held_out_reward" not in frame
    assert "validation loss 1.400" in repr(run.checkpoint_list()[0])


def test_best_is_the_earliest_with_the_lowest_complete_loss(client: Client, run: Run) -> None:
    assert run.best().step_index == 10
    assert run.best().validation_loss == 1.1
    other = stored.create_supervised(client, "cut")
    stored.train(other)
    for n, (loss, complete) in enumerate([(1.5, True), (0.2, False), (1.4, True)], 1):
        stored.loss(other, n, 1.0)
        stored.read(other, n, loss, complete=complete)
        stored.save(other, n)
    assert other.best().step_index == 3


def test_no_best_says_why(client: Client) -> None:
    none = stored.create_supervised(client, "none", validates=False)
    stored.train(none)
    stored.loss(none, 1, 1.0)
    stored.save(none, 1)
    with pytest.raises(LookupError, match="has no validation dataset"):
        none.best()
    cut = stored.create_supervised(client, "cut")
    stored.train(cut)
    stored.read(cut, 1, 1.0, complete=False)
    with pytest.raises(NotFound, match="8 of 20 rows were read at step 1"):
        cut.best()


def test_a_reinforcement_run_of_a_descriptor_validates_nothing_and_says_so(client: Client) -> None:
    run = stored.create_supervised(
        client, validates=False, algorithm="grpo", val_enabled=False, batch_size=8, group_size=4
    )
    stored.train(run)
    stored.step(run, 1)
    stored.save(run, 1)
    with pytest.raises(LookupError, match=r"validates nothing.*Evaluations.*come later"):
        run.best()
    told = repr(run).splitlines()
    assert "grpo · as graded · support-triage · nbtrain/tiny" in told
    assert not any(line.startswith("held-out") for line in told)


# Properties


def test_what_a_descriptor_says_of_a_run_is_read_back(run: Run) -> None:
    assert (run.method, run.config_name, run.description) == ("sft", "r8-e2", "triage of mail")
    assert run.progress.observed_step == run.progress.completed_steps == 20
    assert run.progress.saved_step == 20


def test_checks_are_a_frame(run: Run) -> None:
    run._store.put_checks(run._key, [PASSED, WARNED])
    assert list(run.checks.columns) == [
        *("name", "measured", "unit", "warn", "refuse", "verdict", "said"),
    ]
    assert run.checks["verdict"].tolist() == ["passed", "warned"]
    assert run.checks["warn"].tolist() == [0.005, 0.005]


def test_what_a_check_says_is_shown_in_full(run: Run) -> None:
    said = "'default' covers 21 modules (model.layers.0.self_attn.q_proj, …), 61,440 weights" * 3
    run._store.put_checks(run._key, [PASSED | {"said": said}])
    report = CheckReport((Check.from_json(PASSED | {"said": said}),))
    for shown in (run.checks, report.to_frame(), report):
        assert said in repr(shown)
        assert html.escape(said) in shown._repr_html_().replace("'", "&#x27;")
    assert type(run.checks.head()) is pd.DataFrame


def test_the_model_is_what_the_run_registered(run: Run) -> None:
    assert run.model is None
    checkpoint = run.best()
    stored.finish(run)
    run._store.put_model(
        "ba" * 32, name="triage", run=run._key, checkpoint_id=checkpoint.checkpoint_id,
        base_model_slug="nbtrain/tiny", base_fingerprint="ef" * 32, config_hash="12" * 32,
        weights_digest="00" * 32, path="models/x",
    )  # fmt: skip
    assert run.model is not None
    assert (run.model.model_id, run.model.name, run.model.step) == ("ba" * 32, "triage", 10)
    assert "registered as model triage (babababababa)" in repr(run)


def test_earlier_runs_have_their_last_reading(client: Client, run: Run) -> None:
    again = stored.create_supervised(client, "again")
    assert [earlier.id for earlier in again.earlier_runs] == [run.id]
    frame = again.earlier_runs.to_frame()
    assert frame["validation_loss"].tolist() == [1.3]
    assert frame["perplexity"][0] == pytest.approx(math.exp(1.3))
    assert "validation loss 1.3" in repr(again.earlier_runs)


def test_preparing_tells_its_stage(client: Client) -> None:
    run = stored.create_supervised(client)
    run._store.move_phase(run._key, Phase.PREPARING, attempt=1)
    run._store.heartbeat(run._key, 1, "rank", activity="tokenising 400 of 1,000 rows")
    assert (run.status, run.progress.activity) == ("pending", "tokenising 400 of 1,000 rows")
    assert repr(run).splitlines()[:2] == [
        f"run tuned ({run.id[:12]}) · pending, PREPARING",
        "now: tokenising 400 of 1,000 rows",
    ]
    assert run.glance().line() == "tokenising 400 of 1,000 rows"


def test_waiting_in_vain_tells_the_losses(run: Run) -> None:
    told = r"step 20 of 40, loss 1\.000, validation loss 1\.300 \(perplexity 3\.669\)\); it goes on"
    with pytest.raises(TimeoutError, match=told):
        run.wait(timeout=0.1)


def test_a_smoke_check_that_failed_succeeds_with_a_verdict(client: Client) -> None:
    run = stored.create_supervised(client, "smoke", smoke=True, validates=False)
    stored.train(run)
    for n in range(1, 13):
        stored.loss(run, n, 2.0 / n)
    assert run.verdict is None
    run._store.put_verdict(run._key, FAILED_SMOKE)
    stored.finish(run, ended="smoke check failed: the verdict again")
    assert run.wait().status == "succeeded"
    assert run.verdict is not None
    assert (run.verdict.passed, run.verdict["score"]) == (False, 0.912)
    told = [
        "smoke check failed: score 0.912, needed 0.980",
        "suspected: mask (the end token is not trained in 8 rows)",
        'worst: line 7 (0.310): after 3 tokens " yes\\n" should come, and nothing came',
        "worst: line 3 (0.550)",
    ]
    assert repr(run.verdict).splitlines() == told
    lines = repr(run).splitlines()
    assert "smoke check failed · succeeded, COMPLETED" in lines[0]
    assert [line for line in lines if line in told] == told
    assert "the verdict again" not in repr(run)
    assert "no validation dataset" not in repr(run)
    assert "epoch 0.60 ·" in repr(run)
    assert "#9a6700" in run._repr_mimebundle_()["text/html"]
    assert run.diagnose().rules == ["smoke check", "learning"]


def test_a_smoke_check_that_passed_is_green(client: Client) -> None:
    run = stored.create_supervised(client, "smoke", smoke=True, validates=False)
    stored.train(run)
    for n in range(1, 13):
        stored.loss(run, n, 2.0 / n)
    run._store.put_verdict(run._key, {"passed": True, "score": 1.0, "threshold": 0.98})
    stored.finish(run)
    assert "smoke check passed · succeeded" in repr(run)
    assert "#1a7f37" in run._repr_mimebundle_()["text/html"]
    assert run.diagnose().healthy


# The glance


def test_the_summary_tells_losses_rate_epoch_and_checks(run: Run) -> None:
    run._store.put_checks(run._key, [PASSED, WARNED])
    lines = repr(run).splitlines()
    for line in (
        "sft · support-triage · nbtrain/tiny",
        "step 20 of 40 · 20 updates",
        "start checks: 1 of 2 passed",
        "warned: packed loss 0.0081 nats (warns above 0.005): packed rows differ",
        "loss 1.725 → 1.225 (first and last 10 steps)",
        "validation loss 1.400 (perplexity 4.055) at step 5 → 1.300 (3.669) at step 20, lowest "
        "1.100 (3.004) at step 10",
        "learning rate 5.25e-05 · epoch 1.00 of 2 · 400 trained tokens in the last step",
    ):
        assert line in lines
    shown = [line for line in lines if line.startswith("checkpoint ")]
    assert shown[0].endswith("step 10 validation loss 1.100, best")
    assert [line.split("step ")[1].split()[0] for line in shown] == ["10", "15", "20", "5"]
    assert not any("trajector" in line or "held-out" in line for line in lines)


def test_the_bundle_has_a_picture_of_the_losses(run: Run) -> None:
    from PIL import Image

    bundle = run._repr_mimebundle_()
    assert 'alt="loss by step of' in bundle["text/html"]
    assert ">validation loss</th>" in bundle["text/html"]
    picture = base64.b64decode(bundle["image/png"])
    assert len(picture) < 20_000
    colours = {colour for _, colour in Image.open(io.BytesIO(picture)).convert("RGB").getcolors()}
    # Blue and orange are told apart only as long as the palette keeps them
    assert any(blue > red + 80 for red, _, blue in colours)
    assert any(red > blue + 120 for red, _, blue in colours)


def test_the_picture_draws_losses_rounds_and_rate(run: Run) -> None:
    stored.read(run, 21, 0.2, complete=False)
    axes, below = run.plot().axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["validation loss"] == [1.4, 1.1, 1.1, 1.3]
    assert lines["validation, round not complete"] == [0.2]
    assert below.lines[0].get_ydata()[0] == pytest.approx(1e-4)
    assert axes.get_xlim()[1] >= 40


def test_the_glance_reads_only_new_steps_and_the_end_whole(run: Run) -> None:
    glance = run.glance()
    before = glance.refresh().supervised
    assert before is not None
    stored.loss(run, 21, 0.5, epoch=1.05)
    stored.read(run, 21, 0.9)
    after = glance.refresh().supervised
    assert after is not None
    assert after.losses == [*before.losses, (21, 0.5)]
    assert (after.epoch, after.rounds[-1].loss) == (1.05, 0.9)
    stored.finish(run)
    ended = glance.refresh().supervised
    assert ended is not None
    assert (ended.losses, glance.is_final) == (after.losses, True)


def test_steps_past_the_restored_one_are_hidden(client: Client, run: Run) -> None:
    glance = run.glance()
    assert len(glance.refresh().supervised.losses) == 20  # type: ignore[union-attr]
    store = stored.store_of(client)
    stored.finish(run, Phase.FAILED, failure="killed")
    stored.host(store, run._key, 2)
    second = RunWriter(store, run._key, 2)
    second.supersede_after(15)
    second.commit_step({"step": 16, "loss": 0.5, "update_applied": True, "epoch": 0.8})
    seen = glance.refresh().supervised
    assert seen is not None
    assert [step for step, _ in seen.losses] == list(range(1, 17))
    assert (seen.losses[-1], seen.epoch, len(seen.rounds)) == ((16, 0.5), 0.8, 3)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 9), st.booleans()) | st.tuples(st.none(), st.booleans()),
        max_size=20,
    )
)
def test_the_lowest_round_is_complete_and_the_earliest(
    given_rounds: list[tuple[float | None, bool]],
) -> None:
    rounds = [Validated(n, loss, None, whole) for n, (loss, whole) in enumerate(given_rounds)]
    found = lowest(rounds)
    whole = [r for r in rounds if r.complete and r.loss is not None]
    if not whole:
        assert found is None
        return
    assert found is not None
    assert found.loss == min(r.loss for r in whole if r.loss is not None)
    assert found.step == min(r.step for r in whole if r.loss == found.loss)


def test_words_of_a_run_with_next_to_nothing() -> None:
    assert movement(Supervised()) == []
    assert movement(Supervised(losses=[(1, 2.0)], validates=False)) == [
        "loss 2.000",
        "no validation dataset: nothing tells learning from memorising",
    ]
    assert movement(Supervised(losses=[(1, None)])) == []
    assert loss_told(Supervised(losses=[(1, None)])) == "loss not finite"
    far = Supervised(rounds=[Validated(1, 230.0, math.exp(230), True)])
    assert movement(far) == ["validation loss 230.000 (perplexity 7.722e+99) at step 1"]


def test_words_of_checks_and_verdicts() -> None:
    assert checks_told([]) == []
    refused = WARNED | {"verdict": "refused", "measured": None, "said": ""}
    assert checks_told([PASSED, refused]) == [
        "start checks: 1 of 2 passed",
        "refused: packed loss not finite nats (refuses above 0.025)",
    ]
    least = WARNED | {"at_least": True, "warn": 1.0}
    assert "(warns below 1)" in checks_told([least])[1]
    assert sentences({"passed": True, "score": 1.0, "threshold": 0.98}) == [
        "smoke check passed: score 1.000, needed 0.980"
    ]
    assert sentences({"passed": False, "worst": [{"row": 4}]}) == [
        "smoke check failed", "worst: row 4"
    ]  # fmt: skip


# Diagnosis

STEPS = 60
HEALTHY = stored.SFT_SETTINGS | {"warmup_ratio": 0.1}


def step(n: int, **more: Any) -> dict[str, Any]:
    metrics = {
        "grad_norm": 0.4 + n % 3 / 2, "epoch": n / 30, "trained_tokens": 400, "tokens": 1600,
        "seconds_loss": 2.0, "seconds_validation": 0.2, "row_ids": [n, n + 1],
    }  # fmt: skip
    row = {"step": n, "learning_rate": 1e-4, "update_applied": True, "loss": losses()[n - 1][1]}
    return row | {"metrics": metrics | more}


def losses(first: float = 2.0, last: float = 0.8) -> list[tuple[int, float | None]]:
    return [
        (n, first + (last - first) * n / STEPS + (n * 7 % 5 - 2) / 50) for n in range(1, STEPS + 1)
    ]


def rounds(*values: float, complete: bool = True) -> list[dict[str, Any]]:
    every = STEPS // len(values)
    return [
        {"step": (n + 1) * every, "loss": v, "perplexity": math.exp(v), "round_completed": complete,
         "completed_samples": 20 if complete else 8, "expected_samples": 20}
        for n, v in enumerate(values)
    ]  # fmt: skip


def healthy(**more: Any) -> Facts:
    facts = Facts(
        phase="COMPLETED", options=HEALTHY, train_tasks=240, completed_steps=STEPS,
        total_steps=STEPS, updates_applied=STEPS, now=1000.0, waiting_since=0.0, method="sft",
        losses=losses(), steps=[step(n) for n in range(1, STEPS + 1)],
        rounds=rounds(1.7, 1.4, 1.2, 1.1), checks=[PASSED],
    )  # fmt: skip
    for name, value in more.items():
        setattr(facts, name, value)
    return facts


def with_steps(**figures: Any) -> dict[str, Any]:
    return {"steps": [step(n, **figures) for n in range(1, STEPS + 1)]}


def options(**more: Any) -> dict[str, Any]:
    return {"options": HEALTHY | more}


FLAT = {"losses": losses(2.0, 2.0), "rounds": rounds(2.0, 2.0)}
BROKEN = [*losses()[:-2], (59, None), (60, None)]
WARMING = {
    "phase": "TRAINING", "completed_steps": 4, "losses": losses()[:4], "rounds": [],
    "steps": [step(n) | {"learning_rate": n * 1e-6} for n in range(1, 5)], "total_steps": 600,
}  # fmt: skip

CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("failed", "problem", {"phase": "FAILED", "failure": "out of memory"}, "after 60 of 60 steps: out of memory"),
    ("no step yet", "hint", {"phase": "TRAINING", "completed_steps": 0, "losses": [], "steps": [], "rounds": [], "updates_applied": 0, "now": 40.0}, "No step is complete after 40 s of training: a step is recorded when its sequences"),
    ("waiting", "problem", {"phase": "PREPARING", "completed_steps": 0, "losses": [], "steps": [], "rounds": [], "updates_applied": 0, "activity": "tokenising 4 of 9 rows"}, "PREPARING for 16 min 40 s: tokenising 4 of 9 rows"),
    ("not finite", "problem", {"losses": BROKEN}, "not finite in 2 steps, first in step 59 (rows 60, 61 …)"),
    ("flat loss", "problem", FLAT, "The training loss does not fall: loss 2.000 → 2.000 (first and last 10 steps), -7e-05 a step"),
    ("loss rises", "problem", {"losses": losses(1.0, 3.0), "rounds": rounds(2.0, 2.0)}, "The training loss rises: loss 1.183 → 2.850 (first and last 10 steps)"),
    ("memorising", "problem", {"rounds": rounds(1.3, 1.1, 1.2, 1.6)}, "training loss fell from 1.890 to 0.890 while validation loss rose from 1.100 (perplexity 3.004) at step 30 to 1.600 (perplexity 4.953) at step 60"),
    ("memorising", "hint", {"rounds": rounds(1.3, 1.1, 1.15)}, "rose from 1.100"),
    ("memorising", "hint", {"rounds": rounds(1.3, 1.3, 1.3)}, "while validation loss stayed at 1.300"),
    ("nothing to learn", "problem", {"losses": losses(0.01, 0.01), "rounds": []}, "in the first steps already"),
    ("small learning rate", "problem", {**FLAT, **options(learning_rate=1e-7)}, "learning_rate is 1e-07, 1,000 times smaller than the default of 0.0001"),
    ("warming up", "hint", WARMING, "4e-06 after step 4 of 60, 4% of 0.0001"),
    ("few trained tokens", "problem", {**FLAT, **with_steps(trained_tokens=9)}, "The loss does not fall, and an update rests on 9 trained tokens of 1,600 read"),
    ("few updates", "hint", {"total_steps": 4, "completed_steps": 4, "losses": losses()[:4], "rounds": []}, "makes 4 updates of 8 sequences from 240 rows"),
    ("rows not seen", "hint", with_steps(epoch=0.25), "went through 25% of its 240 rows"),
    ("no gradient", "problem", {**FLAT, **with_steps(grad_norm=0.0)}, "the last 20 updates is exactly 0"),
    ("gradient clipped", "hint", with_steps(grad_norm=3.0), "scaled down to 1; their norms were 3 to 3"),
    ("no validation", "hint", {"validates": False, "rounds": []}, "There is no validation dataset"),
    ("validation cut off", "hint", {"rounds": rounds(1.2, complete=False)}, "1 validation round did not complete; the latest read 8 of 20 rows"),
    ("validation cost", "hint", with_steps(seconds_validation=3.0), "60% of the time of the last 20 steps goes into validation, every 10 steps"),
    ("start check packed loss", "hint", {"checks": [PASSED, WARNED]}, "packed loss 0.0081 nats (warns above 0.005): packed rows differ."),
    ("start check packed loss", "problem", {"checks": [WARNED | {"measured": 0.3, "verdict": "refused"}]}, "A start check refused: packed loss 0.3 nats (refuses above 0.025)"),
    ("smoke check", "problem", {"smoke": True, "verdict": FAILED_SMOKE}, "score 0.912, needed 0.980; suspected: mask (the end token is not trained in 8 rows); worst: line 7 (0.310): after"),
    ("no weight changed", "problem", {"updates_applied": 0, "losses": [], "steps": [], "rounds": []}, "without a single update"),
]  # fmt: skip
# ruff: noqa: E501 (a case is a line)


def test_a_healthy_run_says_so_with_its_figures() -> None:
    found = diagnose(healthy())
    assert (found.rules, found.healthy) == (["learning"], True)
    assert found[0].sentence == (
        "It is learning: loss 1.890 → 0.890 (first and last 10 steps); validation loss 1.700 "
        "(perplexity 5.474) → 1.100 (perplexity 3.004), and none of 240 rows was dropped."
    )


@pytest.mark.parametrize(
    ("rule", "severity", "change", "told"), CASES, ids=[f"{c[0]}-{n}" for n, c in enumerate(CASES)]
)
def test_a_rule_speaks_with_its_figures_and_no_other_does(
    rule: str, severity: str, change: dict[str, Any], told: str
) -> None:
    found = [f for f in diagnose(healthy(**change)) if f.rule != "learning"]
    assert [f.rule for f in found] == [rule]
    assert told in found[0].sentence
    assert found[0].severity == severity
    assert set(found[0].options) <= {*stored.SFT_SETTINGS, "assistant_turns", "validation_dataset"}


def test_a_descriptors_options_go_by_its_own_names() -> None:
    change = {**FLAT, **options(learning_rate=1e-7)}
    (told,) = diagnose(healthy(**change, door="descriptor"))
    assert "optimizer.learningRate is 1e-07" in told.sentence
    assert told.options == ("optimizer.learningRate",)
    few = FLAT | with_steps(trained_tokens=9)
    (tokens,) = diagnose(healthy(**few, door="descriptor"))
    assert "training.gradientAccumulation" in tokens.suggestion
    assert "loss.assistantTurns: all" in tokens.suggestion


def noisy(fall: float) -> list[tuple[int, float | None]]:
    """24 steps whose noise hides their trend; the mean of the last 10 is lower by this share."""
    around = [0.9, -0.9, 0.5, -0.5, 0.7, -0.7, 0.3, -0.3, 0.6, -0.6]
    ends = [2.0 + a for a in around], [2.0 * (1 - fall) + a for a in reversed(around)]
    return list(enumerate([*ends[0], 2.9, 1.1, 2.6, 1.2, *ends[1]], 101))


@pytest.mark.parametrize(
    ("fall", "start", "found"),
    [
        (0.02, 0, [("flat loss", "problem")]),
        (0.02, 100, [("flat loss", "hint")]),
        (0.12, 0, []),
        (0.27, 100, [("learning", "fine")]),
    ],
)
def test_a_loss_is_judged_by_the_means_that_a_glance_shows(
    fall: float, start: int, found: list[tuple[str, str]]
) -> None:
    seen = noisy(fall)
    shown = movement(Supervised(losses=seen))[0]
    assert shown == f"loss 2.000 → {2 * (1 - fall):.3f} (first and last 10 steps)"
    few = with_steps(trained_tokens=9) if fall > 0.1 else {}  # no rule may say it does not fall
    told = diagnose(
        healthy(losses=seen, rounds=[], start_step=start, total_steps=start + STEPS, **few)
    )
    assert [(f.rule, f.severity) for f in told] == found
    assert all(shown in f.sentence for f in told)


def test_what_a_diagnosis_looks_at_is_read_from_the_store(run: Run) -> None:
    run._store.put_checks(run._key, [PASSED, WARNED])
    facts = gather(run._store, *run._look())
    assert (facts.method, facts.door, facts.validates) == ("sft", "descriptor", True)
    assert len(facts.losses) == len(facts.steps) == 20
    assert facts.checks[1]["verdict"] == "warned"
    found = run.diagnose()
    assert found.rules == ["memorising", "start check packed loss"]
    assert "lora.dropout" in found[0].suggestion


def test_groups_that_all_fail_as_graded_need_a_format_term_or_a_warm_start(client: Client) -> None:
    run = stored.create_supervised(
        client, validates=False, algorithm="grpo", val_enabled=False, batch_size=8, group_size=4,
        min_trajectories_per_group=1,
    )  # fmt: skip
    stored.train(run)
    for n in range(1, 6):
        stored.step(
            run, n, 0.0, rewards=(0.0, 0.0), completed_groups=8, used_groups=0,
            no_signal_groups=8, all_failed_groups=8,
        )  # fmt: skip
    (finding,) = (f for f in run.diagnose() if f.rule == "no-signal groups")
    assert finding.severity == "problem"
    assert "40 all failed" in finding.sentence
    assert "a term for the format" in finding.suggestion
    assert "from a registered adapter (warmStartModelId)" in finding.suggestion
    assert finding.options == ("reward", "warmStartModelId")
    stored.step(run, 6, 0.5, rewards=(None, None, 1.0), errors=("reward 'a' raised no", None, None))
    assert any(f.rule == "ungraded" for f in run.diagnose())


def test_replies_cut_off_are_told_as_a_descriptor_says_them(client: Client) -> None:
    run = stored.create_supervised(
        client, validates=False, algorithm="grpo", val_enabled=False, batch_size=8, group_size=4,
        max_output_tokens_per_turn=256, train_on_truncation=True,
    )  # fmt: skip
    stored.train(run)
    for n in range(1, 6):
        stored.step(run, n, termination_reasons={"ENV_DONE": 5, "TRUNCATION": 5})
    (finding,) = (f for f in run.diagnose() if f.rule == "ending TRUNCATION")
    assert "(rlHyperparams.maxCompletionLength is 256); they train with what they" in (
        finding.sentence
    )
    assert finding.suggestion == "Raise rlHyperparams.maxCompletionLength."
    assert finding.options == ("rlHyperparams.maxCompletionLength",)


# Estimates


def ended(client: Client, seconds: float, **more: Any) -> Run:
    run = stored.create_supervised(client, **more)
    stored.train(run)
    for n in range(1, 11):
        stored.loss(run, n, 1.0)
    stored.finish(run)
    row = stored.row_of(run)
    store = stored.store_of(client)
    store._set(run._key, started_at=row.created_at, ended_at=row.created_at + seconds)
    return run


def test_time_is_told_only_where_it_was_measured(client: Client) -> None:
    run = stored.create_supervised(client)
    parts = client._parts
    fresh = estimate_here(parts, run.plan)
    assert earlier_supervised(parts, run.plan) is None
    assert fresh.seconds is None
    assert "time unknown until the first step: no earlier supervised run" in repr(fresh)
    assert fresh.line == "expected: 40 updates of 8 sequences"

    ended(client, 100.0, max_seq_length=512)
    other = estimate_here(parts, run.plan)
    assert other.seconds is None
    assert "6.25 s a thousand tokens, from 1 earlier run of this model with other rows" in repr(
        other
    )

    ended(client, 20.0)
    known = estimate_here(parts, run.plan)
    assert known.seconds == pytest.approx(80.0)
    assert "about 64,000 tokens, 16,000 of them trained" in repr(known)
    assert known.line == (
        "expected: 40 updates of 8 sequences, about 64,000 tokens, about 80 s (from 1 earlier "
        "run of this dataset)"
    )
    assert client.training.estimate_of(run).seconds == known.seconds
    assert "<li>" in known._repr_html_()


def test_a_flat_run_is_told_under_its_own_names(client: Client) -> None:
    run = stored.create_supervised(client)
    store, row = stored.store_of(client), stored.row_of(run)
    assert gather(store, row).door == "descriptor"
    store._set(run._key, resolved={**row.resolved, "flat": True})
    assert gather(store, stored.row_of(run)).door == "options"


def test_a_smoke_check_goes_by_the_median_update(client: Client) -> None:
    run = ended(client, 500.0)
    parts = client._parts
    check = replace(run.plan, smoke=SmokeRef(8, 2000, 0.98))
    rates = earlier_supervised(parts, check)
    assert rates is not None
    assert rates.mean.seconds == pytest.approx(1.75)  # of the steps, not 500 / 10
    stored.store_of(client)._set(run._key, completed_steps=9)
    assert earlier_supervised(parts, check) is None
    assert earlier_supervised(parts, run.plan) is not None


def test_supervised_runs_say_nothing_of_the_time_of_others(client: Client) -> None:
    ended(client, 20.0)
    run = stored.create(client)
    assert client.training.estimate_of(run).seconds is None
