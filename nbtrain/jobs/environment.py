"""The environments and thread counts that a job's processes are started with."""

from __future__ import annotations

import json
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
from nbtrain.training.cores import available_cores

__all__ = [
    "available_cores",
    "has_gpu",
    "host_environment",
    "rank_count",
    "rank_environment",
    "rank_threads",
]

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
    base: Mapping[str, str], *, mark: str, threads: int, gpu: bool, rank: int = 0, ranks: int = 1
) -> dict[str, str]:
    """The environment of rank ``rank`` of ``ranks`` on this machine, in Accelerate's words.

    A single rank gets no LOCAL_RANK: with it, Accelerate would open a process group. MASTER_ADDR
    and its port stay out always: ranks meet by a file.
    """
    env = {name: value for name, value in base.items() if not _OTHER_LAUNCHERS.fullmatch(name)}
    env |= {
        MARK: mark,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": base.get("TOKENIZERS_PARALLELISM", "false"),
        "PYTHONUNBUFFERED": "1",
    }
    if ranks > 1:
        env["LOCAL_RANK"] = str(rank)
        # Whatever the machine's name resolves to, if anything; and nobody else can listen.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
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


def rank_threads(
    resolved: Mapping[str, Any], *, stated: str | None, cores: int, ranks: int = 1
) -> int:
    """How many threads each of ``ranks`` ranks computes with.

    A run that restores training state takes the number its parent's checkpoint recorded, since
    other numbers add up in another order. Else a number stated by OMP_NUM_THREADS (``stated``);
    else 1 for the embedded model and for weights files under 50 MB, its share of ``cores`` for
    others.
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
    return 1 if size is not None and size < SMALL_WEIGHTS_BYTES else max(1, cores // ranks)


def rank_count(resolved: Mapping[str, Any]) -> int:
    """How many ranks the run has: one for each GPU it asks for."""
    return int(_option(resolved, "gpus") or 1)


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
