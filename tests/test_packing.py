"""Packed rows: nothing is lost, and a packed score equals a plain one on every family."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, tiny_model

from nbtrain.training.packing import Packable, build_row, plan_rows

ids = st.lists(st.integers(5, 60), min_size=1, max_size=6).map(tuple)
prompts = st.sampled_from([(5, 6, 7), (9,), (5, 6, 8, 11)])
packables = st.lists(st.builds(Packable, prompts, ids, st.just(1.0)), min_size=1, max_size=12)
CPU = torch.device("cpu")


@given(packables, st.integers(1, 40))
def test_every_token_of_every_trajectory_is_scored_once(items: list[Packable], limit: int) -> None:
    plans = plan_rows(items, row_tokens=limit)
    seen: list[int] = []
    for plan in plans:
        row = build_row(plan, items, CPU)
        assert row.input_ids.shape == row.position_ids.shape == (1, plan.length)
        assert row.mask.shape == (1, 1, plan.length, plan.length)
        alone = len(row.members) == 1
        assert plan.length <= limit or alone
        offset = 0
        for segment, number in enumerate(row.members):
            count = len(items[number].token_ids)
            assert row.targets[offset : offset + count].tolist() == list(items[number].token_ids)
            assert set(row.segments[offset : offset + count].tolist()) == {segment}
            offset += count
        assert offset == len(row.targets) == int(row.lengths.sum())
        seen += row.members
    assert seen == list(range(len(items)))


def test_neighbours_with_one_prompt_share_it() -> None:
    items = [Packable((5, 6, 7), (8, 9), 1.0)] * 3 + [Packable((9,), (8,), 1.0)]
    (plan,) = plan_rows(items, row_tokens=100)
    assert plan.length == 3 + 3 * 1 + 1
    assert [numbers for _, numbers in plan.blocks] == [(0, 1, 2), (3,)]


def test_the_layout_depends_on_the_trajectories_alone() -> None:
    items = [Packable((5, n), (8, 9, n), 1.0) for n in range(6)]
    assert plan_rows(items, row_tokens=14) == plan_rows(list(items), row_tokens=14)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_equal_plain_ones(family: str) -> None:
    """Each reply is scored as if it stood alone behind its prompt."""
    model = tiny_model(family)
    items = [
        Packable((5, 6, 7, 8), (9, 10, 11), 1.0),
        Packable((5, 6, 7, 8), (12,), 1.0),
        Packable((5, 6, 7, 8), (13, 9, 9, 14, 10), 1.0),
        Packable((20, 21), (22, 23), 1.0),
    ]
    (plan,) = plan_rows(items, row_tokens=100)
    row = build_row(plan, items, CPU)
    with torch.no_grad():
        packed = model(
            input_ids=row.input_ids,
            position_ids=row.position_ids,
            attention_mask=row.mask,
            logits_to_keep=row.scored,
            use_cache=False,
        ).logits[0]
        plain = []
        for item in items:
            whole = torch.tensor([item.prompt_ids + item.token_ids])
            plain.append(model(input_ids=whole).logits[0, len(item.prompt_ids) - 1 : -1])
    assert torch.allclose(packed, torch.cat(plain), atol=1e-5)
