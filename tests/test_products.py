"""Products with frozen bf16 weights where the processor has no bf16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbtrain.rollout import products
from nbtrain.rollout.products import ComputedWide, is_plain, linear, times, widen
from nbtrain.training.environment import describe


@pytest.fixture(params=[False, True], ids=["emulated", "native"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(products, "_cpu_has_bf16", lambda: request.param)
    return bool(request.param)


def weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 7, 64, generator=generator)
    w = torch.randn(48, 64, generator=generator)
    bias = torch.randn(48, generator=generator)
    return x.bfloat16(), w.bfloat16(), bias.bfloat16()


def test_without_bf16_a_product_is_the_exact_one_rounded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "_cpu_has_bf16", lambda: False)
    x, w, bias = weights()
    exact = x.double() @ w.double().t() + bias.double()
    assert torch.equal(linear(x, w, bias), exact.float().bfloat16())
    assert times(exact.bfloat16(), w).dtype is torch.float32


def test_types_and_values_hold_either_way(native: bool) -> None:
    x, w, bias = weights()
    wanted = x.float() @ w.float().t() + bias.float()
    found = linear(x, w, bias)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=0.1)
    wide = linear(x.float(), w.float())
    assert torch.equal(wide, nn.functional.linear(x.float(), w.float()))


def test_the_gradient_is_that_of_the_layer_in_fp32_rounded(native: bool) -> None:
    x, w, bias = weights()
    layer = nn.Linear(64, 48)
    layer.weight.data, layer.bias.data = w, bias
    model = nn.Sequential(layer).requires_grad_(False)
    widen(model)
    assert (type(layer) is ComputedWide) == (not native)
    assert is_plain(layer)
    x.requires_grad_(True)
    upstream = torch.randn(3, 7, 48, generator=torch.Generator().manual_seed(6)).bfloat16()
    model(x).backward(upstream)
    assert x.grad is not None
    wanted = upstream.float() @ w.float()
    torch.testing.assert_close(x.grad.float(), wanted, rtol=1e-2, atol=0.1)


def test_a_layer_that_trains_has_its_own_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_cpu_has_bf16", lambda: False)
    x, w, bias = weights()
    layer = nn.Linear(64, 48)
    layer.weight.data, layer.bias.data = w, bias
    widen(nn.Sequential(layer))
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None


def test_a_checkpoint_says_what_its_run_computed_in(native: bool) -> None:
    cpu = torch.device("cpu")
    told = {
        precision: describe(cpu, precision=precision, kv_budget_bytes=0)["computed_in"]
        for precision in ("fp32", "bf16", "int4")
    }
    assert told == (
        {"fp32": "fp32", "bf16": "bf16", "int4": "bf16"} if native else dict.fromkeys(told, "fp32")
    )


def test_full_precision_and_subclasses_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    monkeypatch.setattr(products, "_cpu_has_bf16", lambda: False)
    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4).bfloat16())
    widen(model)
    assert [type(layer) for layer in model] == [nn.Linear, Own]
    assert not is_plain(model[1])
