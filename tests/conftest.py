"""Fixtures every test file shares: an own home folder, no network, one torch thread."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from shells import Shell

    from nbtrain.client import Run

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# A busy machine is no failure: examples have no time limit.
settings.register_profile("nbtrain", deadline=None)
settings.load_profile("nbtrain")


@pytest.fixture(autouse=True)
def interrupts() -> None:
    """An interrupt raises, as in a person's shell.

    Background jobs begin with interrupts ignored, and so would all that the tests start; an event
    loop that a time-out tears apart leaves its own handler behind.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh NBTRAIN_HOME; nothing of the user's own is read or written."""
    folder = tmp_path / "home"
    monkeypatch.setenv("NBTRAIN_HOME", str(folder))
    monkeypatch.delenv("NBTRAIN_STORE_URL", raising=False)
    return folder


@pytest.fixture
def browser() -> Iterator[Any]:
    """Headless Chromium. Where there is none the test skips, unless it is demanded."""
    if CHROMIUM is None:
        if os.environ.get("NBTRAIN_DEMAND_BROWSER"):
            pytest.fail("Chromium is not installed, and the browser tests are demanded")
        pytest.skip("Chromium is not installed: the browser tests need it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Runs that would have been started; their host seems to be this very process."""
    import nbtrain.jobs.launch
    from nbtrain.client import Run
    from nbtrain.processes import process_identity

    runs: list[Run] = []

    def launch(store: Any, row: Any, **_: Any) -> None:
        who = process_identity(os.getpid())
        assert who is not None
        store.start_attempt(
            row.key, 1, host_pid=who.pid, host_start_time=who.start_time, boot_id=who.boot_id
        )
        runs.append(Run(store, row))

    monkeypatch.setattr(nbtrain.jobs.launch, "launch", launch)
    return runs


@pytest.fixture
def shell(home: Path, tmp_path: Path, launched: list[Run]) -> Iterator[Shell]:
    """A shell with the extension loaded; launching is cut short, everything up to it is real."""
    from shells import Shell

    shell = Shell(tmp_path / "ipython")
    yield shell
    shell.do("%unload_ext nbtrain")
