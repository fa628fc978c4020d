"""Layouts: nothing is lost, nothing is scored that was not sampled, sizes decide."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.training.packing import Layout, Packable, Unit, blocks_of, row_length
from nbtrain.training.prefix import SHORTEST, buckets, plan_units

CPU = torch.device("cpu")
PROMPTS = [(5, 6, 7), (9,), (5, 6, 8, 11)]
sizes = st.builds(
    Layout,
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(1, 60),
    st.none() | st.integers(1, 5),
)


@st.composite
def packables(draw: st.DrawFn) -> list[Packable]:
    """Trajectories of which some tokens, never all, were observed."""
    items = []
    for _ in range(draw(st.integers(1, 12))):
        count = draw(st.integers(1, 8))
        keep = draw(st.integers(0, count - 1))
        marks = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        spans = tuple((n, n + 1) for n, mark in enumerate(marks) if mark and n != keep)
        ids = tuple(draw(st.integers(12, 60)) for _ in range(count))
        items.append(Packable(draw(st.sampled_from(PROMPTS)), ids, spans))
    return items


def reads(unit: Unit, items: list[Packable]) -> dict[int, list[tuple[list[int], int]]]:
    """For each trajectory its scored tokens: all that the model sees before each, and the token."""
    found: dict[int, list[tuple[list[int], int]]] = {}
    for part in unit.parts:
        prompt = [] if unit.prompt is None else unit.prompt[0].tolist()
        width = part.input_ids.shape[1]
        allowed = part.allowed()
        if allowed is None:
            allowed = torch.ones(width, width, dtype=torch.bool).tril()[None, None]
        allowed = allowed.expand(len(part.input_ids), -1, -1, -1)[:, 0]
        rest = []
        for place in part.scored.tolist():
            row, column = divmod(place, width)
            ids = torch.tensor([*prompt, *part.input_ids[row].tolist()])
            rest.append(ids[allowed[row, column]].tolist())
        if part.order is not None and part.first is not None:
            seen = [prompt] * len(part.first) + rest
            assert unit.first_targets is not None
            assert all(
                unit.first_targets[at] == items[number].token_ids[0]
                for at, number in zip(
                    part.first.tolist(),
                    [n for n in part.members if items[n].sampled[0] == 0],
                    strict=True,
                )
            )
            rest = [seen[at] for at in part.order.tolist()]
        pairs = list(zip(rest, part.targets.tolist(), strict=True))
        assert part.lengths.sum() == len(pairs) == len(part.segments)
        for at, number in enumerate(part.members):
            own = (part.segments == at).nonzero()[:, 0].tolist()
            assert number not in found
            assert len(own) == part.lengths[at]
            found[number] = [pairs[n] for n in own]
    return found


@given(packables(), sizes, st.booleans())
def test_every_sampled_token_is_scored_once_from_all_before_it(
    items: list[Packable], layout: Layout, packs: bool
) -> None:
    """And from nothing else: the mask shows each token its own prompt and reply, no more."""
    found: dict[int, list[tuple[list[int], int]]] = {}
    for unit in plan_units(items, layout, CPU, packs=packs):
        mine = reads(unit, items)
        assert not found.keys() & mine.keys()
        found |= mine
        assert all(layout.holds(len(part.members)) for part in unit.parts)
    for number, item in enumerate(items):
        assert found[number] == [
            ([*item.prompt_ids, *item.token_ids[:place]], item.token_ids[place])
            for place in item.sampled
        ]


@given(packables(), sizes)
def test_positions_go_on_from_the_prompt(items: list[Packable], layout: Layout) -> None:
    for unit in plan_units(items, layout, CPU):
        for part in unit.parts:
            if part.position_ids is None:
                assert len(part.members) == 1
                continue
            flat = part.position_ids.reshape(-1)
            reply = iter(part.scored.tolist())
            for number in part.members:
                item = items[number]
                for place in item.sampled:
                    if unit.prompt is None or place:
                        assert flat[next(reply)] == len(item.prompt_ids) + place - 1


@given(packables(), sizes)
def test_sizes_choose_the_layout(items: list[Packable], layout: Layout) -> None:
    units = plan_units(items, layout, CPU)
    for block in blocks_of(items):
        (unit,) = [u for u in units if any(block[1][0] in part.members for part in u.parts)]
        if row_length(block, items) <= layout.packed_tokens:
            assert unit.parts[0].owner is not None
        else:
            assert (unit.prompt is None) == (len(block[1]) == 1)
    for unit in units:
        for part in unit.parts:
            rows, width = part.input_ids.shape
            if len(part.scored):  # else there is nothing to read: one column of filler
                assert rows == 1 or rows * width <= layout.batch_tokens


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 200))
def test_batches_behind_a_prompt_hold_little_padding(lengths: list[int], limit: int) -> None:
    items = [Packable((5,), tuple(range(5, 5 + n))) for n in lengths]
    batches = buckets(list(range(len(items))), items, Layout(batch_tokens=limit))
    assert sorted(n for batch in batches for n in batch) == list(range(len(items)))
    for batch in batches:
        reads = [items[n].read for n in batch]
        assert min(reads) >= SHORTEST * max(reads)


def test_neighbours_with_one_prompt_share_it() -> None:
    items = [Packable((5, 6, 7), (8, 9))] * 3 + [Packable((9,), (8,))]
    (unit,) = plan_units(items, Layout(row_tokens=100), CPU)
    assert unit.parts[0].input_ids.shape == (1, 3 + 3 * 1 + 1)
    apart = plan_units(items, Layout(row_tokens=0), CPU)
    assert [tuple(u.parts[0].input_ids.shape) for u in apart] == [(2, 6)]


@given(packables(), sizes)
def test_the_layout_depends_on_the_trajectories_alone(
    items: list[Packable], layout: Layout
) -> None:
    one, other = (plan_units(list(items), layout, CPU) for _ in range(2))
    assert [[p.members for p in u.parts] for u in one] == [
        [p.members for p in u.parts] for u in other
    ]


@pytest.mark.parametrize(
    ("spans", "sampled", "read"),
    [
        ((), [0, 1, 2, 3], 3),
        (((1, 3),), [0, 3], 3),
        (((2, 4),), [0, 1], 1),  # what is said after the last sampled token need not be read
        (((0, 1), (2, 3)), [1, 3], 3),
    ],
)
def test_observed_tokens_are_read_not_scored(
    spans: tuple[tuple[int, int], ...], sampled: list[int], read: int
) -> None:
    item = Packable((5,), (6, 7, 8, 9), spans)
    assert item.sampled == sampled
    assert item.read == read
