"""Checkpoints: whole or not at all, hashed, strict."""

from __future__ import annotations

import errno
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from nbtrain.training import checkpoints
from nbtrain.training.checkpoints import CheckpointError, Identity, Saved
from nbtrain.training.partials import clear_partial
from nbtrain.training.record import insist

FITS = {"base_fingerprint": "f" * 64, "tokenizer_fingerprint": "t" * 64}
IDENTITY = Identity("a" * 64, 1, 10, "nbtrain/tiny", "f" * 64, "t" * 64, "w" * 64, "c" * 64)


def write(folder: Path, **changes: Any) -> checkpoints.Saved:
    parts: dict[str, Any] = {
        "adapter": {"lora_A.weight": torch.arange(6.0).reshape(2, 3)},
        "adapter_config": {"r": 2},
        "optimizer": {"lora_A|exp_avg": torch.ones(2, 3)},
        "state": {"step": 10, "collector": {"cursor": 3}},
    }
    return checkpoints.save(folder, IDENTITY, **(parts | changes))


def read(saved: checkpoints.Saved, **rest: Any) -> checkpoints.Loaded:
    return checkpoints.load(saved.path, checkpoint_id=saved.checkpoint_id, **rest)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    saved = write(tmp_path)
    loaded = read(saved, **FITS, training_state=True)
    assert torch.equal(loaded.adapter["lora_A.weight"], torch.arange(6.0).reshape(2, 3))
    assert loaded.optimizer is not None
    assert torch.equal(loaded.optimizer["lora_A|exp_avg"], torch.ones(2, 3))
    assert loaded.state == {"step": 10, "collector": {"cursor": 3}}
    assert loaded.manifest["identity"]["step"] == 10
    assert len(saved.checkpoint_id) == 64
    assert saved.size_bytes == sum(p.stat().st_size for p in saved.path.iterdir())


def test_files_are_private(tmp_path: Path) -> None:
    saved = write(tmp_path / "checkpoints")
    assert saved.path.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in saved.path.iterdir()} == {0o600}


def test_another_base_model_is_refused(tmp_path: Path) -> None:
    saved = write(tmp_path)
    with pytest.raises(CheckpointError, match="trained on base model nbtrain/tiny"):
        read(
            saved,
            base_fingerprint="0" * 64,
            tokenizer_fingerprint="t" * 64,
            training_state=True,
        )
    with pytest.raises(CheckpointError, match="another tokenizer"):
        read(
            saved,
            base_fingerprint="f" * 64,
            tokenizer_fingerprint="0" * 64,
            training_state=True,
        )


@pytest.mark.parametrize("name", [*checkpoints.WEIGHT_FILES, *checkpoints.STATE_FILES])
@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_every_file_is_verified(tmp_path: Path, name: str, damage: str) -> None:
    saved = write(tmp_path)
    path = saved.path / name
    if damage == "delete":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-2] ^= 1
        path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=name):
        read(saved, **FITS, training_state=True)


def test_weights_load_without_their_training_state(tmp_path: Path) -> None:
    saved = write(tmp_path)
    checkpoints.drop_training_state(saved.path)
    loaded = read(saved, **FITS, training_state=False)
    assert loaded.state is None
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(saved, **FITS, training_state=True)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000010"]
    read(first, **FITS, training_state=True)


def test_a_disk_that_is_full_for_tensors_is_told_as_for_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        text = "Error while serializing: I/O error: No space left on device (os error 28)"
        raise SafetensorError(text)

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(OSError, match="No space left on device") as told:
        checkpoints.write_tensors(tmp_path / "a", {"a": torch.zeros(2)})
    assert told.value.errno == errno.ENOSPC


def test_a_checkpoint_waits_for_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    """The limit on a file's size fails the writing of tensors, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    failed: list[int | None] = []

    def save() -> Saved:
        limit = before[0] if failed else 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            return write(tmp_path)
        except OSError as error:
            failed.append(error.errno)
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    read(insist(save), **FITS, training_state=True)
    assert failed == [errno.EFBIG]
    assert [p.name for p in tmp_path.iterdir()] == ["step-000010"]


def test_a_killed_writer_leaves_no_checkpoint(tmp_path: Path) -> None:
    partial = tmp_path / ".step-000010.partial"
    partial.mkdir()
    (partial / checkpoints.ADAPTER).write_bytes(b"half")
    saved = write(tmp_path)
    read(saved, **FITS, training_state=True)
    partial.mkdir()
    clear_partial(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000010"]


def test_numbers_that_are_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write(tmp_path, state={"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_the_id_is_the_manifests_hash(tmp_path: Path) -> None:
    """Two saves of one state have one id; another state has another."""
    first = write(tmp_path / "a")
    second = write(tmp_path / "b")
    third = write(tmp_path / "c", state={"step": 11})
    assert first.checkpoint_id == second.checkpoint_id != third.checkpoint_id
    manifest = json.loads((first.path / checkpoints.MANIFEST).read_text())
    assert set(manifest) == {"format", "identity", "weights", "training_state"}


def test_a_manifest_that_was_altered_with_its_files_is_refused(tmp_path: Path) -> None:
    """The hashes in it may all agree; its own is the checkpoint's id."""
    saved = write(tmp_path)
    other = write(tmp_path / "other", adapter={"lora_A.weight": torch.zeros(2, 3)})
    for name in (*checkpoints.WEIGHT_FILES, checkpoints.MANIFEST):
        (saved.path / name).write_bytes((other.path / name).read_bytes())
    with pytest.raises(CheckpointError, match="manifest is not the one"):
        read(saved, **FITS, training_state=True)


def test_training_state_of_another_format_is_refused_and_its_weights_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "FORMAT", 1)
    saved = write(tmp_path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"format 1, this version reads 2: load_weights_only"):
        read(saved, **FITS, training_state=True)
    assert read(saved, **FITS, training_state=False).optimizer is None
