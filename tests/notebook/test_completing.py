"""Completion and help over the protocol of a real kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_kernels import Kernel, kernel

from nbtrain.notebook.flags import TRAIN
from nbtrain.notebook.verbs import VERBS


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel for the file, with a home of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBTRAIN_HOME", str(tmp_path_factory.mktemp("home")))
        with kernel() as started:
            yield started


def complete(here: Kernel, cell: str) -> list[tuple[str, str]]:
    """Texts and types at the bar; every match replaces what is typed."""
    at = cell.index("|")
    code = cell.replace("|", "", 1)
    content: dict[str, Any] = here.client.complete(code, at, reply=True, timeout=60)["content"]
    assert content["status"] == "ok"
    assert content["cursor_end"] == at
    shown = content["metadata"]["_jupyter_types_experimental"]
    assert [item["text"] for item in shown] == content["matches"]
    return [(item["text"], item["type"]) for item in shown]


def inspect(here: Kernel, code: str) -> str:
    content = here.client.inspect(code, len(code), reply=True, timeout=60)["content"]
    assert content["found"]
    return str(content["data"]["text/plain"])


def asked(here: Kernel, code: str) -> str:
    """What a question mark shows in the pager."""
    reply = here.client.execute(code, reply=True, timeout=60)
    (page,) = reply["content"]["payload"]
    return str(page["data"]["text/plain"])


def test_every_kind_of_place_completes(here: Kernel) -> None:
    assert [text for text, _ in complete(here, "%%train |")] == [flag.name for flag in TRAIN]
    assert complete(here, "%%train --workload su|")[0] == ("sums", "workload")
    assert complete(here, "%%train --method=g|") == [("grpo", "value"), ("gspo", "value")]
    assert complete(here, "%%train --workload sums\nbatch_s|") == [("batch_size: ", "integer")]
    assert complete(here, "%%train --workload sums\nval_enabled: |")[0] == ("true", "default")
    nested = "%%train\nkind: run\nconfig:\n  hyperparams:\n    training:\n      ep|"
    assert complete(here, nested)[0][0] == "epochs: "
    assert [text for text, _ in complete(here, "%train |")] == list(VERBS)


def test_names_of_the_kernel_s_own_objects(here: Kernel) -> None:
    here.run("w = nbtrain.Client().workloads.get('sums')\nrate = 3e-4")
    assert complete(here, "%%train --workload $|") == [("$w", "WorkloadItem")]
    assert complete(here, "%%train\nlearning_rate: $|") == [("$rate", "float")]


def test_other_cells_are_as_ever(here: Kernel) -> None:
    here.run("some_long_name = 1")
    assert [text for text, _ in complete(here, "some_long|")] == ["some_long_name"]
    assert any(text == "%%timeit" for text, _ in complete(here, "%%timei|"))


def test_help_comes_from_the_tables(here: Kernel) -> None:
    cell, line = asked(here, "%%train?"), asked(here, "%train?")
    shifted = inspect(here, "%%train")
    for flag in TRAIN:
        assert flag.name in cell
        assert flag.name in shifted, "Shift+Tab does not know which of both magics is meant"
    assert "batch_size 4" in cell, "what --small takes"
    for verb in VERBS.values():
        assert f"%train {verb.name}" in line
    assert "--max-tokens N" in here.run("%train help sample")


def test_a_fault_has_its_caret(here: Kernel, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="smoke is for sft") as refused:
        here.run("%%train --workload sums --smoke\n")
    assert "    %%train --workload sums --smoke\n" + " " * 28 + "^" in str(refused.value)
    with pytest.raises(Exception, match="did you mean '--small'"):
        here.run("%%train --workload sums --smal\n")
