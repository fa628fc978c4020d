"""Smoke checks: healthy rows pass, each kind of broken row is named by its layer."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masked import ENDS, chatml, family, said
from supervised_world import World, chats, write_jsonl

from nbtrain.catalog import Catalog
from nbtrain.data import masks
from nbtrain.data.masks import LossRules, mask_row
from nbtrain.data.rendering import Renderer, RowRefused
from nbtrain.plan.phases import Phase
from nbtrain.plan.resolved import ResolvedPlan, SmokeRef
from nbtrain.rollout.ranks import Alone
from nbtrain.store import StoredRun, open_store
from nbtrain.training.supervised.answers import Answer, Stretch, read_answers
from nbtrain.training.supervised.preparing import Preparation
from nbtrain.training.supervised.rows import RowWriter, TokenizedRows
from nbtrain.training.supervised.smoke import PATIENCE, SmokeCheck
from nbtrain.training.supervised.suspects import (
    Scored,
    attainable,
    contradictions,
    matching,
    suspect,
)


@pytest.fixture
def world(home: Path) -> Iterator[World]:
    with open_store() as store:
        yield World(store)


def plan_of(
    world: World,
    rows: object,
    *,
    size: int = 8,
    steps: int = 300,
    threshold: float = 0.98,
    **changes: Any,
) -> ResolvedPlan:
    """A smoke check of ``rows`` that learns quickly, as a descriptor with ``smoke`` resolves."""
    quick = {"learning_rate": 1e-2, "micro_batch_per_gpu": 8, "lora_rank": 8, "lora_alpha": 16}
    plan = world.plan(rows, **(quick | changes))
    return replace(plan, smoke=SmokeRef(size, steps, threshold), total_steps=steps)


def verdict_of(world: World, plan: ResolvedPlan) -> tuple[dict[str, Any], StoredRun, str]:
    """The kept verdict, the run, and how it ended; it never fails."""
    run, ending = world.train(plan)
    assert ending.failure is None
    assert ending.ended is not None
    assert run.phase == Phase.RECORDING
    assert run.verdict is not None
    json.dumps(run.verdict, allow_nan=False)
    assert world.store.models() == []
    return run.verdict, run, ending.ended


# --- whole runs


def test_healthy_rows_are_known_by_heart_long_before_the_cap(world: World, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", chats(12), blank=[0, 3])
    plan = plan_of(world, rows, validation=chats(3))
    found, run, ended = verdict_of(world, plan)
    assert found["passed"] is True
    assert found["score"] >= 0.98
    assert (found["threshold"], found["rows"], found["layer"]) == (0.98, 8, None)
    assert ended.startswith("smoke check passed: ")
    assert f"{found['score']:.4f} of the answers of 8 rows" in ended
    assert run.updates_applied == found["updates"] < 100
    seen = {row for step in world.steps(run) for row in step["metrics"]["row_ids"]}
    assert seen == set(range(8))
    assert [(c.step, c.reason) for c in world.store.checkpoints(run.key)] == [
        (found["updates"], "final")
    ]
    assert world.store.validation_rounds(run.key) == []
    assert not any(check["name"].startswith("validation") for check in run.checks or [])


def test_the_cap_ends_it_and_training_is_suspected(world: World) -> None:
    plan = plan_of(world, chats(4), size=100, steps=3, learning_rate=1e-4)
    found, run, ended = verdict_of(world, plan)
    assert run.updates_applied == found["updates"] == 3
    assert found["rows"] == 4
    assert (found["passed"], found["layer"]) == (False, "training")
    assert "smoke.maxSteps" in found["said"]
    assert ended.startswith("smoke check failed: ")
    assert 0 < len(found["worst"]) <= 5
    worst = found["worst"][0]
    assert worst["line"] == worst["row"] + 1
    assert worst["expected"] == f"It is {2 * worst['line'] + 1}.<|im_end|>"
    apart = worst["first_difference"]
    whole = worst["expected"].replace("<|im_end|>", "E")  # one token is one character now
    assert whole[: apart["token"]] == worst["got"].replace("<|im_end|>", "E")[: apart["token"]]
    assert whole[apart["token"]] != worst["got"].replace("<|im_end|>", "E")[apart["token"]]
    scores = [row["score"] for row in found["worst"]]
    assert scores == sorted(scores)


def test_contradictory_rows_are_named_by_their_lines(world: World, tmp_path: Path) -> None:
    rows = chats(6)
    for one, other in ((0, 1), (3, 5)):
        rows[other]["messages"][0] = rows[one]["messages"][0]
    path = write_jsonl(tmp_path / "rows.jsonl", rows, blank=[1])
    found, run, _ = verdict_of(world, plan_of(world, path, threshold=0.97))
    assert (found["passed"], found["layer"]) == (False, "data")
    assert "different answers: lines 1, 3; lines 5, 7" in found["said"]
    assert run.updates_applied < 300  # given up: more updates cannot help


def two_turns(mask: Sequence[int]) -> list[dict[str, Any]]:
    pairs = zip(chats(4), chats(8)[4:], strict=True)
    return [{"messages": [*a["messages"], *b["messages"]], "marks": list(mask)} for a, b in pairs]


def test_a_mask_column_on_the_wrong_message_is_named(world: World) -> None:
    plan = plan_of(world, two_turns([0, 1, 0, 0]), explicit_loss_mask_column="marks")
    found, _, _ = verdict_of(world, plan)
    assert (found["passed"], found["layer"]) == (False, "mask")
    assert "the mask column marks leaves the last assistant message out of 4 of 4" in found["said"]
    assert found["teacher_forced"] >= 0.98
    assert found["worst"][0]["expected"].startswith("It is ")


def test_a_mask_column_on_the_right_message_passes(world: World) -> None:
    plan = plan_of(world, two_turns([0, 0, 0, 1]), explicit_loss_mask_column="marks")
    found, _, _ = verdict_of(world, plan)
    assert (found["passed"], found["layer"]) == (True, None)


@pytest.mark.parametrize(
    ("slip", "ends", "beside"),
    [
        (lambda places: [place - 4 for place in places], True, True),
        (lambda places: places[4:], False, False),
    ],
    ids=["four to the left", "the first four lost"],
)
def test_marks_that_are_wrong_are_named_as_the_mask(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    slip: Callable[[list[int]], list[int]],
    ends: bool,
    beside: bool,
) -> None:
    true = masks._tokens_in

    def wrong(spans: Any, rendering: Any) -> list[bool]:
        marks = true(spans, rendering)
        places = slip([place for place, mark in enumerate(marks) if mark])
        return [place in places for place in range(len(marks))]

    monkeypatch.setattr(masks, "_tokens_in", wrong)
    found, _, _ = verdict_of(world, plan_of(world, chats(4)))
    assert (found["passed"], found["layer"]) == (False, "mask")
    told = found["said"]
    assert "16 of 36 tokens of the answers are not trained (lines 1, 2, 3, 4)" in told
    assert ("the end token is not trained in 4 rows" in told) is ends
    assert ("16 trained tokens belong to no answer" in told) is beside


def test_a_generation_prompt_unlike_the_trained_text_is_the_template(
    world: World, tmp_path: Path
) -> None:
    source = Path(Catalog(world.store).base_model("nbtrain/tiny").location)
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    template = folder / "chat_template.jinja"
    text = template.read_text("utf-8")
    template.write_text(text.replace("assistant\\n' -}}", "assistant\\nWell, ' -}}"), "utf-8")
    found, _, _ = verdict_of(world, plan_of(world, chats(4), model=str(folder)))
    assert (found["passed"], found["layer"]) == (False, "template")
    assert "the generation prompt has 'Well, ' where the trained text has nothing" in found["said"]
    assert found["teacher_forced"] >= 0.98


def test_several_turns_are_written_each_with_its_true_history(world: World) -> None:
    found, _, _ = verdict_of(world, plan_of(world, two_turns([]), assistant_turns="all"))
    assert (found["passed"], found["rows"]) == (True, 4)


def test_packed_rows_pass_too(world: World) -> None:
    found, _, _ = verdict_of(world, plan_of(world, chats(4), packing=True))
    assert found["passed"] is True


# --- what is asked for


def kept(renderer: Renderer, rows: list[dict[str, Any]], rules: LossRules, folder: Path) -> Any:
    with RowWriter(folder) as writer:
        for row in rows:
            found = mask_row(renderer, row, rules)
            writer.append(found.ids, found.trained)
    return TokenizedRows(folder)


class Listed:
    """Rows in memory, on lines of their own."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._all, self.rows = rows, len(rows)

    def open_rows(self, start: int = 0) -> Iterator[dict[str, Any]]:
        return iter(self._all[start:])

    def line_of(self, index: int) -> int:
        return index + 1


