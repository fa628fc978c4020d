"""A plan written as a cell reads back as the same plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.notebook.cell import Cell, CellText, read_cell
from nbtrain.plan.as_cell import as_cell

NAMES = {"best": object(), "x": 5}


def read(cell: str) -> Cell:
    """The cell as the magic reads it, in a notebook that has variables."""
    head, _, body = cell.partition("\n")
    assert head.startswith("%%train")
    return read_cell(CellText(head.removeprefix("%%train").lstrip(" "), body), NAMES)


texts = st.text(st.characters(codec="utf-8"), max_size=20)
keys = texts.filter(lambda text: text.strip() != "")
odd = st.sampled_from(["$best", "$$x", "yes", "1e-4", "null", "# no", "a: b", "- a", "012"])
floats = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers(-(10**18), 10**18) | floats | texts | odd
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
on_a_line = texts.filter(lambda text: text and text.splitlines() == [text])


@given(st.dictionaries(keys, values, max_size=5))
def test_the_body_reads_back(body: dict[str, Any]) -> None:
    assert read(as_cell(body)).body == body


@given(on_a_line, on_a_line, st.booleans(), st.booleans())
def test_the_line_reads_back(name: str, parent: str, small: bool, only: bool) -> None:
    cell = read(as_cell({}, name=name, parent=parent, into="run", weights_only=only, small=small))
    stated = {"display_name": name, "parent_checkpoint_id": parent}
    stated |= {"load_weights_only": True} if only else {}
    assert cell.beside == stated | ({"small": True} if small else {})
    assert cell.into == "run"
    assert cell.body == {}


def test_a_cell_looks_as_a_person_writes_it() -> None:
    body = {
        "kind": "run",
        "config": {
            "dataset": "rows",
            "hyperparams": {"training": {"epochs": 2}},
            "reward": {"terms": [{"kind": "rule", "weight": 0.5}, {"kind": "judge", "urls": []}]},
        },
        "learning_rate": 1e-5,
        "note": "two\nlines",
        "empty": {},
    }
    parent = SimpleNamespace(checkpoint_id="ab" * 32)
    assert as_cell(
        body, workload="sums", model="nbtrain/tiny", parent=parent, name="it's one", smoke=True
    ) == (
        "%%train --workload sums --model nbtrain/tiny --from " + "ab" * 32 + " --name 'it''s one' "
        "--smoke\n"
        "kind: run\n"
        "config:\n"
        "  dataset: rows\n"
        "  hyperparams:\n"
        "    training:\n"
        "      epochs: 2\n"
        "  reward:\n"
        "    terms:\n"
        "      - kind: rule\n"
        "        weight: 0.5\n"
        "      - kind: judge\n"
        "        urls: []\n"
        "learning_rate: 1e-5\n"
        'note: "two\\nlines"\n'
        "empty: {}\n"
    )


def test_what_no_text_can_state_is_refused() -> None:
    with pytest.raises(TypeError, match="name it with"):
        as_cell({"reward": print})
    with pytest.raises(TypeError, match="--workload needs text"):
        as_cell({}, workload=3)
    for name in ("", "two\nlines", "two\u2028lines", "\n"):
        with pytest.raises(ValueError, match="--name needs one line"):
            as_cell({}, name=name)
