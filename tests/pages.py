"""A page in Python: what a browser says to a panel in a real kernel, and what it hears."""

from __future__ import annotations

import math
import queue
import struct
import time
from collections.abc import Callable
from typing import Any

from live_kernels import Kernel

Message = dict[str, Any]


class KernelPage:
    """One page that shows a panel of a kernel's."""

    def __init__(self, kernel: Kernel, which: int = -1) -> None:
        opened = [
            m["content"]
            for m in kernel.messages
            if m["msg_type"] == "comm_open" and "run_id" in m["content"]["data"].get("state", {})
        ]
        self.kernel = kernel
        self.comm_id: str = opened[which]["comm_id"]
        self._opened: Message = opened[which]["data"]["state"]
        self.heard: list[tuple[Message, list[memoryview]]] = []

    @property
    def state(self) -> Message:
        """What its kernel has told it so far, also while a cell was running."""
        state = dict(self._opened)
        for message in self.kernel.messages:
            content = message["content"]
            if message["msg_type"] == "comm_msg" and content["comm_id"] == self.comm_id:
                state |= content["data"].get("state", {})
        return state

    def send(self, content: object, *, subshell: str | None = None) -> None:
        """Send a custom message, over a subshell if one is named."""
        data = {"method": "custom", "content": content}
        self._send({"comm_id": self.comm_id, "data": data}, subshell)

    def pick(self, checkpoint_id: str | None) -> None:
        """Change the trait, as a click does."""
        data = {"method": "update", "state": {"selected_id": checkpoint_id}}
        self._send({"comm_id": self.comm_id, "data": data}, None)

    def _send(self, content: Message, subshell: str | None) -> None:
        message = self.kernel.client.session.msg("comm_msg", content)
        if subshell is not None:
            message["header"]["subshell_id"] = subshell
        self.kernel.client.shell_channel.send(message)

    def listen(self, until: Callable[[Message], bool], seconds: float = 30.0) -> Message:
        """The first custom message for which ``until`` holds; every one is kept."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                message = self.kernel.client.get_iopub_msg(timeout=0.2)
            except queue.Empty:
                continue
            self.kernel.messages.append(message)
            found = self.take(message)
            if found is not None and until(found):
                return found
        told = f"nothing of the kind in {seconds:g} s; heard {[c for c, _ in self.heard][-5:]}"
        raise AssertionError(told)

    def take(self, message: Message) -> Message | None:
        """The content of a custom message of this panel."""
        content = message["content"]
        if message["msg_type"] != "comm_msg" or content["comm_id"] != self.comm_id:
            return None
        data = content["data"]
        if data["method"] == "update":
            return None
        self.heard.append((data["content"], message["buffers"]))
        found: Message = data["content"]
        return found

    def update(self, seconds: float = 30.0) -> tuple[Message, dict[str, list[list[float | None]]]]:
        """The next update, with its tables as rows."""
        content = self.listen(lambda c: c["kind"] == "update", seconds)
        return content, tables_of(content, self.heard[-1][1])


def tables_of(content: Message, buffers: list[memoryview]) -> dict[str, list[list[float | None]]]:
    """The rows of an update's tables; ``None`` for a missing figure."""
    found: dict[str, list[list[float | None]]] = {}
    left = iter(buffers)
    for table in content["tables"]:
        columns = [struct.unpack(f"<{table['rows']}d", bytes(next(left))) for _ in table["columns"]]
        found[table["name"]] = [
            [None if math.isnan(value) else value for value in row]
            for row in zip(*columns, strict=True)
        ]
    return found
