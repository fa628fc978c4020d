"""Bundles: Python modules and data files that score, known by the SHA-256 of their zip.

A bundle never changes; a name points at one and may be moved. Its folder ``bundles/<id>`` in the
home holds ``bundle.zip`` and, once it has been needed, the unpacked ``files``. Modules stand at
the bundle's root or in packages; siblings import each other relatively (``from . import
helpers``), and data is found beside ``__file__``.
"""

from __future__ import annotations

import hashlib
import io
import keyword
import os
import shutil
import zipfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from nbtrain.errors import NotFound, Problem, Refused, StoreError
from nbtrain.plan.fields import describe
from nbtrain.rewards.archives import is_unpacked, new_folder, pack_path, unpack
from nbtrain.rewards.bundle_code import NoFunction, stated_signature
from nbtrain.store import (
    Store,
    check_id,
    name_problems,
    private_folder,
    put_file,
    unknown,
    usable_path,
)

__all__ = ["Bundle", "BundleRegistry"]


class Bundle:
    """A registered bundle. Looking at it runs nothing of it."""

    def __init__(
        self, bundle_id: str, folder: Path, about: Mapping[str, Any], name: str | None
    ) -> None:
        self.bundle_id = check_id(bundle_id)
        """SHA-256 of the zip's bytes, 64 hex digits."""
        self.name = name
        """The alias it was asked for by, if any."""
        self.folder = folder
        self.modules: tuple[str, ...] = tuple(about["modules"])
        """Dotted names of the modules that can be imported from it, sorted."""
        self.size = int(about["size"])
        """Bytes of the zip."""

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Paths of its files within it, in the zip's order. Raises ``NotFound`` when damaged."""
        with zipfile.ZipFile(io.BytesIO(self._bytes())) as archive:
            return tuple(info.filename for info in archive.infolist() if not info.is_dir())

    def unpacked(self) -> Path:
        """The folder of the unpacked files, made or made anew where it is not what the zip holds.

        Raises :class:`~nbtrain.errors.NotFound` when the zip is gone or damaged, and
        :class:`~nbtrain.errors.StoreError` when the files cannot be written.
        """
        data = self._bytes()
        files = self.folder / "files"
        for _ in range(3):  # another process may put it there at the same time
            if is_unpacked(data, files):
                return files
            self._unpack_anew(data, files)
        msg = f"the files of bundle {self.bundle_id[:12]} cannot be kept in {files}"
        raise NotFound(msg)

    @staticmethod
    def _unpack_anew(data: bytes, files: Path) -> None:
        fresh, old = new_folder(files), new_folder(files)
        try:
            unpack(data, fresh)
            if files.is_symlink() or files.is_file():
                files.unlink()
            elif files.exists():
                files.replace(old)
            fresh.replace(files)
        except FileNotFoundError:
            pass  # the other process was faster with the old ones
        except OSError as error:
            if not files.exists():
                msg = f"a bundle cannot be unpacked into {files}: {error.strerror or error}"
                raise StoreError(msg) from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)

    def lacking(self, module: str, function: str) -> tuple[str, str | None] | None:
        """What is wrong with a function that should score, told from its text and not run.

        A clause that begins with "has", and what is allowed; ``None`` for one that can score.
        Raises :class:`~nbtrain.errors.NotFound` when the zip is gone or damaged.
        """
        try:
            stated_signature(self.unpacked(), module, function)
        except NoFunction as error:
            return str(error), error.allowed
        return None

    def _bytes(self) -> bytes:
        path = self.folder / "bundle.zip"
        try:
            if path.stat().st_uid not in (os.geteuid(), 0):
                msg = f"{path} belongs to another user and is not loaded"
                raise NotFound(msg)
            data = path.read_bytes()
        except OSError:
            data = b""
        if hashlib.sha256(data).hexdigest() != self.bundle_id:
            called = f"{self.name} ({self.bundle_id[:12]})" if self.name else self.bundle_id[:12]
            msg = f"the file {path} of bundle {called} is gone or damaged; register it again"
            raise NotFound(msg)
        return data

    def __repr__(self) -> str:
        called = f"{self.name!r}, " if self.name else ""
        return f"Bundle({called}{self.bundle_id[:12]}, modules {', '.join(self.modules)})"


class BundleRegistry:
    """The bundles of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def register(self, name: str, path: str | os.PathLike[str]) -> Bundle:
        """Keep the folder or zip at ``path`` as a bundle and let ``name`` mean it.

        The same bytes twice are one bundle. Raises :class:`~nbtrain.errors.Refused` with
        everything that is wrong.
        """
        problems = name_problems("bundle", name)
        data: bytes = b""
        modules: tuple[str, ...] = ()
        try:
            data, modules = _read(path)
        except Refused as refused:
            problems += refused.problems
        if problems:
            raise Refused(problems)
        bundle_id = hashlib.sha256(data).hexdigest()
        about = {"modules": list(modules), "size": len(data)}
        folder = private_folder(private_folder(self._store.home / "bundles") / bundle_id)
        put_file(folder / "bundle.zip", data)
        where = str(folder.relative_to(self._store.home))
        self._store.put_content("bundle", bundle_id, spec=about, path=where, name=name)
        return Bundle(bundle_id, folder, about, name)

    def get(self, ref: object) -> Bundle:
        """The bundle of a name, an id, an id prefix of at least 4 digits, or itself.

        Raises ``NotFound`` naming what there is, ``AmbiguousReference`` when a prefix fits
        several.
        """
        if isinstance(ref, Bundle):
            return ref
        if not isinstance(ref, str) or not ref:
            msg = f"{describe(ref)} is no bundle: a name, an id or a bundle is expected"
            raise NotFound(msg)
        row = self._store.content("bundle", ref)
        if row is None:
            raise unknown(ref, "bundle", self._store.aliases("bundle"))
        name = ref if self._store.alias("bundle", ref) else self._names().get(row["bundle_id"])
        return self._bundle(row, name)

    def list(self) -> list[Bundle]:
        """Every bundle, newest first, each under the name that was moved to it last."""
        names = self._names()
        rows = self._store.contents("bundle")
        return [self._bundle(row, names.get(row["bundle_id"])) for row in rows]

    def _names(self) -> dict[str, str]:
        aliases = reversed(self._store.aliases("bundle").items())
        return {target: name for name, target in aliases}

    def _bundle(self, row: Mapping[str, Any], name: str | None) -> Bundle:
        return Bundle(row["bundle_id"], self._store.home / row["path"], row["spec"], name)


def _read(path: object) -> tuple[bytes, tuple[str, ...]]:
    if not isinstance(path, (str, os.PathLike)):
        message = f"path is a {type(path).__name__}"
        raise Refused([Problem("path", message, found=path, allowed="a folder or a zip")])
    data = pack_path(usable_path(path, "path"))
    modules = _modules(data)
    if not modules:
        message = f"{os.fspath(path)} holds no Python module"
        hint = "A bundle has its modules at its root, such as reward.py"
        raise Refused([Problem("path", message, found=os.fspath(path), hint=hint)])
    return data, modules


def _modules(data: bytes) -> tuple[str, ...]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [info.filename for info in archive.infolist() if info.filename.endswith(".py")]
    found = set()
    for name in names:
        parts = PurePosixPath(name.removesuffix(".py")).parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts and all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
            found.add(".".join(parts))
    return tuple(sorted(found))
