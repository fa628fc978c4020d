"""Tab in ``%%train`` cells and ``%train`` lines: pure places, then a real shell's completer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import stored
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.completer import provisionalcompleter
from shells import Shell

from nbtrain.client import Run, default_client
from nbtrain.client import known as lists
from nbtrain.notebook import completion
from nbtrain.notebook.cell import CellText, read_cell
from nbtrain.notebook.completion_offers import LONGEST, MOST, offers
from nbtrain.notebook.completion_place import body_place, line_place
from nbtrain.notebook.flags import TRAIN
from nbtrain.notebook.verbs import VERBS
from nbtrain.plan.descriptor.document import FLAT
from nbtrain.plan.descriptor.table import FIELDS
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.statements import BODY_KEYS


class Named:
    """What could be named, without a store."""

    def runs(self, _: str = "") -> list[tuple[str, str]]:
        return [("first", "running"), ("my run", "succeeded")]

    def checkpoints(self, _: str = "") -> list[tuple[str, str]]:
        return [("abcdef012345", "step 40 0.81")]

    def names(self, kind: str, _: str = "") -> list[tuple[str, str]]:
        return [(f"{kind.replace(' ', '-')}-1", kind), (f"{kind.replace(' ', '-')}-2", kind)]


def told(
    cell: str, names: Mapping[str, object] | None = None, known: Any = Named
) -> list[tuple[str, str]]:
    """Texts and their types where the bar stands."""
    at = cell.index("|")
    row, column = cell.count("\n", 0, at), at - (cell.rfind("\n", 0, at) + 1)
    found = offers(
        cell.replace("|", "", 1), row, column, known=known, names=names or {}
    )  # fmt: skip
    assert found is not None
    before = cell[:at].rpartition("\n")[2]
    assert before.endswith(found[0])
    return [(offer.text, offer.type) for offer in found[1]]


def at(cell: str, names: Mapping[str, object] | None = None) -> list[str]:
    return [text for text, _ in told(cell, names)]


def test_flags_of_a_cell_are_offered_once() -> None:
    assert at("%%train |") == [flag.name for flag in TRAIN]
    assert at("%%train --w|") == ["--workload", "--weights-only", "--wait"]
    assert "--workload" not in at("%%train --workload sums |")
    assert at("%%train --name 'a b' --d|") == ["--dry-run"]
    assert at("%%train --name 'a --d|") == []
    assert at("%%train # --d|") == []


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("%%train --method |", ["sft", "grpo", "gspo"]),
        ("%%train --method=g|", ["grpo", "gspo"]),
        ("%%train --workload w|", ["workload-1", "workload-2"]),
        ("%%train --workload 'w|", ["'workload-1'", "'workload-2'"]),
        ("%%train --workload 'w|'", ["'workload-1", "'workload-2"]),
        ("%%train --model |", ["base-model-1", "base-model-2"]),
        ("%%train --from |", ["abcdef012345"]),
        ("%%train --name |", ["first", "'my run'"]),
        ("%%train --into |", ["run"]),
        ("%train |", list(VERBS)),
        ("%train  sh|", ["show"]),
        ("  x = %train sh|", ["show"]),
        ("%train show |", ["first", "'my run'"]),
        ("%train show 'm|", ["'my run'"]),
        ("%train show first |", []),
        ("%train wait first --|", ["--timeout"]),
        ("%train wait --timeout 5 fi|", ["first"]),
        ("%train export |", ["first", "'my run'", "abcdef012345", "--format"]),
        ("%train export first out --format |", ["parquet", "csv", "xlsx"]),
        ("%train sample |", ["abcdef012345", "--n", "--temperature", "--max-tokens", "--seed"]),
        ("%train datasets |", ["dataset-1", "dataset-2"]),
        ("%train base-models |", ["base-model-1", "base-model-2"]),
        ("%train bundles bundle-2|", ["bundle-2"]),
        ("%train help di|", ["diagnose"]),
        ("%train options learning|", ["learning_rate"]),
        ("%train nonsense |", []),
        ("1 + 1\n%train wat|\n2", ["watch"]),
    ],
)
def test_words_of_lines(cell: str, expected: list[str]) -> None:
    assert at(cell) == expected


@pytest.mark.parametrize(
    ("cell", "types"),
    [
        ("%train |", {"verb"}),
        ("%%train |", {"flag"}),
        ("%%train --method |", {"value"}),
        ("%%train --workload |", {"workload", "WorkloadItem"}),
        ("%%train --into |", {"variable"}),
        ("%train show |", {"running", "succeeded"}),
        ("%%train --from |", {"step 40 0.81"}),
        ("%%train\nval_enabled: |", {"value", "default"}),
        ("%%train\nnum_steps: |", {"default"}),
        ("%%train\nworkload: $|", {"WorkloadItem"}),
        ("%%train\n|", {"workload", "base model", "checkpoint", "text", "boolean", "choice",
                        "integer", "number", "descriptor"}),
    ],
)  # fmt: skip
def test_types_are_a_word_or_two(cell: str, types: set[str], shell: Shell) -> None:
    names = {"w": default_client().workloads.get("sums")}
    assert {kind for _, kind in told(cell, names)} == types


PLACES = (
    "%train |", "%train show |", "%train export |", "%train sample |", "%train options |",
    "%train help |", "%train list --|", "%train bundles |", "%train export a b --format |",
    "%%train |", "%%train --from |", "%%train --name |", "%%train\n|", "%%train --method sft\n|",
    "%%train\n{|", "%%train\nkind: run\n|", "%%train\nkind: run\nconfig:\n  |",
    *(f"%%train\n{name}: |" for name in OPTIONS),
    *(f"%%train --method sft\n{name}: |" for name in FLAT),
)  # fmt: skip


def test_no_type_is_long_or_breaks_a_line() -> None:
    class Wordy(Named):
        def runs(self, _: str = "") -> list[tuple[str, str]]:
            return [("first", "succeeded\nand much more was told of it")]

        def names(self, kind: str, _: str = "") -> list[tuple[str, str]]:
            return [(kind, "a description of what it is " * 9)]

    seen = set()
    for cell in PLACES:
        for known in (Named, Wordy):
            for text, kind in told(cell, {"n": 3}, known):
                assert 0 < len(kind) <= LONGEST, (cell, text, kind)
                assert kind.splitlines() == [kind]
                seen.add(kind)
    assert "succeeded and m…" in seen
    assert seen >= {"verb", "flag", "integer", "number", "boolean", "choice", "value"}


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("%%train\nbatch|", ["batch_size: ", "batch_timeout_seconds: "]),
        ("%%train\nbatch|: 3", ["batch_size", "batch_timeout_seconds"]),
        ("%%train\nbatch_size: 3\nbatch|", ["batch_timeout_seconds: "]),
        ("%%train\nbatch|\nbatch_size: 3", ["batch_timeout_seconds: "]),
        ("%%train\n# batch_size: 3\nbatch_s|", ["batch_size: "]),
        ("%%train\nstaleness|", ["max_staleness: "]),
        ("%%train\nalgorithm: |", ["sft", "grpo", "gspo"]),
        ("%%train\nval_enabled: |", ["true", "false"]),
        ("%%train\nval_enabled: f|  # why", ["false"]),
        ("%%train\nnum_steps: |", ["100"]),
        ("%%train\nlearning_rate: 0|", ["0.0001"]),
        ("%%train\nworkload: |", ["workload-1", "workload-2"]),
        ('%%train\nworkload: "w|"', ['"workload-1', '"workload-2']),
        ("%%train\nparent_checkpoint_id: |", ["abcdef012345"]),
        ("%%train --method sft\nepo|", ["epochs: "]),
        ("%%train\nalgorithm: sft\nepo|", ["epochs: "]),
        ("%%train --method sft\nvalidation_dataset: |", ["dataset-1", "dataset-2"]),
        ("%%train --method sft\nprecision: |", ["BF16", "INT4"]),
        ("%%train\nworkload: sums # |", []),
        ("%%train\n  deep:\n    ba|", []),
    ],
)
def test_a_body_of_options(cell: str, expected: list[str]) -> None:
    assert at(cell) == expected


def test_every_key_is_offered_with_what_it_takes() -> None:
    texts = dict(told("%%train\n|"))
    assert list(texts) == [f"{key}: " for key in (*BODY_KEYS, "kind")]
    assert texts["batch_size: "] == "integer"
    assert texts["algorithm: "] == "choice"
    flat = dict(told("%%train --method sft\n|"))
    assert {f"{key}: " for key in FLAT if key != "algorithm"} <= flat.keys()
    assert flat["lora_alpha: "] == "number"
    assert "group_size: " not in flat
    assert "workload: " not in dict(told("%%train --workload sums\n|"))
    assert "kind: " not in flat


DESCRIPTOR = """%%train
kind: run
workload: w
config:
  dataset: d
  method: METHOD
  hyperparams:
    training:
      epochs: 2
      LEAF
  data:
    packing: PACK
  GROUP
