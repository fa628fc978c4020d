"""The host kernel's connection file and sockets: where they lie, and one message over them.

They lie in a private folder with a short path, not in the run's folder: a Unix socket's path may
have 107 bytes, and Jupyter's ``external_connection_dir`` must hold connection files only.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["kernel_name", "remove_connection", "send_code", "write_connection"]

_SOCKET_PATH_BYTES = 107
_SOCKETS = 5


def kernel_name(run_id: str, attempt: int) -> str:
    """Name of the connection file and of the sockets of one attempt: short, and unique enough."""
    return f"{run_id[:12]}-{attempt}"


def _folders() -> Iterator[Path]:
    """Candidates for the runtime folder, best first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield Path(runtime) / "nbtrain"
    yield Path(tempfile.gettempdir()) / f"nbtrain-{os.getuid()}"
    yield Path("/tmp") / f"nbtrain-{os.getuid()}"


def _private(folder: Path) -> bool:
    """Make ``folder`` if need be; whether it is a real folder that only this user can enter.

    In a shared temporary folder somebody else may have been there first.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    mine = found.st_uid == os.getuid()
    return stat.S_ISDIR(found.st_mode) and mine and not stat.S_IMODE(found.st_mode) & 0o077


def _takes_sockets(folder: Path, name: str) -> bool:
    """Whether a Unix socket can be made in ``folder`` under a name like those ZeroMQ will use."""
    path = str(folder / f"{name}-{_SOCKETS}")
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(path)
        except OSError:
            return False
        os.unlink(path)
    return True


def write_connection(run_id: str, attempt: int) -> Path:
    """Write the connection file (mode 0600) of one attempt's host and return its path.

    Transport ``ipc`` in the first private folder that takes sockets; ``tcp`` on the loopback
    address where none does. Raises ``OSError`` when no private folder can be made at all.
    """
    from jupyter_client.connect import write_connection_file

    name = kernel_name(run_id, attempt)
    folders = [folder for folder in _folders() if _private(folder)]
    if not folders:
        msg = "no private runtime folder for the host's connection file can be made"
        raise OSError(msg)
    folder = next((f for f in folders if _takes_sockets(f, name)), None)
    kernels = (folder or folders[0]) / "kernels"
    kernels.mkdir(mode=0o700, exist_ok=True)
    path = kernels / f"{name}.json"
    remove_connection(path)
    # Private from its first byte, whatever the umask is.
    path.touch(mode=0o600)
    # Without a key the kernel would run whatever anybody sends.
    known: dict[str, Any] = {"key": secrets.token_hex(32).encode(), "kernel_name": "nbtrain"}
    if folder is None:
        write_connection_file(str(path), **known)
    else:
        write_connection_file(str(path), transport="ipc", ip=str(folder / name), **known)
    return path


def remove_connection(path: Path) -> None:
    """Remove a connection file and its sockets, as far as they are still there."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        info = json.loads(path.read_text("utf-8"))
        if info["transport"] == "ipc":
            for port in range(1, _SOCKETS + 1):
                Path(f"{info['ip']}-{port}").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def send_code(path: Path, code: str, *, timeout: float) -> bool:
    """Have the host's kernel run ``code``; whether it did so within ``timeout`` seconds.

    Works in the caller's thread with sockets of its own, so it can be called from a notebook
    cell, from a thread and from a script. Never raises for a host that is gone.
    """
    import zmq
    from jupyter_client.session import Session

    try:
        info = json.loads(path.read_text("utf-8"))
        separator = "-" if info["transport"] == "ipc" else ":"
        address = f"{info['transport']}://{info['ip']}{separator}{info['shell_port']}"
        session = Session(key=info["key"].encode(), signature_scheme=info["signature_scheme"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    context = zmq.Context()
    channel = context.socket(zmq.DEALER)
    channel.linger = 0
    try:
        channel.connect(address)
        content = {
            "code": code,
            "silent": True,
            "store_history": False,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,
        }
        session.send(channel, "execute_request", content)
        if not channel.poll(int(timeout * 1000)):
            return False
        _, reply = session.recv(channel, mode=0)
        return reply is not None and reply["content"].get("status") == "ok"
    except (zmq.ZMQError, ValueError, OSError):
        return False
    finally:
        channel.close()
        context.term()
