"""Plain LoRA layers without PEFT's bookkeeping in every call.

PEFT finds the active adapter, its variant and its parts anew in each call of each layer. For a
small model that costs as much as the arithmetic. Here it is looked up once a decode step; the
arithmetic, its order and the weights it reads are PEFT's, so the results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import frexp
from typing import Any

from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, add, nn
from torch.nn.functional import linear

from nbtrain.rollout import products

__all__ = ["LeanLora"]

Forward = Callable[[Tensor], Tensor]


class LeanLora:
    """The LoRA layers among ``modules`` that are nothing but ``W x + scaling * B A x``.

    Left to PEFT are variants (DoRA and others), layers whose parts carry hooks, and, each time,
    layers whose adapter is merged, disabled or not the only active one. ``lean`` makes the
    forward of a layer and the name of its adapter.
    """

    def __init__(
        self, modules: Iterable[nn.Module], lean: Callable[[Any, str], Forward] | None = None
    ) -> None:
        self._lean = lean or _lean
        self._layers: list[Any] = [
            module
            for module in modules
            if type(module) is LoraLinear
            and "forward" not in module.__dict__
            and not _hooked(module)
        ]
        self._forwards: dict[tuple[int, str], Forward] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """For the time of the block, plain layers in eval mode run lean."""
        changed = []
        try:
            for layer in self._layers:
                if (forward := self._forward(layer)) is not None:
                    layer.__dict__["forward"] = forward
                    changed.append(layer.__dict__)
            yield
        finally:
            for state in changed:
                del state["forward"]

    def _forward(self, layer: Any) -> Forward | None:
        adapters = layer.active_adapters
        if len(adapters) != 1 or layer.disable_adapters or layer.merged_adapters:
            return None
        name = adapters[0]
        key = id(layer), name
        if key not in self._forwards:
            if name not in layer.lora_A or layer.lora_variant:
                return None
            self._forwards[key] = self._lean(layer, name)
        return self._forwards[key]


def _hooked(layer: nn.Module) -> bool:
    """Whether a part of the layer does more when called than its class says."""
    return any(
        part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__
        for part in layer.modules()
        if part is not layer
    )


def _lean(layer: Any, name: str) -> Forward:
    base, scaling = layer.base_layer, layer.scaling
    # The dictionaries, not the tensors in them: a weight that is replaced later is seen.
    w, a, b = base._parameters, layer.lora_A[name]._parameters, layer.lora_B[name]._parameters
    plain = products.is_plain(base)

    def forward(x: Tensor) -> Tensor:
        result = products.linear(x, w["weight"], w["bias"]) if plain else base(x)
        weight = a["weight"]
        narrow = x.dtype != weight.dtype
        delta = linear(linear(x.to(weight.dtype) if narrow else x, weight), b["weight"], b["bias"])
        scale = scaling[name]
        # A power of two multiplies exactly, so that one operation rounds as two do.
        exact = frexp(scale)[0] == 0.5
        total: Tensor = add(result, delta, alpha=scale) if exact else result + delta * scale
        return total.to(result.dtype) if narrow else total

    return forward
