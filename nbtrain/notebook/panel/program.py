"""The panel's program, as the build of ``labextension`` leaves it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nbtrain.errors import NbtrainError

__all__ = ["Program", "loader", "program"]

_BUILT = Path(__file__).parent.parent / "static"


@dataclass(frozen=True, slots=True)
class Program:
    """A JavaScript module and its style sheet, both UTF-8, under the hash of both."""

    module: bytes
    style: bytes
    hash: str


@cache
def loader() -> str:
    """The small module that stands in each panel's state and fetches the program.

    Raises :class:`NbtrainError` in a source tree where nothing was built.
    """
    return _read("loader.js").decode()


@cache
def program() -> Program:
    """The program. Raises :class:`NbtrainError` in a source tree where nothing was built."""
    module, style = _read("panel.js"), _read("panel.css")
    digest = hashlib.sha256(module + b"\0" + style).hexdigest()
    return Program(module, style, digest[:32])


def _read(name: str) -> bytes:
    try:
        return (_BUILT / name).read_bytes()
    except OSError as error:
        msg = (
            f"the panel's {name} is not there ({_BUILT}): in a source tree it is built by "
            "`jlpm install && jlpm build` in labextension/. print(run) and run.plot() need no panel"
        )
        raise NbtrainError(msg) from error
