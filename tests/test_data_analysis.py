"""A dataset under a model's tokenizer, in this process and asked of the side process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from masked import chatml, said, tokenizer_with
from transformers import AutoTokenizer

from nbtrain.catalog import Catalog
from nbtrain.catalog.base_models import BaseModel, embedded_folder
from nbtrain.client.side import SideProcess, side_process
from nbtrain.client.warm import _Watch
from nbtrain.data.analysis import Analysis, Lengths, analyze, preview_row, rows_page
from nbtrain.data.datasets import Dataset, DatasetRegistry
from nbtrain.data.masks import LossRules, mask_row
from nbtrain.data.rendering import WRITES_DATE, Renderer, end_ids_in
from nbtrain.errors import NbtrainError, NotFound, Refused
from nbtrain.processes import Identity, is_alive, process_identity
from nbtrain.store import Store, open_store

SYSTEM = {"role": "system", "content": "rules"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def store(home: Path) -> Store:
    return open_store(home)


@pytest.fixture(scope="module")
def dataset(store: Store, home: Path) -> Dataset:
    """Twenty rows in a file whose second line is blank; row 5 (line 7) carries tools."""
    rows: list[dict[str, Any]] = [said(f"{n}+1=", str(n + 1) * (1 + n % 3)) for n in range(20)]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    rows[5]["tools"] = [tool]
    written = [json.dumps(row) for row in rows]
    path = home / "sums.jsonl"
    path.write_text("\n".join([written[0], "", *written[1:]]), "utf-8")
    return DatasetRegistry(store).register("sums", path)


@pytest.fixture(scope="module")
def model(store: Store) -> BaseModel:
    return Catalog(store).base_model("nbtrain/tiny")


@pytest.fixture(scope="module")
def side(home: Path) -> Iterator[SideProcess]:
    process = SideProcess(home)
    yield process
    process.close()


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    return Renderer(tokenizer, end_ids_in(embedded_folder(), tokenizer))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], Lengths(0, 0, 0, 0, 0)),
        ([7], Lengths(7, 7, 7, 7, 7)),
        (range(1, 101), Lengths(50, 90, 99, 100, 5050)),
        ([1] * 99 + [1000], Lengths(1, 1, 1, 1000, 1099)),
    ],
)
def test_percentiles_by_nearest_rank(lengths: Any, expected: Lengths) -> None:
    counts: dict[int, int] = {}
    for length in lengths:
        counts[length] = counts.get(length, 0) + 1
    assert Lengths.of(counts) == expected


def test_an_analysis_counts_tokens_and_names_lines(dataset: Dataset, renderer: Renderer) -> None:
    rows = [
        mask_row(renderer, row, LossRules()) for row in dataset.open_rows() if "tools" not in row
    ]
    lengths = sorted(len(row.ids) for row in rows)
    limit = lengths[-3]
    found = analyze(dataset, renderer.tokenizer, LossRules(), limit, ends=renderer.ends)
    assert (found.rows, found.refused) == (20, 1)
    assert found.tokens.total == sum(lengths)
    assert (found.tokens.max, found.tokens.median) == (lengths[-1], lengths[9])
    assert found.trained.total == sum(row.trained_tokens for row in rows)
    assert found.over == sum(length > limit for length in lengths) == len(found.over_lines)
    (finding,) = found.findings
    assert finding.message == "the chat template ignores the tools of this row"
    assert (finding.count, finding.lines) == (1, [7])
    assert Analysis.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert "1 refused" in str(found)


def test_rows_refused_in_the_same_way_are_one_finding(store: Store) -> None:
    rows = [
        said("a", "b"),
        *[{"messages": [SYSTEM, *said("a", f"{n}")["messages"]]} for n in range(12)],
    ]
    dataset = DatasetRegistry(store).register("systems", rows)
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = tokenizer_with(template + chatml().tokenizer.chat_template, ["<|im_end|>"])
    found = analyze(dataset, tokenizer, LossRules(), 100)
    (finding,) = found.findings
    assert (finding.count, finding.lines) == (12, list(range(2, 12)))
    assert "does not take the system message" in finding.text()


def test_the_digests_follow_tokenizer_and_template(dataset: Dataset) -> None:
    one = tokenizer_with(chatml().tokenizer.chat_template, ["<|im_end|>"])
    two = tokenizer_with(chatml().tokenizer.chat_template + "\n", ["<|im_end|>"])
    three = tokenizer_with(chatml().tokenizer.chat_template, ["<|im_end|>", "more"])
    first, second, third = (analyze(dataset, it, LossRules(), 9) for it in (one, two, three))
    assert first.tokenizer == second.tokenizer != third.tokenizer
    assert first.template == third.template != second.template


def test_memory_does_not_grow_with_the_rows(store: Store) -> None:
    tokenizer = tokenizer_with(chatml().tokenizer.chat_template, ["<|im_end|>"])
    registry = DatasetRegistry(store)

    def peak(rows: int) -> int:
        texts = (f"{n} " + "word " * 40 for n in range(rows))
        dataset = registry.register(f"many-{rows}", [said(text, "ok") for text in texts])
        analyze(dataset, tokenizer, LossRules(), 10)
        tracemalloc.start()
        analyze(dataset, tokenizer, LossRules(), 10)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    # A row kept would take 25 kB; what is left over waits for the garbage collector.
    assert peak(600) < peak(60) + 500_000


def test_a_page_of_rows_shows_counts_and_refusals(dataset: Dataset, renderer: Renderer) -> None:
    page = rows_page(dataset, renderer, LossRules(), offset=4, limit=2)
    assert [shown["row"] for shown in page] == [4, 5]
    assert [shown["line"] for shown in page] == [6, 7]
    assert page[0]["text"].endswith("[[55<|im_end|>]]\n")
    assert page[0]["trained"] == 3
    assert page[1]["tokens"] is None
    assert page[1]["refused"][0].startswith("the chat template ignores the tools")
    assert rows_page(dataset, renderer, LossRules(), offset=20) == []


def test_a_preview_of_a_refused_row_names_its_line(dataset: Dataset, renderer: Renderer) -> None:
    with pytest.raises(Refused, match=r"sums, line 7"):
        preview_row(dataset, renderer, LossRules(), 5)


# --- the side process


def test_the_side_process_answers_as_this_one_does(
    side: SideProcess, dataset: Dataset, model: BaseModel, renderer: Renderer
) -> None:
    told: list[int] = []
    rules = LossRules("all")
    found = side.analyze(dataset, model, rules, 30, progress=told.append)
    assert found == analyze(dataset, renderer.tokenizer, rules, 30, ends=renderer.ends)
    assert side.rows(dataset, model, rules, 3, 3) == rows_page(dataset, renderer, rules, 3, 3)
    assert side.preview(dataset, model, row=2) == preview_row(dataset, renderer, LossRules(), 2)
    first = side.pid
    side.rows(dataset, model)
    assert first is not None
    assert side.pid == first
    assert (side.log.stat().st_mode & 0o777) == 0o600


def test_its_refusals_arrive_as_refusals(
    side: SideProcess, dataset: Dataset, model: BaseModel, tmp_path: Path
) -> None:
    with pytest.raises(Refused) as caught:
        side.preview(dataset, model, row=5)
    (problem,) = caught.value.problems[:1]
    assert problem.field == "tools"
    assert problem.where is not None
    assert (problem.where.line, problem.where.source) == (7, "sums")
    with pytest.raises(IndexError, match="no row 20"):
        side.preview(dataset, model, row=20)
    with pytest.raises(NbtrainError, match="rules_of_nobody"):
        side.request({"op": "rules_of_nobody"})
    gone = Dataset(tmp_path / "gone", dataset.spec, "gone")
    with pytest.raises(NotFound, match="gone or damaged"):
        side.rows(gone, model)


def test_it_survives_a_line_that_is_no_request(
    side: SideProcess, dataset: Dataset, model: BaseModel
) -> None:
    first = side.rows(dataset, model, limit=1)
    pid, process = side.pid, side._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.write(b'\xff{"id"\n[]\n\n')
    process.stdin.flush()
    assert side.rows(dataset, model, limit=1) == first
    assert side.pid == pid


def test_it_is_started_anew_after_it_died(
    side: SideProcess, dataset: Dataset, model: BaseModel
) -> None:
    before = side.rows(dataset, model, limit=1)
    pid = side.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert side.rows(dataset, model, limit=1) == before
    assert side.pid not in (pid, None)


def test_one_that_hangs_is_killed_and_started_anew(
    home: Path, dataset: Dataset, model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = SideProcess(home, patience=0.5)
    try:
        before = side.rows(dataset, model, limit=1)
        pid = side.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert side.rows(dataset, model, limit=1) == before
        assert side.pid not in (pid, None)
        running = side._running

        def stopped(*told: Any) -> Any:
            process = running(*told)
            os.kill(process.pid, signal.SIGSTOP)
            return process

        monkeypatch.setattr(side, "_running", stopped)
        monkeypatch.setattr(side, "_first", 0.5)
        with pytest.raises(NbtrainError, match=r"gave no sign of life for 0\.5 s, twice"):
            side.preview(dataset, model)
        assert side.pid is None
    finally:
        side.close()


def test_a_sign_of_life_is_waited_on(home: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with _Watch(process, 0.4) as watch:
            for _ in range(4):
                time.sleep(0.2)
                watch.seen()
            assert not watch.expired
            assert process.poll() is None
            process.wait(30)
            assert watch.expired
    finally:
        process.kill()
        process.wait()


DATED = "{{ strftime_now('%Y-%m-%d') }}"


@pytest.mark.parametrize(
    ("added", "dated"),
    [
        ("", False),
        (DATED, True),
        ("{% if false %}" + DATED + "{% endif %}", False),
        ("{% macro day() %}" + DATED + "{% endmacro %}{{ day() }}", True),
    ],
)
def test_a_template_that_writes_the_date_is_remarked(
    dataset: Dataset, added: str, dated: bool
) -> None:
    tokenizer = tokenizer_with(added + chatml().tokenizer.chat_template, ["<|im_end|>"])
    found = analyze(dataset, tokenizer, LossRules(), 30)
    assert found.remarks == ((WRITES_DATE,) if dated else ())
    assert (WRITES_DATE in str(found)) is dated
    assert Analysis.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_there_is_one_for_a_home(home: Path, tmp_path: Path) -> None:
    assert side_process(home) is side_process(home)
    assert side_process(home) is not side_process(tmp_path)
    assert side_process(home).pid is None  # nothing was asked yet


_STARTS_ONE = """
import sys, time
from pathlib import Path
from nbtrain.client.side import side_process
side = side_process(Path(sys.argv[1]))
print(side.request({"op": "ping"}), flush=True)
if sys.argv[2] == "stay":
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["leave", "stay"])
def test_it_ends_with_the_process_that_started_it(home: Path, how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _STARTS_ONE, str(home), how], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        identity = process_identity(int(parent.stdout.readline()))
        if how == "stay":
            assert identity is not None
            parent.kill()
        parent.wait(30)
    assert identity is None or _gone(identity)


def _gone(identity: Identity) -> bool:
    until = time.monotonic() + 10
    while is_alive(identity) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_alive(identity)
