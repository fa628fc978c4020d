"""Checkpoints: written whole or not at all, hashed, and loaded strictly.

A checkpoint is a folder ``step-000010`` with the adapter as PEFT saves it, the training state
(optimizer moments in ``training_state.safetensors``, everything else in ``state.json``) and a
manifest with the SHA-256 of every file. It is written under a temporary name, flushed to the
disk, renamed, and only then committed in the store; a checkpoint the store does not list does not
exist. Its id is the SHA-256 of its manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nbtrain.errors import NbtrainError
from nbtrain.store.home import sync
from nbtrain.training.partials import partial_name

MANIFEST = "manifest.json"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "training_state.safetensors"
STATE = "state.json"
FORMAT = 2
"""Of the training state. Adapters of any format load."""

WEIGHT_FILES = (ADAPTER, ADAPTER_CONFIG)
STATE_FILES = (OPTIMIZER, STATE)


class CheckpointError(NbtrainError, RuntimeError):
    """A checkpoint is damaged, or does not fit what it is loaded into."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint belongs to; loading compares the fingerprints."""

    run_id: str
    attempt: int
    step: int
    base_model_slug: str
    base_fingerprint: str
    tokenizer_fingerprint: str
    workload_id: str
    config_hash: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on disk, not yet committed in the store."""

    checkpoint_id: str
    path: Path
    size_bytes: int
    manifest_digest: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint read back and verified. Without training state the last two are ``None``."""

    manifest: dict[str, Any]
    adapter: dict[str, Tensor]
    optimizer: dict[str, Tensor] | None
    state: dict[str, Any] | None


def save(
    folder: Path,
    identity: Identity,
    *,
    adapter: Mapping[str, Tensor],
    adapter_config: Mapping[str, Any],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> Saved:
    """Write a checkpoint into ``folder``.

    Raises ``OSError`` (a full disk) leaving nothing behind.
    """
    name = f"step-{identity.step:06d}"
    target = folder / name
    partial = folder / partial_name(identity.step)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700)
    try:
        write_tensors(partial / ADAPTER, adapter, {"format": "pt"})
        write_tensors(partial / OPTIMIZER, optimizer)
        _write_json(partial / ADAPTER_CONFIG, adapter_config)
        _write_json(partial / STATE, state)
        manifest = _manifest(partial, identity)
        _write_json(partial / MANIFEST, manifest)
        size = sum(path.stat().st_size for path in partial.iterdir())
        for path in partial.iterdir():
            path.chmod(0o600)
            sync(path)
        sync(partial)
        # A folder of this name can only be one that was never committed: its step is being redone.
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        sync(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    digest = _sha256(target / MANIFEST)
    return Saved(digest, target, size, digest)


def load(
    path: Path,
    *,
    checkpoint_id: str,
    base_fingerprint: str,
    tokenizer_fingerprint: str,
    training_state: bool,
) -> Loaded:
    """Read a checkpoint and verify every byte of it.

    Parameters
    ----------
    path
        The checkpoint's folder.
    checkpoint_id
        Its id, which is its manifest's SHA-256.
    base_fingerprint
        Of the base model it is loaded onto; another one is refused.
    tokenizer_fingerprint
        Of that model's tokenizer and chat template; another one is refused.
    training_state
        Read optimizer, schedule and collector state too.

    Raises
    ------
    CheckpointError
        When a file is missing or altered, or the base model or its tokenizer is another one.
    """
    try:
        data = (path / MANIFEST).read_bytes()
    except OSError as error:
        msg = f"checkpoint {path.name} has no readable manifest: {error}"
        raise CheckpointError(msg) from error
    if hashlib.sha256(data).hexdigest() != checkpoint_id:
        msg = f"checkpoint {path.name}: its manifest is not the one of {checkpoint_id[:12]}"
        raise CheckpointError(msg)
    manifest = json.loads(data)
    found = manifest["identity"]["base_fingerprint"]
    if found != base_fingerprint:
        msg = (
            f"checkpoint {path.name} was trained on base model "
            f"{manifest['identity']['base_model_slug']} ({found[:12]}), "
            f"not on the one given ({base_fingerprint[:12]})"
        )
        raise CheckpointError(msg)
    tokenizer = manifest["identity"]["tokenizer_fingerprint"]
    if tokenizer != tokenizer_fingerprint:
        msg = (
            f"checkpoint {path.name} was trained with another tokenizer or chat template "
            f"({tokenizer[:12]}, here {tokenizer_fingerprint[:12]})"
        )
        raise CheckpointError(msg)
    _verify(path, manifest["weights"])
    adapter = load_file(path / ADAPTER)
    if not training_state:
        return Loaded(manifest, adapter, None, None)
    if manifest["format"] != FORMAT:
        msg = (
            f"checkpoint {path.name} holds training state of format {manifest['format']}, this "
            f"version reads {FORMAT}: load_weights_only: true starts from its weights"
        )
        raise CheckpointError(msg)
    _verify(path, manifest["training_state"])
    state = json.loads((path / STATE).read_text("utf-8"))
    return Loaded(manifest, adapter, load_file(path / OPTIMIZER), state)


def drop(path: Path) -> None:
    """Delete a checkpoint, once the store no longer lists it."""
    shutil.rmtree(path, ignore_errors=True)


def drop_training_state(path: Path) -> None:
    """Delete a checkpoint's training state, once the store no longer lists it."""
    for name in STATE_FILES:
        (path / name).unlink(missing_ok=True)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a file of safetensors. Raises ``OSError`` with its ``errno``, as any writer does.

    The library itself tells a full disk in the text of an error of its own.
    """
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        told = re.search(r"\(os error (\d+)\)", str(error))
        if told is None:
            raise
        number = int(told[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def _manifest(folder: Path, identity: Identity) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "identity": {name: getattr(identity, name) for name in Identity.__slots__},
        "weights": {name: _sha256(folder / name) for name in WEIGHT_FILES},
        "training_state": {name: _sha256(folder / name) for name in STATE_FILES},
    }


def _verify(folder: Path, files: Mapping[str, str]) -> None:
    for name, expected in files.items():
        try:
            found = _sha256(folder / name)
        except OSError as error:
            msg = f"checkpoint {folder.name}: {name} cannot be read: {error}"
            raise CheckpointError(msg) from error
        if found != expected:
            msg = f"checkpoint {folder.name}: {name} is damaged (its SHA-256 is not the manifest's)"
            raise CheckpointError(msg)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    text = json.dumps(data, allow_nan=False, indent=1, sort_keys=True)
    path.write_text(text + "\n", "utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
