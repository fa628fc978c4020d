"""What a supervised update is made of: rows on the disk, their order, packing, batches."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.training import attempt
from nbtrain.training.supervised.collate import IGNORED, collate, trained_tokens
from nbtrain.training.supervised.order import Order, dropout_seed
from nbtrain.training.supervised.packing import pack, unpacked
from nbtrain.training.supervised.rows import RowWriter, TokenizedRows

PAD = 7


def written(folder: Path, rows: list[tuple[list[int], list[bool]]]) -> TokenizedRows:
    with RowWriter(folder) as writer:
        for ids, trained in rows:
            writer.append(ids, trained)
    return TokenizedRows(folder)


def some_rows(count: int, seed: int = 0) -> list[tuple[list[int], list[bool]]]:
    draws = random.Random(seed)
    lengths = [draws.randint(2, 12) for _ in range(count)]
    return [
        ([draws.randrange(200_000) for _ in range(n)], [at >= n // 2 for at in range(n)])
        for n in lengths
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "ids.i32").symlink_to("/dev/full")
    rows = [(list(range(1000)), [True] * 1000)] * 1000
    with pytest.raises(OSError, match="No space left on device") as told:
        written(tmp_path, rows)
    assert told.value.errno == errno.ENOSPC
    assert attempt._sentence(told.value).startswith("the disk is full: ")


def test_rows_come_back_as_they_went_in(tmp_path: Path) -> None:
    given_rows = some_rows(40)
    rows = written(tmp_path, given_rows)
    assert len(rows) == 40
    assert rows.tokens == sum(len(ids) for ids, _ in given_rows)
    for position in (0, 17, 39, 3):
        ids, trained = rows.row(position)
        assert ids.tolist() == given_rows[position][0]
        assert trained.tolist() == given_rows[position][1]


def test_the_first_token_is_never_trained_and_lengths_must_agree(tmp_path: Path) -> None:
    rows = written(tmp_path, [([1, 2], [True, True])])
    assert rows.row(0)[1].tolist() == [False, True]
    with RowWriter(tmp_path / "other") as writer, pytest.raises(ValueError, match="2 ids, 1 mark"):
        writer.append([1, 2], [True])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 70))
def test_packing_holds_every_row_once_within_the_limit(lengths: list[int], limit: int) -> None:
    bins = pack(lengths, limit)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    sizes = [sum(lengths[row] for row in rows) for rows in bins]
    assert all(0 < size <= limit for size in sizes)
    assert all(list(rows) == sorted(rows) for rows in bins)
    # Best fit leaves no two sequences that would fit into one
    assert len(bins) == 1 or sum(sorted(sizes)[:2]) > limit
    assert pack(lengths, limit) == bins


def test_a_row_longer_than_a_sequence_is_no_silent_cut() -> None:
    with pytest.raises(ValueError, match="row 1 has 9 tokens, a sequence holds 8"):
        pack([3, 9], 8)


orders = st.builds(
    lambda count, seed, shuffle, per_pass, passes: Order(
        unpacked(count), seed=seed, shuffle=shuffle, per_pass=per_pass, passes=passes
    ),
    st.integers(1, 40),
    st.integers(1, 1000),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 4),
)


@given(orders, st.integers(1, 3))
def test_every_epoch_has_every_row_once_whatever_was_asked_before(order: Order, epoch: int) -> None:
    steps = range((epoch - 1) * order.updates_per_epoch + 1, epoch * order.updates_per_epoch + 1)
    seen = [order.update(step) for step in steps]
    rows = [row for update in seen for sequence in update for row in sequence]
    assert sorted(rows) == list(range(len(order.sequences)))
    assert all(len(update) == order.per_update for update in seen[:-1])
    # A fresh order asked for the last step alone says the same: no state is carried
    again = Order(
        order.sequences,
        seed=order._seed,
        shuffle=order._shuffle,
        per_pass=order._per_pass,
        passes=order.per_update // order._per_pass,
    )
    assert again.update(steps[-1]) == seen[-1]
    if not order._shuffle:
        assert rows == list(range(len(rows)))


@given(orders, st.integers(1, 20), st.integers(1, 3), st.integers(1, 3))
def test_passes_are_the_update_whatever_ranks_and_cap(
    order: Order, step: int, ranks: int, cap: int
) -> None:
    update = order.update(step)
    dealt = [order.passes(step, rank=rank, ranks=ranks, cap=cap) for rank in range(ranks)]
    assert sorted(s for passes in dealt for one in passes for s in one) == sorted(update)
    assert all(0 < len(one) <= cap for passes in dealt for one in passes)
    whole = order.passes(step)
    assert [s for one in whole for s in one] == update


def test_epochs_differ_and_seeds_differ() -> None:
    def first(seed: int, step: int) -> list[tuple[int, ...]]:
        order = Order(unpacked(30), seed=seed, shuffle=True, per_pass=30, passes=1)
        return order.update(step)

    assert first(1, 1) != first(1, 2)
    assert first(1, 1) != first(2, 1)
    assert len({dropout_seed(s, t, r) for s in (1, 2) for t in (1, 2) for r in (0, 1)}) == 8


def test_totals() -> None:
    order = Order(unpacked(10), seed=1, shuffle=True, per_pass=2, passes=2)
    assert order.updates_per_epoch == 3
    assert [order.total(epochs=2, max_steps=most) for most in (0, 4, 99)] == [6, 4, 6]
    assert (order.place(4).epoch, order.place(4).update) == (1, 0)


def test_padding_is_masked_by_place_though_the_end_token_is_the_padding(tmp_path: Path) -> None:
    rows = written(tmp_path, [([3, 4, PAD], [False, True, True]), ([5, PAD], [False, True])])
    batch = collate(rows, [(0,), (1,)], packed=False, pad_id=PAD)
    assert batch["input_ids"].tolist() == [[3, 4, PAD], [5, PAD, PAD]]
    assert batch["labels"].tolist() == [[IGNORED, 4, PAD], [IGNORED, PAD, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert trained_tokens(batch) == 3
    assert "attention_mask" not in collate(rows, [(0,)], packed=False)


def test_packed_rows_begin_anew_and_have_no_mask(tmp_path: Path) -> None:
    rows = written(tmp_path, some_rows(3))
    batch = collate(rows, [(0, 2), (1,)], packed=True)
    assert "attention_mask" not in batch
    lengths = rows.lengths.tolist()
    positions = batch["position_ids"][0]
    assert positions[: lengths[0]].tolist() == list(range(lengths[0]))
    assert positions[lengths[0] : lengths[0] + lengths[2]].tolist() == list(range(lengths[2]))
    assert set(batch["position_ids"][1, lengths[1] :].tolist()) == {0}
    # Nothing crosses from one row into the next: a row's first token is never a target
    assert batch["labels"][0, lengths[0]] == IGNORED
    for row, (at, start) in {0: (0, 0), 2: (0, lengths[0]), 1: (1, 0)}.items():
        ids, trained = rows.row(row)
        expected = torch.where(torch.from_numpy(trained), torch.from_numpy(ids.astype("int64")),
                               torch.tensor(IGNORED))  # fmt: skip
        assert torch.equal(batch["labels"][at, start : start + len(ids)], expected)
