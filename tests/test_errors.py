"""Errors in a notebook: a sentence for what nbtrain raises on purpose, everything for the rest."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbtrain.errors import (
    NbtrainError,
    NotFound,
    NotWritten,
    PlanRefused,
    Problem,
    Refused,
    RunEnded,
    WaitedTooLong,
)

PROBLEMS = [Problem("a", "a is 1", 1, "2", hint="Try 2"), Problem("b", "b is missing")]


@pytest.fixture
def shell(tmp_path: Path) -> InteractiveShell:
    config = Config()
    config.HistoryManager.enabled = False
    return InteractiveShell(config=config, ipython_dir=str(tmp_path))


def shown(shell: InteractiveShell, error: Exception) -> list[str]:
    lines: list[list[str]] = []
    shell._showtraceback = lambda _type, _value, told: lines.append(told)

    def fail() -> None:
        raise error

    shell.user_ns["fail"] = fail
    shell.run_cell("fail()")
    return "\n".join(lines[0]).splitlines()


@pytest.mark.parametrize(
    "error",
    [
        NbtrainError("something"),
        NotFound("no run is called 'x'"),
        RunEnded("run x failed: first line\nsecond line"),
        WaitedTooLong("still going"),
        NotWritten(28, "/a cannot be written: the disk is full"),
        Refused(PROBLEMS),
        PlanRefused(PROBLEMS[:1]),
    ],
)
def test_errors_on_purpose_are_sentences(shell: InteractiveShell, error: NbtrainError) -> None:
    assert shown(shell, error) == str(error).splitlines()


def test_other_errors_keep_their_traceback(shell: InteractiveShell) -> None:
    assert len(shown(shell, ValueError("a defect"))) > 3


@pytest.mark.parametrize(
    "error",
    [
        WaitedTooLong("still going"),
        PlanRefused(PROBLEMS),
        NotWritten(28, "/a cannot be written: the disk is full"),
    ],
)
def test_errors_pickle(error: NbtrainError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