execution:
  EXECUTION
TOP"""


def descriptor(place: str, typed: str, method: str = "sft") -> list[str]:
    text = DESCRIPTOR.replace("METHOD", method).replace(place, f"{typed}|", 1)
    for other in ("LEAF", "GROUP", "EXECUTION", "TOP", "PACK"):
        text = text.replace(other, "")
    return at(text)


def test_a_descriptor_completes_by_its_indentation() -> None:
    training = descriptor("LEAF", "")
    assert training[0] == "maxSteps: "
    assert "epochs: " not in training
    assert descriptor("LEAF", "se") == ["seed: "]
    assert descriptor("PACK", "") == ["true", "false"]
    groups = descriptor("GROUP", "")
    assert {"maxSeqLength: ", "model:", "loss:"} <= set(groups)
    assert not {"data:", "hyperparams:", "dataset: ", "rlHyperparams:", "reward:"} & set(groups)
    assert {"rlHyperparams:", "reward:"} <= set(descriptor("GROUP", "", "grpo"))
    assert descriptor("EXECUTION", "g") == ["gpus: "]
    assert "smoke:" in descriptor("TOP", "")
    assert "smoke:" not in descriptor("TOP", "", "grpo")


def test_every_field_can_be_reached() -> None:
    """Following the offers from the top comes to every field that the trl engine honours."""
    found = set()
    for method in ("sft", "grpo"):
        todo: list[tuple[str, ...]] = [()]
        while todo:
            path = todo.pop()
            if path[:2] == ("config", "reward"):
                continue
            above = "".join(f"{'  ' * n}{key}:\n" for n, key in enumerate(path))
            cell = f"%%train --method {method}\nkind: run\n{above}{'  ' * len(path)}|"
            for text in at(cell):
                key = (*path, text.rstrip(": "))
                found.add(".".join(key))
                if text.endswith(":"):
                    todo.append(key)
    wanted = {path for path, one in FIELDS.items() if not one.by_verl} - {"kind"}
    assert wanted <= found


@pytest.mark.parametrize("lead", ["      - ", "    - ", "      "])
def test_terms_of_a_reward(lead: str) -> None:
    head = "%%train\nkind: run\nconfig:\n  method: grpo\n  reward:\n    terms:\n"
    if "-" in lead:
        assert at(f"{head}{lead}kind: |")[:3] == ["rule", "json-label-match", "exact"]
        assert at(f"{head}{lead}kind: rule\n{lead}|")[0] == "kind: "
    inside = f"{head}    - kind: rule\n      "
    if "-" not in lead:
        assert "kind: " not in at(f"{inside}|")
        assert at(f"{inside}bu|") == ["bundle: "]
        assert at(f"{inside}bundle: |") == ["bundle-1", "bundle-2"]
    assert at("%%train\nkind: run\nconfig:\n  method: grpo\n  reward:\n    |") == ["terms:"]


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ('%%train\n{"batch_s|', ['"batch_size": ']),
        ('%%train\n{"batch_s|"', ['"batch_size']),
        ('%%train\n{"batch_s|": 4}', ['"batch_size']),
        ('%%train\n{"batch_size": 4, "batch|', ['"batch_timeout_seconds": ']),
        ('%%train\n{"val_enabled": |}', ["true", "false"]),
        ('%%train\n{"workload": "w|', ['"workload-1"', '"workload-2"']),
        ('%%train\n{"workload": |', ['"workload-1"', '"workload-2"']),
        ('%%train\n{\n  "algorithm": "g|"\n}', ['"grpo', '"gspo']),
        ('%%train\n{"kind": "run", "config": {"hyperparams": {"training": {"ep|', ['"epochs": ']),
        ('%%train\n{"a": [|', []),
        ('%%train\n{"a": 1}|', []),
    ],
)
def test_a_body_in_json(cell: str, expected: list[str]) -> None:
    assert at(cell) == expected


def test_variables_of_a_fitting_type(shell: Shell, launched: list[Run]) -> None:
    shell.do("%%train --workload sums --into mine\n")
    stored.train(launched[0])
    stored.save(launched[0], 1)
    names: dict[str, object] = {
        "mine": launched[0], "best": launched[0].checkpoint_list()[0], "rate": 1e-4, "n": 3,
        "flag": True, "w": default_client().workloads.get("sums"), "title": "abc",
    }  # fmt: skip
    assert at("%%train --from $|", names) == ["$best"]
    assert at("%%train --workload $|", names) == ["$w"]
    assert at("%%train --into |", names) == ["mine", "run"]
    assert at("%%train\nlearning_rate: $|", names) == ["$rate", "$n"]
    assert at("%%train\nval_enabled: $|", names) == ["$flag"]
    assert at("%%train\nworkload: $|", names) == ["$w"]
    assert at("%%train\ndisplay_name: $|", names) == ["$title"]
    assert at('%%train\n{"workload": $|', names) == ['"$w"']
    assert at("%train show $|", names) == ["$mine"]
    assert at("%train export $|", names) == ["$mine", "$best"]


CELLS = (
    DESCRIPTOR,
    "%%train --workload 'a b' --from=$x # c\nnum_steps: 3\n- a\n  - b: [1, {c: 2}]\n'q': \"x\n",
    '\n\n%%train --name "\n{"a": {"b": ["c", {"d": "e\\"f"}]}, "kind": "run"}\n}}]\n',
    "x = %train show 'it''s' --limit\n%train\n  %train  \n",
    "%%train\n\u00e9\ud83d\ude00: \u2028 \r\t- - : #\n",
)


@given(st.sampled_from(CELLS), st.integers(0, 400), st.text(max_size=4))
def test_no_cursor_makes_it_fail(cell: str, offset: int, typed: str) -> None:
    offset = min(offset, len(cell))
    text = cell[:offset] + typed + cell[offset:]
    before = text[: offset + len(typed)]
    row, column = before.count("\n"), len(before) - (before.rfind("\n") + 1)
    found = offers(text, row, column, known=Named, names={"x": 1})  # type: ignore[arg-type]
    if found is not None:
        assert before.endswith(found[0])
        assert len(found[1]) <= MOST


@given(st.text(alphabet="ab ='\"#-$\\", max_size=20))
def test_the_words_before_and_the_typed_one_are_the_line(line: str) -> None:
    place = line_place(f" {line}")
    assert place is None or f" {line}".endswith(place.typed)


@given(st.lists(st.text(alphabet="ab:- #{'\"", max_size=9), min_size=1), st.integers(0, 9))
def test_no_body_makes_it_fail(lines: list[str], column: int) -> None:
    for row in range(len(lines)):
        place = body_place(lines, row, min(column, len(lines[row])))
        assert place is None or lines[row][: min(column, len(lines[row]))].endswith(place.typed)


def test_an_offer_taken_makes_a_cell_that_reads() -> None:
    for name, option in OPTIONS.items():
        for value in at(f"%%train --workload sums\n{name}: |"):
            cell = read_cell(CellText("--workload sums", f"{name}: {value}\n"), {})
            assert option.choices is None or cell.body[name] in (*option.choices, None, "sft")
            if option.type == "boolean":
                assert isinstance(cell.body[name], bool | None)


# --- in a shell


def complete(shell: Shell, cell: str) -> list[tuple[str, str, str]]:
    """What the shell's completer gives: the text, its type, and what it replaces."""
    at = cell.index("|")
    text = cell.replace("|", "", 1)
    with provisionalcompleter():
        found: Iterator[Any] = shell.ip.Completer.completions(text, at)
        return [(c.text, c.type, text[c.start : c.end]) for c in found]


