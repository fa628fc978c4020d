"""What this machine has, asked without importing torch."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import psutil

from nbtrain.jobs.environment import has_gpu
from nbtrain.jobs.memory import available_bytes
from nbtrain.plan.registry import MachineInfo

__all__ = ["free_bytes", "this_machine"]


@cache
def this_machine() -> MachineInfo:
    """GPUs that torch could use, the memory, and which optional packages are installed."""
    return MachineInfo(
        gpus=_gpus(os.environ),
        vllm=_installed("vllm"),
        memory_gib=psutil.virtual_memory().total / 2**30,
        int4=_installed("bitsandbytes"),
    )


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _gpus(env: Mapping[str, str]) -> int:
    if not has_gpu(env):
        return 0
    visible = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    found = sum(
        bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*")
    )
    found = found or len(_ask("-L"))
    return min(len(visible), found) if visible else max(1, found)


def free_bytes(machine: MachineInfo) -> int | None:
    """Memory of one rank's device: a GPU's free memory, else what the machine can still give.

    ``None`` where it cannot be told.
    """
    if not machine.gpus:
        return available_bytes()
    told = _ask("--query-gpu=memory.free", "--format=csv,noheader,nounits")
    sizes = [int(line) for line in told if line.strip().isdigit()]
    return min(sizes) * 2**20 if sizes else None


def _ask(*arguments: str) -> list[str]:
    """What nvidia-smi says, line by line; nothing where it is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        said = subprocess.run([tool, *arguments], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return said.stdout.decode(errors="replace").splitlines() if said.returncode == 0 else []
