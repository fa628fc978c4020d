"""Steps and limits at the client's doors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stored

from nbtrain.client import Client, Run
from nbtrain.client.whole import LARGEST, whole_numbers
from nbtrain.errors import Refused


def test_whole_numbers_are_those_of_a_plan() -> None:
    found = whole_numbers(a=None, b=0, c=8.0, d=np.int64(3), e=10**30, f=1e300)
    assert found == (None, 0, 8, 3, LARGEST, LARGEST)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(Refused, match="3 problems") as caught:
        whole_numbers(step="x", limit=-1, more=True)
    assert [problem.field for problem in caught.value.problems] == ["step", "limit", "more"]


DOORS: list[tuple[str, Callable[[Client, Run, Any], int]]] = [
    ("step", lambda client, run, n: len(run.texts(step=n))),
    ("limit", lambda client, run, n: len(run.texts(1, limit=n))),
    ("step", lambda client, run, n: len(run.sampled_groups(step=n))),
    ("limit", lambda client, run, n: len(client.training.runs.list(n))),
    ("step", lambda client, run, n: len(client.trajectories.list(run, n).items)),
    ("limit", lambda client, run, n: len(client.trajectories.list(run, limit=n).items)),
]


def test_doors_take_any_whole_number_and_refuse_the_rest(home: Path) -> None:
    client = Client()
    run = stored.create(client)
    stored.step(run, 1)
    for field, door in DOORS:
        assert door(client, run, 1) > 0
        assert (door(client, run, 10**30) == 0) is (field == "step")
        assert (door(client, run, 2**63) == 0) is (field == "step")
        assert door(client, run, 0) == 0
        for wrong in ("x", -1, 1.5, True, float("nan"), [1]):
            with pytest.raises(Refused) as caught:
                door(client, run, wrong)
            assert [problem.field for problem in caught.value.problems] == [field]
    for tail in (str(2**63), "9" * 30, "9" * 5_000):
        assert client.trajectories.list(run, after=f"{run.id[:12]}-{tail}").items == []
