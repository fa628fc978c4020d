"""What is remarked before a supervised run starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from supervised_world import World, chats

from nbtrain.catalog.base_models import embedded_folder
from nbtrain.data.rendering import WRITES_DATE
from nbtrain.store import open_store
from nbtrain.training import matching
from nbtrain.training.ranks import join_ranks
from nbtrain.training.supervised.preparing import Preparation


@pytest.mark.parametrize("dated", [False, True])
def test_a_template_that_writes_the_date_is_remarked(
    home: Path, tmp_path: Path, dated: bool
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(embedded_folder(), folder)
    template = folder / "chat_template.jinja"
    if dated:
        template.write_text("{{ strftime_now('%Y') }}" + template.read_text("utf-8"), "utf-8")
    with open_store() as store:
        plan = World(store).plan(chats(3), model=str(folder))
        ranks, device = join_ranks(tmp_path, 0)
        ready = Preparation(store, plan, tmp_path / "rows", ranks=ranks, device=device).run()
        ready.close()
    assert ready.problems == []
    assert (WRITES_DATE in ready.remarks) is dated


def test_a_pattern_that_is_never_done_matching_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "SECONDS", 1)
    said: list[tuple[str, bool]] = []
    with open_store() as store:
        plan = World(store).plan(chats(3), lora_target_modules="(.*)*(.*)*(.*)*zz$")
        ranks, device = join_ranks(tmp_path, 0)
        ready = Preparation(
            store, plan, tmp_path / "rows", ranks=ranks, device=device,
            says=lambda text, /, *, now=False: said.append((text, now)),
        ).run()  # fmt: skip
        ready.close()
    (problem,) = ready.problems
    assert problem.field == "lora.targetModules"
    assert "is not matched against the module paths within 1 s" in str(problem)
    assert "model.layers.0.self_attn.q_proj" in str(problem)
    assert said[-1] == ("loading the model", True)


@pytest.mark.parametrize("pattern", [r".*\.(q|v)_proj", "no_such_layer", "(a+)+b"])
def test_a_pattern_that_is_done_is_left_to_match_or_not(pattern: str) -> None:
    assert matching.is_done_matching(pattern, ["model.layers.0.self_attn.q_proj", "lm_head"])
