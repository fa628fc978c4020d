"""Matrix products with frozen weights of lower precision than the processor computes in.

Many processors have no arithmetic in bf16, and their products in it are emulated, at a seventh
of the rate that they reach in fp32. There the weights stay as they are and each product is
computed in fp32 and rounded once, which is also nearer to the true value. SmolLM2-135M on two
AVX2 cores, forward over 8 x 128 tokens: 32.2 CPU seconds emulated, 4.6 so, 4.0 with weights in
fp32, which take twice the memory.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["ComputedWide", "computes_wide", "is_plain", "linear", "times", "widen"]


def computes_wide(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products in ``dtype`` are computed in fp32 on this device."""
    return dtype is torch.bfloat16 and device.type == "cpu" and not _cpu_has_bf16()


@cache
def _cpu_has_bf16() -> bool:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            features = set(file.read().split())
    except OSError:
        return False
    if platform.machine() == "aarch64":
        return "bf16" in features
    return "avx512_bf16" in features and "AVX512" in torch.backends.cpu.get_cpu_capability()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, in the type of ``x``."""
    if computes_wide(weight.dtype, weight.device):
        out = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return out.to(x.dtype)
    return functional.linear(x, weight, bias)


def times(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight``; where it is computed in fp32, it also comes so."""
    if computes_wide(weight.dtype, weight.device):
        return x.float() @ weight.float()
    return x @ weight


class _Frozen(torch.autograd.Function):
    """:func:`linear` with a weight that has no gradient, and is kept as it is for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return times(upstream, weight).to(upstream.dtype), None, None


_frozen: Any = _Frozen.apply


class ComputedWide(nn.Linear):
    """A linear layer whose products are computed in fp32 while its weight is frozen."""

    def forward(self, input: Tensor) -> Tensor:
        """``W x + bias``."""
        if self.weight.requires_grad or not computes_wide(self.weight.dtype, self.weight.device):
            return super().forward(input)
        out: Tensor = _frozen(input, self.weight, self.bias)
        return out


def is_plain(layer: nn.Module) -> bool:
    """Whether the layer is nothing but ``W x + bias``."""
    return type(layer) is nn.Linear or type(layer) is ComputedWide


def widen(model: nn.Module) -> None:
    """Let the model's linear layers compute as :func:`linear` does, where that is another way."""
    for layer in model.modules():
        if type(layer) is nn.Linear and computes_wide(layer.weight.dtype, layer.weight.device):
            layer.__class__ = ComputedWide
