"""How a warm process answers: one JSON request a line on stdin, one JSON reply a line on stdout.

A request is ``{"id", "op", …}``; its reply is ``{"id", "result"}`` or ``{"id", "error"}``, after
any number of ``{"id", "progress"}``. ``ping`` gives the process's id. SIGINT stops the answer that
is being made, at its next sign of life, and nothing else. The process ends with its stdin and with
its parent, and where it has an ``idle`` limit, when nothing was asked for so many seconds.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, BinaryIO

from nbtrain.errors import NbtrainError, NotFound, Refused
from nbtrain.processes import die_with_parent

__all__ = ["Answer", "Teller", "serve"]

_CHUNK = 1 << 16


class Teller:
    """What an answer says while it is being made: its progress, and so that it lives.

    Both calls raise ``KeyboardInterrupt`` once the answer is no longer wanted, so that it stops
    where its maker is ready to.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self.number: object = None
        self.unwanted = False

    def __call__(self, progress: Any) -> None:
        """Tell how far the answer is: a number or a text."""
        self.check()
        self._send({"id": self.number, "progress": progress})

    def check(self) -> None:
        """Stop here if the answer is no longer wanted."""
        if self.unwanted:
            raise KeyboardInterrupt


Answer = Callable[[Mapping[str, Any], Teller], Any]
"""The result of one request, as plain values. Raises what stops it."""


def serve(answer: Answer, *, idle: float | None = None) -> None:
    """Answer what comes over stdin until the parent closes it or dies, or ``idle`` is over."""
    die_with_parent()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Whatever a library prints goes to the log: stdout carries replies alone.
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        _answer_all(answer, _lines(0, idle), out)


def _answer_all(answer: Answer, requests: Iterator[bytes], out: BinaryIO) -> None:
    def send(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message, allow_nan=False).encode("ascii") + b"\n")
        out.flush()

    tell = Teller(send)

    def stop(*_: object) -> None:
        tell.unwanted = True

    signal.signal(signal.SIGINT, stop)
    for line in requests:
        tell.number, tell.unwanted = None, False
        try:
            request = json.loads(line)
            tell.number = request["id"]
            result = os.getpid() if request.get("op") == "ping" else answer(request, tell)
            send({"id": tell.number, "result": result})
        except (Exception, KeyboardInterrupt) as error:  # the next request may be better
            send({"id": tell.number, "error": _told(error)})


def _lines(stream: int, idle: float | None) -> Iterator[bytes]:
    held = b""
    while select.select([stream], [], [], idle)[0]:
        chunk = os.read(stream, _CHUNK)
        if not chunk:
            return
        *whole, held = (held + chunk).split(b"\n")
        yield from whole
    print(f"nothing was asked for {idle} s: ending", file=sys.stderr, flush=True)


def _told(error: BaseException) -> dict[str, Any]:
    """An error as plain values; the client makes the same one of it."""
    if isinstance(error, Refused):
        problems = [asdict(problem) for problem in error.problems]
        for problem in problems:
            found = problem["found"]
            plain = found is None or isinstance(found, str | int | float)
            problem["found"] = found if plain else str(found)
        return {"kind": "refused", "message": str(error), "problems": problems}
    if isinstance(error, NotFound):
        return {"kind": "not_found", "message": str(error)}
    if isinstance(error, IndexError):
        return {"kind": "index", "message": str(error)}
    if isinstance(error, KeyboardInterrupt):
        return {"kind": "stopped", "message": "the answer was stopped"}
    if not isinstance(error, NbtrainError):
        traceback.print_exc()
    return {"kind": "error", "message": str(error) or type(error).__name__}
