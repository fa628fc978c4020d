"""Environments of many trajectories, each in a process of its own while its trajectory lasts.

Processes are forked from a zygote that has loaded the environment's code once
(:mod:`nbtrain.environments.zygote`). This side only sends, receives and keeps time; it never
waits for a process, and it never forks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nbtrain.environments.answers import CallKind
from nbtrain.environments.channel import dumped
from nbtrain.environments.contract import Contract
from nbtrain.environments.events import EnvironmentEvent, EnvironmentEventKind
from nbtrain.environments.fleet import Ended, Fleet, Process
from nbtrain.environments.packing import read_packed
from nbtrain.errors import Problem
from nbtrain.rewards.crew import Closing

__all__ = ["EnvironmentPool"]

_CLOSE_SECONDS = 10.0
"""An environment that takes longer to close costs its process; its trajectory has ended already."""

_LAST_SECONDS = 2.0
"""How long the pool's end waits for those that are closing."""

_ANSWERS = {
    "open": EnvironmentEventKind.OPENED,
    "act": EnvironmentEventKind.OBSERVED,
    "close": EnvironmentEventKind.CLOSED,
}


class EnvironmentPool(Closing):
    """Environments of the class packed at ``path``, in at most ``workers`` processes.

    Implements :class:`nbtrain.rollout.types.Environments`: every ``open``, ``act`` and ``close``
    is answered by one event, unless the key is dropped. A process is used again for the next
    trajectory, with a new object. A process that takes longer than its limit is killed with what
    it started: ``start_seconds`` for construction and reset, and for telling its state; what
    ``act`` was given. ``close`` of the environment runs after its state was told, for 10 s at most.
    A process that answers what it was not asked, or over 64 MiB, is killed too, and its trajectory
    fails alone. What environments print goes to ``log_path``, at most 10 MiB per process.

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
        self.start_seconds = float(start_seconds)
        self.most_seconds = math.inf
        """No ``act`` may take longer, whatever its own limit."""
        self._contract = packed.contract
        self._waiting: dict[int, bytes] = {}  # in the order they came
        self._by_key: dict[int, Process] = {}
        self._events: list[EnvironmentEvent] = []
        self._probed: list[dict[str, Any]] = []
        self._fleet = Fleet(packed.name, Path(path).resolve(), workers, self.log_path)

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
        """Environments constructing, acting or telling their state at this moment."""
        return self._fleet.busy

    def open(self, key: int, columns: Mapping[str, Any]) -> None:
        """Queue the construction and reset of trajectory ``key``'s environment.

        Raises ``ValueError`` for a key that is open and ``RuntimeError`` when the pool is closed.
        """
        self._check_open()
        if key in self._by_key or key in self._waiting:
            msg = f"environment {key} is open already"
            raise ValueError(msg)
        self._waiting[key] = dumped({"call": "open", "columns": dict(columns)})
        self._start_waiting()

    def act(self, key: int, reply: Mapping[str, Any], *, limit: float) -> None:
        """Hand an assistant message to it; it is killed when it takes over ``limit`` seconds.

        Raises ``ValueError`` for a key that is not open, or has not answered yet.
        """
        data = dumped({"call": "act", "reply": dict(reply)})
        self._call(key, "act", data, min(limit, self.most_seconds), self._acting(reply))

    def close(self, key: int) -> None:
        """Ask for its state, then let it go. Raises ``ValueError`` as :meth:`act` does."""
        what = f"the end of {self.name} (get_reward and its attributes)"
        self._call(key, "close", dumped({"call": "close"}), self.start_seconds, what)

    def drop(self, keys: Iterable[int]) -> None:
        """Let these go at once, whatever they are doing; no event comes any more.

        A busy one is killed. One that waits for its next call is closed in its own time.
        Keys that are not open are passed over.
        """
        gone = set(keys)
        for key in gone & self._waiting.keys():
            del self._waiting[key]
        self._events = [event for event in self._events if event.key not in gone]
        for process in [self._by_key.pop(key) for key in gone if key in self._by_key]:
            if process.call is not None:
                self._fleet.kill(process)
            else:
                self._let_go(process)
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
        end = time.monotonic() + self.start_seconds
        while not self._fleet.loaded and self._fleet.failure is None:
            left = end - time.monotonic()
            if left <= 0:
                limit = f"{self.start_seconds:g} s"
                return self._problem(f"the environment's code was not loaded within {limit}")
            self._pump(left)
        if self._fleet.failure is not None:
            return self._problem(self._fleet.failure)
        answer = self._probe()
        if "error" in answer:
            return self._problem(answer["error"])
        self._contract = Contract.from_json(answer["contract"])
        return None

    def _end(self) -> None:
        end = time.monotonic() + _LAST_SECONDS
        while self._fleet.dropping and (left := end - time.monotonic()) > 0:
            self._fleet.pump(left)
        self._fleet.stop()
        self._by_key.clear()
        self._waiting.clear()
        self._events.clear()

    def _check_open(self) -> None:
        if self._closed:
            msg = "the pool of environments is closed"
            raise RuntimeError(msg)

    def _problem(self, text: str) -> Problem:
        hint = f"See {self.log_path.name}, the log of the environments"
        return Problem("environment", text, hint=hint)

    def _probe(self) -> dict[str, Any]:
        while (process := self._fleet.get()) is None:
            self._pump(self.start_seconds)
        data = dumped({"call": "probe"})
        self._fleet.send(process, "probe", data, self.start_seconds, f"{self.name}()")
        while not self._probed:
            self._pump(self.start_seconds)
        return self._probed.pop()

    def _acting(self, reply: Mapping[str, Any]) -> str:
        """What a reply calls, as a person would name it."""
        if self._contract is not None and self._contract.form == "step":
            return f"{self.name}.step"
        names = [str((call.get("function") or {}).get("name")) for call in _calls(reply)]
        return ", ".join(f"{self.name}.{name}" for name in dict.fromkeys(names)) or self.name

    def _call(self, key: int, kind: CallKind, data: bytes, limit: float, what: str) -> None:
        self._check_open()
        process = self._by_key.get(key)
        if process is None or process.call is not None:
            state = "is not open" if process is None else "has not answered yet"
            msg = f"environment {key} {state}"
            raise ValueError(msg)
        if process.failure is None:
            self._fleet.send(process, kind, data, limit, what)
        else:  # it died since its last answer
            self._let_go(self._by_key.pop(key))
            self._failed(key, {"error": process.failure})

    def _start_waiting(self) -> None:
        """Give waiting environments processes while there are any."""
        while self._waiting and self._fleet.failure is None:
            process = self._fleet.get()
            if process is None:
                return
            process.key = key = next(iter(self._waiting))
            self._by_key[key] = process
            what = f"{self.name}() or {self.name}.reset"
            self._fleet.send(process, "open", self._waiting.pop(key), self.start_seconds, what)
        for key in self._waiting:
            self._failed(key, {"error": self._fleet.failure})
        self._waiting.clear()

    def _pump(self, wait: float) -> None:
        for ended in self._fleet.pump(wait):
            self._take(ended)
        self._start_waiting()

    def _take(self, ended: Ended) -> None:
        process, kind, answer = ended
        if kind == "probe":
            self._probed.append(answer)
            self._let_go(process)
            return
        key = process.key
        if key is None:
            self._fleet.rest(process)
            return
        if "error" in answer or kind == "close":
            self._let_go(self._by_key.pop(key))
        if "error" in answer:
            self._failed(key, answer)
            return
        self._events.append(
            EnvironmentEvent(
                key=key,
                kind=_ANSWERS[kind],
                text=answer.get("text"),
                messages=tuple(answer.get("messages", ())),
                done=answer.get("done", False),
                state=answer.get("state", {}),
                seconds=answer["seconds"],
            )
        )

    def _let_go(self, process: Process) -> None:
        """Close its environment, if it lives; it takes the next one when that is done."""
        process.key = None
        if process.failure is None:
            data = dumped({"call": "drop"})
            self._fleet.send(process, "drop", data, _CLOSE_SECONDS, f"{self.name}.close")

    def _failed(self, key: int, answer: Mapping[str, Any]) -> None:
        self._events.append(
            EnvironmentEvent(
                key=key,
                kind=EnvironmentEventKind.FAILED,
                error=answer["error"],
                seconds=answer.get("seconds", 0.0),
                timed_out=answer.get("timed_out", False),
            )
        )


def _calls(reply: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return reply.get("tool_calls") or []
