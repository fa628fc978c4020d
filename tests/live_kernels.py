"""Real kernels for the tests, and what their cells put out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jupyter_client import BlockingKernelClient, KernelManager

TIMEOUT = 180.0


class CellFailed(Exception):
    """A cell ended in an error; the text is what it showed."""

    def __init__(self, ename: str, shown: str) -> None:
        super().__init__(f"{ename}: {shown}")
        self.ename = ename
        self.shown = shown


class Kernel:
    """One kernel and every message that its cells published."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client
        self.messages: list[dict[str, Any]] = []

    def run(self, code: str, timeout: float = TIMEOUT) -> str:
        """Execute a cell and return the text of its result or of what it printed."""
        sent = self.client.execute(code, store_history=True)
        mine = self._listen(sent, time.monotonic() + timeout)
        reply = self.client.get_shell_msg(timeout=timeout)
        while reply["parent_header"].get("msg_id") != sent:
            reply = self.client.get_shell_msg(timeout=timeout)
        if reply["content"]["status"] != "ok":
            content = reply["content"]
            raise CellFailed(content["ename"], "\n".join(content["traceback"]))
        printed = [m["content"]["text"] for m in mine if m["msg_type"] == "stream"]
        results = [
            m["content"]["data"]["text/plain"] for m in mine if m["msg_type"] == "execute_result"
        ]
        return "".join(printed + results)

    def _listen(self, sent: str, deadline: float) -> list[dict[str, Any]]:
        """Messages of the cell, up to its end; those of other cells are kept as well.

        An output that is updated between two cells belongs to the one before.
        """
        mine: list[dict[str, Any]] = []
        while True:
            left = deadline - time.monotonic()
            message = self.client.get_iopub_msg(timeout=max(0.01, left))
            self.messages.append(message)
            if message["parent_header"].get("msg_id") != sent:
                continue
            mine.append(message)
            idle = message["content"].get("execution_state") == "idle"
            if message["msg_type"] == "status" and idle:
                return mine


@contextmanager
def kernel() -> Iterator[Kernel]:
    """A fresh kernel with the extension loaded; killed at the end, whatever it does."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        started = Kernel(manager, client)
        started.run("%load_ext nbtrain\nimport nbtrain, os, time")
        yield started
    finally:
        client.stop_channels()
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