CALL = {
    "messages": [
        {"role": "user", "content": "Weather in Rome?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {"type": "function", "function": {"name": "look", "arguments": {"city": "Rome"}}}
            ],
        },
        {"role": "tool", "name": "look", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "Looks.",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    ],
}
RULES = [
    LossRules("last"),
    LossRules("all"),
    LossRules("all", tool_calls=False),
    LossRules("all", tool_results=True),
]


# glm4moe's rows are refused: nothing ends their last turn
@pytest.mark.parametrize("name", sorted(ENDS.keys() - {"glm4moe"}))
def test_answers_are_what_the_marks_train_in_every_template(name: str, tmp_path: Path) -> None:
    renderer, tried = family(name), 0
    for number, rules in enumerate(RULES):
        for kind, row in enumerate([said("Two and two?", "Four.", "Sure?", "Yes, quite."), CALL]):
            folder = tmp_path / f"{number}.{kind}"
            try:
                rows = kept(renderer, [row], rules, folder)
            except RowRefused:
                continue
            (answer,) = read_answers(Listed([row]), renderer, rules, rows)
            ids, marks = rows.row(0)
            rows.close()
            assert (answer.untrained, answer.beside, answer.end_untrained) == (0, 0, False)
            if not rules.tool_results:
                written = [token for s in answer.stretches for token in s.expected]
                assert written == ids[marks].tolist()
            tried += 1
    assert tried >= 2


