"""Where nbtrain keeps its files, and that nobody else can read them."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nbtrain.errors import NbtrainError, NotWritten, Problem, Refused, StoreError

__all__ = [
    "home_folder",
    "private_file",
    "private_folder",
    "put_file",
    "sync",
    "usable_path",
    "write_json",
    "writing",
]


def home_folder() -> Path:
    """``$NBTRAIN_HOME``, or nbtrain's folder among the platform's user data; made 0700.

    Raises :class:`StoreError` when it cannot be made, :class:`Refused` for no usable path.
    """
    stated = os.environ.get("NBTRAIN_HOME")
    if stated:
        return private_folder(usable_path(stated, "NBTRAIN_HOME"))
    # platformdirs is imported only where the home is not stated: a rank's home always is
    import platformdirs

    return private_folder(platformdirs.user_data_path("nbtrain", appauthor=False))


def private_folder(path: Path) -> Path:
    """The folder, made with mode 0700 when it is missing or still empty.

    A folder that holds something already keeps its mode: it may be the user's own home, and what
    nbtrain puts into it is private by itself.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.stat().st_mode & 0o077 and not any(path.iterdir()):
            path.chmod(0o700)
    except OSError as error:
        msg = f"the folder {path} cannot be used: {error.strerror or error}. {_HINT}"
        raise StoreError(msg) from error
    return path


def private_file(path: Path) -> Path:
    """The file, made with mode 0600 when missing; an own file that others may read is narrowed."""
    try:
        if not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        status = path.stat()
        if status.st_mode & 0o077 and status.st_uid == os.geteuid():
            path.chmod(0o600)
    except OSError as error:
        msg = f"the store {path} cannot be used: {error.strerror or error}. {_HINT}"
        raise StoreError(msg) from error
    return path


def usable_path(given: str | os.PathLike[str], field: str) -> Path:
    """The absolute path that was stated, ``~`` resolved, whether anything is there or not.

    Raises :class:`Refused`, for ``field``, where the system takes no such path: an unknown user's
    home, a NUL, a name too long, a folder that may not be entered.
    """
    try:
        if not os.fspath(given):
            msg = "it is empty"
            raise ValueError(msg)
        path = Path(given).expanduser().absolute()  # which fails where the current folder is gone
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        shown = str(given)
        shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"
        message = f"{field}: {shown!r} is no path that can be used: {reason}"
        raise Refused([Problem(field, message, shown)]) from None
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Writing ``path``, as it was stated: what the system refuses leaves as :class:`NotWritten`.

    The sentence names this path, not the temporary one that was written first.
    """
    try:
        yield
    except NbtrainError:
        raise
    except OSError as error:
        reason = _REASONS.get(error.errno or 0) or error.strerror or error
        raise NotWritten(error.errno, f"{path} cannot be written: {reason}") from error


_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.ENOENT: "the file system takes no new file there",  # its folder was there
}
_SHOWN = 200
_HINT = "NBTRAIN_HOME names another folder"


def write_json(path: Path, data: object) -> None:
    """Write ``data`` as strict JSON into a file of its own, 0600.

    Raises ``ValueError`` for NaN and :class:`StoreError` when it cannot be written.
    """
    text = json.dumps(data, allow_nan=False, indent=1)
    private_file(path)
    try:
        path.write_text(text + "\n", "utf-8")
    except OSError as error:
        msg = f"{path} cannot be written: {error.strerror or error}. {_HINT}"
        raise StoreError(msg) from error


def put_file(path: Path, data: bytes) -> None:
    """Make ``path`` hold ``data``, whole or as before, 0600. Raises ``OSError``."""
    if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return
    handle, half = tempfile.mkstemp(dir=path.parent, prefix=".half-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(half).replace(path)
    except BaseException:
        Path(half).unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk. Raises ``OSError``."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
