"""Digests of weight files, remembered by what the system says of a file: big ones are read once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from nbtrain.plan.identity import canonical
from nbtrain.store.home import put_file

__all__ = ["BESIDE_WEIGHTS", "FileDigests", "fingerprint", "tokenizer_digest"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)


BESIDE_WEIGHTS = (*TOKENIZER_FILES, "generation_config.json")
"""Small files that decide what a model reads and writes, and so are part of its identity."""


def fingerprint(config: bytes, weights: Mapping[str, str], beside: Mapping[str, str]) -> str:
    """A base model's identity: SHA-256 over its configuration and its files' digests.

    ``weights`` and ``beside`` (tokenizer, chat template, generation settings: what there is of
    ``BESIDE_WEIGHTS``) map file names to SHA-256 digests.
    """
    parts = {
        "config": hashlib.sha256(config).hexdigest(),
        "weights": dict(weights),
        "beside": dict(beside),
    }
    return hashlib.sha256(canonical(parts)).hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over the tokenizer's files and chat template in ``folder``."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


class FileDigests:
    """SHA-256 of files, kept in one small JSON file.

    A file is not read again while its path, inode, size, and times of modification and of change
    are the same. The time of change cannot be set back, as the other can.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory

    def sha256(self, path: Path) -> str:
        """Hex digest of the file's content. Raises ``OSError`` when it cannot be read."""
        stat = path.stat()
        key = str(path.resolve())
        stamp = f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}-{stat.st_dev}-{stat.st_ino}"
        known = self._load()
        entry = known.get(key)
        if entry and entry[0] == stamp:
            return entry[1]
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._save({**self._load(), key: [stamp, digest]})
        return digest

    def _load(self) -> dict[str, list[str]]:
        try:
            loaded = json.loads(self._memory.read_text("utf-8"))
        except (OSError, ValueError):
            return {}  # nothing lost: the files are read again
        return loaded if isinstance(loaded, dict) else {}

    def _save(self, known: Mapping[str, list[str]]) -> None:
        self._memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        put_file(self._memory, json.dumps(known, indent=0, sort_keys=True).encode())
