"""Fixtures every test file shares: an own home folder, no network, one torch thread."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# A busy machine is no failure: examples have no time limit.
settings.register_profile("nbtrain", deadline=None)
settings.load_profile("nbtrain")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh NBTRAIN_HOME; nothing of the user's own is read or written."""
    folder = tmp_path / "home"
    monkeypatch.setenv("NBTRAIN_HOME", str(folder))
    monkeypatch.delenv("NBTRAIN_STORE_URL", raising=False)
    return folder
