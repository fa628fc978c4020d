"""The environments and thread counts that a job's processes are started with."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbtrain.processes import MARK

__all__ = ["available_cores", "has_gpu", "host_environment", "rank_environment", "rank_threads"]

SMALL_WEIGHTS_BYTES = 50 * 10**6
"""Weights files below this gain nothing from a second thread, and lose to its overhead."""

# The notebook kernel's own: with the first, ipykernel would die with the notebook.
_KERNEL_ONLY = ("JPY_PARENT_PID", "JPY_SESSION_NAME", "MPLBACKEND")
# A launcher around the notebook (torchrun, mpirun, accelerate) does not concern the job.
_OTHER_LAUNCHERS = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|GROUP_RANK|ROLE_.*"
    r"|GROUP_WORLD_SIZE|TORCHELASTIC_.*|PMI_.*|OMPI_COMM_.*|MV2_COMM_.*|ACCELERATE_.*"
)


def host_environment(base: Mapping[str, str], *, home: Path, url: str | None) -> dict[str, str]:
    """The host's environment: ``base`` without what ties it to the notebook's kernel.

    Relative entries of PYTHONPATH are made absolute, since the host works in the run's folder;
    a checkout that is not installed stays importable.
    """
    env = {name: value for name, value in base.items() if name not in _KERNEL_ONLY}
    env["NBTRAIN_HOME"] = str(home)
    env["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # else ipykernel's debugger warns at every start
    env.pop("NBTRAIN_STORE_URL", None)
    if url is not None:
        env["NBTRAIN_STORE_URL"] = url
    paths = [os.path.abspath(p) for p in base.get("PYTHONPATH", "").split(os.pathsep) if p]
    checkout = Path(__file__).resolve().parents[2]
    if str(checkout) not in paths and not _installed(checkout):
        paths.insert(0, str(checkout))
    if paths:
        env["PYTHONPATH"] = os.pathsep.join(paths)
    return env


def _installed(folder: Path) -> bool:
    """Whether a fresh interpreter finds ``folder`` without help.

    Only a plain site folder counts: naming one in PYTHONPATH would put it before the standard
    library.
    """
    sites = [*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib")]
    return folder in {Path(each).resolve() for each in sites}


def rank_environment(
    base: Mapping[str, str], *, mark: str, threads: int, gpu: bool
) -> dict[str, str]:
    """The environment of the only rank, in Accelerate's words.

    LOCAL_RANK and MASTER_ADDR stay out: with them, Accelerate opens a process group and its
    network port for a single process too.
    """
    env = {name: value for name, value in base.items() if not _OTHER_LAUNCHERS.fullmatch(name)}
    env |= {
        MARK: mark,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": base.get("TOKENIZERS_PARALLELISM", "false"),
        "PYTHONUNBUFFERED": "1",
    }
    if not gpu:
        env["ACCELERATE_USE_CPU"] = "true"
    return env


def has_gpu(env: Mapping[str, str] | None = None) -> bool:
    """Whether this machine shows a GPU that torch could use; asked without importing torch."""
    env = os.environ if env is None else env
    if env.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    if any(re.fullmatch(r"nvidia\d+", path.name) for path in Path("/dev").glob("nvidia*")):
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return listed.returncode == 0 and b"GPU " in listed.stdout


def available_cores() -> int:
    """Cores this process may use: its affinity, cut by the control group's quota. At least 1."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(cores, _quota(Path("/sys/fs/cgroup/cpu.max"))))


def _quota(path: Path) -> int:
    try:
        quota, period = path.read_text().split()
        return sys.maxsize if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return sys.maxsize


def rank_threads(resolved: Mapping[str, Any], *, stated: str | None, cores: int) -> int:
    """How many threads the rank computes with.

    A run that restores training state takes the number its parent's checkpoint recorded, since
    other numbers add up in another order. Else a number stated by OMP_NUM_THREADS (``stated``);
    else 1 for the embedded model and for weights files under 50 MB, ``cores`` for others.
    """
    parent = resolved.get("parent")
    if parent is not None and not _option(resolved, "load_weights_only"):
        recorded = _recorded_threads(Path(parent["path"]) / "state.json")
        if recorded is not None:
            return recorded
    if stated is not None and stated.isdigit() and int(stated) > 0:
        return int(stated)
    model = resolved["base_model"]
    if model["kind"] == "embedded":
        return 1
    size = _weights_bytes(Path(model["location"]))
    return 1 if size is not None and size < SMALL_WEIGHTS_BYTES else cores


def _option(resolved: Mapping[str, Any], name: str) -> Any:
    return resolved["settings"].get(name, {}).get("value")


def _recorded_threads(path: Path) -> int | None:
    try:
        threads = json.loads(path.read_text("utf-8"))["environment"]["threads"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return threads if isinstance(threads, int) and threads > 0 else None


def _weights_bytes(location: Path) -> int | None:
    """Size of the weights at ``location``, a file or a folder; None when they are not there."""
    if location.is_file():
        return location.stat().st_size
    for pattern in ("*.safetensors", "*.bin", "*.gguf"):
        sizes = [path.stat().st_size for path in location.glob(pattern)]
        if sizes:
            return sum(sizes)
    return None
