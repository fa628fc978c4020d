"""What the machine has, asked without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nbtrain.client import machine
from nbtrain.jobs.memory import within_quota
from nbtrain.plan.registry import MachineInfo


@pytest.mark.parametrize("hidden", ["", " ", "-1"])
def test_hidden_gpus_are_none(hidden: str) -> None:
    assert machine._gpus({"CUDA_VISIBLE_DEVICES": hidden}) == 0


def test_a_cpu_machine_has_what_is_available_within_its_control_group() -> None:
    free = machine.free_bytes(MachineInfo())
    assert free is not None
    assert 0 < free <= psutil.virtual_memory().total


def test_the_control_group_s_limit_counts_without_cached_files(tmp_path: Path) -> None:
    assert within_quota(tmp_path) == sys.maxsize
    (tmp_path / "memory.max").write_text("max\n")
    assert within_quota(tmp_path) == sys.maxsize
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    assert within_quota(tmp_path) == 500
    (tmp_path / "memory.current").write_text("1900\n")
    assert within_quota(tmp_path) == 0


def test_asking_loads_no_torch() -> None:
    code = (
        "import sys; from nbtrain.client.machine import this_machine, free_bytes; "
        "free_bytes(this_machine()); print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"
