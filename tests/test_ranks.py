"""Real processes that meet and share, on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from nbtrain.jobs.environment import rank_environment
from nbtrain.rollout.ranks import Alone, Ranks
from nbtrain.training.outcome import meeting_path

PRELUDE = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from nbtrain.training.ranks import LostRankError, join_ranks
ranks, device = join_ranks(Path(sys.argv[1]), 1)
"""
EPILOGUE = "\nprint('done', flush=True); os._exit(0)\n"


def start(code: str, folder: Path, *, rank: int, ranks: int) -> subprocess.Popen[str]:
    env = rank_environment(os.environ, mark="test/1", threads=1, gpu=False, rank=rank, ranks=ranks)
    env["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code) + EPILOGUE, str(folder)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str, folder: Path, *, ranks: int = 2) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each rank that runs ``code``."""
    processes = [start(code, folder, rank=rank, ranks=ranks) for rank in range(ranks)]
    try:
        return [(p.returncode, *said) for p in processes for said in [p.communicate(timeout=120)]]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_two_ranks_gather_and_sum(tmp_path: Path) -> None:
    folder = tmp_path / "größe %20 #1?"  # no character of the path may matter
    code = """
    assert (ranks.size, device.type, torch.get_num_threads()) == (2, "cpu", 1)
    # Of any size and kind, from nothing to much, in the order of ranks.
    for values in ([None, "ä" * 100_000], [{"counts": [1, 2]}, (1.5, b"x")], [list(range(99)), 0]):
        assert ranks.gather(values[ranks.rank]) == values
    # Several types and shapes at once; who has nothing adds zeros.
    one = torch.full((2, 3), float(ranks.rank))
    two = torch.full((4,), 0.1 * (ranks.rank == 1), dtype=torch.float64)
    three = torch.tensor(ranks.rank + 1)
    learned = torch.nn.Parameter(torch.ones(5, 2))
    turned = torch.arange(6.0).view(2, 3).t()  # not contiguous
    ranks.sum([one, two, three, learned, turned, torch.zeros(0)])
    assert torch.equal(one, torch.full((2, 3), 1.0)), one
    assert torch.equal(two, torch.full((4,), 0.1, dtype=torch.float64))
    assert three.item() == 3
    assert torch.equal(learned, torch.full((5, 2), 2.0))
    assert torch.equal(turned, torch.arange(0.0, 12.0, 2).view(2, 3).t())
    ranks.sum([])
    # The very same bits everywhere, or the ranks would drift apart.
    torch.manual_seed(ranks.rank)
    noise = [torch.randn(10_001), torch.randn(3, 3).to(torch.bfloat16)]
    ranks.sum(noise)
    digests = ranks.gather([tensor.view(torch.uint8).tolist() for tensor in noise])
    assert digests[0] == digests[1]
    """
    for ended in run(code + GRADIENT, folder):
        assert ended[:2] == (0, "done\n"), ended[2]
    assert meeting_path(folder, 1).exists()  # the host removes it


GRADIENT = """
    # A gradient in unequal parts is that of one process.
    groups = [3, 1, 4, 0, 5]  # sizes: rank 0 has three groups, rank 1 two, one of them empty
    mine = [n for n in range(len(groups)) if n % ranks.size == ranks.rank]
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64))
    def samples(group):
        torch.manual_seed(group)
        return torch.randn(groups[group], 7, dtype=torch.float64)
    def gradient(chosen, total):
        weight.grad = torch.zeros_like(weight)
        for group in chosen:
            (torch.tanh(samples(group) @ weight).sum() / total).backward()
        return weight.grad
    total = sum(ranks.gather(sum(groups[n] for n in mine)))
    split = gradient(mine, total).clone()
    ranks.sum([split])
    whole = gradient(range(len(groups)), sum(groups))
    assert total == 13
    assert torch.allclose(split, whole, rtol=1e-14, atol=1e-15), (split, whole)
"""


def test_a_rank_that_waits_looks_around_and_can_leave(tmp_path: Path) -> None:
    code = """
    class Cancelled(BaseException): pass
    looks = 0
    def look():
        global looks
        looks += 1
        if time.monotonic() > end:
            raise Cancelled
    if ranks.rank == 1:
        time.sleep(60)  # the other is gone long before
    ranks.while_waiting = look
    end = time.monotonic() + 0.5
    try:
        ranks.gather("alone")
    except Cancelled:
        assert looks > 20, looks
        print("left", flush=True)
        os._exit(0)
    """
    first, second = (start(code, tmp_path, rank=rank, ranks=2) for rank in range(2))
    try:
        assert first.communicate(timeout=60) == ("left\n", "")
        assert first.returncode == 0
        assert second.poll() is None
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def test_nobody_waits_for_a_rank_that_died(tmp_path: Path) -> None:
    code = """
    ranks.gather(0)
    if ranks.rank == 1:
        os.kill(os.getpid(), 9)
    for call in (lambda: ranks.sum([torch.ones(3)]), lambda: ranks.gather(1)):
        try:
            call()
        except LostRankError as error:
            assert "rank 0 lost another rank" in str(error)
            print("lost", flush=True)
    """
    first, second = run(code, tmp_path)
    assert first[:2] == (0, "lost\nlost\ndone\n"), first[2]
    assert second[0] == -signal.SIGKILL


def test_ranks_that_are_not_those_started_are_refused() -> None:
    # Accelerate sees one process where the host started two.
    env = rank_environment(os.environ, mark="test/1", threads=1, gpu=False)
    env["CUDA_VISIBLE_DEVICES"] = ""
    check = """
import sys
from types import SimpleNamespace
from nbtrain.errors import StartChecksFailed
from nbtrain.training.ranks import _same_world
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
_same_world(accelerator, 0, 1)
for rank, size in ((0, 2), (1, 2)):
    try:
        _same_world(accelerator, rank, size)
    except StartChecksFailed as error:
        print(error.problems[0])
"""
    said = subprocess.run(
        [sys.executable, "-c", check], env=env, capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines() == [
        "process 0 of 1 runs where 0 of 2 was started; allowed: 2",
        "process 0 of 1 runs where 1 of 2 was started; allowed: 2",
    ]


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    env = rank_environment(os.environ, mark="test/1", threads=1, gpu=False, rank=1, ranks=2)
    env["CUDA_VISIBLE_DEVICES"] = ""
    check = """
import sys
from pathlib import Path
from nbtrain.training import ranks
ranks.JOIN_SECONDS = 0.5
try:
    ranks.join_ranks(Path(sys.argv[1]), 1)
except ranks.LostRankError as error:
    print(error)
"""
    said = subprocess.run(
        [sys.executable, "-c", check, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.startswith("rank 1 of 2 did not meet the others: ")


def test_a_single_rank_opens_nothing(tmp_path: Path) -> None:
    code = """
    assert ranks.size == 1 and not dist.is_initialized()
    assert ranks.gather({"a": 1}) == [{"a": 1}]
    """
    ((returned, said, errors),) = run(code, tmp_path, ranks=1)
    assert (returned, said) == (0, "done\n"), errors
    assert not meeting_path(tmp_path, 1).exists()


def test_one_rank_is_itself_a_team() -> None:
    alone: Ranks = Alone()
    assert (alone.rank, alone.size, alone.gather("x")) == (0, 1, ["x"])
