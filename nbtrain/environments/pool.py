"""Environments of many trajectories, each in a process of its own while its trajectory lasts.

Processes are forked from a zygote that has loaded the environment's code once
(:mod:`nbtrain.environments.zygote`). This side only sends, receives and keeps time; it never
waits for a process, and it never forks.
"""

from __future__ import annotations

import itertools
import math
import pickle
import selectors
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from nbtrain.environments.channel import Channel, frame
from nbtrain.environments.contract import Contract
from nbtrain.environments.events import EnvironmentEvent, EnvironmentEventKind
from nbtrain.environments.nursery import Nursery
from nbtrain.environments.packing import read_packed
from nbtrain.errors import Problem
from nbtrain.rewards.crew import how_it_died
from nbtrain.rewards.output import Drain

__all__ = ["EnvironmentPool"]

_DROP_SECONDS = 5.0
_MOST_BREAKS = 3

CallKind = Literal["open", "act", "close", "drop", "probe"]
_ANSWERS = {
    "open": EnvironmentEventKind.OPENED,
    "act": EnvironmentEventKind.OBSERVED,
    "close": EnvironmentEventKind.CLOSED,
}


@dataclass(slots=True)
class _Call:
    kind: CallKind
    limit: float
    began: float


@dataclass(slots=True)
class _Process:
    """A process and whose environment it holds; ``failure`` says why it died between calls."""

    token: int
    channel: Channel
    key: int | None = None
    call: _Call | None = None
    failure: str | None = None


