"""Several processes that train together: joining them, and what they tell each other.

The host starts the ranks of a run and tells each its number through the environment. They find
each other through a file in the attempt's folder, so no port has to be agreed on; what they then
say goes over the loopback address (CPU) or NCCL (GPU).

While a rank waits for another it goes on looking at the run's commands, and it never waits for
one that has died: a closed connection ends the wait at once, and the host stops the rest.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from nbtrain.errors import NbtrainError, Problem, StartChecksFailed, first_line
from nbtrain.rollout.ranks import Alone, Ranks
from nbtrain.training.outcome import meeting_path

__all__ = ["Joined", "LostRankError", "join_ranks"]

log = logging.getLogger("nbtrain.training")

JOIN_SECONDS = 300.0
"""How long ranks wait for each other at the start. They join before they load anything."""
SILENCE_SECONDS = 24 * 3600.0
"""How long a call may wait for a rank that lives. Long, since one rank may collect far longer
than another: a rank that died ends the wait at once, and one that hangs shows as busy."""
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 5e-3


class LostRankError(NbtrainError):
    """Another rank is gone, which is why this one fails: the cause lies there."""


def join_ranks(run_folder: Path, attempt: int) -> tuple[Ranks, torch.device]:
    """Meet the other ranks of this attempt, and get this rank's device from Accelerate.

    Reads RANK, LOCAL_RANK, WORLD_SIZE and OMP_NUM_THREADS as the host set them. A rank that is
    alone opens no process group. Raises :class:`StartChecksFailed` when the ranks that met are
    not those that were started, or are more than this machine has GPUs.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    cuda = torch.cuda.is_available()
    if size > 1:
        if cuda:
            _enough_gpus(size)
        _meet(meeting_path(run_folder, attempt), rank, size, cuda=cuda)
    accelerator = Accelerator(cpu=not cuda, mixed_precision="no")
    _same_world(accelerator, rank, size)
    device = torch.device(accelerator.device)
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if size == 1:
        return Alone(), device
    log.info("rank %d of %d on %s", rank, size, device)
    return Joined(), device


def _enough_gpus(size: int) -> None:
    found = torch.cuda.device_count()
    if found < size:
        problem = Problem(
            "gpus",
            f"{size} GPUs are asked for, this machine has {found}",
            found=size,
            allowed=f"1 to {found}",
        )
        raise StartChecksFailed([problem])


def _meet(meeting: Path, rank: int, size: int, *, cuda: bool) -> None:
    """Open the process group: all ranks are there when it returns."""
    meeting.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=JOIN_SECONDS))
    try:
        store.set(f"here/{rank}", "1")
        store.wait([f"here/{each}" for each in range(size)])
        # Gloo beside NCCL: what ranks tell each other as objects never touches a GPU.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=SILENCE_SECONDS),
        )
    except RuntimeError as error:
        msg = f"rank {rank} of {size} did not meet the others: {first_line(error)}"
        raise LostRankError(msg) from error


def _same_world(accelerator: Accelerator, rank: int, size: int) -> None:
    """Some launchers quietly start one process where several were asked for."""
    found = (accelerator.process_index, accelerator.num_processes)
    if found != (rank, size):
        message = f"process {found[0]} of {found[1]} runs where {rank} of {size} was started"
        problem = Problem("world size", message, found=found[1], allowed=str(size))
        raise StartChecksFailed([problem])


class Joined:
    """The ranks of an open process group, as one of them sees them.

    ``while_waiting`` is called again and again while this rank waits for others, for at most
    5 ms apart; what it raises ends the wait, and with it what this rank shares with the others.
    Every call raises :class:`LostRankError` when another rank has gone.
    """

    def __init__(self, while_waiting: Callable[[], object] = lambda: None) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.while_waiting = while_waiting

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value``, in the order of ranks, on every rank."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value, protocol=5)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(sizes, torch.tensor([len(mine)]), async_op=True))
        lengths = [int(size) for size in sizes]
        # All of one length, as all_gather needs them.
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = mine
        all_of_them = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(all_of_them, padded, async_op=True))
        return [
            pickle.loads(buffer[:length].numpy().tobytes())
            for buffer, length in zip(all_of_them, lengths, strict=True)
        ]

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Add up each tensor over all ranks, in place; all ranks get the very same bits.

        Every rank passes tensors of the same shapes and types in the same order, zeros where it
        has nothing to add.
        """
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in kinds.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
            self._reduce(flat)
            parts = torch.split(flat, [tensor.numel() for tensor in same])
            with torch.no_grad():
                for tensor, part in zip(same, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))

    def _reduce(self, flat: Tensor) -> None:
        self._wait(lambda: dist.all_reduce(flat, async_op=True))

    def _wait(self, start: Callable[[], Any]) -> None:
        """Wait for a collective in naps: a blocked wait could not be cancelled."""
        with self._lost():
            work = start()
        nap = _SHORTEST_NAP
        while not work.is_completed():
            self.while_waiting()
            time.sleep(nap)
            nap = min(nap * 2, _LONGEST_NAP)
        with self._lost():
            work.wait()

    @contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            msg = f"rank {self.rank} lost another rank: {first_line(error)}"
            raise LostRankError(msg) from error