def test_a_call_that_is_not_trained_is_history_for_the_end_token(tmp_path: Path) -> None:
    renderer, rules = family("qwen2_5"), LossRules("all", tool_calls=False)
    rows = kept(renderer, [CALL], rules, tmp_path / "rows")
    (answer,) = read_answers(Listed([CALL]), renderer, rules, rows)
    text, end, last = (renderer.tokenizer.decode(s.expected) for s in answer.stretches)
    assert (text.strip(), end, last) == ("Let me look.", "<|im_end|>", "Sunny.<|im_end|>")
    assert "</tool_call>" in renderer.tokenizer.decode(answer.stretches[1].prompt)


@pytest.mark.parametrize(
    ("columns", "asked"), [([[0, 1, 0, 0]] * 2, 2), ([[0, 1, 0, 0], [0, 0, 0, 1]], 1)]
)
def test_a_mask_may_leave_the_last_message_out_of_some_rows(
    columns: list[list[int]], asked: int, tmp_path: Path
) -> None:
    renderer, rules = chatml(), LossRules(mask_column="m")
    rows = [said("a?", "one", "b?", "two") | {"m": mask} for mask in columns]
    answers = read_answers(Listed(rows), renderer, rules, kept(renderer, rows, rules, tmp_path))
    assert len(answers[0].stretches) == asked
    assert answers[0].passed_over
    assert bool(answers[0].untrained) is (asked == 2)


# --- what is suspected


def row(
    score: float,
    *,
    line: int = 1,
    prompt: int = 0,
    answer: int = 0,
    forced: float = 0.9,
    **more: Any,
) -> Scored:
    asked = Stretch((prompt or line, 7), (answer or line, 3))
    return Scored(Answer(line - 1, line, (asked,), **more), score, forced)


HEALTHY = [row(1.0, line=line, forced=1.0) for line in (90, 91, 92)]


@pytest.mark.parametrize(
    ("rows", "layer", "words"),
    [
        ([row(0.0, untrained=2)], "mask", "2 of 2 tokens of the answers are not trained (line 1)"),
        ([row(0.0, beside=3)], "mask", "3 trained tokens belong to no answer (line 1)"),
        (
            [Scored(Answer(0, 1, ()), 0.0, 1.0)],
            "mask",
            "no assistant message is trained (line 1)",
        ),
        ([row(0.5, prompt_differs="it differs")], "template", "it differs (line 1)"),
        ([row(0.5, forced=1.0)], "template", "left to itself"),
        (
            [row(0.5, line=4, prompt=5), row(1.0, line=9, prompt=5)],
            "data",
            "lines 4, 9",
        ),
        ([row(0.5)], "training", "the loss is still 1.25"),
        # What explains most of the rows that fall short, and at least half of them
        ([row(0.1, line=n) for n in (1, 2, 3)] + [row(0.1, line=4, untrained=1)], "training", ""),
        (
            [row(0.1, line=n, prompt=5) for n in (1, 2)] + [row(0.1, line=4, untrained=1)],
            "data",
            "lines 1, 2",
        ),
        (
            [row(0.1, line=n, untrained=1, prompt_differs="it differs") for n in (1, 2)],
            "mask",
            "lines 1, 2",
        ),
        # Deviations of rows that come back all the same are no cause
        ([row(1.0, line=1, untrained=1), row(0.2, line=2)], "training", ""),
    ],
)
def test_the_layer_that_explains_most(rows: list[Scored], layer: str, words: str) -> None:
    found, told = suspect([*rows, *HEALTHY], threshold=0.98, loss=1.25, updates=12)
    assert found == layer
    assert words in told


def test_equal_answers_are_no_contradiction() -> None:
    rows = [row(1.0, line=n, prompt=5, answer=a) for n, a in ((1, 8), (2, 8), (3, 9))]
    assert contradictions([one.answer for one in rows[:2]]) == []
    assert contradictions([one.answer for one in rows]) == [[0, 1, 2]]


