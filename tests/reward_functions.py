"""Reward functions that the tests pack: good ones and every kind of bad one."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any


def right(completion: str, task: dict[str, Any]) -> float:
    return float(completion == task["answer"])


def group_right(prompts: list[Any], completions: list[Any], answer: list[str]) -> list[float]:
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer, strict=True)]


def everything(**kw: Any) -> float:
    return 0.0


def spins(completion: str, task: dict[str, Any]) -> float:
    while "tower" in completion:
        pass
    return 1.0


def group_spins(completions: list[Any], **kw: Any) -> list[float]:
    while any("tower" in str(c) for c in completions):
        pass
    return [1.0] * len(completions)


def holds_the_gil(completion: str, task: dict[str, Any]) -> float:
    if "tower" in completion:
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the GIL during the call
    return 1.0


def slow(completion: str, task: dict[str, Any]) -> float:
    time.sleep(0.3)
    return 1.0


def dies(completion: str, task: dict[str, Any]) -> float:
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "segfault":
        ctypes.string_at(0)
    if completion.startswith("exit"):
        os._exit(int(completion[4:]))
    return 1.0


def leaves(completion: str, task: dict[str, Any]) -> float:
    raise SystemExit(completion)


def alarmed(completions: list[Any], **kw: Any) -> list[float]:
    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(1)
    return [float(len(str(c)) % 2) for c in completions]  # and forgets to take the alarm back


def key_error(completions: list[Any], **kw: Any) -> list[float]:
    return [float(c["missing_key"] == 1) for c in [{} for _ in completions]]


def some_raise(completion: str, task: dict[str, Any]) -> float:
    if completion == "bad":
        raise ValueError("no " * 50_000)
    return 1.0


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("cannot travel", threading.Lock())

    def __reduce__(self) -> Any:
        raise TypeError("never")


def strange_error(completion: str, task: dict[str, Any]) -> float:
    raise Unpicklable


def odd_numbers(completions: list[Any], **kw: Any) -> list[float]:
    return [1.0, float("nan"), 0.0, float("inf")][: len(completions)]


def none_for_some(completion: str, task: dict[str, Any]) -> float | None:
    return None if completion == "skip" else 1.0


def no_answer_no_list(completions: list[Any], answer: Any = None, **kw: Any) -> list[float]:
    if not answer:
        return []
    return [float(a in str(c)) for c, a in zip(completions, answer, strict=True)]


def number_types(completions: list[Any], **kw: Any) -> list[Any]:
    import numpy as np

    values = [np.float32(1), np.int64(0), np.array(0.5), Decimal("0.25"), True, 3]
    return [values[i % 6] for i in range(len(completions))]


async def waits(completions: list[Any], **kw: Any) -> list[float]:
    async def one(completion: Any) -> float:
        await asyncio.sleep(0.2)
        return float(len(str(completion)) > 3)

    return await asyncio.gather(*[one(c) for c in completions])


async def waits_alone(completion: str, task: dict[str, Any]) -> float:
    await asyncio.sleep(60 if completion == "tower" else 0.2)
    if completion == "bad":
        raise ValueError("bad")
    return 1.0


def never_awaited(completions: list[Any], **kw: Any) -> list[Any]:
    return [waits_alone("", {}) for _ in completions]


def prints(completions: list[Any], **kw: Any) -> list[float]:
    sys.stdout.write("o" * (1 << 20) + "\n")
    sys.stderr.write("e" * (1 << 20) + "\n")
    return [float(i % 2) for i in range(len(completions))]


def prints_below(completion: str, task: dict[str, Any]) -> float:
    """Past Python's own streams, and from a program of its own."""
    os.write(1, b"c" * (20 << 20))
    subprocess.run(["head", "-c", "30000000", "/dev/zero"], check=True)
    return 1.0


def starts_a_program(completion: str, task: dict[str, Any]) -> float:
    child = subprocess.Popen(["sleep", "600"])
    Path(task["pid_file"]).write_text(str(child.pid))
    child.wait()
    return 1.0


def reads_stdin(completion: str, task: dict[str, Any]) -> float:
    return float(len(sys.stdin.read()) + len(os.read(0, 10)))


def where_am_i(completion: str, task: dict[str, Any]) -> float:
    assert threading.current_thread() is threading.main_thread()
    return float(os.getpid())


def without_torch(completion: str, task: dict[str, Any]) -> float:
    return float(not {"torch", "pandas", "numpy", "sqlalchemy"} & set(sys.modules))


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    return {"score": float(solution_str == ground_truth), "acc": True}


def slow_pid(completion: str, task: dict[str, Any]) -> float:
    """Takes a while, and tells which worker it ran in."""
    time.sleep(0.1)
    return float(os.getpid())
