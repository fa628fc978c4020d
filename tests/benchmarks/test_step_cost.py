"""The cost of a whole step beside stock TRL's, loosely: one short round on the embedded model.

``python tests/benchmarks/step_cost.py`` measures it well, and larger models too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from step_cost import ARMS, CASES, PARTS, Figures, measure, table


@pytest.fixture(scope="module")
def results() -> dict[str, list[Figures]]:
    case = replace(CASES["embedded"], steps=5)
    return {arm: [measure(case, arm)] for arm in ARMS}


def test_a_step_costs_three_fifths_of_trls_at_most(results: dict[str, list[Figures]]) -> None:
    """Against TRL as it is fastest on a CPU. The bar is 1/2 over five rounds; this is one."""
    cost = {arm: rounds[0]["cpu"] / rounds[0]["tokens"] for arm, rounds in results.items()}
    assert cost["nbtrain"] <= 0.6 * cost["trl"]
    assert cost["nbtrain"] <= 0.6 * cost["trl-defaults"]


def test_the_parts_of_a_step_add_up(results: dict[str, list[Figures]]) -> None:
    """Nothing is booked twice: what is generated, scored and left over is the whole."""
    for arm, (figures,) in results.items():
        assert set(figures["parts"]) == set(PARTS)
        assert sum(figures["parts"].values()) == pytest.approx(figures["cpu"], rel=0.01), arm
        assert min(figures["parts"].values()) >= -0.01 * figures["cpu"], arm
        for part in ("generation", "forward", "backward"):
            assert figures["parts"][part] > 0.1 * figures["cpu"], (arm, part)
    assert len(table(CASES["embedded"], results).splitlines()) == 4 + len(ARMS)
