"""The processes of a pool: getting one, talking to it, killing it when it is late.

Knows no trajectories. Every call that was sent ends once: with the process's own answer, or with
one that says how the process ended.
"""

from __future__ import annotations

import itertools
import selectors
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nbtrain.environments.answers import CallKind, read_answer
from nbtrain.environments.channel import Channel, ChannelError, framed
from nbtrain.environments.nursery import Nursery
from nbtrain.rewards.crew import how_it_died
from nbtrain.rewards.output import Drain

__all__ = ["LATE", "Ended", "Fleet", "Process"]

LATE = "did not answer within"
"""Stands in the error of every call that was killed at its limit."""

_MOST_BREAKS = 3


@dataclass(slots=True)
class _Call:
    number: int
    kind: CallKind
    limit: float
    what: str
    began: float


@dataclass(slots=True)
class Process:
    """A process; ``key`` is the trajectory whose environment it holds.

    ``failure`` says how it ended; then it takes no call any more.
    """

    token: int
    channel: Channel
    key: int | None = None
    call: _Call | None = None
    failure: str | None = None


class Ended(NamedTuple):
    """A call that ended. ``answer`` holds ``seconds``, and ``error`` where it failed."""

    process: Process
    kind: CallKind
    answer: dict[str, Any]


class Fleet:
    """At most ``workers`` processes for the environment ``name`` that is packed at ``path``."""

    def __init__(self, name: str, path: Path, workers: int, log_path: Path) -> None:
        self._name = name
        self._workers = workers
        self._log = log_path.name
        self._processes: dict[int, Process] = {}
        self._idle: list[Process] = []
        self._ended: list[Ended] = []
        self._tokens = itertools.count(1)
        self._calls = itertools.count(1)
        self._breaks = 0
        self._selector = selectors.DefaultSelector()
        self._drain = Drain(log_path, workers)
        self._nursery = Nursery(path, self._drain.writer)
        self._start_nursery()

    @property
    def failure(self) -> str | None:
        """Why nothing can be started any more."""
        return self._nursery.failure

    @property
    def loaded(self) -> bool:
        """Whether the environment's code has been loaded, or has failed to."""
        return self._nursery.loaded

    @property
    def busy(self) -> int:
        """Processes of a trajectory that are at work."""
        return sum(p.call is not None and p.key is not None for p in self._processes.values())

    @property
    def dropping(self) -> bool:
        """Whether an environment is being closed."""
        return any(p.call is not None and p.call.kind == "drop" for p in self._processes.values())

    def get(self) -> Process | None:
        """A process without work, a new one while there may be more, else ``None``."""
        if self._idle:
            return self._idle.pop()
        if len(self._processes) >= self._workers:
            return None
        token = next(self._tokens)
        process = Process(token, self._nursery.fork(token))
        self._processes[token] = process
        return process

    def send(self, process: Process, kind: CallKind, data: bytes, limit: float, what: str) -> None:
        """Have a process do something within ``limit`` seconds; ``what`` names the user's code.

        ``data`` is the dumped message.
        """
        number = next(self._calls)
        process.call = _Call(number, kind, limit, what, time.monotonic())
        process.channel.send(framed(data, number))
        self._watch(process)

    def rest(self, process: Process) -> None:
        """Take back a process without an environment."""
        process.key = None
        if process.failure is None:
            self._idle.append(process)

    def kill(self, process: Process) -> None:
        """Kill it, and all that it started; it counts until it is known to be dead."""
        process.key = process.call = None
        self._condemn(process, "killed")

    def pump(self, wait: float) -> list[Ended]:
        """Calls that have ended, waiting up to ``wait`` seconds for one; the overdue are killed."""
        limits = [p.call.began + p.call.limit for p in self._processes.values() if p.call]
        wait = max(0.0, min([wait, *(limit - time.monotonic() for limit in limits)]))
        for selected, _ in self._selector.select(wait):
            if selected.data is None:
                self._hear_nursery()
            elif selected.data.token in self._processes:
                self._hear(selected.data)
        now = time.monotonic()
        for process in list(self._processes.values()):
            call = process.call
            if call is not None and now > call.began + call.limit:
                text = f"{call.what} {LATE} {call.limit:g} s; its process was killed"
                self._end_call(process, text, timed_out=True)
        ended, self._ended = self._ended, []
        return ended

    def stop(self) -> None:
        """Kill everything."""
        self._nursery.stop()
        for process in self._processes.values():
            process.channel.close()
        self._selector.close()
        self._drain.close()

    # --- what comes --------------------------------------------------------------------------

    def _hear(self, process: Process) -> None:
        if process.failure is not None:
            return
        process.channel.flush()
        try:
            for number, answer in process.channel.received():
                self._answered(process, number, answer)
        except Exception as error:  # whatever it sent, it fails alone
            how = str(error) if isinstance(error, ChannelError) else repr(error)
            text = f"environment {self._name!r} broke the channel to its process, which was killed"
            self._end_call(process, f"{text}: {how}")
            return
        self._watch(process)

    def _answered(self, process: Process, number: int, answer: Any) -> None:
        call = process.call
        if call is None or call.number != number:
            msg = f"it answered to call {number}, which is not the one under way"
            raise ChannelError(msg)
        read = read_answer(call.kind, answer)
        self._breaks = 0
        process.call = None
        self._ended.append(Ended(process, call.kind, read))

    def _end_call(self, process: Process, error: str, *, timed_out: bool = False) -> None:
        """Kill a process, in the middle of its call if it has one, which fails with ``error``."""
        self._fail(process, error, timed_out=timed_out)
        self._condemn(process, error)

    def _condemn(self, process: Process, failure: str) -> None:
        """Kill it and listen to it no more."""
        process.failure = failure
        if process in self._idle:
            self._idle.remove(process)
        self._unwatch(process)
        self._nursery.kill(process.token)

    def _fail(self, process: Process, error: str, *, timed_out: bool = False) -> None:
        self._drain.say(error)
        call, process.call = process.call, None
        if call is not None:
            seconds = time.monotonic() - call.began
            answer = {"error": error, "seconds": seconds, "timed_out": timed_out}
            self._ended.append(Ended(process, call.kind, answer))

    def _unwatch(self, process: Process) -> None:
        if process.channel.socket in self._selector.get_map():
            self._selector.unregister(process.channel.socket)

    def _watch(self, process: Process) -> None:
        """Select what the channel waits for; nothing any more once the other side is gone."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.channel.unsent else 0)
        connection = process.channel.socket
        known = self._selector.get_map().get(connection)
        if process.channel.ended:
            self._unwatch(process)
        elif known is None:
            self._selector.register(connection, events, process)
        elif known.events != events:
            self._selector.modify(connection, events, process)

    # --- the zygote --------------------------------------------------------------------------

    def _start_nursery(self) -> None:
        self._nursery.start()
        self._selector.register(self._nursery.channel.socket, selectors.EVENT_READ)

    def _hear_nursery(self) -> None:
        for told in self._nursery.hear():
            process = self._processes.get(told["died"])
            if process is not None:
                self._hear(process)  # what it said last
                self._gone(process, told.get("error") or how_it_died(told["code"]))
        if self._nursery.channel.ended:
            self._lost()

    def _gone(self, process: Process, how: str) -> None:
        del self._processes[process.token]
        if process in self._idle:
            self._idle.remove(process)
        self._unwatch(process)
        process.channel.close()
        text = f"environment {self._name!r} gave no answer: {how}; see {self._log}"
        process.failure = process.failure or text
        if process.call is not None:
            self._fail(process, text)

    def _lost(self) -> None:
        """The zygote died, and all processes with it: begin again, but not for ever."""
        how = f"the process that environments start from died: {self._nursery.how_it_ended()}"
        self._selector.unregister(self._nursery.channel.socket)
        for process in list(self._processes.values()):
            self._gone(process, how)
        self._breaks += 1
        self._nursery.stop()
        if self._breaks > _MOST_BREAKS:
            self._nursery.failure = f"{how}, again and again; see {self._log}"
            return
        self._drain.say(f"{how}; it is started again")
        self._start_nursery()
