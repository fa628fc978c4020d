"""The sample `support-triage`."""

from __future__ import annotations

import json
from collections import Counter

from nbtrain.catalog.support_triage import SYSTEM, triage_rows


def test_sides_have_their_sizes_and_share_no_letter():
    train, validation = triage_rows()
    assert (len(train), len(validation)) == (2208, 96)
    letters = [row["messages"][1]["content"] for row in [*train, *validation]]
    assert len(set(letters)) == 2304


def test_labels_stand_in_equal_shares_on_both_sides():
    for rows, each in zip(triage_rows(), (184, 8), strict=True):
        labels = Counter(row["messages"][-1]["content"] for row in rows)
        assert len(labels) == 12
        assert set(labels.values()) == {each}


def test_a_row_is_a_chat_that_ends_with_its_label():
    train, _ = triage_rows()
    for row in train:
        system, letter, label = row["messages"]
        assert (system["role"], system["content"]) == ("system", SYSTEM)
        assert letter["role"] == "user"
        assert label["role"] == "assistant"
        found = json.loads(label["content"])
        assert list(found) == ["team", "priority"]
        assert found["priority"] in {"high", "normal", "low"}


def test_rows_are_the_same_every_time():
    assert triage_rows() == triage_rows()
    letter = triage_rows()[0][0]["messages"][1]["content"]
    assert letter == "Hi there, please change the delivery address. Could you check this for me?"