def test_what_contradictory_rows_can_reach() -> None:
    def asked(prompt: int, *expected: int) -> Answer:
        return Answer(0, 1, (Stretch((prompt,), expected),))

    twice, other = asked(1, 5, 6, 3), asked(1, 5, 7, 3)
    assert attainable([]) == 0
    assert attainable([twice, asked(2, 9, 3)]) == 1
    assert attainable([twice, twice, other]) == pytest.approx((1 + 1 + 1 / 3) / 3)
    assert attainable([asked(1, 5, 3), asked(1, 6, 3)]) == 0.5


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=3)),
        min_size=1,
        max_size=6,
    )
)
def test_no_model_does_better_than_attainable(rows: list[tuple[int, list[int]]]) -> None:
    answers = [Answer(0, 1, (Stretch((p,), tuple(e)),)) for p, e in rows]
    best = attainable(answers)
    for texts in itertools.product(itertools.product((0, 1), repeat=3), repeat=3):
        shares = [matching(e, texts[p]) / len(e) for p, e in rows]
        assert sum(shares) / len(shares) <= best + 1e-9
    assert (best == 1) >= (not contradictions(answers))


def test_many_lines_are_counted() -> None:
    rows = [row(0.0, line=n, untrained=1) for n in range(1, 15)]
    _, told = suspect(rows, threshold=0.9, loss=1.0, updates=1)
    assert "lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 4 more" in told


# --- when it measures


class Both:
    """Two ranks of which this is the second; the first measures the same on all its rows."""

    rank, size = 1, 2

    def __init__(self, first: list[Any]) -> None:
        self._first = first

    def gather(self, value: Any) -> list[Any]:
        return [self._first.pop(0), value]

    def sum(self, tensors: Sequence[Any]) -> None:
        raise AssertionError


class Recording(Alone):
    """One rank's part of two: what it tells the other."""

    size = 2

    def __init__(self) -> None:
        self.told: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.told.append(value)
        return [value, []]


def prepared(world: World, plan: ResolvedPlan, folder: Path) -> Any:
    return Preparation(world.store, plan, folder, ranks=Alone(), device=torch.device("cpu")).run()


def test_ranks_measure_their_share_and_judge_alike(world: World, tmp_path: Path) -> None:
    plan = plan_of(world, chats(5), steps=10, micro_batch_per_gpu=2)
    ready = prepared(world, plan, tmp_path / "rows")

    def check(ranks: Any) -> SmokeCheck:
        return SmokeCheck(world.store, plan, ready, ranks=ranks, device=torch.device("cpu"))

    alone = check(Alone())
    alone.until(10)
    first = Recording()
    half = check(first)
    with pytest.raises(ValueError, match="zip"):
        half.until(10)  # it lacks the other's rows
    together = check(Both(first.told))
    together.until(10)
    one, two = alone.verdict(), together.verdict()
    assert one["score"] == two["score"]
    assert one["worst"] == two["worst"]
    assert one["teacher_forced"] == pytest.approx(two["teacher_forced"])


def test_it_measures_now_and_then_and_after_the_last_step(world: World, tmp_path: Path) -> None:
    plan = plan_of(world, chats(6), steps=25, micro_batch_per_gpu=1, learning_rate=1e-5)
    ready = prepared(world, plan, tmp_path / "rows")
    looked = 0

    def tick() -> None:
        nonlocal looked
        looked += 1

    check = SmokeCheck(
        world.store, plan, ready, ranks=Alone(), device=torch.device("cpu"), tick=tick
    )
    measured = []
    for step in range(1, 26):
        before = looked
        check.until(step)
        if looked > before:
            measured.append((step, looked - before > 6))
    # Two epochs apart; rows that are not predicted are not written, but for the last time
    assert measured == [(12, False), (24, False), (25, True)]
    assert check.activity is None


def test_it_is_given_up_only_for_a_reason_and_without_progress(
    world: World, tmp_path: Path
) -> None:
    plan = plan_of(world, chats(2), steps=100)
    ready = prepared(world, plan, tmp_path / "rows")
    check = SmokeCheck(world.store, plan, ready, ranks=Alone(), device=torch.device("cpu"))
    layers = iter(["mask"] * 3 + ["training"] + ["mask"] * 20)
    check._suspected = lambda: (next(layers), "")  # type: ignore[method-assign]
    assert not any(check._hopeless(score) for score in (0.5, 0.5, 0.5, 0.6, 0.6, 0.6))
    assert [check._hopeless(0.6) for _ in range(PATIENCE)] == [False] * (PATIENCE - 1) + [True]