class EnvironmentPool:
    """Environments of the class packed at ``path``, in at most ``workers`` processes.

    Implements :class:`nbtrain.rollout.types.Environments`: every ``open``, ``act`` and ``close``
    is answered by one event, unless the key is dropped. A process is used again for the next
    trajectory, with a new object. A process that takes longer than its limit is killed with what
    it started: ``start_seconds`` for construction and reset, and for closing; what ``act`` was
    given. What environments print goes to ``log_path``, at most 10 MiB per process.

    Use it from one thread, which must outlive it: on Linux the processes die with it.

    Raises :class:`~nbtrain.errors.Refused` when ``path`` holds no packed environment.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        workers: int,
        log_path: str | Path,
        start_seconds: float = 120.0,
    ) -> None:
        if workers < 1 or not 0 < start_seconds < math.inf:
            msg = f"workers {workers} and start_seconds {start_seconds} must be above 0"
            raise ValueError(msg)
        packed = read_packed(path)
        self.name: str = packed.name
        self.log_path = Path(log_path)
        self._contract = packed.contract
        self._workers = workers
        self._start_seconds = float(start_seconds)
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._processes: dict[int, _Process] = {}
        self._by_key: dict[int, _Process] = {}
        self._idle: list[_Process] = []
        self._events: list[EnvironmentEvent] = []
        self._tokens = itertools.count(1)
        self._breaks = 0
        self._probed: dict[str, Any] | None = None
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._drain = Drain(self.log_path, workers)
        self._nursery = Nursery(Path(path).resolve(), self._drain.writer)
        self._nursery.start()
        self._selector.register(self._nursery.channel.socket, selectors.EVENT_READ)

    # --- for the caller ----------------------------------------------------------------------

    @property
    def contract(self) -> Contract:
        """How the environment is talked to; of some factories known after :meth:`check_start`."""
        if self._contract is None:
            msg = "the environment's contract is known when check_start has made one"
            raise RuntimeError(msg)
        return self._contract

    @property
    def waiting(self) -> int:
        """Environments queued for a process."""
        return len(self._waiting)

    @property
    def busy(self) -> int:
        """Environments constructing, acting or closing at this moment."""
        return sum(p.call is not None and p.key is not None for p in self._processes.values())

    def open(self, key: int, columns: Mapping[str, Any]) -> None:
        """Queue the construction and reset of trajectory ``key``'s environment.

        Raises ``ValueError`` for a key that is open and ``RuntimeError`` when the pool is closed.
        """
        self._check_open()
        if key in self._by_key or any(key == waiting for waiting, _ in self._waiting):
            msg = f"environment {key} is open already"
            raise ValueError(msg)
        self._waiting.append((key, frame({"call": "open", "columns": dict(columns)})))
        self._start_waiting()

    def act(self, key: int, reply: Mapping[str, Any], *, limit: float) -> None:
        """Hand an assistant message to it; it is killed when it takes over ``limit`` seconds.

        Raises ``ValueError`` for a key that is not open, or has not answered yet.
        """
        self._call(key, "act", frame({"call": "act", "reply": dict(reply)}), limit)

    def close(self, key: int) -> None:
        """Ask for its state, then let it go. Raises ``ValueError`` as :meth:`act` does."""
        self._call(key, "close", frame({"call": "close"}), self._start_seconds)

    def drop(self, keys: Iterable[int]) -> None:
        """Let these go at once, whatever they are doing; no event comes any more.

        A busy one is killed. One that waits for its next call is closed in its own time.
        Keys that are not open are passed over.
        """
        gone = set(keys)
        self._waiting = deque((k, data) for k, data in self._waiting if k not in gone)
        self._events = [event for event in self._events if event.key not in gone]
        for process in [self._by_key.pop(key) for key in gone if key in self._by_key]:
            process.key = None
            if process.call is not None:
                self._kill(process)
            elif process.failure is None:
                self._send(process, "drop", frame({"call": "drop"}), _DROP_SECONDS)
        self._start_waiting()

    def events(self, block: float = 0.0) -> list[EnvironmentEvent]:
        """Answers since the last call; waits up to ``block`` seconds for the first.

        Returns at once when nothing is under way. Limits are kept here: call it often.
        """
        end = time.monotonic() + block
        self._pump(0.0)
        while not self._events and (self.busy or self._waiting):
            left = end - time.monotonic()
            if left <= 0:
                break
            self._pump(left)
        events, self._events = self._events, []
        return events

    def check_start(self) -> Problem | None:
        """Load the code and make one environment; the problem when that fails, else None.

        Takes at most ``start_seconds`` for each. To be called while nothing is under way.
        """
        end = time.monotonic() + self._start_seconds
        while not self._nursery.loaded and self._nursery.failure is None:
            left = end - time.monotonic()
            if left <= 0:
                limit = f"{self._start_seconds:g} s"
                return self._problem(f"the environment's code was not loaded within {limit}")
            self._pump(left)
        if self._nursery.failure is not None:
            return self._problem(self._nursery.failure)
        self._probed = None
        process = self._new_process()
        self._send(process, "probe", frame({"call": "probe"}), self._start_seconds)
        answer = self._probe_answer()
        if "error" in answer:
            return self._problem(answer["error"])
        self._contract = Contract.from_json(answer["contract"])
        return None

    def _probe_answer(self) -> dict[str, Any]:
        while self._probed is None:
            self._pump(self._start_seconds)
        return self._probed

    def close_all(self) -> None:
        """Kill every process, running calls included. Events that were not taken are lost."""
        if self._closed:
            return
        self._closed = True
        self._nursery.stop()
        for process in self._processes.values():
            process.channel.close()
        self._selector.close()
        self._drain.close()
        for kept in (self._processes, self._by_key, self._idle, self._waiting, self._events):
            kept.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close_all()

    # --- calls -------------------------------------------------------------------------------

    def _problem(self, text: str) -> Problem:
        hint = f"See {self.log_path.name}, the log of the environments"
        return Problem("environment", text, hint=hint)

    def _check_open(self) -> None:
        if self._closed:
            msg = "the pool of environments is closed"
            raise RuntimeError(msg)

    def _call(self, key: int, kind: CallKind, data: bytes, limit: float) -> None:
        self._check_open()
        process = self._by_key.get(key)
        if process is None or process.call is not None:
            state = "is not open" if process is None else "has not answered yet"
            msg = f"environment {key} {state}"
            raise ValueError(msg)
        if process.failure is not None:
            self._fail(process, process.failure)
        else:
            self._send(process, kind, data, limit)

    def _send(self, process: _Process, kind: CallKind, data: bytes, limit: float) -> None:
        process.call = _Call(kind, limit, time.monotonic())
        process.channel.send(data)
        self._watch(process)

    def _start_waiting(self) -> None:
        """Give waiting environments idle processes, or new ones while there may be more."""
        while self._waiting and self._nursery.failure is None:
            if self._idle:
                process = self._idle.pop()
            elif len(self._processes) < self._workers:
                process = self._new_process()
            else:
                return
            process.key, data = self._waiting.popleft()
            self._by_key[process.key] = process
            self._send(process, "open", data, self._start_seconds)
        while self._waiting:
            key, _ = self._waiting.popleft()
            self._failed(key, str(self._nursery.failure))

    def _answered(self, process: _Process, answer: dict[str, Any]) -> None:
        call, process.call = process.call, None
        if call is None:
            return
        self._breaks = 0
        if call.kind in ("probe", "drop"):
            if call.kind == "probe":
                self._probed = answer
            self._rest(process)
            return
        assert process.key is not None
        key = process.key
        if "error" in answer:
            self._release(process)
            self._failed(key, answer["error"], answer["seconds"])
            return
        if call.kind == "close":
            self._release(process)
        self._events.append(
            EnvironmentEvent(
                key=key,
                kind=_ANSWERS[call.kind],
                text=answer.get("text"),
                messages=tuple(answer.get("messages", ())),
                done=answer.get("done", False),
                state=answer.get("state", {}),
                seconds=answer["seconds"],
            )
        )

    def _release(self, process: _Process) -> None:
        if process.key is not None:
            del self._by_key[process.key]
            process.key = None
        self._rest(process)

    def _rest(self, process: _Process) -> None:
        if process.token in self._processes and process.failure is None:
            self._idle.append(process)

    def _failed(
        self, key: int, error: str, seconds: float = 0.0, *, timed_out: bool = False
    ) -> None:
        self._events.append(
            EnvironmentEvent(
                key, EnvironmentEventKind.FAILED, error=error, seconds=seconds, timed_out=timed_out
            )
        )

    def _fail(self, process: _Process, error: str, *, timed_out: bool = False) -> None:
        """End what the process was doing with ``error``; its environment is gone."""
        call, process.call = process.call, None
        seconds = time.monotonic() - call.began if call is not None else 0.0
        if call is not None and call.kind == "probe":
            self._probed = {"error": error}
        elif process.key is not None:
            key, process.key = process.key, None
            del self._by_key[key]
            self._failed(key, error, seconds, timed_out=timed_out)
        self._drain.say(error)

    # --- time and processes ------------------------------------------------------------------

    def _pump(self, wait: float) -> None:
        """Take what has come, waiting up to ``wait`` seconds for it; kill what is overdue."""
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
                what = "its construction and reset" if call.kind == "open" else call.kind
                text = f"environment {self.name!r} did not answer to {what} within {call.limit:g} s"
                self._fail(process, f"{text}; its process was killed", timed_out=True)
                self._kill(process)
        self._start_waiting()

    def _hear(self, process: _Process) -> None:
        process.channel.flush()
        try:
            for answer in process.channel.received():
                self._answered(process, answer)
        except pickle.UnpicklingError as error:
            self._fail(process, f"environment {self.name!r} broke its channel: {error}")
            self._kill(process)
            return
        self._watch(process)

    def _watch(self, process: _Process) -> None:
        """Select what the channel waits for; nothing any more once the other side is gone."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.channel.unsent else 0)
        connection = process.channel.socket
        known = self._selector.get_map().get(connection)
        if process.channel.ended:
            if known is not None:
                self._selector.unregister(connection)
        elif known is None:
            self._selector.register(connection, events, process)
        elif known.events != events:
            self._selector.modify(connection, events, process)

    def _new_process(self) -> _Process:
        token = next(self._tokens)
        process = _Process(token, self._nursery.fork(token))
        self._processes[token] = process
        return process

    def _kill(self, process: _Process) -> None:
        """It counts as a process until the zygote tells that it is dead."""
        process.failure = "killed"
        process.call = None
        self._nursery.kill(process.token)

    def _hear_nursery(self) -> None:
        for told in self._nursery.hear():
            process = self._processes.get(told["died"])
            if process is not None:
                self._hear(process)  # what it said last
                self._gone(process, told.get("error") or how_it_died(told["code"]))
        if self._nursery.channel.ended:
            self._lost()

    def _gone(self, process: _Process, how: str) -> None:
        del self._processes[process.token]
        if process in self._idle:
            self._idle.remove(process)
        if process.channel.socket in self._selector.get_map():
            self._selector.unregister(process.channel.socket)
        process.channel.close()
        text = f"environment {self.name!r} gave no answer: {how}; see {self.log_path.name}"
        if process.call is not None:
            self._fail(process, text)
        process.failure = process.failure or text

    def _lost(self) -> None:
        """The zygote died, and all processes with it: begin again, but not for ever."""
        how = f"the process that environments start from died: {self._nursery.how_it_ended()}"
        self._selector.unregister(self._nursery.channel.socket)
        for process in list(self._processes.values()):
            self._gone(process, how)
        self._breaks += 1
        self._nursery.stop()
        if self._breaks > _MOST_BREAKS:
            self._nursery.failure = f"{how}, again and again; see {self.log_path.name}"
            return
        self._drain.say(f"{how}; it is started again")
        self._nursery.start()
        self._selector.register(self._nursery.channel.socket, selectors.EVENT_READ)
