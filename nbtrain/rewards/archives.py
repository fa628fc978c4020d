"""Bundles as bytes: packing a folder, checking a zip, unpacking it.

A folder always packs to the same bytes: paths sorted, time stamps and modes fixed, entries stored
and not compressed, since compressors differ between machines. Hidden files and empty folders are
part of it. Bytecode is not (``__pycache__``, ``*.pyc``): it would make the hash depend on which
Python last ran there. A zip that is handed over stays as it is, byte by byte; its entries are
stored or deflated, since what other compressors hold in memory knows no bound.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import stat
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePosixPath

from nbtrain.errors import Problem, Refused

__all__ = ["MOST_ENTRIES", "MOST_UNPACKED", "SIZE_LIMIT", "is_unpacked", "pack_path", "unpack"]

SIZE_LIMIT = 256 << 20
"""Most bytes of a bundle."""
MOST_UNPACKED = 1 << 30
"""Most bytes of its files."""
MOST_ENTRIES = 10_000
MOST_PATH, MOST_NAME = 1024, 255
"""Most bytes of a path within a bundle, and of one name in it."""

_FIELD = "path"
_SHOWN = 200
_KNOWN_TIME = (1980, 1, 1, 0, 0, 0)
_ENCRYPTED = 0x1


def pack_path(path: Path) -> bytes:
    """The bytes of the bundle at ``path``, a folder or a zip, checked.

    Raises :class:`~nbtrain.errors.Refused` with everything that is wrong with it.
    """
    if not path.exists():
        message = f"there is no folder or zip {path}"
        raise Refused([Problem(_FIELD, message, found=str(path))])
    if path.is_dir():
        data = _pack_folder(path)
    elif path.is_file():
        if path.stat().st_size > SIZE_LIMIT:
            raise Refused([_too_big(path.stat().st_size)])
        data = path.read_bytes()
    else:
        message = f"{path} is neither a folder nor a file"
        raise Refused([Problem(_FIELD, message, found=str(path), allowed="a folder or a zip")])
    problems = _zip_problems(data, path)
    if problems:
        raise Refused(problems)
    return data


def unpack(data: bytes, folder: Path) -> None:
    """Put the files of a checked zip into ``folder``, an empty one; readable by the owner alone."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            target = folder / info.filename
            if info.is_dir():
                target.mkdir(mode=0o700, parents=True, exist_ok=True)
                continue
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(archive.read(info))


