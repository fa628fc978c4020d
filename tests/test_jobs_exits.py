"""Why a process ended, in words."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.jobs.exits import Exit, explain, last_exception, last_lines, tail, verdict
from nbtrain.training.outcome import Outcome

COMPLETED = Outcome("completed", "nothing left to learn")
FAILED = Outcome("failed", None, "the loss is not finite")
CANCELLED = Outcome("cancelled", "cancelled on request")

TRACEBACK = """step 3
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
ValueError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    g()
    ~^^
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
  a detail
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank0.log"


def test_the_last_exception_of_a_chain_is_named(log: Path) -> None:
    log.write_text(TRACEBACK)
    assert last_exception(log) == (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )


def test_an_indented_traceback_is_read(log: Path) -> None:
    log.write_text("".join(f"  | {line}\n" for line in TRACEBACK.splitlines()))
    assert last_exception(log) is None
    log.write_text("".join(f"    {line}\n" for line in TRACEBACK.splitlines()))
    assert (last_exception(log) or "").startswith("torch.OutOfMemoryError")


@pytest.mark.parametrize("text", ["", "all is well\n", "Traceback (most recent call last):\n  cut"])
def test_a_log_without_an_exception_has_none(text: str, log: Path) -> None:
    log.write_text(text)
    assert last_exception(log) is None


def test_a_missing_log_has_no_lines(log: Path) -> None:
    assert last_lines(log) == []
    assert last_exception(log) is None


def test_lines_come_without_control_characters_and_cut(log: Path) -> None:
    log.write_bytes(b"first\n\x1b[31mred\x1b[0m\r\n\n" + b"y" * 10_000 + b"\n\xff\xfe end\x07\n")
    first, red, long, end = last_lines(log)
    assert (first, red) == ("first", "red")
    assert len(long) == 400
    assert end == "\ufffd\ufffd end"


@pytest.mark.parametrize("line", [b"x" * 63 + b"\n", b"y" * 62 + b"\n"])
def test_a_tail_is_whole_lines_and_says_what_it_leaves_off(line: bytes, log: Path) -> None:
    log.write_bytes(line * 2000)
    text, left_off = tail(log)
    assert set(text.splitlines()) == {line.decode().rstrip()}
    assert len(text) + left_off == 2000 * len(line)
    assert 64 * 1024 - len(line) < len(text) <= 64 * 1024
    log.write_bytes(b"z" * 200_000 + b"\n")  # one endless line is cut rather than lost
    assert len(tail(log)[0]) > 60_000
    assert tail(log.with_name("none")) == ("", 0)


def test_only_the_end_of_a_huge_log_is_read(log: Path) -> None:
    with log.open("wb") as stream:
        stream.truncate(10 * 2**30)  # a hole: nothing of it may be read
        stream.seek(0, 2)
        stream.write(b"\n" + b"".join(b"line %d\n" % n for n in range(30)))
    assert last_lines(log, 2) == ["line 28", "line 29"]


@pytest.mark.parametrize(
    ("exit", "says"),
    [
        (Exit(0), "the rank exited with code 0 without saying what came of it"),
        (Exit(3), "the rank exited with code 3"),
        (Exit(-11), "the rank was killed by signal 11 (SIGSEGV)"),
        (
            Exit(-9, 3 * 2**30),
            "the rank was killed by signal 9 (SIGKILL), likely out of memory; peak memory 3072 MiB",
        ),
        (Exit(-9), "the rank was killed by signal 9 (SIGKILL), likely out of memory"),
        (Exit(-63), "the rank was killed by signal 63 (unknown)"),
    ],
)
def test_an_exit_is_told_in_words(exit: Exit, says: str, log: Path) -> None:
    assert explain(exit, what="the rank", log=log) == f"{says}; its log is empty ({log})"
    log.write_text("one\ntwo\n")
    assert explain(exit, what="the rank", log=log) == (
        f"{says}; last lines of {log}:\n  one\n  two"
    )


def test_an_exception_explains_an_exit_but_not_a_kill(log: Path) -> None:
    log.write_text("Traceback (most recent call last):\n  x\nValueError: no\n")
    said = explain(Exit(1), what="the rank", log=log)
    assert said == f"the rank exited with code 1: ValueError: no\n(the whole log: {log})"
    assert explain(Exit(-9), what="the rank", log=log).startswith("the rank was killed")


@pytest.mark.parametrize(
    ("code", "outcome", "stopped", "cancelled", "result", "says"),
    [
        (0, COMPLETED, False, False, "completed", "nothing left to learn"),
        # It had finished when it was asked, or stopped, or crashed while it closed down.
        (0, COMPLETED, False, True, "completed", "nothing left to learn"),
        (-9, COMPLETED, True, True, "completed", "nothing left to learn"),
        (-11, COMPLETED, False, False, "completed", "nothing left to learn"),
        (0, CANCELLED, False, True, "cancelled", "cancelled on request"),
        (1, FAILED, False, False, "failed", "the loss is not finite"),
        # It failed by itself before it looked at the cancel.
        (1, FAILED, False, True, "failed", "the loss is not finite"),
        # The host's signals made it fail.
        (1, FAILED, True, True, "cancelled", "the job did not stop by itself and was stopped"),
        (-9, None, True, True, "cancelled", "did not stop by itself"),
        (-15, None, False, True, "cancelled", "cancelled"),
        (-15, None, False, False, "failed", "SIGTERM"),
        (-9, None, False, True, "failed", "likely out of memory"),
        (0, None, False, False, "failed", "without saying"),
        (1, Outcome("failed"), False, False, "failed", "exited with code 1"),
    ],
)
def test_what_a_run_comes_to(
    code: int,
    outcome: Outcome | None,
    stopped: bool,
    cancelled: bool,
    result: str,
    says: str,
    log: Path,
) -> None:
    found = verdict(
        Exit(code), outcome, what="the rank", log=log, stopped=stopped, cancelled=cancelled
    )
    assert found.result == result
    assert says in (found.failure or found.ended or "")


@given(
    code=st.integers(-64, 255),
    outcome=st.sampled_from([None, COMPLETED, FAILED, CANCELLED, Outcome("failed")]),
    stopped=st.booleans(),
    cancelled=st.booleans(),
)
def test_every_end_is_explained(
    code: int, outcome: Outcome | None, stopped: bool, cancelled: bool
) -> None:
    found = verdict(
        Exit(code),
        outcome,
        what="the rank",
        log=Path("/nowhere/rank0.log"),
        stopped=stopped,
        cancelled=cancelled or stopped,
    )
    assert bool(found.failure) == (found.result == "failed")
    if found.result == "completed":
        assert outcome == COMPLETED
    if found.result == "cancelled":
        assert cancelled or stopped or outcome == CANCELLED
    assert signal.Signals(9).name == "SIGKILL"
