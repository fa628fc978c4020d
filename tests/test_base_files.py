"""A base model whose files changed after the plan was made: said, with all else that is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from described import plan_of, run_here, sums
from safetensors.torch import load_file, save_file
from supervised_world import World, chats

from nbtrain.errors import StartChecksFailed
from nbtrain.store import open_store
from nbtrain.training.base_files import loading


@pytest.fixture
def world(home: Path) -> Iterator[World]:
    with open_store() as store:
        yield World(store)


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Path:
    """A copy of the embedded model that can be damaged."""
    source = Path(world.plan(chats(2)).base_model.location)
    copy = tmp_path / "base"
    shutil.copytree(source, copy)
    for path in (copy, *copy.iterdir()):
        path.chmod(0o700)
    return copy


def weights(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def other_weights(folder: Path) -> None:
    found = {name: 1.5 * value for name, value in load_file(weights(folder)).items()}
    save_file(found, weights(folder), metadata={"format": "pt"})


def cut_weights(folder: Path) -> None:
    weights(folder).write_bytes(weights(folder).read_bytes()[:5000])


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


CHANGED = "the base model's files have changed since the plan was checked"
DAMAGE: list[tuple[Callable[[Path], Any], list[str], bool]] = [
    (other_weights, [CHANGED], True),
    (cut_weights, [CHANGED], True),
    (no_tokenizer, [CHANGED, "the tokenizer of"], False),
    (shutil.rmtree, ["the base model's folder is gone"], False),
]
"""What is done to the folder, the sentences, and whether the rows are still read."""
each = pytest.mark.parametrize(("damage", "sentences", "reads"), DAMAGE)


def check_problems(
    error: StartChecksFailed, sentences: list[str], reads: bool, field: str = "baseModel"
) -> None:
    of_base = [p for p in error.problems if p.field == field]
    assert len(of_base) == len(sentences), error
    for problem, sentence in zip(of_base, sentences, strict=True):
        assert problem.message.startswith(sentence)
    others = [p for p in error.problems if p.field != field]
    assert bool(others) is reads, error
    assert all(p.where is not None and p.where.line == 3 for p in others)


@each
def test_a_supervised_run_trains_on_no_other_base(
    damage: Callable[[Path], Any], sentences: list[str], reads: bool, world: World, folder: Path
) -> None:
    rows = chats(4)
    rows[2]["messages"][1]["content"] = "long " * 60
    plan = world.plan(rows, model=str(folder))
    damage(folder)
    with pytest.raises(StartChecksFailed) as caught:
        world.train(plan)
    check_problems(caught.value, sentences, reads)


@each
def test_a_reinforcement_run_trains_on_no_other_base(
    damage: Callable[[Path], Any],
    sentences: list[str],
    reads: bool,
    world: World,
    folder: Path,
) -> None:
    rows = sums(4)
    rows[2]["messages"][0]["content"] = "What is " + "1 + " * 200 + "3?"
    base = world.plan(chats(2), model=str(folder)).base_model
    plan = replace(plan_of(world.datasets.register("sums", rows)), base_model=base)
    damage(folder)
    with pytest.raises(StartChecksFailed) as caught:
        run_here(world.store, plan)
    check_problems(caught.value, sentences, reads)


def test_memory_that_runs_out_while_loading_is_no_damage(world: World) -> None:
    plan = world.plan(chats(2))
    with pytest.raises(MemoryError), loading(plan, "the model"):
        raise MemoryError
    told = "the model of nbtrain/tiny cannot be loaded: KeyError"
    with pytest.raises(StartChecksFailed, match=told), loading(plan, "the model"):
        raise KeyError("model.embed_tokens")
