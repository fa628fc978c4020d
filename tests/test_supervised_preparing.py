"""What is remarked before a supervised run starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from supervised_world import World, chats

from nbtrain.catalog.base_models import embedded_folder
from nbtrain.data.rendering import WRITES_DATE
from nbtrain.store import open_store
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