def is_unpacked(data: bytes, folder: Path) -> bool:
    """Whether ``folder`` still holds the zip's files, and nothing more that could be imported.

    Other files beside them are none of our business: a reward may keep a cache there.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
        for info in infos:
            path = folder / info.filename
            if path.is_symlink() or path.is_dir() != info.is_dir():
                return False
            if not info.is_dir() and (
                path.stat().st_size != info.file_size or zlib.crc32(path.read_bytes()) != info.CRC
            ):
                return False
        known = {_plain(info) for info in infos}
        importable = tuple(importlib.machinery.all_suffixes())
        return all(
            path.relative_to(folder).as_posix() in known
            for path in folder.rglob("*")
            if path.name.endswith(importable)
        )
    except OSError:
        return False


# --- packing ---------------------------------------------------------------------------------


def _pack_folder(folder: Path) -> bytes:
    problems: list[Problem] = []
    found = list(islice(_walk(folder, folder, problems), MOST_ENTRIES + 1))
    if len(found) > MOST_ENTRIES:
        problems.append(_too_many(f"more than {MOST_ENTRIES:,}"))
    if problems:
        raise Refused(problems)
    found.sort(key=lambda path: path.as_posix().encode())
    buffer = io.BytesIO()
    try:
        size = sum(path.stat().st_size for path in found if path.is_file())
        if size > SIZE_LIMIT:
            raise Refused([_too_big(size)])
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            for path in found:
                name = path.relative_to(folder).as_posix()
                if path.is_dir():
                    archive.writestr(_entry(f"{name}/", stat.S_IFDIR | 0o755), b"")
                else:
                    archive.writestr(_entry(name, stat.S_IFREG | 0o644), path.read_bytes())
    except OSError as error:  # it changes while it is read
        message = f"{error.filename or folder} cannot be read: {error.strerror or error}"
        raise Refused([Problem(_FIELD, message, found=str(folder))]) from error
    return buffer.getvalue()


def _entry(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _KNOWN_TIME)
    info.create_system = 3  # Unix, whatever packed it
    info.external_attr = mode << 16
    return info


def _walk(folder: Path, root: Path, problems: list[Problem]) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        message = f"the folder {folder} cannot be read: {error.strerror}"
        problems.append(Problem(_FIELD, message, found=str(folder)))
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.name == "__pycache__" or entry.name.endswith(".pyc"):
            continue
        unwanted = _name_problem(path.relative_to(root).as_posix())
        if unwanted is not None:
            problems.append(_unwanted(str(path), unwanted))
        elif entry.is_symlink() or not (entry.is_dir() or entry.is_file()):
            kind = "a symbolic link" if entry.is_symlink() else "neither a file nor a folder"
            problems.append(_unwanted(str(path), kind))
        elif entry.is_dir():
            yield path
            yield from _walk(path, root, problems)
        elif not os.access(path, os.R_OK):
            problems.append(Problem(_FIELD, f"{path} cannot be read", found=str(path)))
        else:
            yield path


# --- checking --------------------------------------------------------------------------------


def _zip_problems(data: bytes, path: Path) -> list[Problem]:
    if len(data) > SIZE_LIMIT:
        return [_too_big(len(data))]
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except Exception as error:  # zipfile lets out whatever it comes across in the bytes
        message = f"{path} is no zip that can be read: {error or type(error).__name__}"
        return [Problem(_FIELD, message, found=str(path), allowed="a folder or a zip")]
    with archive:
        infos = archive.infolist()
        if len(infos) > MOST_ENTRIES:
            return [_too_many(f"{len(infos):,}")]
        found = [(info, _entry_problem(info)) for info in infos]
        problems = [problem for _, problem in found if problem]
        problems += _clashes([info for info, problem in found if not problem])
        size = sum(info.file_size for info in infos)
        if size > MOST_UNPACKED:
            message = f"the bundle's files have {size >> 20:,} MiB unpacked"
            allowed = f"at most {MOST_UNPACKED >> 20:,} MiB"
            problems.append(Problem(_FIELD, message, found=size, allowed=allowed))
        return problems or _content_problems(archive)


def _entry_problem(info: zipfile.ZipInfo) -> Problem | None:
    # orig_filename: zipfile itself cuts names at a NUL
    name = info.orig_filename
    mode = info.external_attr >> 16 if info.create_system == 3 else 0
    unwanted = _name_problem(name)
    if unwanted is not None:
        return _unwanted(name, unwanted)
    if stat.S_ISLNK(mode):
        return _unwanted(name, "a symbolic link")
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return _unwanted(name, "neither a file nor a folder")
    if info.flag_bits & _ENCRYPTED:
        return _unwanted(name, "encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return _unwanted(name, "compressed in another way than deflate, which is not unpacked")
    return None


def _name_problem(name: str) -> str | None:
    """What is wrong with a path within a bundle."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or name[1:2] == ":":
        return "a path that leads outside"
    if not parts or "\\" in name or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in name):
        return "no plain path"
    if len(name.encode()) > MOST_PATH or any(len(part.encode()) > MOST_NAME for part in parts):
        return f"a path of more than {MOST_PATH:,} bytes, or {MOST_NAME} in one name"
    return None


def _clashes(infos: list[zipfile.ZipInfo]) -> list[Problem]:
    counts = Counter(map(_plain, infos))
    files = {_plain(info) for info in infos if not info.is_dir()}
    twice = [_unwanted(name, "there twice") for name, count in counts.items() if count > 1]
    return twice + [
        _unwanted(info.filename, f"below {str(parent)!r}, which is a file")
        for info in infos
        for parent in PurePosixPath(info.filename).parents
        if str(parent) in files
    ]


def _plain(info: zipfile.ZipInfo) -> str:
    """The path that an entry is unpacked to: ``./a//b.py`` is ``a/b.py``."""
    return PurePosixPath(info.filename).as_posix()


def _content_problems(archive: zipfile.ZipFile) -> list[Problem]:
    problems = []
    for info in archive.infolist():
        try:
            with archive.open(info) as file:
                size = 0
                while read := file.read(1 << 20):  # the end of it compares the checksum
                    size += len(read)
            if size != info.file_size:
                problems.append(_unwanted(info.filename, "damaged: it is shorter than it says"))
        except Exception as error:  # as above
            problems.append(_unwanted(info.filename, f"damaged: {error or type(error).__name__}"))
    return problems


def _unwanted(name: str, what: str) -> Problem:
    shown = name if len(name) <= _SHOWN else name[: _SHOWN - 1] + "…"
    return Problem(
        _FIELD,
        f"{shown!r} in the bundle is {what}",
        found=shown,
        allowed="plain files and folders below the bundle's root",
    )


def _too_many(found: str) -> Problem:
    message = f"the bundle has {found} entries"
    return Problem(_FIELD, message, found=found, allowed=f"at most {MOST_ENTRIES:,}")


def _too_big(size: int) -> Problem:
    return Problem(
        _FIELD,
        f"the bundle has {size >> 20:,} MiB",
        found=size,
        allowed=f"at most {SIZE_LIMIT >> 20} MiB",
        hint="Keep big data elsewhere and read it from there",
    )


def new_folder(beside: Path) -> Path:
    """An empty private folder beside the final one, to be renamed to it."""
    return Path(tempfile.mkdtemp(dir=beside.parent, prefix=f".{beside.name}-"))
