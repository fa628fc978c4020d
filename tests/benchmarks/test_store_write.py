"""The promises about writing to the store, loosely: in CPU seconds beside plain writes, the best of
a few tries.

``python tests/benchmarks/store_write.py`` prints the figures.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from machine import slowness, writing
from store_write import delays, measure

from nbtrain.store import Store, open_store

SLACK = 1.5
"""Whatever else a neighbour on the same core makes longer."""


def best(store: Store, trajectories: int, *, amending: bool = False) -> float:
    """What a step costs, as a share of the bar on this machine at that moment."""
    tries = []
    for _ in range(6):
        cost = measure(store, trajectories, 20, amending=amending)
        tries.append(cost.median / (cost.bar * slowness(writing, tries=1)))
    return min(tries)


@pytest.mark.parametrize("trajectories", [0, 64, 256])
def test_a_step_costs_about_2_ms_and_20_us_per_trajectory_at_most(
    home: Path, trajectories: int
) -> None:
    with open_store() as store:
        assert best(store, trajectories) <= SLACK


@pytest.mark.parametrize("trajectories", [64, 256])
def test_changing_all_rows_of_the_step_before_stays_within_the_same_bar(
    home: Path, trajectories: int
) -> None:
    with open_store() as store:
        assert best(store, trajectories, amending=True) <= SLACK


def test_a_committed_step_is_seen_by_another_process_within_a_second(home: Path) -> None:
    assert max(delays(home, 5)) <= 1.0