def test_the_shell_completes_with_types_and_nothing_else(shell: Shell) -> None:
    assert complete(shell, "%%train --workload su|") == [
        ("sums", "workload", "su"),
        ("support-triage", "workload", "su"),
    ]
    assert complete(shell, "%%train\nbatch_s|") == [("batch_size: ", "integer", "batch_s")]
    assert complete(shell, "%%train\nnothing_like_it|") == [], "no Python names either"
    assert ("show", "verb", "sh") in complete(shell, "%train sh|")


def words(shell: Shell, cell: str) -> list[str]:
    return [text for text, *_ in complete(shell, cell)]


def test_older_runs_are_found_by_what_is_typed(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "MOST", 3)
    client = default_client()
    names = ["firm", "First", "first", None, None, "same", "sam", "same", "same", "same", "late"]
    made = [stored.create(client, name) for name in names]
    assert words(shell, "%train show |") == ["late", "same", "sam"]
    assert words(shell, "%train show fir|") == ["first", "firm"]
    assert words(shell, "%train show 'Fi|") == ["'First'"]
    assert words(shell, "%train show sam|") == ["same", "sam"]
    nameless = made[3].id[:12]
    assert words(shell, f"%train show {nameless[:9]}|") == [nameless]
    assert words(shell, "%%train --name fir|") == ["first", "firm"]
    assert words(shell, "%%train\ndisplay_name: fir|") == ["first", "firm"]
    assert words(shell, "%train show at|") == ["late"]
    assert words(shell, "%train show \ud800|") == []
    monkeypatch.setattr(lists, "MOST", 1)
    assert words(shell, "%%train --workload calc|") == ["calculator"]


