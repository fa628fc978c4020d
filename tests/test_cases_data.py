"""Data as people really have it: odd contents, odd consoles, many rows."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets_world import chat, refusals, text, written
from masked import CASES, chatml

from nbtrain.data.datasets import DatasetRegistry
from nbtrain.data.masks import LossRules
from nbtrain.store import open_store
from nbtrain.training.supervised.tokenizing import tokenize


@pytest.fixture
def registry(home: Path) -> DatasetRegistry:
    return DatasetRegistry(open_store())


def test_df08_answers_that_are_no_text_are_named_by_line_and_kind(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    lines = (CASES / "DF-08.nonstring.jsonl").read_text("utf-8").splitlines()
    found = refusals(registry, written(tmp_path, "\n".join([*lines, "", lines[0]])))
    kinds = ("an object", "a number", "a truth value", "an empty list")
    assert [one.where and one.where.line for one in found] == [1, 2, 3, 4]
    for one, kind in zip(found, kinds, strict=True):
        assert one.message.startswith(f"messages[1].content is {kind}")
    assert "2 rows: lines 1, 6" in found[0].message


ODD_CONSOLE = """
import json, sys
from pathlib import Path
from nbtrain.client import Client
from nbtrain.errors import Refused

cases = Path(sys.argv[1])
client = Client()
client.datasets.register("d", cases / "EV-05.uni.jsonl")
client.workloads.create("试验")
document = (cases / "EV-05.uni.yaml").read_text("utf-8").replace("tiny", "nbtrain/tiny")
file = Path(sys.argv[2]) / "odd.yaml"
file.write_text(document, "utf-8")
view = client.training.resolve(file)
file.write_text(document.replace("dataset: d", "dataset: 你好"), "utf-8")
try:
    client.training.resolve(file)
    refused = ""
except Refused as error:
    refused = str(error)
    print(ascii(refused))
found = {
    "workload": view.plan.workload.name,
    "description": view.plan.description,
    "refused": refused,
}
Path(sys.argv[2], "found.json").write_text(json.dumps(found), "utf-8")
"""


def test_ev05_a_console_of_ascii_harms_nothing(home: Path, tmp_path: Path) -> None:
    """Rows, descriptors and messages with any characters, where Python would guess ASCII."""
    script = written(tmp_path, ODD_CONSOLE, "script.py")
    odd = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii",
           "PYTHONCOERCECLOCALE": "0"}  # fmt: skip
    ran = subprocess.run(
        [sys.executable, str(script), str(CASES), str(tmp_path)],
        env=os.environ | odd,
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode("utf-8", "replace")[-3000:]
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert (found["workload"], found["description"]) == ("试验", "naïve 🚀")
    assert "你好" in found["refused"]
    assert "odd.yaml" in found["refused"]
    (row,) = DatasetRegistry(open_store()).get("d").open_rows()
    assert row == json.loads((CASES / "EV-05.uni.jsonl").read_text("utf-8"))


def test_tokenizing_takes_no_more_memory_for_ten_thousand_rows(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    """Objects that Python holds while rows are rendered, masked and written to the disk.

    One kept for each row would be thousands.
    """
    count, held = 10_000, {}
    rows = (chat(f"{n} of them?", f"{n}") for n in range(count))

    def look(done: int, total: int) -> None:
        if done in (2_000, total):
            gc.collect()
            held[done] = sys.getallocatedblocks()

    found = tokenize(
        registry.register("d", written(tmp_path, text(*rows))),
        chatml(),
        LossRules(),
        tmp_path / "rows",
        max_tokens=100,
        truncation="error",
        source="d",
        progress=look,
    )
    assert (found.rows, found.problems) == (count, [])
    assert found.rate > 0
    assert held[count] - held[2_000] < 2_000, held


def values(rows: list[dict[str, Any]]) -> list[Any]:
    return [row["para"] for row in rows]


def test_df05_one_odd_value_among_ten_thousand_keeps_its_type(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    rows = [chat(str(n), "a", para="1a" if n == 9_998 else n % 50) for n in range(10_000)]
    found = registry.register("d", written(tmp_path, text(*rows)))
    assert values(list(found.open_rows())) == values(rows)
    assert values(list(found.open_rows(9_997))) == [47, "1a", 49]
