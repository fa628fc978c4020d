"""What a job's processes are started with: environments, threads, connection files."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nbtrain.jobs import connection, environment
from nbtrain.jobs.connection import kernel_name, remove_connection, send_code, write_connection
from nbtrain.jobs.environment import (
    has_gpu,
    host_environment,
    rank_count,
    rank_environment,
    rank_threads,
)
from nbtrain.processes import MARK
from nbtrain.training import cores as cores_module
from nbtrain.training.cores import available_cores, worker_count

RUN = "ab" * 32
CHECKOUT = Path(__file__).parents[1]


# --- environments -------------------------------------------------------------------------------


def test_the_host_is_cut_loose_from_the_kernel(tmp_path: Path) -> None:
    kernel = {"JPY_PARENT_PID": "1", "JPY_SESSION_NAME": "n", "MPLBACKEND": "x", "HOME": "/h"}
    env = host_environment(kernel | {"NBTRAIN_STORE_URL": "old"}, home=tmp_path, url=None)
    assert env.keys().isdisjoint({"JPY_PARENT_PID", "JPY_SESSION_NAME", "MPLBACKEND"})
    assert env["HOME"] == "/h"
    assert env["NBTRAIN_HOME"] == str(tmp_path)
    assert "NBTRAIN_STORE_URL" not in env
    assert host_environment({}, home=tmp_path, url="sqlite:///x")["NBTRAIN_STORE_URL"]


def test_relative_import_paths_survive_the_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = f"lib{os.pathsep}{os.pathsep}{CHECKOUT}"
    env = host_environment({"PYTHONPATH": paths}, home=tmp_path, url=None)
    assert env["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "lib"), str(CHECKOUT)]


def test_a_site_folder_is_never_put_before_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site" / "nbtrain" / "jobs" / "environment.py"
    monkeypatch.setattr(environment, "__file__", str(installed))
    found = host_environment({}, home=tmp_path, url=None)
    assert found["PYTHONPATH"] == str(tmp_path / "site")
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path / "site")])
    assert "PYTHONPATH" not in host_environment({}, home=tmp_path, url=None)


def test_the_rank_knows_no_other_launcher() -> None:
    around = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "MASTER_PORT": "9",
        "TORCHELASTIC_RUN_ID": "x",
        "OMPI_COMM_WORLD_SIZE": "4",
        "ACCELERATE_MIXED_PRECISION": "fp16",
        "OMP_NUM_THREADS": "64",
        "PATH": "/bin",
        "MY_RANK": "kept",
    }
    env = rank_environment(around, mark=f"{RUN}/1", threads=2, gpu=False)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("0", "1", "1")
    assert env.keys().isdisjoint(
        {"LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE"}
    )
    assert "ACCELERATE_MIXED_PRECISION" not in env
    assert (env["OMP_NUM_THREADS"], env["ACCELERATE_USE_CPU"]) == ("2", "true")
    assert (env["PATH"], env["MY_RANK"], env[MARK]) == ("/bin", "kept", f"{RUN}/1")
    assert "ACCELERATE_USE_CPU" not in rank_environment({}, mark="m", threads=1, gpu=True)
    second = rank_environment(around, mark=f"{RUN}/1", threads=2, gpu=False, rank=1, ranks=3)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert [second[name] for name in names] == ["1", "1", "3", "3"]
    # Nothing but the loopback, unless it is stated.
    assert second["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    other = rank_environment(
        {"GLOO_SOCKET_IFNAME": "eth0"}, mark="m", threads=1, gpu=False, rank=0, ranks=2
    )
    assert other["GLOO_SOCKET_IFNAME"] == "eth0"


def test_accelerate_takes_the_environment_as_one_process_on_the_cpu() -> None:
    env = rank_environment(os.environ, mark="m", threads=1, gpu=False)
    code = (
        "from accelerate import PartialState; s = PartialState();"
        "print(s.num_processes, s.device, s.distributed_type.value)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["1", "cpu", "NO"]


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_hidden_gpu_is_none(value: str) -> None:
    assert not has_gpu({"CUDA_VISIBLE_DEVICES": value})


@pytest.mark.parametrize(
    ("script", "found"),
    [("echo 'GPU 0: some card'", True), ("echo no devices", False), ("exit 9", False)],
)
def test_without_device_files_the_driver_is_asked(
    script: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert has_gpu({}) is found


# --- threads ------------------------------------------------------------------------------------


def plan(location: Path, kind: str = "folder", **changes: Any) -> dict[str, Any]:
    return {
        "settings": {"load_weights_only": {"value": False}},
        "base_model": {"kind": kind, "location": str(location)},
        "parent": None,
    } | changes


def weights(folder: Path, size: int, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    with (folder / name).open("wb") as stream:
        stream.truncate(size)
    return folder


def test_small_models_get_one_thread_and_others_all_cores(tmp_path: Path) -> None:
    def threads(**of: Any) -> int:
        return rank_threads(plan(**of), stated=None, cores=6)

    assert threads(location=tmp_path, kind="embedded") == 1
    small = weights(tmp_path / "small", 49 * 10**6)
    assert threads(location=small) == 1
    assert threads(location=weights(tmp_path / "big", 50 * 10**6)) == 6
    two = weights(weights(tmp_path / "two", 30 * 10**6), 30 * 10**6, "model-2.safetensors")
    assert threads(location=two) == 6
    assert threads(location=weights(tmp_path / "g", 10**6, "m.gguf") / "m.gguf", kind="gguf") == 1
    assert threads(location="not/local", kind="repository") == 6


@pytest.mark.parametrize(
    ("stated", "threads"), [("3", 3), ("0", 1), ("", 1), ("auto", 1), (None, 1)]
)
def test_a_stated_number_counts(stated: str | None, threads: int, tmp_path: Path) -> None:
    assert rank_threads(plan(tmp_path, "embedded"), stated=stated, cores=6) == threads


def test_ranks_share_the_cores(tmp_path: Path) -> None:
    def threads(cores: int, ranks: int, stated: str | None = None) -> int:
        large = plan(Path("not/local"), "repository")
        return rank_threads(large, stated=stated, cores=cores, ranks=ranks)

    assert [threads(6, ranks) for ranks in (1, 2, 4, 7)] == [6, 3, 1, 1]
    assert threads(6, 2, stated="5") == 5
    assert rank_count({"settings": {}}) == 1  # plans from before the option
    assert rank_count({"settings": {"gpus": {"value": 3}}}) == 3


def test_a_resumed_run_keeps_its_parents_number(tmp_path: Path) -> None:
    parent = {"path": str(tmp_path)}
    (tmp_path / "state.json").write_text(json.dumps({"environment": {"threads": 5}}))
    resumed = plan(tmp_path, "embedded", parent=parent)
    assert rank_threads(resumed, stated="3", cores=2) == 5
    fresh = resumed | {"settings": {"load_weights_only": {"value": True}}}
    assert rank_threads(fresh, stated=None, cores=2) == 1
    for text in ("{}", "[]", "half a", '{"environment": {"threads": "x"}}'):
        (tmp_path / "state.json").write_text(text)
        assert rank_threads(resumed, stated=None, cores=2) == 1


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", sys.maxsize), ("150000 100000", 2), ("50000 100000", 1), ("odd", sys.maxsize)],
)
def test_a_control_groups_quota_is_read(text: str, cores: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(f"{text}\n")
    assert cores_module._quota(tmp_path / "cpu.max") == cores
    assert cores_module._quota(tmp_path / "missing") == sys.maxsize
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("stated", "most", "ranks", "here", "workers"),
    [
        # Unstated: as many as cores, up to the most, shared by the ranks.
        (None, 4, 1, 16, 4),
        (None, 4, 1, 2, 2),
        (None, 64, 2, 16, 8),
        (None, 4, 8, 16, 1),
        # Stated: for the whole run, whatever there is.
        (9, 4, 1, 2, 9),
        (9, 4, 2, 2, 4),
        (1, 64, 2, 16, 1),
    ],
)
def test_ranks_share_the_workers(
    stated: int | None,
    most: int,
    ranks: int,
    here: int,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cores_module, "available_cores", lambda: here)
    assert worker_count(stated, most=most, ranks=ranks) == workers


# --- connection files ---------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder as the system gives one; short enough for sockets."""
    folder = tmp_path / "r"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(connection, "_SOCKET_PATH_BYTES", 200)
    monkeypatch.setattr(connection, "_takes_sockets", lambda folder, name: True)
    return folder / "nbtrain"