def test_checkpoints_of_the_newest_runs_that_have_any_are_offered(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "_RUNS", 2)
    client = default_client()
    saved = []
    for number in range(3):
        run = stored.create(client, f"saved {number}")
        saved.append(stored.save(run, 1)[:12])
    for number in range(4):
        stored.create(client, f"bare {number}")
    assert set(words(shell, "%%train --from |")) == set(saved[1:])
    assert words(shell, f"%%train --from {saved[0][:8]}|") == [saved[0]]
    (word,) = words(shell, f'%%train\nparent_checkpoint_id: "{saved[0][:8]}|"')
    assert word == f'"{saved[0]}'


def test_runs_and_checkpoints_are_read_from_the_store(shell: Shell, launched: list[Run]) -> None:
    shell.do("%%train --workload sums --name first\n")
    (run,) = launched
    stored.train(run)
    for number, reward in ((0, 0.1), (1, 0.5)):
        stored.validate(run, number, reward)
        stored.save(run, number)
    best = run.best().checkpoint_id[:12]
    shown = complete(shell, "%%train --from |")
    assert shown[0] == (best, "step 1 0.50", "")
    assert [told for _, told, _ in shown] == ["step 1 0.50", "step 0 0.10"]
    (only,) = complete(shell, "%train show |")
    assert only[0] == "first"
    assert only[1] == "running"


