"""The machine a job runs on: device, threads, memory for keys and values, versions.

What exactness depends on besides a run's own state is written into every checkpoint; a resume
takes over what it can and says where it differs.
"""

from __future__ import annotations

import platform
from typing import Any

import psutil
import torch

from nbtrain.rollout.products import computes_wide
from nbtrain.training.cores import worker_count

__all__ = ["describe", "emulated", "free_memory", "kv_budget", "worker_count"]


def free_memory(device: torch.device, *, ranks: int = 1) -> int:
    """Bytes free for this rank: of its GPU, or its share of the machine's where it has none."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // ranks


def kv_budget(device: torch.device, saved: dict[str, Any] | None = None, *, ranks: int = 1) -> int:
    """Bytes that keys and values may take: a third of what is free now.

    It decides which replies are decoded together, so a resume on the same kind of device takes
    over what its checkpoint ran with, as far as that is free.
    """
    free = free_memory(device, ranks=ranks)
    if saved and saved.get("device") == device.type:
        before = int(saved.get("kv_budget_bytes") or 0)
        if 0 < before < free:
            return before
    return free // 3


def emulated(precision: str, device: torch.device) -> str | None:
    """A sentence where the device has no arithmetic of its own in this precision."""
    if precision != "bf16":
        return None
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return None
        return "this cuda emulates bf16: precision: fp32 may be as fast"
    if computes_wide(torch.bfloat16, device):
        return f"this {device.type} has no bf16: products with such weights are computed in fp32"
    return None


def describe(
    device: torch.device, *, precision: str, kv_budget_bytes: int, ranks: int = 1
) -> dict[str, Any]:
    """What exactness depends on besides the state, as plain JSON."""
    import accelerate
    import peft
    import transformers

    return {
        "device": device.type,
        "ranks": ranks,
        "precision": precision,
        "computed_in": _computed_in(precision, device),
        "kv_budget_bytes": kv_budget_bytes,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "accelerate": accelerate.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
    }


def _computed_in(precision: str, device: torch.device) -> str:
    """What products are computed in; weights of four bits are widened to bf16 for them."""
    return "fp32" if precision == "fp32" or computes_wide(torch.bfloat16, device) else "bf16"
