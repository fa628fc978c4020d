"""Rows that a template cannot follow, and patterns and rates, as a job meets them: all, by line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from masked import CASES, case_renderer, case_rows, family
from supervised_world import World, chats

from nbtrain.data.masks import LossRules
from nbtrain.data.rendering import Renderer
from nbtrain.rollout.ranks import Alone
from nbtrain.store import open_store
from nbtrain.training.supervised.checks import row_checks
from nbtrain.training.supervised.preparing import Preparation, Prepared
from nbtrain.training.supervised.tokenizing import Tokenized, tokenize

END = "<|im_end|>"


@pytest.fixture
def world(home: Path) -> Iterator[World]:
    with open_store() as store:
        yield World(store)


def tokenized(
    world: World, renderer: Renderer, rows: Any, folder: Path, turns: Any = "last"
) -> Tokenized:
    dataset = world.datasets.register("case", rows)
    return tokenize(
        dataset,
        renderer,
        LossRules(turns),
        folder / "rows",
        max_tokens=400,
        truncation="error",
        source="case",
    )


def told(found: Tokenized) -> list[tuple[str, int | None]]:
    return [(one.message, one.where.line if one.where else None) for one in found.problems]


def test_tm03_the_trained_tokens_are_counted_without_generation_markers(
    world: World, tmp_path: Path
) -> None:
    renderer = case_renderer("TM-03", END)
    found = tokenized(world, renderer, case_rows("TM-03"), tmp_path)
    answer = renderer.tokenizer.encode("Lima.<|im_end|>", add_special_tokens=False)
    check = row_checks(found)[0]
    assert (found.trained_tokens, check.measured, check.verdict) == (len(answer),) * 2 + ("passed",)
    assert f"{len(answer)} of {found.tokens} tokens in 1 rows are trained" in check.said


def test_tm06_thoughts_taken_out_of_trained_turns_are_counted_by_row(
    world: World, tmp_path: Path
) -> None:
    (bad,) = case_rows("TM-06")
    rows = [*chats(2), bad, *chats(1), bad | {"n": 2}]
    found = tokenized(world, case_renderer("TM-06", END), rows, tmp_path, "all")
    ((message, line),) = told(found)
    assert message.startswith("reasoning removed from 1 of 2 trained turns")
    assert "alike in 2 rows: lines 3, 5" in message
    assert (line, found.rows) == (3, 3)


def test_tm09_users_twice_in_a_row_are_named_by_line_and_counted(
    world: World, tmp_path: Path
) -> None:
    good, bad = case_rows("TM-09")
    path = CASES / "TM-09.rows.jsonl"
    found = tokenized(world, family("gemma"), path, tmp_path)
    assert told(found) == [("the chat template needs user and assistant to alternate", 2)]
    assert "Roles: user, assistant, user, user" in str(found.problems[0])
    more = tokenized(world, family("gemma"), [bad, good, bad | {"n": 1}], tmp_path)
    assert "alike in 2 rows: lines 1, 3" in more.problems[0].message


def test_tm10_system_messages_that_are_not_taken_are_counted_and_the_first_named(
    world: World, tmp_path: Path
) -> None:
    rows = case_rows("TM-10")
    renderer = case_renderer("TM-10", "<end_of_turn>")
    found = tokenized(world, renderer, CASES / "TM-10.rows.jsonl", tmp_path)
    ((message, line),) = told(found)
    assert "does not take the system message" in message
    assert (line, found.rows) == (2, 2)
    more = tokenized(world, renderer, [*rows, rows[1] | {"n": 1}], tmp_path)
    assert "alike in 2 rows: lines 2, 4" in more.problems[0].message


def test_tm16_rows_that_only_call_tools_train_and_the_empty_one_is_named(
    world: World, tmp_path: Path
) -> None:
    from nbtrain.errors import Refused

    with pytest.raises(Refused) as refused:
        world.datasets.register("case", CASES / "TM-16.rows.jsonl")
    (problem,) = refused.value.problems
    assert problem.where is not None
    assert (problem.message, problem.where.line) == ("messages[1].content is null", 3)
    found = tokenized(world, family("qwen2_5"), case_rows("TM-16")[:2], tmp_path)
    assert (found.rows, found.problems) == (2, [])


def prepared(world: World, folder: Path, pattern: str) -> Prepared:
    plan = world.plan(chats(2), lora_target_modules=pattern)
    return Preparation(
        world.store, plan, folder / "rows", ranks=Alone(), device=torch.device("cpu")
    ).run()


def pattern_of(name: str) -> str:
    """The pattern that stands in one of the three documents."""
    from nbtrain.plan.source import parse

    value = parse((CASES / name).read_text("utf-8"))
    for key in ("config", "hyperparams", "lora", "targetModules"):
        value = value[key]
    return str(value)


def test_al05_a_pattern_that_matches_no_whole_path_shows_five(world: World, tmp_path: Path) -> None:
    with closing(prepared(world, tmp_path, pattern_of("AL-05.bad.yaml"))) as ready:
        (problem,) = ready.problems
    paths = [f"model.layers.{n}.self_attn.{p}_proj" for n in range(2) for p in "qkvo"]
    assert problem.field == "lora.targetModules"
    assert sum(path in str(problem) for path in paths) + str(problem).count("mlp.") >= 5


def test_al05_a_pattern_that_matches_covers_its_modules_alone(world: World, tmp_path: Path) -> None:
    with closing(prepared(world, tmp_path, pattern_of("AL-05.ok.yaml"))) as ready:
        assert ready.problems == []
        assert ready.model is not None
        assert ready.model.trainable
        assert all("q_proj" in name for name in ready.model.trainable)


def test_rs12_a_capped_run_ends_at_the_floor(world: World) -> None:
    config = json.loads((CASES / "RS-12.run.json").read_text())["config"]["hyperparams"]
    run, _ = world.train(
        world.plan(
            chats(4),
            learning_rate=config["optimizer"]["learningRate"],
            scheduler_kind=config["scheduler"]["kind"],
            min_learning_rate_ratio=config["scheduler"]["minLearningRateRatio"],
            epochs=config["training"]["epochs"],
            max_steps=config["training"]["maxSteps"],
        )
    )
    rates = [step["learning_rate"] for step in world.steps(run)]
    assert len(rates) == 10
    assert rates[-1] == pytest.approx(1e-4, rel=1e-2)
    assert rates == sorted(rates, reverse=True)
