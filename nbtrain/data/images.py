"""The images that rows name: found beside the rows, known by the SHA-256 of their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbtrain.data.conversations import image_paths
from nbtrain.data.findings import Findings
from nbtrain.data.rows import Row

__all__ = ["Images", "identity_of"]


class Images:
    """Collects the images of rows.

    ``known`` maps relative paths to ``{"sha256", "bytes"}``, ``None`` where there is no such
    file below ``folder`` (``None`` for rows that come from no file).
    """

    def __init__(self, folder: Path | None, findings: Findings) -> None:
        self.known: dict[str, dict[str, Any] | None] = {}
        self._folder = folder
        self._findings = findings

    def add(self, row: Row, line: int) -> None:
        """Look at the images of a checked row; one that is missing is a note."""
        for path in image_paths(row):
            if path not in self.known:
                self.known[path] = self._look(path)
            if self.known[path] is None:
                where = "beside the rows" if self._folder else "as the rows come from no file"
                message = f"the image {path[:100]!r} was not found {where}"
                self._findings.add("image-missing", line, "messages", message, note=True)

    def identity(self) -> bytes:
        """What the images add to the rows' identity; empty without any."""
        return identity_of(self.known)

    def _look(self, path: str) -> dict[str, Any] | None:
        if self._folder is None:
            return None
        try:
            with (self._folder / path).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                return {"sha256": digest, "bytes": file.seek(0, 2)}
        except (OSError, ValueError):
            return None


def identity_of(known: Mapping[str, Mapping[str, Any] | None]) -> bytes:
    """What images, by path, add to the identity of the rows that name them; empty without any."""
    lines = (
        f"{path!r} {found['sha256'] if found else None}\n" for path, found in sorted(known.items())
    )
    return "".join(lines).encode()
