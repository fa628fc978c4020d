"""A LoRA layer's forward and backward as one operation each.

Autograd over PEFT's layer keeps a copy of the input in the adapter's precision for every layer,
and passes over the full width to scale, to add and to sum gradients. Here the scale goes to the
narrow side and the additions into the matrix products; the input is kept as it came, which
neighbouring layers share. The gradient is PEFT's, to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from nbtrain.rollout import products
from nbtrain.rollout.lean_lora import Forward

__all__ = ["trained_lora"]


def trained_lora(layer: Any, name: str) -> Forward:
    """The forward of PEFT's LoRA ``layer`` with adapter ``name``, for training."""
    base, scaling = layer.base_layer, layer.scaling
    # The dictionaries, not the tensors in them: a weight that is replaced later is seen.
    w, a, b = base._parameters, layer.lora_A[name]._parameters, layer.lora_B[name]._parameters
    plain = products.is_plain(base) and b["bias"] is None
    fused = plain and not any(p.requires_grad for p in w.values() if p is not None)

    def forward(x: Tensor) -> Tensor:
        if fused:
            out: Tensor = _apply(x, w["weight"], w["bias"], a["weight"], b["weight"], scaling[name])
            return out
        result: Tensor = base(x)
        wide = x.to(a["weight"].dtype)
        delta = linear(linear(wide, a["weight"]) * scaling[name], b["weight"], None)
        if b["bias"] is not None:
            delta = delta + b["bias"] * scaling[name]
        total: Tensor = (result + delta).to(result.dtype)
        return total

    return forward


class _LoraLinear(torch.autograd.Function):
    """``W x + bias + scale B A x``; W and bias are frozen and may be of lower precision."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        out = products.linear(x, w, bias)
        narrow = linear(x.to(a.dtype), a).flatten(0, -2)
        ctx.save_for_backward(x, w, a, b, narrow)
        ctx.scale = scale
        wide = out.flatten(0, -2).to(a.dtype)
        return wide.addmm_(narrow, b.t(), alpha=scale).to(out.dtype).view(out.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, w, a, b, narrow = ctx.saved_tensors
        flat = upstream.flatten(0, -2)
        wide = flat.to(a.dtype)
        inner = (wide @ b).mul_(ctx.scale)
        gradient = None
        if ctx.needs_input_grad[0]:
            gradient = products.times(flat, w).to(a.dtype).addmm_(inner, a)
            gradient = gradient.to(x.dtype).view(x.shape)
        to_a = inner.t() @ x.flatten(0, -2).to(a.dtype)
        to_b = (wide.t() @ narrow).mul_(ctx.scale)
        return gradient, None, None, to_a, to_b, None


_apply: Any = _LoraLinear.apply
