"""What staleness costs in learning: one seed, few updates, a wide margin.

``-m long`` runs ``stale_learning.py``'s arms with the range that is the default; the curves that
chose it stand in ``curves/``.
"""

from __future__ import annotations

from statistics import mean

import pytest
from stale_learning import arm
from sums_runs import Result

from nbtrain.plan.defaults import STALE_GSPO_CLIP

FRESH_CLIP = (3e-4, 4e-4)


def pair(rate: float, steps: int, seed: int) -> tuple[Result, Result]:
    """The same run at staleness 0 and at 3, each with its default range."""
    return arm(rate, 0, FRESH_CLIP, steps, seed), arm(rate, 3, STALE_GSPO_CLIP, steps, seed)


def test_old_policies_teach_nearly_as_well() -> None:
    fresh, stale = pair(5e-4, 30, 0)
    assert mean(fresh.held_out) > 0.7
    assert mean(stale.held_out) >= mean(fresh.held_out) - 0.10
    assert set(fresh.lags) == {0.0}
    assert mean(stale.lags) > 0.2, "nothing would be tested"
    assert mean(stale.clipped) < 0.5


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("rate", [1e-4, 5e-4])
def test_staleness_3_ends_where_staleness_0_does(rate: float) -> None:
    pairs = [pair(rate, 80, seed) for seed in (0, 1, 2)]
    fresh, stale = (mean(mean(one.held_out) for one in side) for side in zip(*pairs, strict=True))
    assert stale >= fresh - 0.03
    assert mean(mean(one.clipped) for _, one in pairs) < 0.2
