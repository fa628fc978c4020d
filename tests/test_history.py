"""Kept adapters: which are kept, exactly swapped in and out, exactly stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nbtrain.training.history import AdapterHistory


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {
        "a.weight": nn.Parameter(torch.randn(3, 2, dtype=dtype)),
        "b|odd.weight": nn.Parameter(torch.randn(2, dtype=dtype)),
    }


@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=8))
def test_the_last_ones_are_kept(size: int, steps: list[int]) -> None:
    history = AdapterHistory(parameters(), size)
    seen, version = [], 0
    for step in steps:  # a skipped update leaves the version as it was
        version += step
        history.keep(version)
        seen.append(version)
    assert history.versions == sorted(set(seen))[-size:]


def test_an_older_adapter_is_used_for_a_while() -> None:
    own = parameters()
    history = AdapterHistory(own, 2)
    old = {name: p.detach().clone() for name, p in own.items()}
    history.keep(4)
    with torch.no_grad():
        for p in own.values():
            p.mul_(-3)
    new = {name: p.detach().clone() for name, p in own.items()}
    handles = {name: p.data_ptr() for name, p in own.items()}

    def fails() -> None:
        with history.using(4):
            assert all(torch.equal(old[name], p) for name, p in own.items())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert all(torch.equal(new[name], p) for name, p in own.items())
    assert handles == {name: p.data_ptr() for name, p in own.items()}
    assert 4 in history
    with pytest.raises(KeyError), history.using(5):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_state_round_trips(dtype: torch.dtype) -> None:
    own = parameters(dtype)
    history = AdapterHistory(own, 3)
    for version in (2, 3, 11):
        history.keep(version)
        with torch.no_grad():
            for p in own.values():
                p.add_(1)
    state = history.state()
    other = AdapterHistory(parameters(dtype), 2)
    other.load(state)
    assert other.versions == [3, 11]
    again = other.state()
    assert all(torch.equal(state[key], value) for key, value in again.items())
    assert len(again) == 4
    assert AdapterHistory(own, 1).state() == {}


@pytest.mark.parametrize(
    "change", [lambda s: s.pop("2|a.weight"), lambda s: s.update({"2|a.weight": torch.zeros(9)})]
)
def test_a_state_of_another_adapter_is_refused(change: Any) -> None:
    history = AdapterHistory(parameters(), 2)
    history.keep(2)
    state = history.state()
    change(state)
    with pytest.raises(ValueError, match="version 2 does not fit"):
        history.load(state)
    assert history.versions == [2]


def test_a_history_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        AdapterHistory(parameters(), 0)
