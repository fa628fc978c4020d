"""Framed messages over a socket, without ever blocking the side that must not wait.

A frame is 8 bytes of length and a pickle. What comes from a process that runs user code is read
by an unpickler that knows plain data only.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import socket
import struct
from typing import Any

__all__ = ["Channel", "frame", "receive"]

_HEAD = struct.Struct(">Q")
_CHUNK = 1 << 16


def frame(message: Any) -> bytes:
    """A message as it goes through a socket."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(data)) + data


def receive(connection: socket.socket) -> Any:
    """Wait for one message; ``None`` at the end. For the side that has nothing else to do."""
    head = _exactly(connection, _HEAD.size)
    data = None if head is None else _exactly(connection, _HEAD.unpack(head)[0])
    return None if data is None else pickle.loads(data)


def _exactly(connection: socket.socket, size: int) -> bytearray | None:
    data = bytearray()
    while len(data) < size:
        more = connection.recv(min(_CHUNK, size - len(data)))
        if not more:
            return None
        data += more
    return data


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        msg = f"{module}.{name} is not plain data"
        raise pickle.UnpicklingError(msg)


class Channel:
    """One end of a socket pair, never blocking."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._out = bytearray()
        self._in = bytearray()
        self.ended = False
        """Whether the other side is gone; frames that came before it can still be read."""

    @property
    def unsent(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._out)

    def send(self, data: bytes) -> None:
        """Send bytes, now or when :meth:`flush` finds room."""
        self._out += data
        self.flush()

    def flush(self) -> None:
        """Send what can be sent."""
        try:
            while self._out:
                del self._out[: self.socket.send(self._out)]
        except BlockingIOError:
            return
        except OSError:
            self.ended = True
            self._out.clear()

    def received(self) -> list[Any]:
        """Every whole message that has come."""
        while not self.ended:
            try:
                data = self.socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.ended = not data
            self._in += data
        messages = []
        while len(self._in) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._in)[0]
            if len(self._in) < end:
                break
            messages.append(_PlainUnpickler(io.BytesIO(self._in[_HEAD.size : end])).load())
            del self._in[:end]
        return messages

    def close(self) -> None:
        """Close the socket."""
        with contextlib.suppress(OSError):
            self.socket.close()
