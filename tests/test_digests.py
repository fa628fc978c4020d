"""Digests of files are remembered, and never those of another content."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from nbtrain.catalog.digests import FileDigests


def test_a_file_is_read_again_when_it_was_written_with_its_old_size_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, memory = tmp_path / "weights", FileDigests(tmp_path / "memory.json")
    file.write_bytes(b"one")
    before = file.stat()
    assert memory.sha256(file) == hashlib.sha256(b"one").hexdigest()
    file.write_bytes(b"two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert memory.sha256(file) == hashlib.sha256(b"two").hexdigest()
    other = tmp_path / "other"
    other.write_bytes(b"six")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    assert memory.sha256(file) == hashlib.sha256(b"six").hexdigest()
    monkeypatch.setattr(hashlib, "file_digest", None)
    known = FileDigests(tmp_path / "memory.json").sha256(file)
    assert known == hashlib.sha256(b"six").hexdigest(), "an unchanged file is not read again"
