"""Why a process ended, in words."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.jobs.exits import (
    Exit,
    RankEnd,
    explain,
    first_cause,
    last_exception,
    last_lines,
    tail,
    verdict,
)
from nbtrain.jobs.rank_watch import RankWatch
from nbtrain.training.outcome import Outcome

COMPLETED = Outcome("completed", "nothing left to learn")
FAILED = Outcome("failed", None, "the loss is not finite")
CANCELLED = Outcome("cancelled", "cancelled on request")
LOST = Outcome("failed", None, "rank 0 lost another rank", lost_rank=True)
STOPPED = "cancelled; the job did not stop by itself and was stopped"

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
            Exit(-9, 3 * 2**30, 12 * 2**20),
            "the rank was killed by signal 9 (SIGKILL); if nobody did it, the system ran out of "
            "memory: peak 3072 MiB, 12 MiB free",
        ),
        (
            Exit(-9),
            "the rank was killed by signal 9 (SIGKILL); if nobody did it, the system ran out of "
            "memory",
        ),
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
        (0, COMPLETED, None, False, "completed", "nothing left to learn"),
        # It had finished when it was asked, or stopped, or crashed while it closed down.
        (0, COMPLETED, None, True, "completed", "nothing left to learn"),
        (-9, COMPLETED, STOPPED, True, "completed", "nothing left to learn"),
        (-11, COMPLETED, None, False, "completed", "nothing left to learn"),
        (0, CANCELLED, None, True, "cancelled", "cancelled on request"),
        (1, FAILED, None, False, "failed", "the loss is not finite"),
        # It failed by itself before it looked at the cancel.
        (1, FAILED, None, True, "failed", "the loss is not finite"),
        # The host's signals made it fail.
        (1, FAILED, STOPPED, True, "cancelled", "the job did not stop by itself and was stopped"),
        (-9, None, STOPPED, True, "cancelled", "did not stop by itself"),
        (-15, None, None, True, "cancelled", "cancelled"),
        (-15, None, None, False, "failed", "SIGTERM"),
        (-9, None, None, True, "failed", "if nobody did it"),
        (0, None, None, False, "failed", "without saying"),
        (1, Outcome("failed"), None, False, "failed", "exited with code 1"),
    ],
)
def test_what_a_run_comes_to(
    code: int,
    outcome: Outcome | None,
    stopped: str | None,
    cancelled: bool,
    result: str,
    says: str,
    log: Path,
) -> None:
    end = RankEnd(0, Exit(code), outcome, log)
    found = verdict([end], stopped=stopped, cancelled=cancelled)
    assert found.result == result
    assert says in (found.failure or found.ended or "")


@given(
    ends=st.lists(
        st.tuples(
            st.integers(-64, 255),
            st.sampled_from([None, COMPLETED, FAILED, CANCELLED, LOST, Outcome("failed")]),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    order=st.randoms(use_true_random=False),
    stopped=st.sampled_from([None, STOPPED]),
    cancelled=st.booleans(),
)
def test_every_end_is_explained(
    ends: list[tuple[int, Outcome | None, bool]],
    order: Random,
    stopped: str | None,
    cancelled: bool,
) -> None:
    log = Path("/nowhere/rank.log")
    ranks = [RankEnd(n, Exit(code), said, log, by) for n, (code, said, by) in enumerate(ends)]
    outcome = ends[0][1]
    order.shuffle(ranks)
    found = verdict(ranks, stopped=stopped, cancelled=cancelled or bool(stopped))
    assert bool(found.failure) == (found.result == "failed")
    if found.result == "completed":
        assert outcome == COMPLETED
    if found.result == "cancelled":
        assert cancelled or stopped or outcome == CANCELLED


def end(rank: int, code: int, outcome: Outcome | None = None, *, by_host: bool = False) -> RankEnd:
    return RankEnd(rank, Exit(code), outcome, Path(f"/nowhere/rank{rank}.log"), by_host)


@pytest.mark.parametrize(
    ("ends", "blamed"),
    [
        # In the order in which they ended: the first is to blame, ...
        ([end(1, -9), end(0, 1, FAILED)], 1),
        ([end(0, 1, FAILED), end(1, -9)], 0),
        # ... but not one that only lost another, ...
        ([end(0, 1, LOST), end(2, 1, LOST), end(1, 1, FAILED)], 1),
        # ... nor one that the host had stopped meanwhile, ...
        ([end(0, 1, LOST), end(1, -15, by_host=True)], 0),
        ([end(2, 7), end(0, 1, FAILED, by_host=True), end(1, -9, by_host=True)], 2),
        # ... nor one that had come to its good end.
        ([end(1, 0, COMPLETED), end(0, -9)], 0),
        ([end(1, -11, COMPLETED), end(0, 0, None, by_host=True)], 0),
    ],
)
def test_the_cause_is_blamed(ends: list[RankEnd], blamed: int) -> None:
    assert first_cause(ends).rank == blamed
    said = verdict(ends, stopped=None, cancelled=False)
    assert said.result == "failed"
    assert (said.failure or "").startswith(f"rank {blamed} of {len(ends)}")


def test_rank_0_has_the_last_word() -> None:
    for said in (COMPLETED, CANCELLED):
        assert verdict([end(1, -9), end(0, 0, said)], stopped=None, cancelled=False) == said
    dead = [end(1, -15, by_host=True), end(0, -9, by_host=True)]
    assert verdict(dead, stopped=STOPPED, cancelled=True) == Outcome("cancelled", STOPPED)


class Scripted:
    """A process that ends when it is told."""

    def __init__(self, rank: int) -> None:
        self.pid = 100 + rank
        self.log = Path(f"/nowhere/rank{rank}.log")
        self.code: int | None = None

    def poll(self) -> Exit | None:
        return None if self.code is None else Exit(self.code)


@pytest.mark.parametrize(
    ("rank", "code", "outcome", "patience"),
    [
        (0, 0, COMPLETED, 10.0),
        (0, 0, CANCELLED, 0.0),
        (0, 1, FAILED, 0.0),
        (0, -9, None, 0.0),
        (1, -9, None, 0.0),
        (1, 1, LOST, 2.0),
        (1, 0, COMPLETED, math.inf),
    ],
)
def test_the_others_go_on_for_so_long(
    rank: int, code: int, outcome: Outcome | None, patience: float
) -> None:
    ranks = [Scripted(0), Scripted(1), Scripted(2)]
    watch = RankWatch(ranks, lambda number: outcome if number == rank else None)
    assert watch.look(0.0)
    assert not watch.to_stop(1e9)
    ranks[rank].code = code
    assert watch.look(100.0)
    assert watch.living == [each for each in range(3) if each != rank]
    assert watch.to_stop(100.0 + min(patience, 1e9)) == (patience < math.inf)
    if patience:
        assert not watch.to_stop(100.0 + min(patience, 1e9) - 0.1)
    watch.by_host = True
    assert watch.to_stop(0.0)
    for each in ranks:
        each.code = -15 if each.code is None else each.code
    assert not watch.look(200.0)
    assert [one.by_host for one in watch.ends] == [False, True, True]