def test_a_connection_file_is_private_and_short(runtime: Path) -> None:
    old = os.umask(0)
    try:
        path = write_connection(RUN, 2)
    finally:
        os.umask(old)
    assert path == runtime / "kernels" / f"{kernel_name(RUN, 2)}.json"
    info = json.loads(path.read_text())
    assert (info["transport"], info["ip"]) == ("ipc", str(runtime / "abababababab-2"))
    assert len(info["key"]) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert runtime.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777 == 0o700
    for port in range(1, 6):
        (runtime / f"abababababab-2-{port}").touch()
    # Written anew: what an earlier host left is cleared away first.
    assert json.loads(write_connection(RUN, 2).read_text())["shell_port"] == 1
    remove_connection(path)
    remove_connection(path)
    assert [*runtime.rglob("*")] == [runtime / "kernels"]


@pytest.mark.parametrize("spoil", ["open", "file", "long"])
def test_a_folder_that_will_not_do_is_passed_over(
    spoil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100 if spoil == "long" else "r")
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    if spoil == "open":
        (folder / "nbtrain").mkdir(mode=0o777)
        (folder / "nbtrain").chmod(0o777)
    if spoil == "file":
        (folder / "nbtrain").touch()
    path = write_connection(RUN, 1)
    try:
        assert not path.is_relative_to(folder)
        info = json.loads(path.read_text())
        assert info["transport"] == "ipc"
        assert len(os.fsencode(f"{info['ip']}-5")) <= 107
    finally:
        remove_connection(path)


def test_where_no_folder_takes_sockets_the_loopback_does(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_takes_sockets", lambda folder, name: False)
    info = json.loads(write_connection(RUN, 1).read_text())
    assert (info["transport"], info["ip"]) == ("tcp", "127.0.0.1")
    assert len({info[f"{name}_port"] for name in ("shell", "iopub", "stdin", "control", "hb")}) == 5


def test_a_socket_folder_is_tried_out() -> None:
    folder = Path("/tmp") / f"nbtrain-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert connection._takes_sockets(folder, "probe")
    assert not (folder / "probe-5").exists()
    assert not connection._takes_sockets(folder / ("y" * 100), "probe")
    assert not connection._takes_sockets(folder / "missing", "probe")
    assert socket.AF_UNIX


def test_no_answer_is_no_error(runtime: Path, tmp_path: Path) -> None:
    path = write_connection(RUN, 1)
    assert not send_code(path, "1", timeout=0.05)
    assert not send_code(tmp_path / "missing.json", "1", timeout=0.05)
    path.write_text("{}")
    assert not send_code(path, "1", timeout=0.05)
