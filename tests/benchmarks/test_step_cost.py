"""The cost of a whole step beside stock TRL's, loosely: one short round on the embedded model.

``python tests/benchmarks/step_cost.py`` measures it well.
"""

from __future__ import annotations

from step_cost import measure


def test_a_step_costs_three_quarters_of_trls_at_most() -> None:
    arguments = ["--steps", "5"]
    cost = {}
    for arm in ("nbtrain", "trl"):  # trl as it is fastest on a CPU
        result = measure(arguments, arm)
        assert result["tokens"] > 0
        cost[arm] = result["cpu"] / result["tokens"]
    assert cost["nbtrain"] <= 0.75 * cost["trl"]