def test_other_cells_complete_as_ever(shell: Shell) -> None:
    shell.ns["training_rate"] = 1
    for cell in ("training_r|", "print(training_r|", "x = 'train' + training_r|"):
        before = complete(shell, cell)
        assert any(text == "training_rate" for text, *_ in before)
    assert any(text == "%%timeit" for text, *_ in complete(shell, "%%timei|"))
    assert any(text == "%train" for text, *_ in complete(shell, "%trai|"))
    assert any(text == "training_rate" for text, *_ in complete(shell, "'%train'\ntraining_r|"))


def test_a_broken_store_gives_no_completions(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NBTRAIN_HOME", "/dev/null/nowhere")
    assert isinstance(complete(shell, "%%train --from |"), list)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    assert complete(shell, "%%train\nbatch_s|")


def test_the_matcher_comes_and_goes_with_the_extension(shell: Shell) -> None:
    matchers = shell.ip.Completer.custom_matchers
    assert len(matchers) == 1
    completion.install(shell.ip)
    assert len(matchers) == 1
    shell.do("%unload_ext nbtrain")
    assert matchers == []
    shell.do("%load_ext nbtrain")
    assert len(matchers) == 1


def test_completion_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "from nbtrain.client import default_client\n"
        "from nbtrain.notebook.completion_offers import offers\n"
        "found = offers('%%train --workload ', 0, 19, known=lambda: default_client().known,"
        " names={})\n"
        "assert found[1], found\n"
        "assert not {'torch', 'transformers', 'pandas'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
