"""Framed messages over a socket, without ever blocking the side that must not wait.

A frame is its length and the number of the call it belongs to, 8 bytes each, and a pickle. What
comes from a process that runs user code is read by an unpickler that knows plain data only.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import socket
import struct
from typing import Any

__all__ = ["FRAME_LIMIT", "Channel", "ChannelError", "dumped", "frame", "framed", "receive"]

FRAME_LIMIT = 64 << 20
"""Bytes of the largest message that a channel takes in."""

_HEAD = struct.Struct(">QQ")
_CHUNK = 1 << 16


class ChannelError(Exception):
    """What came through a channel cannot be used; the text is a clause that says why."""


def dumped(message: Any) -> bytes:
    """A message as bytes, for :func:`framed`."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def framed(data: bytes, call: int) -> bytes:
    """A dumped message as it goes through a socket, of the call with this number."""
    return _HEAD.pack(len(data), call) + data


def frame(message: Any, call: int = 0) -> bytes:
    """A message as it goes through a socket, of the call with this number."""
    return framed(dumped(message), call)


def receive(connection: socket.socket) -> tuple[int, Any] | None:
    """Wait for one message and its call's number; ``None`` at the end.

    For the side that has nothing else to do.
    """
    head = _exactly(connection, _HEAD.size)
    if head is None:
        return None
    size, call = _HEAD.unpack(head)
    data = _exactly(connection, size)
    return None if data is None else (call, pickle.loads(data))


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


def _loaded(data: bytearray) -> Any:
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a pickle of garbage raises anything
        msg = f"what it sent cannot be read: {type(error).__name__}: {error!s:.200}"
        raise ChannelError(msg) from None


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

    def received(self) -> list[tuple[int, Any]]:
        """Every whole message that has come, with its call's number.

        Raises :class:`ChannelError` for what is none, or is larger than ``FRAME_LIMIT``: nothing
        of that size is ever held.
        """
        while not self.ended:
            try:
                data = self.socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.ended = not data
            self._in += data
            self._check_size()
        messages = []
        while len(self._in) >= _HEAD.size:
            self._check_size()
            size, call = _HEAD.unpack_from(self._in)
            end = _HEAD.size + size
            if len(self._in) < end:
                break
            messages.append((call, _loaded(self._in[_HEAD.size : end])))
            del self._in[:end]
        return messages

    def _check_size(self) -> None:
        """Refuse what is too large by what it says of itself, or by having come at all."""
        size = _HEAD.unpack_from(self._in)[0] if len(self._in) >= _HEAD.size else 0
        size = max(size, len(self._in) - _HEAD.size)
        if size > FRAME_LIMIT:
            msg = f"{size} bytes in one answer; at most {FRAME_LIMIT >> 20} MiB are taken"
            raise ChannelError(msg)

    def close(self) -> None:
        """Close the socket."""
        with contextlib.suppress(OSError):
            self.socket.close()
