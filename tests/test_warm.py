"""Warm processes: started when needed, asked by threads, interrupted, idle, killed, orphaned."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbtrain.client.warm import WarmProcess, kept
from nbtrain.errors import NbtrainError, NotFound, Refused

ECHO = """
import os, signal, sys, time
from nbtrain.data.serving import serve
from nbtrain.errors import NotFound, Problem, Refused

def answer(request, tell):
    op = request["op"]
    if op == "echo":
        return request["said"]
    if op == "slowly":
        for n in range(int(request["steps"])):
            time.sleep(0.02)
            tell(n)
        return "done"
    if op == "deaf":
        tell("now")
        time.sleep(60)
    if op == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if op == "refuses":
        raise Refused([Problem("field", "it is wrong", object(), "right")])
    if op == "misses":
        raise NotFound("no such thing")
    if op == "breaks":
        return 1 / 0
    if op == "unsayable":
        return float("nan")

serve(answer, idle=float(sys.argv[1]) if len(sys.argv) > 1 else None)
"""


class Echo(WarmProcess):
    module = "warm_echo"
    called = "the process that echoes"
    log_name = "echo.log"

    def __init__(self, folder: Path, *, idle: float | None = None, patience: float = 30.0) -> None:
        (folder / "warm_echo.py").write_text(ECHO)
        paths = os.pathsep.join([str(folder), *sys.path])
        super().__init__(
            folder,
            patience=patience,
            first=60,
            arguments=() if idle is None else (str(idle),),
            environment=os.environ | {"PYTHONPATH": paths},
        )

    def say(self, said: Any) -> Any:
        return self.request({"op": "echo", "said": said}, starting=lambda text: None)


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Echo]:
    process = Echo(tmp_path)
    yield process
    process.close()


def test_it_starts_when_asked_and_says_so(echo: Echo, capsys: pytest.CaptureFixture[str]) -> None:
    assert echo.pid is None
    told: list[str] = []
    request = {"op": "echo", "said": "a\nb\u2028\0<ü>"}
    assert echo.request(request, starting=told.append) == request["said"]
    assert told == ["starting the process that echoes; this takes some seconds"]
    assert echo.request({"op": "ping"}) == echo.pid
    assert capsys.readouterr().err == ""
    echo.close()
    echo.request({"op": "ping"})
    assert capsys.readouterr().err.strip() == told[0]
    assert (echo.log.stat().st_mode & 0o777) == 0o600


def test_a_long_request_arrives_whole(echo: Echo) -> None:
    said = "äöü" * 200_000
    assert echo.say(said) == said


@pytest.mark.parametrize(
    ("op", "kind", "words"),
    [
        ("refuses", Refused, "it is wrong; allowed: right"),
        ("misses", NotFound, "no such thing"),
        ("breaks", NbtrainError, r"division by zero \(the side process's log is .*echo\.log\)"),
        ("unsayable", NbtrainError, "JSON compliant"),
    ],
)
def test_errors_arrive_as_themselves(echo: Echo, op: str, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        echo.request({"op": op})
    assert echo.say("still here") == "still here"


def test_one_that_dies_twice_is_told_with_how(echo: Echo) -> None:
    said = r"was killed \(as .* no memory left\), twice; its log is"
    with pytest.raises(NbtrainError, match=said):
        echo.request({"op": "dies"})
    assert echo.say(1) == 1


def test_it_outlives_the_thread_that_started_it(echo: Echo) -> None:
    thread = threading.Thread(target=echo.say, args=(1,))
    thread.start()
    thread.join()
    pid = echo.pid
    time.sleep(0.7)  # longer than its own look at its parent
    assert echo.say(2) == 2
    assert echo.pid == pid


def test_threads_wait_for_one_another(echo: Echo) -> None:
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        echo.request({"op": "slowly", "steps": 5})
        found[number] = echo.say(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: number for number in range(4)}


def _interrupting(progress: Any) -> None:
    if progress in (3, "now"):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_stops_the_answer_and_leaves_the_process(echo: Echo) -> None:
    echo.say(1)
    pid = echo.pid
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        echo.request({"op": "slowly", "steps": 3000}, _interrupting)
    assert time.monotonic() - began < 10
    assert echo.say(2) == 2
    assert echo.pid == pid


def test_an_answer_that_does_not_stop_is_killed(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbtrain.client.warm._STOP_SECONDS", 0.5)
    echo.say(1)
    pid = echo.pid
    with pytest.raises(KeyboardInterrupt):
        echo.request({"op": "deaf"}, _interrupting)
    assert echo.say(2) == 2
    assert echo.pid != pid


def test_what_a_listener_raises_stops_the_answer_too(echo: Echo) -> None:
    echo.say(1)
    pid = echo.pid
    with pytest.raises(ZeroDivisionError):
        echo.request({"op": "slowly", "steps": 3000}, lambda n: 1 // (3 - n))
    assert echo.say(2) == 2
    assert echo.pid == pid


def test_it_ends_when_idle_and_is_started_by_the_next_question(tmp_path: Path) -> None:
    echo = Echo(tmp_path, idle=0.4)
    try:
        echo.say(1)
        first = echo.pid
        until = time.monotonic() + 20
        while echo.pid is not None and time.monotonic() < until:
            time.sleep(0.05)
        assert echo.pid is None
        assert "nothing was asked for 0.4 s" in echo.log.read_text()
        assert echo.say(2) == 2
        assert echo.pid not in (None, first)
    finally:
        echo.close()


def test_a_busy_one_is_not_idle(tmp_path: Path) -> None:
    echo = Echo(tmp_path, idle=0.4)
    try:
        assert echo.request({"op": "slowly", "steps": 50}) == "done"
    finally:
        echo.close()


def test_there_is_one_for_a_place(tmp_path: Path) -> None:
    assert kept(Echo, tmp_path) is kept(Echo, tmp_path)
    (tmp_path / "other").mkdir()
    assert kept(Echo, tmp_path) is not kept(Echo, tmp_path / "other")


def test_a_fork_neither_speaks_to_it_nor_ends_it(echo: Echo) -> None:
    echo.say(1)
    child = os.fork()
    if child == 0:
        echo.close()
        os._exit(0 if kept(Echo, echo.log.parent) is not echo else 1)
    assert os.waitpid(child, 0)[1] == 0
    pid = echo.pid
    assert echo.say(2) == 2
    assert echo.pid == pid
